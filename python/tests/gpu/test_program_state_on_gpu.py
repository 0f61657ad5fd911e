"""A State of a program that trains on a GPU: random numbers of the device, and buffers there."""

from __future__ import annotations

import io

import torch
from device import DEVICE, STREAMS, begin
from team import Rank, Team

import paramhub

REWINDS = {"PARAMHUB_JOB_ON_WORKER_LOSS": "rewind", "PARAMHUB_RUN_ID": "mine"}


def random_numbers() -> list[torch.Tensor]:
    """From the generators of the host and of each device."""
    devices = [torch.device("cpu")]
    if DEVICE.type != "cpu":
        devices += [torch.device(DEVICE.type, index) for index in range(STREAMS.device_count())]
    return [torch.rand(4, device=device).cpu() for device in devices]


def comes_back(rank: Rank) -> None:
    import paramhub.torch

    begin()
    torch.manual_seed(rank.rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout()).to(DEVICE)
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.5))
    seen = torch.arange(4.0, device=DEVICE)
    state = paramhub.torch.State(optimizer, model=model, epoch=0, seen=seen)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, device=DEVICE)).sum().backward()
        optimizer.step()
        state.epoch += 1
        state.commit()
    expected, mean = random_numbers(), model[1].running_mean.clone()
    with torch.no_grad():
        model[1].running_mean.fill_(7)
    state.epoch = 9
    # As if this rank had gone back to the step: it restores what it has saved.
    saved = optimizer._job.program_state(2)
    assert saved is not None
    state._load_state_dict(torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True))
    assert state.epoch == 2 and state.seen.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(model[1].running_mean, mean) and model[1].running_mean.device == DEVICE
    for found, wanted in zip(random_numbers(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_all_parts_come_back(team: Team, hub: paramhub.Hub) -> None:
    team(comes_back, ranks=1, env={**REWINDS, "PARAMHUB_URL": hub.url})
    team(comes_back, ranks=2, env={**REWINDS, "PARAMHUB_RUN_ID": "pair", "PARAMHUB_URL": hub.url})
