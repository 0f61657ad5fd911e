"""Finds the HubOptimizers of parameters. Frameworks have only the model where they would wrap it, or clip its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from paramhub.torch._guards import suspended

if TYPE_CHECKING:
    from paramhub.torch.hub_optimizer import HubOptimizer

_optimizers: weakref.WeakKeyDictionary[HubOptimizer, None] = weakref.WeakKeyDictionary()
"""The open optimizers in the order in which they were made, which is the same at all ranks."""


def add(optimizer: HubOptimizer) -> None:
    _optimizers[optimizer] = None


def remove(optimizer: HubOptimizer) -> None:
    _optimizers.pop(optimizer, None)


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[HubOptimizer]:
    """The open optimizers that train any of the parameters, which may be those of a module in mid-step."""
    with suspended():
        ids = set(map(id, parameters))
    return [
        optimizer
        for optimizer in _optimizers
        if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])
    ]
