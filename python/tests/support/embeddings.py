"""A model with sparse gradients and its data, with which tests compare trainings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramhub.torch

STEPS = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(500, 16, sparse=True)
        self.bags = nn.EmbeddingBag(400, 16, mode="sum", sparse=True)
        self.last = nn.Linear(16, 4)
        self.other = nn.Linear(16, 4)

    def forward(self, numbers: torch.Tensor, other: bool) -> torch.Tensor:
        hidden = torch.tanh(self.words(numbers).sum(1) + self.bags(numbers % 400))
        return (self.other if other else self.last)(hidden)


def train(
    rank: int, group: Any, options: dict[str, Any], state: Any = None
) -> tuple[nn.Module, list[torch.Tensor]]:
    """The model after training with DDP, with the hook if there is a state for it; and the sparse gradients."""
    torch.manual_seed(3)
    model = Net()
    has_unused = options.get("find_unused_parameters", False)
    model.other.requires_grad_(has_unused)
    ddp = DistributedDataParallel(model, process_group=group, **options)
    if state is not None:
        ddp.register_comm_hook(state, paramhub.torch.hub_hook)
    rows = [model.words.weight, model.bags.weight]
    optimizers = [
        torch.optim.SparseAdam(rows, lr=0.01),
        torch.optim.SGD([p for n, p in model.named_parameters() if "s.weight" not in n], lr=0.1),
    ]
    gradients = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        # The ranks' rows differ in number, and some come several times.
        numbers = torch.randint(0, 500, (3 + 4 * rank, 5), generator=generator)
        ddp(numbers, has_unused and (step + rank) % 2 == 0).pow(2).sum().backward()
        gradients += [weight.grad.clone() for weight in rows if weight.grad is not None]
        for optimizer in optimizers:
            optimizer.step()
    assert all(gradient.is_sparse for gradient in gradients) and len(gradients) == 2 * STEPS
    return model, gradients
