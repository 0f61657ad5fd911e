"""Refuses a HubOptimizer whose model is within DistributedDataParallel (DDP), because both would average its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from paramhub.errors import MisuseError
from paramhub.torch._ddp_instances import ddp_instances

if TYPE_CHECKING:
    from paramhub.torch._exchange import Exchange

_reduced_ids: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = weakref.WeakKeyDictionary()
"""The ids of the parameters whose gradients each DDP instance reduces: all of its model but those it was told to ignore."""


def refuse_in_forward(exchanges: Sequence[Exchange]) -> None:
    """Raises an error if a DDP instance runs this forward pass and will reduce the gradient of one of these parameters.

    The check is in the forward pass so that the error comes before any gradient is sent. It lets two harmless cases pass: the
    DDP instance was told to ignore the parameters, or there will be no backward pass, because gradients are disabled.
    """
    ddp = DistributedDataParallel._active_ddp_module
    if ddp is None or not torch.is_grad_enabled():
        return
    reduced_ids = _reduced_ids.get(ddp)
    if reduced_ids is None:
        reduced_ids = _reduced_ids[ddp] = frozenset(map(id, ddp._module_parameters))
    for exchange in exchanges:
        if id(exchange.parameter) in reduced_ids:
            raise refusal(exchange.name)


def is_reduced_by_ddp(parameter: torch.Tensor) -> bool:
    """Returns whether some DDP instance reduces the parameter's gradient. The search looks through all objects of the process,
    so call this function only to choose an error message."""
    # A DDP instance whose constructor failed may not have `_module_parameters`.
    return any(
        any(reduced is parameter for reduced in ddp.__dict__.get("_module_parameters", ()))
        for ddp in ddp_instances()
    )


def refusal(name: str) -> MisuseError:
    """Makes the error for a parameter of this name, which HubOptimizer and DDP both reduce."""
    return MisuseError(
        f"{name!r} is trained by HubOptimizer and is in a model within DistributedDataParallel: both average its gradient. "
        + WHAT_TO_DO
    )


WHAT_TO_DO = (
    "Leave DistributedDataParallel out and train the model itself, after optimizer.broadcast_parameters() on every rank, "
    "because DistributedDataParallel wrote to the parameters when it was made; or keep it, with an optimizer of torch.optim, "
    "and have its gradients averaged by the hub: "
    'register paramhub.torch.hub_hook, or init_process_group("paramhub"). Hugging Face\'s Trainer, Accelerate and Lightning '
    "wrap a model in it by themselves: docs/pytorch.md says what to do there"
)
