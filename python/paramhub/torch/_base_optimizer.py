"""torch.optim.Optimizer without its import of torch._dynamo, which takes as long as the import of torch itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


class BaseOptimizer(torch.optim.Optimizer):
    """Has the methods of torch.optim.Optimizer that torch hides from its compiler, and hides them only from a compiler that is
    there. Torch would import the compiler at the first call of any of them, so in every rank's constructor, which would delay
    each start and each restart by seconds."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _hidden_from_a_compiler(torch.optim.Optimizer.add_param_group)(self, param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        _hidden_from_a_compiler(torch.optim.Optimizer.zero_grad)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return _hidden_from_a_compiler(torch.optim.Optimizer.state_dict)(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _hidden_from_a_compiler(torch.optim.Optimizer.load_state_dict)(self, state_dict)


def _hidden_from_a_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch as it is, where torch._dynamo has been imported, else the method below torch's decorator."""
    if "torch._dynamo" in sys.modules:
        return method
    return getattr(method, "__wrapped__", method)
