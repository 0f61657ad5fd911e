"""The factors of a Linear's gradient, as forward and backward passes make them.

The gradient of a weight is the sum over samples of outer products of what came out, as its gradient, and what went in. A hook
after the module's forward pass keeps what went in; one before the backward pass of what came out sees its gradient. The hook
on the weight, called once autograd has added to ``weight.grad``, says that those of this pass belong to it. Passes that do not
get there (``torch.autograd.grad``, an evaluation that nobody differentiates) leave nothing behind.

What went in is kept by a node of autograd's own, so that it passes through hooks for saved tensors: activation checkpointing
drops and recomputes it, offloading moves it. What came out is seen at the node that made it, before any in-place operation that
follows and after the tensor hooks that a user may have put there.
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
    """Those of one Linear, whose weight and bias are exchanged by this process."""

    def __init__(self, name: str, module: torch.nn.Linear, weight: Exchange, bias: Exchange | None) -> None:
        self.name = name
        self.weight = weight
        self.bias = bias
        self.outputs, self.inputs = weight.parameter.shape
        self.dtype = weight.dtype
        """In which its factors are handed in: no narrower than they are made."""
        self.turn: int | None = None
        """When its weight first got a gradient, among those of all."""
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        """Of passes under way: the pass, inputs, output gradients."""
        self._taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What the weight's gradient is made of."""
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
        """Of what makes up the weight's gradient so far: under autocast narrower than the weight's."""
        return {part.dtype for pair in self._taken for part in pair}

    @property
    def is_whole(self) -> bool:
        """Whether the weight's gradient is what the last pass has left, or there is none."""
        gradient = self.weight.parameter.grad
        if gradient is None or gradient is not self._gradient:
            return gradient is None
        return gradient._version == self._version

    def see(self, keeper: torch.Tensor, output_gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Before the backward pass of an output, with the result of the node that has what went in."""
        gradient = output_gradients[0]
        if gradient is not None:
            (inputs,) = keeper.grad_fn.saved_tensors
            rows = inputs.detach().reshape(-1, self.inputs), gradient.detach().reshape(-1, self.outputs)
            self._pending.append((torch._C._current_graph_task_id(), *rows))

    def commit(self) -> None:
        """Autograd has added to the weight's gradient."""
        gradient = self.weight.parameter.grad
        if gradient is not self._gradient:
            # The one before was cleared.
            self._taken.clear()
        this = torch._C._current_graph_task_id()
        self._taken += [(inputs, gradients) for task, inputs, gradients in self._pending if task == this]
        self._pending.clear()
        self._gradient, self._version = gradient, 0 if gradient is None else gradient._version
        if self.turn is None:
            self.turn = next(_turns)

    @torch.no_grad()
    def take(self) -> Factors:
        """The factors of the weight's gradient, for once."""
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
        """What has been seen belongs to no gradient any more."""
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
        """What rounding may make of an element, relative to the sum of its addends' sizes."""
        self.tiny = tiny
        """And what it may make of one that is almost nothing."""

    @torch.no_grad()
    def make(
        self, gradient: torch.Tensor | None, bias: torch.Tensor | None, rows: slice | None = None
    ) -> bool:
        """Whether these rows of the weight's gradient, by default all, and all of the bias's are what the factors make.

        What is not finite is taken for right: it goes wrong in the same way whichever way it takes.
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
    """Sums in another order, and what autograd may round on its way: a product of halves, each pass's sum."""
    if dtype is torch.float32:
        return 1e-4 if _multiplies_in_f32() else 2.0**-6
    return 2.0**-5 if dtype is torch.bfloat16 else 2.0**-7


def _multiplies_in_f32() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # It was said in torch's newer way, which this question does not know.
        return False


def _tiny(gradients: torch.Tensor) -> float:
    """What vanishes in a type's smallest numbers."""
    kind = torch.finfo(gradients.dtype)
    return (gradients.shape[0] + 1) * kind.eps * kind.smallest_normal


class _Keep(torch.autograd.Function):
    """A node that saves a tensor, as any operation's does. Nothing is computed, and nobody differentiates it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


class _AfterForward:
    """A Linear's forward hook. Copies of the module, and what is saved of it, have none."""

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
        # Autocast has rounded what went in to the type of what came out.
        # The node lives as long as its result, at least up to torch 2.7.
        keeper = _Keep.apply(self.anchor, inputs.detach().to(output.dtype))
        output.grad_fn.register_prehook(functools.partial(self.capture.see, keeper))

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_to_see, ()


class _NothingToSee:
    """Stands for a hook in a copy."""

    def __call__(self, *arguments: Any) -> None:
        return None


def _nothing_to_see() -> _NothingToSee:
    return _NothingToSee()
