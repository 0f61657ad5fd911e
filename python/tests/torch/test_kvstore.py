"""Key-value stores with torch's tensors and beside torch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stores import COLLECTIVE, KINDS, open_store
from team import Rank, Team
from torch import nn
from workers import TIMEOUT, new_job

import paramhub
import paramhub.kvstore

STEPS = 20
OPTIMIZERS: dict[str, tuple[paramhub.Optimizer, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (
        paramhub.SGD(lr=0.05, momentum=0.9, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    ),
    "adam": (paramhub.Adam(lr=0.01), torch.optim.Adam, {"lr": 0.01}),
}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 20, generator=random)
    return inputs, inputs.sum(1, keepdim=True)


def alone(name: str, ranks: int) -> list[torch.Tensor]:
    """The parameters after training with torch's optimizer on all ranks' batches, whose mean gradient is that of the whole."""
    net = model()
    _, kind, arguments = OPTIMIZERS[name]
    optimizer = kind(net.parameters(), **arguments)
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.param_groups[0]["lr"] /= 2
        inputs, targets = (
            torch.cat(parts) for parts in zip(*(batch(rank, step) for rank in range(ranks)), strict=True)
        )
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def trains(rank: Rank, ticket: paramhub.JobTicket, kind: str, name: str) -> list[torch.Tensor]:
    optimizer, _, arguments = OPTIMIZERS[name]
    with open_store(rank, ticket, kind) as kv:
        net = model()
        parameters = dict(net.named_parameters())
        if rank.rank != 0:
            nn.init.zeros_(parameters["0.weight"])
        data = {key: parameter.data for key, parameter in parameters.items()}
        kv.broadcast(list(data), list(data.values()), out=list(data.values())).wait(TIMEOUT)
        # The optimizer is passed by name and as an object.
        if name == "adam":
            kv.set_optimizer("adam", **arguments)
        else:
            kv.set_optimizer(optimizer)
        for step in range(STEPS):
            if step == STEPS // 2:
                kv.set_hyperparameters(learning_rate=arguments["lr"] / 2)
            inputs, targets = batch(rank.rank, step)
            net.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            for key in reversed(data):
                kv.push(key, parameters[key].grad)
            for key in reversed(data):
                kv.pull(key, out=data[key])
            kv.wait(timeout=TIMEOUT)
        return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_stores_train_as_torch_s_optimizers_do(hub: paramhub.Hub, team: Team, name: str) -> None:
    expected = alone(name, 4)
    found = {kind: team(trains, new_job(hub, 4), kind, name, ranks=4) for kind in KINDS}
    for kind, results in found.items():
        for result in results:
            for own, theirs in zip(result, expected, strict=True):
                assert torch.allclose(own, theirs, rtol=1e-6, atol=1e-6), kind
            assert all(torch.equal(own, same) for own, same in zip(result, results[0], strict=True)), kind
    for kind in COLLECTIVE:
        for own, same in zip(found[kind][0], found["funnel"][0], strict=True):
            assert torch.equal(own, same), f"{kind} is funnel to the bit"


def halves(rank: Rank, ticket: paramhub.JobTicket, kind: str, name: str) -> None:
    dtype = getattr(torch, name)
    with open_store(rank, ticket, kind) as kv:
        value = torch.full((3, 400), 0.5 * rank.rank, dtype=dtype)
        kv.broadcast("w", value, out=value).wait(TIMEOUT)
        assert not value.any()
        own = [torch.full_like(value, rank.rank + 1.0), torch.full_like(value, 0.25)]
        kv.pushpull("w", own, out=value).wait(TIMEOUT)
        assert value.dtype == dtype and (value == 11).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_halves_are_summed(hub: paramhub.Hub, team: Team, kind: str, name: str) -> None:
    team(halves, new_job(hub, 4), kind, name, ranks=4)


def test_a_parameter_lends_its_data_and_not_itself() -> None:
    with paramhub.kvstore.create("local") as kv:
        parameter = nn.Parameter(torch.ones(3))
        with pytest.raises(paramhub.MisuseError, match=r"lends no memory: .*detach"):
            kv.init("w", parameter)
        kv.init("w", parameter.data)
        with pytest.raises(paramhub.MisuseError, match="contiguous"):
            kv.init("v", torch.ones(3, 4).t())
