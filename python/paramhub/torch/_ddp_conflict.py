"""Detects DistributedDataParallel around a HubOptimizer's model: it would average gradients a second time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from paramhub.errors import MisuseError

if TYPE_CHECKING:
    from paramhub.torch._exchange import Exchange

_reduced: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = weakref.WeakKeyDictionary()
"""The ids of the parameters that each instance reduces."""


def refuse_in_forward(exchanges: Sequence[Exchange]) -> None:
    """Called in the forward pass of an instance. Refuses parameters that the instance will reduce in the backward pass.

    So the error comes before any gradient is sent. An instance that ignores these parameters does no harm, nor does an
    evaluation.
    """
    around = DistributedDataParallel._active_ddp_module
    if around is None or not torch.is_grad_enabled():
        return
    reduced = _reduced.get(around)
    if reduced is None:
        reduced = _reduced[around] = frozenset(map(id, around._module_parameters))
    for exchange in exchanges:
        if id(exchange.parameter) in reduced:
            raise refusal(exchange.name)


def is_around(parameter: torch.Tensor) -> bool:
    """Returns whether some instance reduces the parameter's gradient. It looks through all objects of the process, so call it
    only for an error message."""
    return any(
        any(each is parameter for each in thing.__dict__.get("_module_parameters", ()))
        for thing in gc.get_objects()
        if issubclass(type(thing), DistributedDataParallel)
    )


def refusal(name: str) -> MisuseError:
    """The error for HubOptimizer's parameter of this name."""
    return MisuseError(
        f"{name!r} is trained by HubOptimizer and is in a model within DistributedDataParallel: both average its gradient. "
        + WHAT_TO_DO
    )


WHAT_TO_DO = (
    "Leave DistributedDataParallel out and train the model itself, after optimizer.broadcast_parameters() on every rank, for "
    "it has written to the parameters; or keep it, with an optimizer of torch.optim, and have its gradients averaged by the hub: "
    'register paramhub.torch.hub_hook, or init_process_group("paramhub"). Hugging Face\'s Trainer, Accelerate and Lightning '
    "put it around a model by themselves: docs/pytorch.md says what to do there"
)
