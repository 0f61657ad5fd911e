"""Accelerate with HubOptimizer: an Accelerator that leaves the exchange and the step of a model to the hub."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer

from paramhub.errors import MisuseError
from paramhub.torch import HubOptimizer
from paramhub.torch._trained_models import optimizers_of


class HubAccelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` for models that a `HubOptimizer` trains. Make the optimizer first, then prepare both::

        optimizer = paramhub.torch.HubOptimizer(model, paramhub.AdamW(lr=3e-4), max_grad_norm=1.0)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    The model is not wrapped. ``accumulate`` and ``no_sync`` hold its gradients back. ``clip_grad_norm_`` checks that the
    optimizer clips to the same norm, which the hub does, and returns the newest norm of which the hub has told: that of this step
    if all ranks' gradients have arrived there, else of the one before. Models with other optimizers are prepared as usual.

    On another device than the CPU, move the model to ``accelerator.device`` before its optimizer is made.
    """

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        if not optimizers_of(model.parameters()):
            return super().prepare_model(model, device_placement, evaluation_mode)
        elsewhere = {p.device for p in model.parameters() if not _is_same(p.device, self.device)}
        if elsewhere and (self.device_placement if device_placement is None else device_placement):
            raise MisuseError(
                f"the model is on {elsewhere.pop()}, and is to be on {self.device}: call model.to(accelerator.device) before "
                "HubOptimizer is made, which is bound to the memory of its parameters"
            )
        # The mode of evaluation differs in this only: there is no DistributedDataParallel around the model.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        # Placing moves the state by loading it. The hub has that of a HubOptimizer.
        places = False if isinstance(optimizer, HubOptimizer) else device_placement
        return super().prepare_optimizer(optimizer, places)

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
        parameters = list(parameters)
        optimizers = optimizers_of(parameters)
        if not optimizers:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if len(optimizers) > 1:
            raise MisuseError(
                "the parameters have several HubOptimizers, and each clips the gradients of its own"
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
    # torch's numbers of the CPU mean nothing, and `to()` copies where they differ.
    return one.type == other.type and (one.type == "cpu" or one.index == other.index)
