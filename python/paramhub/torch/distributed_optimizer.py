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
from paramhub.torch._process_sets import ProcessSet, global_process_set
from paramhub.torch._reductions import Average, Compression, Compressor, Reduction, Sum, codec_of


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes ``optimizer`` step with the mean (or, with ``op=Sum``, the sum) of all ranks' gradients. ::

        optimizer = paramhub.torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    It returns ``optimizer`` itself, and makes its class a subclass of the former class: state, parameter groups,
    schedulers and ``isinstance`` stay as they are. Gradients are sent to the hub while backward computes them, and the
    results are received into ``parameter.grad``. ``step()`` waits for them and then makes the optimizer's own step. The
    optimizer also has these methods:

    - ``synchronize()`` waits for the gradients, so that code between backward and step can use them.
      ``skip_synchronize()`` is a context in which ``step()`` does not wait again::

          loss.backward()
          optimizer.synchronize()
          torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
          with optimizer.skip_synchronize():
              optimizer.step()

      A GradScaler unscales there, too. ``synchronize()`` raises if gradients were changed before it.
    - ``set_backward_passes_per_step(passes)`` changes ``backward_passes_per_step`` from the next step on.

    Constructing it is collective: all ranks construct theirs, in the same order, with parameters of the same names,
    shapes and types. It calls `init` if that was not called before. With one rank nothing is exchanged.

    ``named_parameters`` names all parameters of the optimizer, in forward order: the results for the first layers arrive
    first. ``compression`` is the encoding of gradients in frames (`Compression.fp16`, ``bf16``, or ``one_bit`` and
    ``two_bit`` for matrices). Sums are made in f32, and the result has the parameter's type.
    ``backward_passes_per_step`` is the number of backward passes whose gradients are added up before the exchange; their
    sum is not divided. ``gradient_predivide_factor``, ``num_groups`` and ``groups`` are checked as Horovod does, and have
    no effect: sums are made in f32, where f16 does not overflow, and tensors are not packed. With
    ``process_set`` gradients are exchanged among its ranks only; other ranks may leave the optimizer alone, or construct
    it, too, and step with their own gradients.

    Of sparse gradients, as of ``torch.nn.Embedding(sparse=True)``, ranks exchange the rows, in ``synchronize()`` or ``step()``,
    uncompressed. All ranks get the rows of all, so a rank's may differ in number, or be missing in a step. A parameter whose
    gradient is dense on any rank, in the first step in which one has a gradient, has dense gradients from then on. The hub
    has memory for a parameter with sparse gradients, too, except where the optimizer is SparseAdam. ``sparse_as_dense``
    exchanges sparse gradients as dense ones, after which they are sparse again.

    A parameter without a gradient on this rank contributes zeros, and its gradient becomes the mean. A parameter without
    a gradient on any rank gets zeros, as with Horovod, and not None as with an optimizer alone, so weight decay and
    momentum do apply. Parameters that do not require a gradient are not exchanged, and must not get one later. An
    exchange follows each call of a closure that was passed to ``step()``.

    Raises MisuseError if parameters are unnamed, or named twice, if ranks disagree on any of them, for ``op=Adasum``, and for
    optimizers whose steps depend on the loss, which differs between ranks (LBFGS). ``step()``, ``backward()`` and
    ``synchronize()`` raise JobFailedError within seconds when another rank has died.
    """
    if isinstance(optimizer, _Distributed):
        raise MisuseError("the optimizer is a DistributedOptimizer already")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MisuseError(
            "LBFGS decides by the loss how often it evaluates it, and ranks have different losses"
        )
    if op is not Average and op is not Sum:
        raise MisuseError(f"gradients are reduced by Average or Sum, not by {op!r}")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise MisuseError("gradient_predivide_factor divides means: leave it out, or use op=Average")
    _check_groups(num_groups if groups is None and num_groups else groups)
    _check_passes(backward_passes_per_step)
    exchange = GradientExchange(
        _named(optimizer, named_parameters),
        "mean" if op is Average else "sum",
        codec_of(compression),
        backward_passes_per_step,
        sparse_as_dense,
        process_set,
        takes_only_sparse=isinstance(optimizer, torch.optim.SparseAdam),
    )
    kind = type(optimizer)
    # An earlier scheduler has set `step` on the object to count the calls. That attribute would hide the subclass's step.
    had_scheduler = optimizer.__dict__.pop("step", None) is not None
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    distributed: Any = optimizer
    distributed._exchange = exchange
    distributed._skips_synchronize = False
    if had_scheduler:
        distributed.step = _counted(distributed)
    return distributed


class _Distributed:
    """The base class that comes before the optimizer's own class."""

    _exchange: GradientExchange
    _skips_synchronize: bool

    def step(self, closure: Callable[[], Any] | None = None, *arguments: Any, **named: Any) -> Any:
        """Waits for the gradients of all ranks, and makes the optimizer's step."""
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

    # So torch does not patch it to call the step's hooks: the optimizer's own step calls them.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Waits until every parameter's gradient is the mean (or sum) over all ranks."""
        self._exchange.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which ``step()`` uses the gradients as they are. Use it after `synchronize`."""
        self._skips_synchronize = True
        try:
            yield
        finally:
            self._skips_synchronize = False

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        """The optimizer's own ``zero_grad``. Raises MisuseError while gradients are exchanged."""
        if self._exchange.is_under_way:
            raise MisuseError(
                "zero_grad() after backward() and before step() or synchronize(): gradients are being exchanged"
            )
        super().zero_grad(*arguments, **named)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Adds up the gradients of ``passes`` backward passes before the exchange, from the next step on."""
        _check_passes(passes)
        self._exchange.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises MisuseError, because the ranks have agreed on the parameters."""
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
    """A step that counts its calls for earlier schedulers, as the step that they had wrapped did."""
    step = type(optimizer).step

    def counted(*arguments: Any, **named: Any) -> Any:
        optimizer._opt_called = True
        return step(optimizer, *arguments, **named)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return counted


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise MisuseError(f"backward_passes_per_step is to be a number from 1, not {passes!r}")


def _check_groups(groups: Any) -> None:
    """Raises MisuseError for groups that Horovod refuses, although none are made."""
    if groups is None or (isinstance(groups, int) and groups > 0):
        return
    if not isinstance(groups, list) or any(not isinstance(each, list | tuple) for each in groups):
        raise MisuseError(
            f"groups is to be a number from 1, or a list of lists of parameters, not {groups!r}"
        )
    grouped = [parameter for group in groups for parameter in group]
    if any(not isinstance(parameter, torch.Tensor) for parameter in grouped):
        raise MisuseError("groups has something that is no tensor: list the parameters themselves")
    if len({id(parameter) for parameter in grouped}) < len(grouped):
        raise MisuseError("groups has a parameter twice: it can be in one group only")


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
    # A tied weight has several names; the first one is used.
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
