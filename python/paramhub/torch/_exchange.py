"""The exchange of one parameter: sends the gradient to the hub and receives the new value in place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from paramhub import _native
from paramhub.errors import JobFailedError, MisuseError
from paramhub.torch import _ddp_conflict, _memory, _tensors, trace
from paramhub.torch._staging import NO_BACKWARD, Stage

if TYPE_CHECKING:
    from paramhub.torch._capture import Capture
    from paramhub.torch._factor_layers import FactorLayer
    from paramhub.torch._hyperparameters import HyperparameterSync
    from paramhub.torch._program_state import State
    from paramhub.torch._shutdown import FailureState
    from paramhub.torch._staged_handle import StagedHandle


class StepState:
    """The state of the current step, which all parameters of one optimizer share."""

    __slots__ = (
        "backward",
        "begin",
        "failures",
        "has_begun",
        "hyperparameters",
        "is_interrupted",
        "is_paused",
        "is_staged",
        "is_traced",
        "job",
        "left",
        "needs_all",
        "passes",
        "program_state",
        "stage",
        "total",
        "watch",
    )

    def __init__(self, passes: int, failures: FailureState) -> None:
        self.job: _native.Job
        self.hyperparameters: HyperparameterSync
        """Sends changes of the optimizer's parameter groups. It is not the optimizer's own, for Lightning runs methods of
        optimizers on an object that has their attributes."""
        self.failures = failures
        self.stage: Stage | None = None
        """The stage of the tensors if they are staged."""
        self.is_staged = False
        """True if tensors are exchanged from separate host memory, as a device's tensors must be."""
        self.watch: trace.Watch | None = None
        self.is_traced = False
        """True if the trace has begun a span for the backward pass under way."""
        self.passes = passes
        """The number of backward passes whose gradients are added up before they are sent."""
        self.is_paused = False
        """True if gradients are only added up, and none is sent."""
        self.has_begun = False
        """True if a gradient has been sent in this step."""
        self.begin: Callable[[], None] = lambda: None
        """Called before the first gradient of a step is sent."""
        self.program_state: weakref.ref[State] | None = None
        """The program's state, which the hub must have before the first gradient of the next step is sent. It refers to the
        optimizer, so a reference to it would keep the optimizer alive."""
        self.backward = NO_BACKWARD
        """Autograd's number of the backward pass that sends gradients. It stays set if an exception ends the pass."""
        self.is_interrupted = False
        """True if `step` has raised before all gradients were sent."""
        self.left = 0
        """The number of gradients that were sent in this step."""
        self.total = 0
        """The number of parameters that are exchanged."""
        self.needs_all = False
        """True if no new value may arrive before all ranks have sent all gradients."""

    @property
    def was_interrupted(self) -> bool:
        """Returns whether an exception has ended a backward pass, or `step`, after a part of the gradients was sent."""
        is_in_it = torch._C._current_graph_task_id() != NO_BACKWARD
        return self.left > 0 and not is_in_it and (self.is_interrupted or self.backward != NO_BACKWARD)

    def begin_step(self) -> None:
        """Prepares the step before its first gradient is sent."""
        state = self.program_state() if self.program_state is not None else None
        if state is not None:
            state._await_saved()
        self.begin()
        self.has_begun = True

    def enter_backward(self, number: int) -> None:
        """Registers the backward pass that sends gradients now."""
        self.backward = number
        torch.autograd.Variable._execution_engine.queue_callback(
            functools.partial(self._leave_backward, number)
        )

    def _leave_backward(self, number: int) -> None:
        # Autograd does not call this if an exception has ended the pass.
        if self.backward == number:
            self.backward = NO_BACKWARD

    def hand_over(self) -> None:
        """Holds back no gradient that was sent any longer. Called when a step ends, well or not."""
        if self.stage is not None:
            self.stage.hand_over()

    def begin_next(self) -> None:
        """Resets the shared state for the next step."""
        self.left = 0
        self.has_begun = self.is_interrupted = self.is_traced = False
        self.backward = NO_BACKWARD

    def trace_backward(self) -> None:
        """Starts the backward pass's span in the trace, at its first gradient."""
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
    """The exchange of one parameter.

    Autograd calls a hook once the parameter's gradient is complete, and the hook sends it. The new value may then overwrite
    the old one although backward goes on. Autograd's order makes this right: the hook's node runs after all nodes that lead
    to it, and a node that needs the old value for other gradients leads to it, too. There are uses that do not (a detached
    use of the parameter, a second backward through the same graph). For these the parameter's version has changed, and
    autograd raises.
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

    def __init__(self, number: int, name: str, parameter: torch.nn.Parameter, step: StepState) -> None:
        self.number = number
        self.name = name
        self.parameter = parameter
        self.step = step
        self.keys = [number]
        self.dtype = parameter.dtype
        self.strides = parameter.stride()
        self.handle: _native.Handle | StagedHandle | None = None
        """The newest request, until a caller has waited for it."""
        self.capture: Capture | None = None
        """The capture of the gradient's factors, if the parameter is the weight of a Linear that may be exchanged as factors."""
        self.layer: FactorLayer | None = None
        """The layer that the parameter belongs to, if it is exchanged as factors."""
        self.passes = 0
        """The number of gradients added up in this step."""
        self.has_left = False
        """True if the gradient of this step was sent."""
        self.gradient: torch.Tensor | None = None
        self.gradient_version = 0
        self.version = 0
        self.settle(parameter.data)

    def settle(self, memory: torch.Tensor) -> None:
        """Stores the address of the parameter's memory. ``memory`` keeps it alive, and has a version counter of its own."""
        self.memory = memory
        self.flat = _memory.flat_view(memory)
        self.place, self.nbytes = _tensors.memory_range(memory)
        self.receives = [(self.place, self.nbytes)]
        self.version = self.parameter._version

    def __call__(self, parameter: torch.Tensor) -> None:
        """The hook that autograd calls when a backward pass has added its gradient to ``parameter.grad``."""
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
        """Sends the step's gradient, and keeps a reference to it until the exchange has ended."""
        assert gradient is not None
        step = self.step
        if not step.has_begun:
            step.begin_step()
        parameter = self.parameter
        if parameter._version != self.version or parameter.data_ptr() != self.place:
            raise self.changed()
        if gradient.layout is not torch.strided or gradient.dtype is not self.dtype:
            raise MisuseError(
                f"the gradient of {self.name!r} is {gradient.layout} of {gradient.dtype}, where dense {self.dtype} was agreed "
                "on: use the module's option for dense gradients (sparse=False), and convert the model before HubOptimizer "
                "is made. HubOptimizer exchanges the rows of Embedding and EmbeddingBag modules that had sparse=True when it was "
                "made; DistributedOptimizer and DDP over the backend those of all sparse gradients"
            )
        self.renew_version()
        self.gradient, self.gradient_version = gradient, gradient._version
        if self.layer is not None:
            self.count()
            self.layer.leave(self)
            return
        self._send(gradient)

    def leave_zeros(self) -> None:
        """Sends zeros instead of the gradient, even if the parameter was changed meanwhile."""
        self.renew_version()
        self._send(torch.zeros_like(self.parameter))

    def renew_version(self) -> None:
        """Increments the parameter's version, so that autograd refuses to use tensors that it saved of the old value."""
        increment_version(self.parameter)
        self.version = self.parameter._version

    def count(self) -> None:
        """Counts the gradient as sent."""
        self.has_left = True
        self.step.left += 1

    def _send(self, gradient: torch.Tensor) -> None:
        step = self.step
        sent = gradient
        if gradient.stride() != self.strides:
            sent = _memory.in_memory_order_of(self.parameter, gradient)
        try:
            if step.stage is None:
                self.handle = step.job.push_pull(
                    self.keys, [(sent.data_ptr(), self.nbytes)], self.receives, (sent, self.memory)
                )
            else:
                self.handle = step.stage.collect(self.number, _memory.flat_view(sent), self.flat)
        except JobFailedError as error:
            step.failures.note_raised(error)
            raise
        self.count()
        if trace.active:
            trace.request(self.name, self.handle)

    def wait(self) -> None:
        """Waits until the parameter has the value that follows from the newest gradient that was sent."""
        handle = self.handle
        if handle is None:
            return
        step = self.step
        if self.has_left and step.needs_all and step.left < step.total:
            raise MisuseError(
                f"{self.name!r} was read between backward and step(), but its new value cannot come before step(): read "
                "parameters, and gradients through them, after step()"
            )
        try:
            if trace.active and not handle.done():
                with trace.wait(self.name):
                    handle.wait()
            else:
                handle.wait()
        except JobFailedError as error:
            step.failures.note_raised(error)
            raise
        self.handle = None

    def next_step(self) -> int:
        """The step to which the next gradient contributes."""
        step = self.step
        if step.stage is not None and self.handle is not None:
            # A stage submits the request later, when the device has computed the gradients of a group.
            self.handle.await_submission()
        return step.job.next_step(self.number)

    def forget(self) -> None:
        """Forgets the request under way, which has failed: the job goes back to an earlier step."""
        self.handle = None
        self.reset_step()

    @property
    def gradient_change(self) -> str | None:
        """Returns how user code changed the gradient after it was sent: ``replaced``, ``modified``, or None."""
        gradient = self.gradient
        if self.parameter.grad is not gradient:
            return "replaced"
        if gradient is not None and gradient._version != self.gradient_version:
            return "modified"
        return None

    def reset_step(self) -> None:
        """Resets this parameter's state for the next step."""
        self.passes = 0
        self.has_left = False
        self.gradient = None

    def changed(self) -> MisuseError:
        """The error for a parameter that was changed or moved since the last exchange."""
        if self.parameter.data_ptr() != self.place:
            return MisuseError(
                f"{self.name!r} was moved to another memory after HubOptimizer was made: call model.to(), .half() and the "
                "like before"
            )
        if _ddp_conflict.is_reduced_by_ddp(self.parameter):
            return _ddp_conflict.refusal(self.name)
        return MisuseError(
            f"{self.name!r} was modified by this process, but the parameters are the hub's: call "
            "optimizer.broadcast_parameters() on every rank after such changes (load_state_dict(), an initialisation), and "
            "leave out what changes parameters in every step (max_norm of an embedding, clamping)"
        )
