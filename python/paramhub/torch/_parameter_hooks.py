"""The hooks and guards that connect an optimizer with a model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramhub.errors import MisuseError
from paramhub.torch._exchange import Exchange
from paramhub.torch._guards import Guards

_exchanged: dict[int, Exchange] = {}
"""The `Exchange` of each parameter, by the parameter's id."""


def is_exchanged(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is a parameter that some optimizer of this process exchanges."""
    return id(tensor) in _exchanged


def check_free(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuses parameters that another optimizer exchanges."""
    for name, parameter in named:
        if id(parameter) in _exchanged:
            raise MisuseError(
                f"{name!r} is exchanged by another HubOptimizer already: close() that one, or give each its own parameters"
            )


class ParameterHooks:
    """The hooks and guards of one optimizer's parameters. It has no reference to the optimizer, so that the optimizer can be
    freed."""

    def __init__(self, model: torch.nn.Module, exchanges: Sequence[Exchange]) -> None:
        self.guards = Guards(model, exchanges)
        self._hooks = [
            exchange.parameter.register_post_accumulate_grad_hook(exchange) for exchange in exchanges
        ]
        self._ids = [id(exchange.parameter) for exchange in exchanges]
        _exchanged.update(zip(self._ids, exchanges, strict=True))

    def remove(self) -> None:
        """Removes hooks and guards: gradients are not sent any more, and reads do not wait. A second call does nothing."""
        self.guards.remove()
        for hook in self._hooks:
            hook.remove()
        for at in self._ids:
            _exchanged.pop(at, None)
        self._hooks, self._ids = [], []
