"""HubOptimizer against torch.optim on the same mean gradient, with real ranks and a real hub."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hub_training import Net, Reference, all_parameters, begin, loss_of
from team import Rank, Team

import paramhub
from paramhub.torch import HubOptimizer

STEPS = 20
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
SAME: list[tuple[paramhub.Optimizer, Any, dict[str, Any]]] = [
    (paramhub.SGD(lr=0.1), SGD, {"lr": 0.1}),
    (
        paramhub.SGD(lr=0.05, momentum=0.9, dampening=0.1),
        SGD,
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.1},
    ),
    (
        paramhub.Nesterov(lr=0.05, weight_decay=1e-2),
        SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2},
    ),
    (paramhub.Adam(lr=3e-3, weight_decay=1e-2), ADAM, {"lr": 3e-3, "weight_decay": 1e-2}),
    (
        paramhub.AdamW(lr=3e-3, betas=(0.8, 0.99), eps=1e-6),
        ADAMW,
        {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6},
    ),
]


def train(rank: Rank, overlap_forward: bool) -> list[bytes]:
    ends = []
    for mine, theirs, options in SAME:
        model = begin(rank)
        optimizer = HubOptimizer(model, mine, overlap_forward=overlap_forward)
        reference = Reference(model, rank.size, lambda m: theirs(m.parameters(), **options))  # noqa: B023
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step).backward()
            optimizer.step()
            if rank.rank == 0:
                reference.step(step)
                reference.check(model)
        ends += all_parameters(model)
        optimizer.close()
    return ends


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("overlap_forward", [True, False])
def test_every_optimizer_is_torchs(team: Team, transport: str, overlap_forward: bool) -> None:
    ends = team(train, overlap_forward, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1] == ends[2] == ends[3]
    assert len(ends[0]) == len(SAME) * len(list(Net().parameters()))
