"""The full path: gradients leave during backward, the hub runs the optimizer, parameters come back in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from paramhub.errors import MisuseError
from paramhub.optimizers import Optimizer
from paramhub.torch import _memory, _numbers, _startup, _tensors
from paramhub.torch._exchange import Exchange, StepUnderWay
from paramhub.torch._guards import Guards
from paramhub.torch._world import world


class HubOptimizer(torch.optim.Optimizer):
    """An optimizer that the hub runs for all ranks, and that exchanges while the model computes.

    Every rank makes it, with equal arguments; rank 0's parameters become everybody's. From then on a training loop is as with
    any optimizer::

        optimizer = paramhub.torch.HubOptimizer(model, paramhub.Nesterov(lr=0.1, momentum=0.9))
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()

    Each gradient leaves as soon as backward has completed it. The hub takes the mean of all ranks' and updates the parameter,
    whose new value arrives in place, perhaps while backward still goes on (see `Exchange` for why that is right). `step`
    only checks that everything left; the next forward pass waits for one module's parameters at a time. So a parameter is
    read through its module, which waits: ``model.fc.weight``, ``model.parameters()``, ``model.state_dict()``. Before anything
    reads one that it holds by itself, call `synchronize`.

    ``optimizer`` is one of `paramhub.SGD`, `Nesterov`, `Adam`, `AdamW`, or one registered at the hub. ``params`` are the
    parameters or groups of them, as for torch.optim, by default all of the model's. What ``param_groups`` say before backward
    holds in that step, as rank 0 has them, so that learning-rate schedulers work as usual.

    ``codec`` (``bf16``, ``f16``) is how gradients travel, by default as they lie in memory. Gradients of
    ``backward_passes_per_step`` passes are added up before they leave; see also `no_sync`. Without ``overlap_forward`` `step`
    waits for all parameters. With ``broadcast_buffers`` rank 0's buffers and frozen parameters become everybody's, once.
    ``chunk_bytes``, ``reproducible`` and ``reject_non_finite`` are as for `paramhub.Job.init`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *,
        params: Iterable[Any] | None = None,
        codec: str | None = None,
        backward_passes_per_step: int = 1,
        overlap_forward: bool = True,
        broadcast_buffers: bool = True,
        chunk_bytes: int | None = None,
        reproducible: bool | None = None,
        reject_non_finite: bool = False,
    ) -> None:
        if backward_passes_per_step < 1:
            raise MisuseError(f"backward_passes_per_step is 1 or more, not {backward_passes_per_step}")
        names = _startup.names(model)
        self._numbers_of = _numbers.defaults(optimizer)
        self._is_complete = False
        super().__init__(model.parameters() if params is None else params, dict(self._numbers_of))
        self._is_complete = True
        self._hub_optimizer = optimizer
        self._overlaps_forward = overlap_forward
        self._settings: dict[str, Any] = {"codec": codec, "reject_non_finite": reject_non_finite}
        if chunk_bytes is not None:
            self._settings["chunk_bytes"] = chunk_bytes
        if reproducible is not None:
            self._settings["reproducible"] = reproducible
        self._world = world()
        self._step = StepUnderWay(backward_passes_per_step)
        self._exchanges = self._make_exchanges(names)
        self._frozen = [
            (names[id(parameter)], parameter)
            for parameter in self._parameters()
            if not parameter.requires_grad
        ]
        if broadcast_buffers:
            exchanged = {id(exchange.parameter) for exchange in self._exchanges}
            _startup.broadcast_rest(self._world, model, exchanged)
        self._open_job()
        self._hooks = [
            exchange.parameter.register_post_accumulate_grad_hook(exchange) for exchange in self._exchanges
        ]
        self._guards = Guards(model, self._exchanges)

    def _make_exchanges(self, names: dict[int, str]) -> list[Exchange]:
        own = {id(parameter) for parameter in self._parameters() if parameter.requires_grad}
        of = {id(parameter): parameter for parameter in self._parameters()}
        strangers = [
            index for index, parameter in enumerate(self._parameters()) if id(parameter) not in names
        ]
        if strangers:
            raise MisuseError(
                f"parameter {strangers[0]} of those given is none of the model's: all must be, so that whoever reads them "
                "through the model waits"
            )
        # Forward order, as far as the model's definition tells: what is needed first is most urgent.
        ordered = [(names[at], of[at]) for at in names if at in own and of[at].numel() > 0]
        for name, parameter in ordered:
            _startup.check(name, parameter)
            _memory.make_dense(parameter)
        _tensors.check_same_device(ordered)
        _memory.check_apart(ordered)
        self._step.total = len(ordered)
        return [
            Exchange(number, name, parameter, self._step) for number, (name, parameter) in enumerate(ordered)
        ]

    def _open_job(self) -> None:
        """All ranks agree on the keys, and start from rank 0's parameters."""
        keys = []
        for exchange in self._exchanges:
            key = _tensors.key(exchange.name, exchange.parameter)
            keys.append({**key, "shape": _memory.memory_shape(exchange.parameter)})
        self._sent = [_numbers.of_group(group, self._numbers_of) for group in self.param_groups]
        chosen = {**self._hub_optimizer.settings(), "hyperparameters": _numbers.settings_of(self._sent[0])}
        job = self._world.open_job(
            self._world.label("hub-optimizer"), {"keys": keys, "optimizer": chosen, **self._settings}
        )
        self._job = self._step.job = job
        self._step.begin = self._send_numbers
        if job.shares_memory:
            for exchange in self._exchanges:
                exchange.settle(_memory.move_into(exchange.parameter, job.parameter_tensor(exchange.number)))
        numbers = [exchange.number for exchange in self._exchanges]
        ranges = [exchange.receives[0] for exchange in self._exchanges]
        owner = [exchange.memory for exchange in self._exchanges]
        if self._world.rank == 0:
            job.initialise(numbers, ranges, owner, 0).wait()
        else:
            job.pull(numbers, ranges, owner).wait()

    def _send_numbers(self) -> None:
        """Before a step's first gradient: what has changed in the groups since the last step holds from this one on."""
        for number, group in enumerate(self.param_groups):
            numbers = _numbers.of_group(group, self._numbers_of)
            if numbers == self._sent[number]:
                continue
            self._sent[number] = numbers
            if self._world.rank == 0:
                self._job.set_hyperparameters(self._job.next_step(0), _numbers.as_json(numbers))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step: checks that every gradient has left, or lets it leave now.

        It does not wait for the new values (unless ``overlap_forward`` is off); whoever reads them does. ``closure`` is called
        first, and its result returned.

        Raises MisuseError where a parameter has no gradient, or where gradients or numbers of ``param_groups`` were changed
        after backward, and JobFailedError if the job has failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._let_the_rest_leave()
        if self._step.has_begun:
            self._check_numbers()
        for exchange in self._exchanges:
            exchange.finish_step()
        self._step.left = 0
        self._step.has_begun = False
        if not self._overlaps_forward:
            self.synchronize()
        elif self._guards.compiled:
            for number in self._guards.compiled:
                self._exchanges[number].wait()
        return loss

    def _let_the_rest_leave(self) -> None:
        """Gradients that no hook has let leave: of passes without exchange, or put there by the user."""
        if self._step.left == self._step.total:
            return
        missing = [exchange for exchange in self._exchanges if not exchange.has_left]
        without = [exchange.name for exchange in missing if exchange.parameter.grad is None]
        if without:
            raise MisuseError(_without_gradient(without, self._step.total))
        for exchange in missing:
            exchange.wait()
            exchange.leave(exchange.parameter.grad)

    def _check_numbers(self) -> None:
        for group, sent in zip(self.param_groups, self._sent, strict=True):
            numbers = _numbers.of_group(group, self._numbers_of)
            if numbers != sent:
                changed = [name for name, value in numbers.items() if value != sent[name]]
                raise MisuseError(
                    f"param_groups' {', '.join(changed)} changed between backward and step(), when the gradients had left: "
                    "change them, or step a scheduler, after step() or before backward"
                )
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise MisuseError(
                    f"{name!r} was frozen when HubOptimizer was made and has a gradient now: make it after unfreezing"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim's. Gradients that are to be zeroed in place are exchanged first."""
        if self._step.has_begun:
            raise MisuseError(
                "zero_grad() came between backward and step(), when gradients had left: call it after step(). A backward pass "
                "whose gradients are not meant for this optimizer runs in `with optimizer.no_sync():`; GradScaler, which "
                "leaves steps out, cannot be used: bf16 needs none"
            )
        if not set_to_none:
            self.synchronize()
        super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context add their gradients up, and none leaves. The first pass outside, or `step`, lets
        the sum leave."""
        before, self._step.is_paused = self._step.is_paused, True
        try:
            yield
        finally:
            self._step.is_paused = before

    def synchronize(self) -> None:
        """Waits until all parameters have their newest values.

        Needed only before code that reads a parameter it holds by itself, not through its module.
        """
        for exchange in self._exchanges:
            exchange.wait()

    def close(self) -> None:
        """Waits for all parameters and leaves the job, with every other rank. The model can then be used freely."""
        self.synchronize()
        for hook in self._hooks:
            hook.remove()
        self._guards.remove()
        self._world.close_job(self._job)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_complete:
            raise MisuseError(
                "a HubOptimizer's parameters are agreed on at its start: close() it and make another one"
            )
        super().add_param_group(param_group)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("a HubOptimizer cannot be copied or pickled: save optimizer.state_dict()")


def _without_gradient(names: list[str], total: int) -> str:
    shown = ", ".join(repr(name) for name in names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"{len(names)} of {total} parameters have no gradient in step(): {shown}. Was backward() called, and outside of "
        "no_sync()? Parameters that take no part are to be frozen (requires_grad_(False)) before HubOptimizer is made"
    )
