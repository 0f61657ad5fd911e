"""One parameter's part in training: its gradient leaves for the hub, and its new value comes back in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import _ddp_around, _memory, _tensors, trace

if TYPE_CHECKING:
    from paramhub.torch._capture import Capture
    from paramhub.torch._factor_layers import FactorLayer
    from paramhub.torch._staging import Stage, StagedHandle


NO_BACKWARD = -1
"""What autograd says outside of a backward pass."""


class StepUnderWay:
    """What the parameters of one optimizer share about the step they are in."""

    __slots__ = (
        "backward",
        "begin",
        "has_begun",
        "is_cut",
        "is_paused",
        "is_staged",
        "is_traced",
        "job",
        "left",
        "needs_all",
        "passes",
        "stage",
        "total",
        "watch",
    )

    def __init__(self, passes: int) -> None:
        self.job: _native.Job
        self.stage: Stage | None = None
        """What the tensors pass through if they are staged."""
        self.is_staged = False
        """Whether tensors are exchanged from host memory of their own, as those of a device must be."""
        self.watch: trace.Watch | None = None
        self.is_traced = False
        """Whether the trace knows that a backward pass is under way."""
        self.passes = passes
        """Backward passes whose gradients are added up before they leave."""
        self.is_paused = False
        """Whether gradients are added up and do not leave at all."""
        self.has_begun = False
        """Whether a gradient has left in this step."""
        self.begin: Callable[[], None] = lambda: None
        """Called before the first gradient of a step leaves."""
        self.backward = NO_BACKWARD
        """The backward pass that gradients are leaving from, by autograd's number, until it has ended well."""
        self.is_cut = False
        """Whether `step` has raised before all gradients had left."""
        self.left = 0
        """Gradients that have left in this step."""
        self.total = 0
        """Parameters that are exchanged."""
        self.needs_all = False
        """Whether no answer may come before all gradients have left, here and elsewhere."""

    @property
    def was_cut_short(self) -> bool:
        """Whether an exception has ended a backward pass, or `step`, when a part of the gradients had left."""
        is_in_it = torch._C._current_graph_task_id() != NO_BACKWARD
        return self.left > 0 and not is_in_it and (self.is_cut or self.backward != NO_BACKWARD)

    def enter_backward(self, number: int) -> None:
        """A gradient leaves from another backward pass than the one before."""
        self.backward = number
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(self._leave_backward, number)
        )

    def _leave_backward(self, number: int) -> None:
        # Autograd does not call this after an exception.
        if self.backward == number:
            self.backward = NO_BACKWARD

    def begin_next(self) -> None:
        """Nothing of a step has left any more."""
        self.left = 0
        self.has_begun = self.is_cut = self.is_traced = False
        self.backward = NO_BACKWARD

    def trace_backward(self) -> None:
        """A backward pass has made its first gradient."""
        if self.watch is None:
            return
        self.is_traced = True
        self.watch.backward_began()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self.is_traced = False
        if self.watch is not None:
            self.watch.backward_ended()


class Exchange:
    """One parameter's.

    A gradient leaves from the hook that autograd calls once the parameter's gradient is complete. That the new value may
    then overwrite the old one, although backward goes on, follows from autograd's order: the hook's node comes after all
    that lead to it, and what needs the old value for other gradients leads to it too. What does not (a detached use of the
    parameter, a second backward through the same graph) finds the parameter's version counted up, and autograd refuses.
    """

    __slots__ = (
        "capture",
        "dtype",
        "flat",
        "gradient",
        "gradient_version",
        "handle",
        "has_left",
        "keys",
        "layer",
        "memory",
        "name",
        "nbytes",
        "number",
        "parameter",
        "passes",
        "place",
        "receives",
        "step",
        "strides",
        "version",
    )

    def __init__(self, number: int, name: str, parameter: torch.nn.Parameter, step: StepUnderWay) -> None:
        self.number = number
        self.name = name
        self.parameter = parameter
        self.step = step
        self.keys = [number]
        self.dtype = parameter.dtype
        self.strides = parameter.stride()
        self.handle: _native.Handle | StagedHandle | None = None
        """The newest request, until somebody has waited for it."""
        self.capture: Capture | None = None
        """What notes the factors of its gradient, if it is the weight of a Linear that may go by them."""
        self.layer: FactorLayer | None = None
        """What it is a part of, if it goes by factors."""
        self.passes = 0
        """Gradients added up in this step."""
        self.has_left = False
        """Whether the gradient of this step has left."""
        self.gradient: torch.Tensor | None = None
        self.gradient_version = 0
        self.version = 0
        self.settle(parameter.data)

    def settle(self, memory: torch.Tensor) -> None:
        """Takes note of where the parameter lies: ``memory`` keeps it, and has a version of its own."""
        self.memory = memory
        self.flat = _memory.flat_view(memory)
        self.place, self.nbytes = _tensors.memory_range(memory)
        self.receives = [(self.place, self.nbytes)]
        self.version = self.parameter._version

    def __call__(self, parameter: torch.Tensor) -> None:
        """Autograd's hook: a backward pass has added its gradient to the parameter's."""
        step = self.step
        if trace.active and not step.is_traced:
            step.trace_backward()
        if self.capture is not None:
            self.capture.commit()
        if step.is_paused:
            return
        if self.has_left:
            raise MisuseError(
                f"a second gradient of {self.name!r} came in one step, but the first has left. If step() was called "
                "after each backward pass, the parameter was part of two graphs within one (reentrant checkpointing: use "
                "use_reentrant=False). To add up several passes give HubOptimizer backward_passes_per_step, or run all "
                "but the last in `with optimizer.no_sync():`, as well as passes whose gradients are not meant for it"
            )
        self.passes += 1
        if self.passes < step.passes:
            return
        if self.handle is not None:
            raise MisuseError(
                f"{self.name!r} was used while its new value was on its way, for it was not read through its module: "
                "call optimizer.synchronize() before the forward pass, or give HubOptimizer overlap_forward=False"
            )
        backward = torch._C._current_graph_task_id()
        if backward != step.backward:
            step.enter_backward(backward)
        self.leave(parameter.grad)

    def leave(self, gradient: torch.Tensor | None) -> None:
        """Hands the step's gradient in. It is kept until it has been exchanged."""
        assert gradient is not None
        step = self.step
        if not step.has_begun:
            step.begin()
            step.has_begun = True
        parameter = self.parameter
        if parameter._version != self.version or parameter.data_ptr() != self.place:
            raise self.changed()
        if gradient.layout is not torch.strided or gradient.dtype is not self.dtype:
            raise MisuseError(
                f"the gradient of {self.name!r} is {gradient.layout} of {gradient.dtype}, where dense {self.dtype} was agreed "
                "on: use the module's option for dense gradients (sparse=False), and convert the model before HubOptimizer "
                "is made"
            )
        self.renew_version()
        self.gradient, self.gradient_version = gradient, gradient._version
        if self.layer is not None:
            self.count()
            self.layer.leave(self)
            return
        self._send(gradient)

    def leave_zeros(self) -> None:
        """Zeros leave in the gradient's place, whatever has become of the parameter meanwhile."""
        self.renew_version()
        self._send(torch.zeros_like(self.parameter))

    def renew_version(self) -> None:
        """Whatever autograd has kept of the parameter is out of date from here on, and it will say so."""
        increment_version(self.parameter)
        self.version = self.parameter._version

    def count(self) -> None:
        """The gradient has left."""
        self.has_left = True
        self.step.left += 1

    def _send(self, gradient: torch.Tensor) -> None:
        step = self.step
        sent = gradient
        if gradient.stride() != self.strides:
            sent = _memory.in_memory_order_of(self.parameter, gradient)
        if step.stage is None:
            self.handle = step.job.push_pull(
                self.keys, [(sent.data_ptr(), self.nbytes)], self.receives, (sent, self.memory)
            )
        else:
            self.handle = step.stage.push_pull(self.keys, [_memory.flat_view(sent)], [self.flat])
        self.count()
        if trace.active:
            trace.request(self.name, self.handle)

    def wait(self) -> None:
        """Waits until the parameter has the value that follows from the newest gradient that left."""
        handle = self.handle
        if handle is None:
            return
        step = self.step
        if self.has_left and step.needs_all and step.left < step.total:
            raise MisuseError(
                f"{self.name!r} was read between backward and step(), but its new value cannot come before step(): read "
                "parameters, and gradients through them, after step()"
            )
        if trace.active and not handle.done():
            with trace.wait(self.name):
                handle.wait()
        else:
            handle.wait()
        self.handle = None

    @property
    def what_became_of_gradient(self) -> str | None:
        """What somebody has done to the gradient after it had left, if it is not what the user sees any more."""
        gradient = self.gradient
        if self.parameter.grad is not gradient:
            return "replaced"
        if gradient is not None and gradient._version != self.gradient_version:
            return "modified"
        return None

    def forget_step(self) -> None:
        """Gets ready for the next step."""
        self.passes = 0
        self.has_left = False
        self.gradient = None

    def changed(self) -> MisuseError:
        """What to say of a parameter that is not as the last exchange left it."""
        if self.parameter.data_ptr() != self.place:
            return MisuseError(
                f"{self.name!r} was moved to another memory after HubOptimizer was made: call model.to(), .half() and the "
                "like before"
            )
        if _ddp_around.is_around(self.parameter):
            return _ddp_around.refusal(self.name)
        return MisuseError(
            f"{self.name!r} was modified by this process, but the parameters are the hub's: call "
            "optimizer.broadcast_parameters() on every rank after such changes (load_state_dict(), an initialisation), and "
            "leave out what changes parameters in every step (max_norm of an embedding, clamping)"
        )
