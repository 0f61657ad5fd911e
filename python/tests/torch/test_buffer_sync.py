"""Rank 0's buffers before each forward pass, against DistributedDataParallel's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from team import Rank, Team
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2))


def train(rank: Rank) -> None:
    dist.init_process_group("gloo")
    ours = network(rank.rank)
    hub = HubOptimizer(ours, paramhub.SGD(lr=0.1, momentum=0.9), sync_buffers=True)
    theirs = DistributedDataParallel(network(0))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank.rank))
        for model, optimizer in ((ours, hub), (theirs, sgd)):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        if step == 3 and rank.rank == 0:
            # One rank evaluates alone.
            ours.eval()
            with torch.no_grad():
                ours(inputs)
            ours.train()
    # Both synchronize before a pass, so that ranks differ by their own last pass alone.
    hub.synchronize()
    for own, expected in zip(ours.state_dict().values(), theirs.module.state_dict().values(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
    hub.close()
    assert not ours._forward_pre_hooks
    dist.destroy_process_group()


def test_buffers_are_those_of_ddp(team: Team) -> None:
    team(train, ranks=3)


def refuse(rank: Rank) -> None:
    paramhub.torch.init(consistency="async")
    with pytest.raises(paramhub.MisuseError, match="sync_buffers waits in each step"):
        HubOptimizer(network(0), paramhub.SGD(lr=0.1), sync_buffers=True)


def test_asynchronous_ranks_cannot_wait_for_buffers(team: Team) -> None:
    team(refuse, ranks=2)
