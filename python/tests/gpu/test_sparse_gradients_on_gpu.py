"""Embeddings with sparse gradients on a GPU, whose rows the ranks exchange, compared with one process on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, begin, begin_collectives, group_differently
from embeddings import STEPS, Net
from team import Rank, Team
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    numbers = torch.randint(0, 500, (3 + 4 * rank, 5), generator=generator)
    return model(numbers.to(DEVICE), False).square().sum()


def make() -> Net:
    model = Net().to(DEVICE)
    model.other.requires_grad_(False)
    return model


def rows_of(model: Net) -> list[nn.Parameter]:
    return [model.words.weight, model.bags.weight]


def dense_of(model: Net) -> list[nn.Parameter]:
    return list(model.last.parameters())


def train_alone(size: int, optimizers: Any) -> Net:
    model = make()
    made = optimizers(model)
    for step in range(STEPS):
        for optimizer in made:
            optimizer.zero_grad()
        sum(loss_of(model, step, rank) / size for rank in range(size)).backward()
        for optimizer in made:
            optimizer.step()
    return model


def train(model: Net, optimizers: list[Any], rank: int) -> None:
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()


def check_same(model: nn.Module, expected: nn.Module) -> None:
    for own, its in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-3, atol=1e-4)


def by_distributed_optimizer(rank: Rank) -> list[torch.Tensor]:
    import paramhub.torch as hvd

    begin()
    group_differently(rank.rank)
    found: list[torch.Tensor] = []

    def sgd(model: Net) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([*rows_of(model), *dense_of(model)], lr=0.05, momentum=0.9)]

    def adam(model: Net) -> list[torch.optim.Optimizer]:
        return [torch.optim.SparseAdam(rows_of(model), lr=0.01), torch.optim.SGD(dense_of(model), lr=0.05)]

    for optimizers in (sgd, adam):
        model = make()
        train(model, [hvd.DistributedOptimizer(each) for each in optimizers(model)], rank.rank)
        for weight in rows_of(model):
            assert weight.grad is not None and weight.grad.is_sparse and weight.grad.device == weight.device
        check_same(model, train_alone(rank.size, optimizers))
        found += [parameter.detach().cpu() for parameter in model.parameters()]
    return found


def by_hub_optimizer(rank: Rank) -> list[torch.Tensor]:
    import paramhub
    import paramhub.torch

    begin()
    group_differently(rank.rank)
    model = make()
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.Adam(lr=0.01, eps=1e-3), sparse_adam=True)
    assert optimizer._step.stage is not None
    train(model, [optimizer], rank.rank)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.synchronize()

    def alone(model: Net) -> list[torch.optim.Optimizer]:
        options = {"lr": 0.01, "eps": 1e-3}
        return [
            torch.optim.SparseAdam(rows_of(model), **options),
            torch.optim.Adam(dense_of(model), **options),
        ]

    check_same(model, train_alone(rank.size, alone))
    assert all(saved["state"][number]["exp_avg"].device == DEVICE for number in (0, 1))
    optimizer.close()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def by_ddp(rank: Rank, way: str) -> list[torch.Tensor]:
    """DDP over paramhub's backend, or over gloo with the hook."""
    import paramhub.torch

    if way == "backend":
        begin_collectives()
    else:
        begin()
        dist.init_process_group("gloo")
    model = make()
    ddp = DistributedDataParallel(model)
    if way == "hook":
        ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)

    def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)]

    train(ddp, sgd(model), rank.rank)
    for weight in rows_of(model):
        assert weight.grad is not None and weight.grad.is_sparse and weight.grad.device == weight.device
    check_same(model, train_alone(rank.size, sgd))
    return [parameter.detach().cpu() for parameter in model.parameters()]


def same_everywhere(results: list[list[torch.Tensor]]) -> None:
    for other in results[1:]:
        assert all(torch.equal(own, its) for own, its in zip(results[0], other, strict=True))


def test_distributed_optimizer_exchanges_rows(team: Team) -> None:
    same_everywhere(team(by_distributed_optimizer, ranks=3))


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_ddp_exchanges_rows(team: Team, way: str) -> None:
    same_everywhere(team(by_ddp, way, ranks=2))


def test_hub_optimizer_exchanges_rows(team: Team) -> None:
    same_everywhere(team(by_hub_optimizer, ranks=3))
