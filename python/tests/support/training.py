"""A small model and its data, with which tests compare trainings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

BATCH = 4
STEPS = 20


class Net(nn.Module):
    """A convolution, a tied pair of layers, a scalar, and two heads, of which each pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.convolution = nn.Conv2d(1, 6, 3)
        self.first = nn.Linear(6 * 36, 64)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied_again = nn.Linear(64, 64, bias=False)
        self.tied_again.weight = self.tied.weight
        self.heads = nn.ModuleList([nn.Linear(64, 10), nn.Linear(64, 10)])

    def forward(self, images: torch.Tensor, head: int = 0) -> torch.Tensor:
        hidden = torch.relu(self.convolution(images * self.scale)).flatten(1)
        hidden = torch.tanh(self.tied_again(torch.relu(self.tied(torch.relu(self.first(hidden))))))
        return self.heads[head](hidden)


class OneHead(Net):
    """A `Net` in which each pass uses every parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(64, 10)])


def make(kind: type[Net] = OneHead) -> Net:
    """The same parameters on every rank and in every call."""
    torch.manual_seed(7)
    return kind()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that differs between ranks and steps."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 1, 8, 8, generator=source), torch.randint(0, 10, (BATCH,), generator=source)


def loss_of(model: Callable[..., torch.Tensor], step: int, rank: int, *arguments: Any) -> torch.Tensor:
    images, labels = batch(step, rank)
    return nn.functional.cross_entropy(model(images, *arguments), labels)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def difference(tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of two tensors, relative to the largest element of the expected one."""
    assert len(tensors) == len(expected) > 0
    return max(
        ((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).item()
        for mine, theirs in zip(tensors, expected, strict=True)
    )
