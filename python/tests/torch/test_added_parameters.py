"""Layers that are trained from some step on: `HubOptimizer.add_param_group`."""

from __future__ import annotations

import pytest
import torch
from team import Rank, Team
from torch import nn

import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(inputs).square().mean()


def train(rank: Rank, are_listed: bool) -> None:
    """``are_listed`` says whether the frozen parameters are in the first group, as they are by default."""
    paramhub.torch.init(reproducible=True)
    ours, reference = network(rank.rank), network(0)
    for model in (ours, reference):
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
    hub = HubOptimizer(
        ours, paramhub.AdamW(lr=0.01), params=None if are_listed else list(ours[4].parameters())
    )
    adamw = torch.optim.AdamW(reference[4].parameters(), lr=0.01)

    def steps(numbers: range) -> None:
        for step in numbers:
            hub.zero_grad()
            loss(ours, rank.rank, step).backward()
            hub.step()
            adamw.zero_grad()
            sum(loss(reference, each, step) for each in range(rank.size)).div(rank.size).backward()
            adamw.step()

    steps(range(4))
    for layer, rate in ((2, 0.002), (0, 0.001)):
        for model in (ours, reference):
            model[layer].requires_grad_(True)
        hub.add_param_group({"params": ours[layer].parameters(), "lr": rate})
        adamw.add_param_group({"params": reference[layer].parameters(), "lr": rate})
        steps(range(10 * layer + 4, 10 * layer + 8))
    assert [group["lr"] for group in hub.param_groups] == [0.01, 0.002, 0.001]
    hub.synchronize()
    for own, expected in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)
    hub.close()


@pytest.mark.parametrize("are_listed", [True, False])
def test_a_layer_that_is_unfrozen_trains_as_with_torch(team: Team, are_listed: bool) -> None:
    team(train, are_listed, ranks=2)
