"""Hugging Face's Trainer with HubOptimizer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import transformers

from paramhub.accelerate import HubAccelerator
from paramhub.errors import MisuseError
from paramhub.optimizers import SGD, Adadelta, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from paramhub.torch import HubOptimizer
from paramhub.torch._trained_models import optimizers_of

_OF_TORCH = {
    getattr(torch.optim, kind.__name__): kind
    for kind in (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, NAdam)
}
_OF_THE_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Arguments of torch's optimizers that change no result."""


_made: weakref.WeakSet[HubOptimizer] = weakref.WeakSet()
"""The optimizers that HubTrainers have made."""


class HubTrainer(transformers.Trainer):
    """`transformers.Trainer` whose optimizer the hub runs.

    The optimizer is that of the arguments (``optim``, ``learning_rate``, ``weight_decay``, ``max_grad_norm`` and so on), if it is
    one that hubs have; or a `HubOptimizer` in ``optimizers``. With ``ddp_broadcast_buffers=False`` ranks do not receive rank 0's
    buffers and frozen parameters at the start. If it clips, the log has ``grad_norm``, of its step or of the one before.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # The Trainer makes its Accelerator by the class's name. A HubAccelerator has the same attributes.
        self.accelerator.__class__ = HubAccelerator

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self._hub_optimizer(self.model if model is None else model)
        # The Trainer would look at all gradients for this, when they have left.
        self._mixed_mesh_grads = False
        return super().create_optimizer(model)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        # Without clipping the hub makes no norm.
        return None if grad_norm is None else super()._get_grad_norm(model, grad_norm=grad_norm)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        for optimizer in optimizers_of(self.model.parameters()):
            optimizer.broadcast_parameters()

    def _hub_optimizer(self, model: torch.nn.Module) -> HubOptimizer:
        for former in optimizers_of(model.parameters()):
            if former in _made:
                former.close()
        kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        decays = set(self.get_decay_parameter_names(model))
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": self.args.weight_decay}]
        groups.append({"params": [], "weight_decay": 0.0})
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups[0 if name in decays else 1]["params"].append(parameter)
        optimizer = HubOptimizer(
            model,
            _as_at_hub(kind, arguments),
            params=[group for group in groups if group["params"]],
            max_grad_norm=self.args.max_grad_norm or None,
            grad_scaler=self.accelerator.scaler,
            find_unused_parameters=bool(self.args.ddp_find_unused_parameters),
            broadcast_buffers=self.args.ddp_broadcast_buffers is not False,
        )
        _made.add(optimizer)
        return optimizer


def _as_at_hub(kind: type, arguments: dict[str, Any]) -> Optimizer:
    """The hub's optimizer that makes the same steps as this one of torch."""
    given = {name: value for name, value in arguments.items() if name not in _OF_THE_IMPLEMENTATION}
    try:
        return _OF_TORCH[kind](**given)
    except (KeyError, TypeError):
        raise MisuseError(
            f"the hub has no optimizer for {getattr(kind, '__name__', kind)} with {given}: choose adamw_torch, "
            "adamw_torch_fused, sgd, adagrad or rmsprop by TrainingArguments(optim=), or give HubTrainer a HubOptimizer"
        ) from None
