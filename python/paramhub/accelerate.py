"""Accelerate with HubOptimizer: an Accelerator that leaves the exchange and the step of a model to the hub."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer

from paramhub.errors import MisuseError
from paramhub.torch import HubOptimizer
from paramhub.torch._guards import suspended
from paramhub.torch._trained_models import optimizers_of

_unwrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models that were prepared for a HubOptimizer."""


class _PreparedHubOptimizer(AcceleratedOptimizer):
    """Knows of the steps that the hub has left out: Accelerate has the scaler call step() in these, too."""

    @property
    def step_was_skipped(self) -> bool:
        return self.optimizer.skipped_last_step


class HubAccelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` for models that a `HubOptimizer` trains. Make the optimizer first, then prepare both::

        optimizer = paramhub.torch.HubOptimizer(model, paramhub.AdamW(lr=3e-4), max_grad_norm=1.0)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    The model is not wrapped. ``accumulate`` and ``no_sync`` hold its gradients back. ``clip_grad_norm_`` checks that the
    optimizer clips to the same norm, which the hub does, and returns the newest norm of which the hub has told: that of this step
    if all ranks' gradients have arrived there, else of the one before; NaN before the first. Models with other optimizers are
    prepared as usual. The HubOptimizer itself is ``optimizer.optimizer``.

    With ``mixed_precision="fp16"`` make it with ``grad_scaler=accelerator.scaler``. ``optimizer_step_was_skipped`` and prepared
    schedulers know of the steps that all ranks leave out, since the gradients of one have overflowed.

    On another device than the CPU, move the model to ``accelerator.device`` before its optimizer is made.
    """

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        with suspended():
            parameters = list(model.parameters())
        optimizers = optimizers_of(parameters)
        if not optimizers:
            if model in _unwrapped:
                # Its HubOptimizer is closed, and another optimizer needs what that did.
                _unwrapped.discard(model)
                model._is_accelerate_prepared = False  # type: ignore[assignment]
            return super().prepare_model(model, device_placement, evaluation_mode)
        exchanged = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        if not evaluation_mode and any(p.requires_grad and id(p) not in exchanged for p in parameters):
            raise MisuseError(
                "a HubOptimizer trains a part of the model, and nothing would average the gradients of the rest: give the "
                "HubOptimizer all parameters that require gradients, or freeze the others"
            )
        elsewhere = {p.device for p in parameters if not _is_same(p.device, self.device)}
        if elsewhere and (self.device_placement if device_placement is None else device_placement):
            raise MisuseError(
                f"the model is on {elsewhere.pop()}, and is to be on {self.device}: call model.to(accelerator.device) before "
                "HubOptimizer is made, which is bound to the memory of its parameters"
            )
        _unwrapped.add(model)
        # The mode of evaluation differs in this only: there is no DistributedDataParallel around the model.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        if not isinstance(optimizer, HubOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if self.scaler is not None and optimizer.grad_scaler is not self.scaler:
            raise MisuseError(
                "mixed_precision='fp16' scales the loss, and the hub must know of it: give HubOptimizer "
                "grad_scaler=accelerator.scaler. bf16 needs no scale"
            )
        # Placing moves the state by loading it. The hub has that of a HubOptimizer.
        prepared = _PreparedHubOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        with contextlib.ExitStack() as held_back:
            held_back.enter_context(super().no_sync(model))
            for optimizer in optimizers_of(model.parameters()):
                held_back.enter_context(optimizer.no_sync())
            yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        with suspended():
            parameters = list(parameters)
        optimizers = optimizers_of(parameters)
        if not optimizers:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        given = set(map(id, parameters))
        if len(optimizers) > 1 or any(
            p.requires_grad and id(p) not in given
            for group in optimizers[0].param_groups
            for p in group["params"]
        ):
            raise MisuseError(
                "clip_grad_norm_() is asked for other parameters than those of one HubOptimizer, and the hub clips the gradients "
                "of all of an optimizer's parameters together"
            )
        (optimizer,) = optimizers
        # With an infinite norm the caller only wants to know the gradients' norm.
        if max_norm != math.inf and (optimizer.max_grad_norm != max_norm or norm_type != 2):
            raise MisuseError(
                f"clip_grad_norm_() is asked for max_norm={max_norm}, norm_type={norm_type}, but the gradients have left for the "
                f"hub, which clips to max_grad_norm={optimizer.max_grad_norm} in the Euclidean norm: give HubOptimizer "
                f"max_grad_norm={max_norm}"
            )
        norm = optimizer.newest_grad_norm
        return torch.tensor(math.nan if norm is None else norm)


def _is_same(one: torch.device, other: torch.device) -> bool:
    if one.type != other.type or one.type == "cpu":
        # torch's numbers of the CPU mean nothing, and `to()` copies where they differ.
        return one.type == other.type
    current = torch.get_device_module(one).current_device()
    return (current if one.index is None else one.index) == (current if other.index is None else other.index)
