"""Ranks of two hosts below one hub: each host has a hub of its own, which sends the host's sums on."""

from __future__ import annotations

import os

import torch
from hub_training import begin, compare, made
from team import Rank, Team

import paramhub
import paramhub.torch as hub_torch
from paramhub.torch import HubOptimizer, _initialization

SGD = {"lr": 0.05, "momentum": 0.9}


def train(rank: Rank, host_hub: bool | None, clip: float | None) -> tuple[bool, list[bytes]]:
    """Trains with ranks 0 and 1 on one host, and 2 and 3 on another."""
    os.environ["PARAMHUB_HOST"] = f"host-{rank.rank // 2}"
    torch.manual_seed(5)
    local_rank = rank.rank % 2
    hub_torch.init(rank=rank.rank, size=4, local_rank=local_rank, local_size=2, host_hub=host_hub)
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.SGD(**SGD), max_grad_norm=clip)
    if clip is None:
        compare(rank, model, optimizer, made(torch.optim.SGD, SGD), steps=5)
    else:
        optimizer.zero_grad()
        model(torch.ones(8, 3, 4, 4)).sum().backward()
        optimizer.step()
    parameters = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    world = _initialization.current()
    assert world is not None
    sums_here = world.hubs._host_hub is not None and world.hubs._host_hub.memory_bytes() > 0
    return sums_here, parameters


def test_each_host_sums_its_ranks_first(team: Team, hub: paramhub.Hub) -> None:
    results = team(train, True, None, env={"PARAMHUB_URL": hub.url})
    assert [sums_here for sums_here, _ in results] == [True, False, True, False]
    assert all(parameters == results[0][1] for _, parameters in results)


def test_a_hub_on_the_same_host_needs_no_other(team: Team, hub: paramhub.Hub) -> None:
    results = team(train, None, None, env={"PARAMHUB_URL": hub.url})
    assert not any(sums_here for sums_here, _ in results)


def test_steps_of_two_phases_go_past_the_hosts_hubs(team: Team, hub: paramhub.Hub) -> None:
    results = team(train, True, 0.5, env={"PARAMHUB_URL": hub.url})
    assert not any(sums_here for sums_here, _ in results)
    assert all(parameters == results[0][1] for _, parameters in results)


def by_scheme(rank: Rank, scheme: str) -> tuple[str, str]:
    os.environ["PARAMHUB_HOST"] = f"host-{rank.rank // 2}"
    hub_torch.init(rank=rank.rank, size=4, local_rank=rank.rank % 2, local_size=2, host_hub=True)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256))
    optimizer = HubOptimizer(model, paramhub.SGD(**SGD), scheme=scheme)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 256), float(step))).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    return optimizer.schemes["0"]


def test_below_hosts_hubs_layers_go_by_the_hub_unless_factors_are_asked_for(
    team: Team, hub: paramhub.Hub
) -> None:
    for scheme, why in team(by_scheme, "auto", env={"PARAMHUB_URL": hub.url}):
        assert scheme == "hub" and "serve racks or hosts" in why
    found = team(by_scheme, "factors", env={"PARAMHUB_URL": hub.url})
    assert found == 4 * [("factors", "as asked")]
