"""Finds the HubOptimizer of parameters. Frameworks have only the model where they would wrap it, or clip its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paramhub.torch.hub_optimizer import HubOptimizer

_optimizers: weakref.WeakSet[HubOptimizer] = weakref.WeakSet()


def add(optimizer: HubOptimizer) -> None:
    _optimizers.add(optimizer)


def remove(optimizer: HubOptimizer) -> None:
    _optimizers.discard(optimizer)


def optimizer_of(parameters: Iterable[torch.Tensor]) -> HubOptimizer | None:
    """The open HubOptimizer that trains any of the parameters, if there is one."""
    ids = set(map(id, parameters))
    for optimizer in _optimizers:
        if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]):
            return optimizer
    return None
