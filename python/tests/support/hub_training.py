"""Training with HubOptimizer and its reference: torch.optim on the mean of all ranks' gradients, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from team import Rank

import paramhub.torch as hub_torch

BATCH = 8
STEPS = 20
ROUNDING = STEPS * 2.0**-23
"""The largest difference between parameters of the same training, relative to the largest parameter. Each step rounds once more,
and how it rounds depends on the processor's kernels."""


class Net(torch.nn.Module):
    """Layers of several kinds: a convolution in channels_last, norms, an odd size, a scalar, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = torch.nn.GroupNorm(2, 8)
        self.hidden = torch.nn.Linear(8 * 4 * 4, 61)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.out = torch.nn.Linear(61, 7)
        self.tied = torch.nn.Linear(61, 7)
        self.tied.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.tanh(self.hidden(x)) * self.scale
        return self.out(x) + self.tied(x)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's inputs and targets in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, 3, 4, 4, generator=generator), torch.randint(
        0, 7, (BATCH,), generator=generator
    )


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(inputs), targets)


class Reference:
    """A copy of the model that one process trains with torch.optim on the batches of all ranks."""

    def __init__(
        self, model: torch.nn.Module, ranks: int, make: Callable[[torch.nn.Module], torch.optim.Optimizer]
    ) -> None:
        self.model = copy.deepcopy(model)
        self.ranks = ranks
        self.optimizer = make(self.model)

    def backward(self, *batches: int, loss: Callable[..., torch.Tensor] = loss_of) -> None:
        """Sets gradients to the mean over all ranks for these batches, summed in the order in which hub and ranks sum."""
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        for rank in range(self.ranks):
            self.optimizer.zero_grad()
            for number in batches:
                loss(self.model, rank, number).backward()
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    before = sums.get(parameter)
                    sums[parameter] = parameter.grad if before is None else before + parameter.grad
        self.optimizer.zero_grad()
        for parameter, total in sums.items():
            parameter.grad = total * (1 / self.ranks)

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    def check(self, model: torch.nn.Module, tolerance: float = ROUNDING) -> None:
        difference = largest_difference(model, self.model)
        assert difference <= tolerance, f"parameters differ by {difference:g} of the largest"


def largest_difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between two models' parameters, relative to each tensor's largest value."""
    with torch.no_grad():
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        return max(
            float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-3)) for mine, theirs in pairs
        )


def made(kind: Any, options: dict[str, Any]) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), **options)


def compare(
    rank: Rank,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer],
    scheduler: Any = None,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    steps: int = STEPS,
    tolerance: float = ROUNDING,
) -> Reference:
    """Trains the model. Rank 0 compares every step with the reference's."""
    reference = Reference(model, rank.size, make)
    theirs = make_scheduler(reference.optimizer) if make_scheduler else None
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, rank.rank, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if rank.rank == 0:
            reference.step(step)
            if theirs is not None:
                theirs.step()
            reference.check(model, tolerance)
    return reference


def begin(rank: Rank, make: Callable[[], torch.nn.Module] = Net) -> torch.nn.Module:
    """A model with different parameters on each rank.

    Gradients are summed in rank order, as in the reference, because Adam divides by the gradient's own size: the last bit of
    a tiny gradient makes a large difference.
    """
    hub_torch.init(reproducible=True)
    torch.manual_seed(rank.rank)
    return make()


def all_parameters(model: torch.nn.Module) -> Iterator[Any]:
    """A model's parameters as bytes, which can be compared across processes."""
    return (parameter.detach().numpy().tobytes() for parameter in model.parameters())
