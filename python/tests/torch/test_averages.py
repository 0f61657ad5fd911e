"""Moving averages of the parameters at the hub, against torch.optim.swa_utils."""

from __future__ import annotations

import copy

import pytest
import torch
from hub_training import Net, Reference, begin, loss_of, made
from team import Rank, Team
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paramhub
from paramhub.torch import HubOptimizer

DECAY = 0.8


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def averages(rank: Rank) -> None:
    for mine, kind, options in (
        (paramhub.SGD(lr=0.05), torch.optim.SGD, {"lr": 0.05}),
        (paramhub.AdamW(lr=0.01), torch.optim.AdamW, {"lr": 0.01}),
    ):
        model = begin(rank)
        optimizer = HubOptimizer(model, mine, ema_decay=DECAY)
        reference = Reference(model, rank.size, made(kind, options))
        averaged = AveragedModel(reference.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        names = [name for name, _ in model.named_parameters()]
        before = optimizer.ema_parameters()
        assert list(before) == names
        assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
        train(model, optimizer, rank.rank, range(6))
        for step in range(6):
            reference.step(step)
            averaged.update_parameters(reference.model)
        found = optimizer.ema_parameters()
        for name, expected in averaged.module.named_parameters():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
        evaluated = Net()
        assert not evaluated.load_state_dict(found, strict=False).unexpected_keys

        # The average goes on from a saved state, bit by bit.
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, rank.rank, range(6, 9))
        expected = optimizer.ema_parameters()
        optimizer.close()
        resumed = begin(rank)
        optimizer = HubOptimizer(resumed, mine, ema_decay=DECAY)
        resumed.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(resumed, optimizer, rank.rank, range(6, 9))
        found = optimizer.ema_parameters()
        assert all(torch.equal(found[name], expected[name]) for name in names)

        # A state of torch has none, and the average goes on from the parameters.
        for state in saved["optimizer"]["state"].values():
            del state["ema"]
        optimizer.load_state_dict(saved["optimizer"])
        found = optimizer.ema_parameters()
        parameters = dict(resumed.named_parameters())
        assert all(torch.equal(found[name], parameters[name]) for name in names)
        optimizer.close()


def test_averages_are_those_of_torch(team: Team) -> None:
    team(averages, ranks=2)


def refusals(rank: Rank) -> None:
    model = begin(rank)
    with pytest.raises(paramhub.MisuseError, match="ema_decay cannot be had with 'muon'"):
        HubOptimizer(model, paramhub.Optimizer("muon"), ema_decay=0.9)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1))
    with pytest.raises(paramhub.MisuseError, match="the hub keeps no averages"):
        optimizer.ema_parameters()
    optimizer.close()


def test_averages_that_nobody_keeps_are_refused(team: Team) -> None:
    team(refusals, ranks=1)
