"""Ranks of two hosts below one hub: each host has a hub of its own, which sends the host's sums on."""

from __future__ import annotations

import math
import os

import pytest
import torch
from hub_training import Reference, begin, compare, loss_of, made
from team import Rank, Team

import paramhub
import paramhub.torch as hub_torch
from paramhub.torch import HubOptimizer, _initialization

SGD = {"lr": 0.05, "momentum": 0.9}


def train(
    rank: Rank, host_hub: bool | None, clip: float | None = None, scales: bool = False
) -> tuple[bool, list[bytes]]:
    """Trains with ranks 0 and 1 on one host, and 2 and 3 on another, with steps in two phases if it clips or scales."""
    os.environ["PARAMHUB_HOST"] = f"host-{rank.rank // 2}"
    torch.manual_seed(5)
    local_rank = rank.rank % 2
    hub_torch.init(rank=rank.rank, size=4, local_rank=local_rank, local_size=2, host_hub=host_hub)
    model = begin(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scales else None
    optimizer = HubOptimizer(model, paramhub.SGD(**SGD), max_grad_norm=clip, grad_scaler=scaler)
    if clip is None and scaler is None:
        compare(rank, model, optimizer, made(torch.optim.SGD, SGD), steps=5)
    else:
        train_in_two_phases(rank, model, optimizer, clip or math.inf, scaler)
    parameters = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    world = _initialization.current()
    assert world is not None
    sums_here = world.hubs._host_hub is not None and world.hubs._host_hub.memory_bytes() > 0
    return sums_here, parameters


def train_in_two_phases(
    rank: Rank,
    model: torch.nn.Module,
    optimizer: HubOptimizer,
    clip: float,
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Compares every step with torch's in one process. With a scaler the gradients of rank 3 overflow in step 2."""
    reference = Reference(model, rank.size, made(torch.optim.SGD, SGD))
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, rank.rank, step)
        overflows = scaler is not None and step == 2
        if overflows and rank.rank == 3:
            loss = loss * math.inf
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if not overflows:
            reference.backward(step)
            norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), clip).item()
            assert optimizer.last_grad_norm == pytest.approx(norm, rel=1e-5)
            norms.append(norm)
            reference.optimizer.step()
        reference.check(model, 1e-5)
    assert clip == math.inf or min(norms) < clip < max(norms), f"some steps are to be clipped, of {norms}"


def test_each_host_sums_its_ranks_first(team: Team, hub: paramhub.Hub) -> None:
    results = team(train, True, env={"PARAMHUB_URL": hub.url})
    assert [sums_here for sums_here, _ in results] == [True, False, True, False]
    assert all(parameters == results[0][1] for _, parameters in results)


def test_a_hub_on_the_same_host_needs_no_other(team: Team, hub: paramhub.Hub) -> None:
    results = team(train, None, env={"PARAMHUB_URL": hub.url})
    assert not any(sums_here for sums_here, _ in results)


@pytest.mark.parametrize(("clip", "scales"), [(3.0, False), (None, True), (3.0, True)])
def test_steps_of_two_phases_are_summed_by_host_too(
    team: Team, hub: paramhub.Hub, clip: float | None, scales: bool
) -> None:
    results = team(train, True, clip, scales, env={"PARAMHUB_URL": hub.url})
    assert [sums_here for sums_here, _ in results] == [True, False, True, False]
    assert all(parameters == results[0][1] for _, parameters in results)


def with_owners(rank: Rank) -> str:
    os.environ["PARAMHUB_HOST"] = f"host-{rank.rank // 2}"
    hub_torch.init(
        rank=rank.rank, size=4, local_rank=rank.rank % 2, local_size=2, host_hub=True, optimize_at="owner"
    )
    with pytest.raises(paramhub.ParamhubError) as refused:
        HubOptimizer(torch.nn.Linear(4, 4), paramhub.SGD(**SGD), max_grad_norm=1.0)
    return str(refused.value)


def test_steps_of_two_phases_are_refused_where_owners_optimise(team: Team, hub: paramhub.Hub) -> None:
    for refused in team(with_owners, env={"PARAMHUB_URL": hub.url}):
        assert "clipping by the global norm" in refused and "leave `optimize_at` out" in refused


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


def in_bf16(rank: Rank, optimizes_at_hub: bool) -> list[float]:
    """Makes a step whose gradients are a little more than 1, so that sums in bf16 are rounded to whole numbers."""
    os.environ["PARAMHUB_HOST"] = f"host-{rank.rank // 2}"
    hub_torch.init(
        rank=rank.rank, size=4, local_rank=rank.rank % 2, local_size=2, host_hub=True, between_sites="bf16"
    )
    layer = torch.nn.Linear(300, 3, bias=False)
    torch.nn.init.constant_(layer.weight, 8.0)
    optimizer: torch.optim.Optimizer
    if optimizes_at_hub:
        optimizer = HubOptimizer(layer, paramhub.SGD(lr=1.0))
    else:
        optimizer = hub_torch.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=1.0), named_parameters=layer.named_parameters()
        )
    layer(torch.full((1, 300), 1 + 1 / 512)).sum().backward()
    optimizer.step()
    layer(torch.zeros(1, 300))
    # A layer whose factors go from rank to rank sends no sums between hosts.
    HubOptimizer(torch.nn.Sequential(torch.nn.Linear(256, 256)), paramhub.SGD(**SGD), scheme="factors")
    return layer.weight.detach().unique().tolist()


@pytest.mark.parametrize("optimizes_at_hub", [True, False])
def test_sums_cross_between_hosts_in_bf16_if_the_run_asks(
    team: Team, hub: paramhub.Hub, optimizes_at_hub: bool
) -> None:
    assert team(in_bf16, optimizes_at_hub, env={"PARAMHUB_URL": hub.url}) == 4 * [[7.0]]


def by_host_asynchronously(rank: Rank, reduction: str | None) -> tuple[float, float]:
    """Every update lowers the weight by 1, as the mean of gradients of 1. Returns the updates seen after 5 steps of all."""
    os.environ["PARAMHUB_HOST"] = f"host-{rank.rank // 2}"
    hub_torch.init(
        rank=rank.rank,
        size=4,
        local_rank=rank.rank % 2,
        local_size=2,
        host_hub=True,
        consistency="async",
        reduction=reduction,
    )
    layer = torch.nn.Linear(300, 3, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = HubOptimizer(layer, paramhub.SGD(lr=1.0))
    for step in range(6):
        if step == 5:
            rank.mark(f"{rank.rank} has made five steps")
            for other in range(4):
                rank.await_mark(f"{other} has made five steps")
        optimizer.zero_grad()
        layer(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
    return -layer.weight.max().item(), -layer.weight.min().item()


@pytest.mark.parametrize(("reduction", "updates_a_step"), [("tree", 2), ("ring", 2), ("flat", 4), (None, 4)])
def test_hosts_or_ranks_do_not_wait_for_one_another(
    team: Team, hub: paramhub.Hub, reduction: str | None, updates_a_step: int
) -> None:
    results = team(by_host_asynchronously, reduction, env={"PARAMHUB_URL": hub.url})
    for least, most in results:
        assert 5 * updates_a_step < least and most <= 6 * updates_a_step
    if updates_a_step == 2:
        assert results[0] == results[1] and results[2] == results[3], "the ranks of a host have the same"


def past_late_ranks(rank: Rank, reduction: str | None, late: list[int]) -> float:
    """Every step lowers the weight by 1, as the mean of gradients of 1. Late ranks make one step, after five of the others."""
    os.environ["PARAMHUB_HOST"] = f"host-{rank.rank // 2}"
    hub_torch.init(
        rank=rank.rank,
        size=4,
        local_rank=rank.rank % 2,
        local_size=2,
        host_hub=True,
        stragglers=f"backup:{len(late)}",
        reduction=reduction,
    )
    layer = torch.nn.Linear(300, 3, bias=False)
    torch.nn.init.zeros_(layer.weight)
    optimizer = HubOptimizer(layer, paramhub.SGD(lr=1.0))
    is_late = rank.rank in late
    if is_late:
        for other in set(range(4)) - set(late):
            rank.await_mark(f"{other}-is-ahead")
    for _ in range(1 if is_late else 5):
        optimizer.zero_grad()
        layer(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
    if not is_late:
        rank.mark(f"{rank.rank}-is-ahead")
    assert (layer.weight == layer.weight[0, 0]).all()
    return -layer.weight[0, 0].item()


@pytest.mark.parametrize(("reduction", "late"), [("tree", [2, 3]), (None, [2])])
def test_hosts_or_ranks_that_are_late_are_left_out(
    team: Team, hub: paramhub.Hub, reduction: str | None, late: list[int]
) -> None:
    assert team(past_late_ranks, reduction, late, env={"PARAMHUB_URL": hub.url}) == 4 * [5.0]


def without_host_hubs(rank: Rank, arguments: dict[str, str]) -> str:
    hub_torch.init(rank=rank.rank, size=2, local_rank=rank.rank, local_size=2, **arguments)
    with pytest.raises(paramhub.ParamhubError) as refused:
        HubOptimizer(torch.nn.Linear(4, 4), paramhub.SGD(**SGD))
    return str(refused.value)


@pytest.mark.parametrize("arguments", [{"between_sites": "bf16"}, {"optimize_at": "owner"}])
def test_what_concerns_hosts_hubs_is_refused_at_once_on_one_host(
    team: Team, arguments: dict[str, str]
) -> None:
    for refused in team(without_host_hubs, arguments, ranks=2):
        assert next(iter(arguments)) in refused and "or leave it out" in refused, refused
