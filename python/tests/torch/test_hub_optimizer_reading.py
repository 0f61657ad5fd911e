"""Code that reads a parameter through its module gets the newest value, however late it arrives."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable

import torch
from hub_training import begin
from team import Rank, Team

import paramhub
from paramhub.torch import HubOptimizer
from paramhub.torch._guards import ParameterTable

DELAY = 0.3
"""Seconds by which rank 1's gradients are late."""


class Model(torch.nn.Module):
    """A model whose parameters are read in all ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = torch.nn.GRU(4, 4, batch_first=True)
        self.linear = torch.nn.Linear(4, 4)
        self.lists = torch.nn.ParameterList([torch.ones(4)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        # Reads self.attention.out_proj.weight, whose module is never called.
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.linear(self.recurrent(x)[0]) * self.lists[0]
        # Reads a child's parameter in the parent's forward pass.
        return torch.nn.functional.linear(x, self.embedding.weight)


TOKENS = torch.tensor([[0, 1, 2, 3, 4, 5]])


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def saved_whole(model: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[torch.nn.Module], list[torch.Tensor]]] = {
    "parameters": values,
    "state_dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "deepcopy": lambda model: values(copy.deepcopy(model)),
    "torch.save": lambda model: values(saved_whole(model)),
    "vector": lambda model: list(torch.nn.utils.parameters_to_vector(model.parameters()).detach().split(7)),
    "evaluation": lambda model: [evaluated(model)],
    "functional_call": lambda model: [
        torch.func.functional_call(model, {"lists.0": torch.ones(4) / 2}, TOKENS).detach()
    ],
}


@torch.no_grad()
def evaluated(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(TOKENS)


def late(rank: Rank) -> None:
    for name, read in WAYS.items():
        model = begin(rank, Model)
        optimizer = HubOptimizer(model, paramhub.SGD(lr=0.5))
        before = read(model)
        model.train()
        model(TOKENS).square().sum().backward()
        if rank.rank == 1:
            # Its gradients were sent already, so only a second step can be late.
            optimizer.step()
            optimizer.synchronize()
            optimizer.zero_grad()
            time.sleep(DELAY)
            model(TOKENS).square().sum().backward()
            optimizer.step()
            optimizer.synchronize()
        else:
            optimizer.step()
            optimizer.zero_grad()
            model(TOKENS).square().sum().backward()
            optimizer.step()
            assert any(exchange.handle is not None for exchange in optimizer._exchanges)
            model.eval()
            found = read(model)
            optimizer.synchronize()
            assert all(torch.equal(mine, right) for mine, right in zip(found, read(model), strict=True)), name
            assert not all(torch.equal(mine, old) for mine, old in zip(found, before, strict=True)), name
        optimizer.close()


def test_late_values_are_waited_for(team: Team) -> None:
    team(late, ranks=2)


def copies(rank: Rank) -> None:
    model = begin(rank, Model)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.5))
    assert isinstance(model.attention.out_proj._parameters, ParameterTable)
    for copied in (copy.deepcopy(model), saved_whole(model)):
        assert type(copied.attention.out_proj._parameters) is dict
        # A copy is independent of the optimizer.
        copied(TOKENS).sum().backward()
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert torch.equal(model.lists[0], torch.ones(4))
    names = [name for name, _ in model.named_parameters()]
    assert list(model.state_dict()) == names
    # Two optimizers share a model; after one is closed the other still works.
    optimizer.close()
    assert type(model.attention.out_proj._parameters) is dict
    head, body = model.recurrent, (model.embedding, model.attention, model.linear, model.lists)
    first = HubOptimizer(model, paramhub.SGD(lr=0.1), params=head.parameters())
    second = HubOptimizer(
        model, paramhub.Adam(), params=[parameter for module in body for parameter in module.parameters()]
    )
    for _ in range(3):
        model(TOKENS).sum().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    first.close()
    with second.no_sync():
        model(TOKENS).sum().backward()
    second.step()


def test_copies_are_free(team: Team) -> None:
    team(copies, ranks=2)
