"""What a State keeps, refuses and restores. Ranks that go back are tested in test_rewind.py."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from team import Rank, Team

import paramhub
import paramhub.torch
from paramhub.errors import MisuseError

REWINDS = {"PARAMHUB_JOB_ON_WORKER_LOSS": "rewind", "PARAMHUB_RUN_ID": "mine"}


class Sampler:
    """A part with a state of its own."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make(**parts: object) -> tuple[torch.nn.Module, paramhub.torch.HubOptimizer, paramhub.torch.State]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.5))
    return model, optimizer, paramhub.torch.State(optimizer, model=model, **parts)


def step(model: torch.nn.Module, optimizer: paramhub.torch.HubOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()


def all_parts_come_back(rank: Rank) -> None:
    sampler = Sampler()
    model, optimizer, state = make(sampler=sampler, epoch=0, seen=[1, "two", {"three": torch.ones(1)}])
    step(model, optimizer)
    state.epoch, sampler.position = 3, 17
    optimizer.param_groups[0]["lr"] = 0.25
    state.commit()
    expected = (torch.rand(1), random.random(), numpy.random.random(), model[1].running_mean.clone())
    state.epoch, sampler.position = 4, 18
    optimizer.param_groups[0]["lr"] = 0.125
    with torch.no_grad():
        model[1].running_mean.fill_(7)
    # As if this rank had gone back to the step: it restores what it has saved.
    state._load_state_dict(load(optimizer, 1))
    assert (state.epoch, sampler.position, optimizer.param_groups[0]["lr"]) == (3, 17, 0.25)
    assert state.seen[2]["three"] == 1 and state.step == 1
    found = (torch.rand(1), random.random(), numpy.random.random(), model[1].running_mean)
    assert all(
        bool((a == b).all()) if torch.is_tensor(a) else a == b for a, b in zip(found, expected, strict=True)
    )
    with pytest.raises(AttributeError, match="has no value 'batch'"):
        state.batch = 1
    with pytest.raises(AttributeError, match="has no part 'batch'"):
        _ = state.batch


def parts_of_a_device_come_back(rank: Rank) -> None:
    """The step ends before the device has computed its gradients, and the job has none of them yet."""
    paramhub.torch.HubOptimizer._stages_all = True
    torch.cpu.Event.synchronize = lambda event: time.sleep(0.05)
    all_parts_come_back(rank)


def load(optimizer: paramhub.torch.HubOptimizer, step: int) -> dict[str, Any]:
    """What the hub has of this rank's state."""
    saved = optimizer._job.program_state(step)
    assert saved is not None
    return torch.load(io.BytesIO(saved), weights_only=True)


def misuse_is_explained(rank: Rank) -> None:
    with pytest.raises(MisuseError, match="'when' cannot be part of a State"):
        make(when=random.Random(1))
    with pytest.raises(MisuseError, match="cannot be called 'commit'"):
        make(commit=1)
    model, optimizer, state = make(epoch=0)
    step(model, optimizer)
    with pytest.raises(MisuseError, match=r"commit\(\) was not called after the step before"):
        step(model, optimizer)
    optimizer.zero_grad()
    state.commit()
    step(model, optimizer)
    state.epoch = bytes(5 << 20)
    with pytest.raises(MisuseError, match="program_state_bytes of the job is 4194304"):
        state.commit()


def it_keeps_nothing_in_a_job_that_fails(rank: Rank) -> None:
    model, optimizer, state = make(epoch=0)
    for _ in range(3):
        step(model, optimizer)
    state.commit()
    assert optimizer._job.rewind_every is None


@pytest.mark.parametrize("what", [all_parts_come_back, parts_of_a_device_come_back, misuse_is_explained])
def test_a_state_in_a_job_that_goes_back(team: Team, hub: paramhub.Hub, what: Callable[[Rank], None]) -> None:
    team(what, ranks=1, env={**REWINDS, "PARAMHUB_URL": hub.url})


def test_a_state_in_a_job_that_does_not(team: Team) -> None:
    team(it_keeps_nothing_in_a_job_that_fails, ranks=1)
