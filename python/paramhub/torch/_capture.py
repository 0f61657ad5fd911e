"""The factors of a Linear's gradient, as forward and backward passes make them.

The gradient of a weight is a sum over samples of outer products: the gradient of the module's output with the module's input. A
hook after the module's forward pass keeps the input. A hook before the backward pass of the output gets the output's gradient.
The hook on the weight, which autograd calls once it has added to ``weight.grad``, marks the factors of this pass as a part of
it. Passes that do not call it (``torch.autograd.grad``, an evaluation without a backward pass) leave no factors.

An autograd node of this module saves the input, so that it passes through hooks for saved tensors: activation checkpointing
drops and recomputes it, offloading moves it. The output's gradient is taken at the node that made the output: before any
in-place operation that follows it, and after the tensor hooks of user code.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch.compiler import is_compiling

from paramhub.torch._exchange import Exchange

_turns = itertools.count()


class Capture:
    """Captures the factors of one Linear, whose weight and bias this process exchanges."""

    def __init__(self, name: str, module: torch.nn.Linear, weight: Exchange, bias: Exchange | None) -> None:
        self.name = name
        self.weight = weight
        self.bias = bias
        self.outputs, self.inputs = weight.parameter.shape
        self.dtype = weight.dtype
        """The type in which the factors are sent: no narrower than the type in which they are computed."""
        self.turn: int | None = None
        """The position of the weight in the order in which weights got their first gradients."""
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """For each backward pass under way: the pass, the inputs and the output gradients."""
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Inputs and output gradients that make up the weight's gradient."""
        self._gradient: torch.Tensor | None = None
        self._version = 0
        self._hook = module.register_forward_hook(_AfterForward(self), prepend=True, with_kwargs=True)
        weight.capture = self

    @property
    def samples(self) -> int:
        """Rows that make up the weight's gradient so far."""
        return sum(inputs.shape[0] for inputs, _ in self._taken)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Types of the factors that make up the weight's gradient so far. Under autocast they are narrower than the weight's."""
        return {part.dtype for pair in self._taken for part in pair}

    @property
    def is_whole(self) -> bool:
        """Returns whether the weight's gradient is unchanged since the last pass, or there is none."""
        gradient = self.weight.parameter.grad
        if gradient is None or gradient is not self._gradient:
            return gradient is None
        return gradient._version == self._version

    def see(self, kept_inputs: torch.Tensor, output_gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Called before the backward pass of an output, with the result of the node that saved the input."""
        gradient = output_gradients[0]
        if gradient is not None:
            (inputs,) = kept_inputs.grad_fn.saved_tensors
            rows = inputs.detach().reshape(-1, self.inputs), gradient.detach().reshape(-1, self.outputs)
            self._pending.append((torch._C._current_graph_task_id(), *rows))

    def commit(self) -> None:
        """Called when autograd has added to the weight's gradient."""
        gradient = self.weight.parameter.grad
        if gradient is not self._gradient:
            # The earlier gradient was cleared.
            self._taken.clear()
        this = torch._C._current_graph_task_id()
        self._taken += [(inputs, gradients) for task, inputs, gradients in self._pending if task == this]
        self._pending.clear()
        self._gradient, self._version = gradient, 0 if gradient is None else gradient._version
        if self.turn is None:
            self.turn = next(_turns)

    @torch.no_grad()
    def take(self) -> Factors:
        """Returns the factors of the weight's gradient, and drops them here."""
        taken = self._taken if self.weight.parameter.grad is not None else []
        dtype, device = self.dtype, self.weight.parameter.device
        tolerance = max((_tolerance(gradients.dtype) for _, gradients in taken), default=0.0)
        tiny = sum(_tiny(gradients) for _, gradients in taken)
        inputs = [inputs.to(dtype) for inputs, _ in taken] or [
            torch.empty(0, self.inputs, dtype=dtype, device=device)
        ]
        gradients = [gradients.to(dtype) for _, gradients in taken] or [
            torch.empty(0, self.outputs, dtype=dtype, device=device)
        ]
        self.forget()
        whole = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (inputs, gradients)]
        return Factors(whole[0].contiguous(), whole[1].contiguous(), tolerance, tiny)

    def forget(self) -> None:
        """Drops the inputs and output gradients captured so far."""
        self._pending.clear()
        self._taken = []
        self._gradient = None

    def remove(self) -> None:
        self.forget()
        self._hook.remove()
        self.weight.capture = None


class Factors:
    """Inputs and output gradients, row by row."""

    __slots__ = ("inputs", "output_gradients", "tiny", "tolerance")

    def __init__(
        self, inputs: torch.Tensor, output_gradients: torch.Tensor, tolerance: float, tiny: float
    ) -> None:
        self.inputs = inputs
        self.output_gradients = output_gradients
        self.tolerance = tolerance
        """The largest rounding error of an element, relative to the sum of its addends' absolute values."""
        self.tiny = tiny
        """The largest absolute rounding error of an element near zero."""

    @torch.no_grad()
    def make(
        self, gradient: torch.Tensor | None, bias: torch.Tensor | None, rows: slice | None = None
    ) -> bool:
        """Returns whether the factors make these rows of the weight's gradient, by default all, and all of the bias's.

        Elements that are not finite count as right: they have the same effect with every scheme.
        """
        with torch.autocast(self.inputs.device.type, enabled=False):
            gradients, inputs = self.output_gradients.float(), self.inputs.float()
            if bias is not None and not self._is_near(bias, gradients.sum(0), gradients.abs().sum(0)):
                return False
            if gradient is None:
                return gradients.shape[0] == 0
            part = gradients.T if rows is None else gradients.T[rows]
            return self._is_near(gradient, part @ inputs, part.abs() @ inputs.abs())

    def _is_near(self, found: torch.Tensor, made: torch.Tensor, size: torch.Tensor) -> bool:
        beyond = (found.float() - made).abs() - self.tolerance * size - self.tiny
        return not bool((beyond > 0).any())


def _tolerance(dtype: torch.dtype) -> float:
    """The relative error of a sum in another order, and of autograd's rounding of half-precision products and of each pass's
    sum."""
    if dtype is torch.float32:
        return 1e-4 if _multiplies_in_f32() else 2.0**-6
    return 2.0**-5 if dtype is torch.bfloat16 else 2.0**-7


def _multiplies_in_f32() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # The precision was set with torch's newer API, and then this call raises.
        return False


def _tiny(gradients: torch.Tensor) -> float:
    """The absolute rounding error near a type's smallest numbers."""
    kind = torch.finfo(gradients.dtype)
    return (gradients.shape[0] + 1) * kind.eps * kind.smallest_normal


class _Keep(torch.autograd.Function):
    """An autograd node that saves a tensor, as an operation's node does. It computes nothing and has no gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


class _AfterForward:
    """A Linear's forward hook. Copies and saved states of the module do not have it."""

    __slots__ = ("anchor", "capture")

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.anchor = torch.empty(0, requires_grad=True)

    def __call__(self, module: torch.nn.Module, arguments: Any, named: dict[str, Any], output: Any) -> None:
        if is_compiling() or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            return
        weight = dict.get(module._parameters, "weight")
        if weight is not self.capture.weight.parameter or not weight.requires_grad or output.grad_fn is None:
            return
        inputs = arguments[0] if arguments else named["input"]
        if inputs.layout is not torch.strided or inputs.is_nested:
            return
        # Autocast has rounded the input to the type of the output.
        # The prehook keeps the node's result alive, because at least up to torch 2.7 the node ends with it.
        kept_inputs = _Keep.apply(self.anchor, inputs.detach().to(output.dtype))
        output.grad_fn.register_prehook(functools.partial(self.capture.see, kept_inputs))

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_to_see, ()


class _NothingToSee:
    """Replaces the hook in a copy of the module."""

    def __call__(self, *arguments: Any) -> None:
        return None


def _nothing_to_see() -> _NothingToSee:
    return _NothingToSee()
