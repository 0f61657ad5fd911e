"""Hugging Face's Trainer with HubOptimizer."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from paramhub.accelerate import HubAccelerator
from paramhub.errors import MisuseError
from paramhub.optimizers import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop
from paramhub.torch import HubOptimizer

_OF_TORCH = {
    getattr(torch.optim, kind.__name__): kind for kind in (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta)
}
_OF_THE_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
"""Arguments of torch's optimizers that change no result."""


class HubTrainer(transformers.Trainer):
    """`transformers.Trainer` whose optimizer the hub runs.

    The optimizer is that of the arguments (``optim``, ``learning_rate``, ``weight_decay``, ``max_grad_norm`` and so on), if it is
    one that hubs have; or a `HubOptimizer` in ``optimizers``. The ``grad_norm`` of the log is that of its step or of the one
    before.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # The Trainer makes its Accelerator by the class's name. A HubAccelerator has the same attributes.
        self.accelerator.__class__ = HubAccelerator

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = self._hub_optimizer(self.model if model is None else model)
        return super().create_optimizer(model)

    def _hub_optimizer(self, model: torch.nn.Module) -> HubOptimizer:
        kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        decays = set(self.get_decay_parameter_names(model))
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": self.args.weight_decay}]
        groups.append({"params": [], "weight_decay": 0.0})
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                groups[0 if name in decays else 1]["params"].append(parameter)
        return HubOptimizer(
            model,
            _as_at_hub(kind, arguments),
            params=[group for group in groups if group["params"]],
            max_grad_norm=self.args.max_grad_norm or None,
            find_unused_parameters=bool(self.args.ddp_find_unused_parameters),
        )


def _as_at_hub(kind: type, arguments: dict[str, Any]) -> Optimizer:
    """The hub's optimizer that makes the same steps as this one of torch."""
    given = {name: value for name, value in arguments.items() if name not in _OF_THE_IMPLEMENTATION}
    try:
        return _OF_TORCH[kind](**given)
    except (KeyError, TypeError):
        raise MisuseError(
            f"the hub has no optimizer for {getattr(kind, '__name__', kind)} with {given}: choose "
            f"{', '.join(kind.__name__ for kind in _OF_TORCH)} by TrainingArguments(optim=), or give HubTrainer a HubOptimizer"
        ) from None
