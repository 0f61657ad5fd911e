"""Horovod's DistributedOptimizer."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._gradients import GradientExchange
from paramhub.torch._reductions import Average, Compression, Compressor, Reduction, Sum, codec_of


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
) -> Any:
    """Lets ``optimizer`` step with the mean (or, with ``op=Sum``, the sum) of all ranks' gradients. ::

        optimizer = paramhub.torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    It returns ``optimizer`` itself, whose class is from now on a subclass of its own class: state, parameter groups,
    schedulers and ``isinstance`` stay as they are. Gradients leave for the hub as backward makes them, and come back into
    ``parameter.grad``; ``step()`` waits for them and then does what the optimizer does. It has these besides:

    - ``synchronize()`` waits for the gradients, for what is done between backward and step; ``skip_synchronize()`` is a
      context in which ``step()`` does not wait again::

          loss.backward()
          optimizer.synchronize()
          torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
          with optimizer.skip_synchronize():
              optimizer.step()

      A GradScaler unscales there, too. Gradients changed before ``synchronize()`` are refused by it.
    - ``set_backward_passes_per_step(passes)``.

    Constructing it is collective: all ranks construct theirs, in the same order, with parameters of the same names,
    shapes and types. `init` is called if it was not before. With one rank nothing is exchanged.

    ``named_parameters`` names all parameters of the optimizer, in forward order: the gradients of front layers come
    back first. ``compression`` is how they travel (`Compression.fp16`, ``bf16``, or ``one_bit`` and ``two_bit`` for
    matrices); they are summed in f32, and the result has the parameter's type. ``backward_passes_per_step`` is how
    many backward passes add up to the gradient that is exchanged; their sum is not divided.
    ``gradient_predivide_factor``, ``num_groups`` and ``groups`` are accepted for Horovod's sake, and change
    nothing: sums do not overflow, and tensors are not packed. ``sparse_as_dense`` makes sparse gradients dense;
    without it they are refused.

    A parameter without a gradient on this rank contributes zeros, and gets the mean as its gradient; without one on any
    rank it gets zeros, as with Horovod, and not None as from an optimizer alone: weight decay and momentum do apply.
    Parameters that do not require a gradient are left out, and must not get one later. A closure given to ``step()`` is
    followed by an exchange each time it is called.

    Raises MisuseError if parameters are unnamed, or named twice, if ranks disagree on any of them, and for optimizers
    that decide by the loss, which differs between ranks (LBFGS). ``step()``, ``backward()`` and ``synchronize()`` raise
    JobFailedError within seconds when another rank has died.
    """
    if isinstance(optimizer, _Distributed):
        raise MisuseError("the optimizer is a DistributedOptimizer already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MisuseError(
            "LBFGS decides by the loss how often it evaluates it, and ranks have different losses"
        )
    if op is not Average and op is not Sum:
        raise MisuseError(f"gradients are reduced by Average or Sum, not by {op!r}")
    _check_passes(backward_passes_per_step)
    exchange = GradientExchange(
        _named(optimizer, named_parameters),
        "mean" if op is Average else "sum",
        codec_of(compression),
        backward_passes_per_step,
        sparse_as_dense,
    )
    kind = type(optimizer)
    # A scheduler made before counts the steps through an attribute of the object, which would bypass ours.
    had_scheduler = optimizer.__dict__.pop("step", None) is not None
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    distributed: Any = optimizer
    distributed._exchange = exchange
    distributed._skips_synchronize = False
    if had_scheduler:
        distributed.step = _counted(distributed)
    return distributed


class _Distributed:
    """What stands before the class of the optimizer that is made distributed."""

    _exchange: GradientExchange
    _skips_synchronize: bool

    def step(self, closure: Callable[[], Any] | None = None, *arguments: Any, **named: Any) -> Any:
        """Waits for the gradients of all ranks, and steps."""
        exchange = self._exchange
        if closure is not None:
            closure = _synchronized(closure, exchange)
        elif self._skips_synchronize:
            if exchange.is_under_way:
                raise MisuseError(
                    "step() within skip_synchronize() while gradients are exchanged: call optimizer.synchronize() first"
                )
        elif not exchange.is_synchronized:
            exchange.synchronize()
        exchange.check_frozen()
        try:
            with trace.span("step"):
                return super().step(closure, *arguments, **named)  # type: ignore[misc]
        finally:
            exchange.is_synchronized = False

    # torch would patch it to call the step's hooks, which the inner class's step calls.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Waits until every parameter's gradient is that of all ranks."""
        self._exchange.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it ``step()`` takes the gradients as they are: for after `synchronize`."""
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        """As the optimizer's own, but not while gradients are exchanged."""
        if self._exchange.is_under_way:
            raise MisuseError(
                "zero_grad() after backward() and before step() or synchronize(): gradients are being exchanged"
            )
        super().zero_grad(*arguments, **named)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, ``passes`` backward passes add up to the gradient that is exchanged."""
        _check_passes(passes)
        self._exchange.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the ranks have agreed on the parameters."""
        raise MisuseError(
            "a DistributedOptimizer's parameters are agreed on when it is constructed: add groups before, or construct "
            "a new one"
        )


def _synchronized(closure: Callable[[], Any], exchange: GradientExchange) -> Callable[[], Any]:
    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        exchange.synchronize()
        return loss

    return evaluate


def _counted(optimizer: Any) -> Callable[..., Any]:
    """A step that tells schedulers made before that it was called, as theirs did."""
    step = type(optimizer).step

    def counted(*arguments: Any, **named: Any) -> Any:
        optimizer._opt_called = True
        return step(optimizer, *arguments, **named)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise MisuseError(f"backward_passes_per_step is to be a number from 1, not {passes!r}")


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters with their names, each once, in the order of the names."""
    held = {
        id(parameter): (group, position, parameter)
        for group, members in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(members["params"])
    }
    if named_parameters is None:
        return [
            (f"allreduce.noname.{group}.{position}", parameter)
            for group, position, parameter in held.values()
        ]
    given = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in given):
        raise MisuseError(
            "named_parameters are to be pairs of name and parameter: pass model.named_parameters()"
        )
    counts = Counter(name for name, _ in given)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise MisuseError(f"named_parameters has names more than once: {', '.join(map(repr, twice))}")
    # A tied weight has several names; the first one stands for all.
    by_identity: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in given:
        by_identity.setdefault(id(parameter), (name, parameter))
    unnamed = [place for identity, place in held.items() if identity not in by_identity]
    if unnamed:
        places = ", ".join(
            f"{list(parameter.shape)} at {position} of group {group}"
            for group, position, parameter in unnamed[:5]
        )
        raise MisuseError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(held)} parameters: {places}. Pass the "
            "names of all of them, or none"
        )
    return [pair for identity, pair in by_identity.items() if identity in held]
