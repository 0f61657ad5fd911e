"""Copies a device's tensors to host memory for the exchange, and the results back, on device streams of their own.

A gradient is copied into the host memory from which it is exchanged: the arena that a hub on this host shares, or pinned
memory that the network sends from. A thread waits for the copy, so that the computation does not, and submits the request.
When the request has ended, its result is copied back on a second device stream. The code that uses the result makes its own
device stream wait for that copy.

    compute stream   gradient ----.                                        .---- wait() ---- next use
    out stream                     '--- copy to host                       |
    stage's thread                               '--- request              |
    back stream                                               '--- copy ---'

Each exchange costs the host a fraction of a millisecond, however small its tensors are. So gradients that become ready one after
the other are collected into groups, and each group is one exchange. Ranks may group differently, because hubs count the
gradients of each key.

Except for pinned memory, which only CUDA has, the code is the same for every accelerator: it gets the streams and events of a
device from torch by the device's name. The CPU is such a device too; its streams do nothing, and most tests run this code on it.
Those in python/tests/gpu run it on a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch import _pinning
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._tensors import memory_range

if TYPE_CHECKING:
    from paramhub._native import Handle, Job

_Copies = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Tensors to copy to, and those to copy from."""
EXIT_TIMEOUT = 10.0
"""Seconds for which the end of the process waits for a stage's thread, which may be waiting for the device."""
GROUP_BYTES = 1 << 20
"""The bytes from which on a group of gradients is exchanged. On an H200 groups of 1, 4 and 8 MiB take equally long; with smaller
ones the exchange of a small model begins earlier."""
CLOSED = "the job was closed before this gradient was sent"
NO_BACKWARD = -1
"""Autograd's number of the current backward pass where there is none."""


class _Group:
    """Gradients that became ready one after the other on one device stream, to be exchanged in one request."""

    def __init__(self, stage: Stage, stream: Any) -> None:
        self.handle = StagedHandle(stage, is_collecting=True)
        self.stream = stream
        self.keys: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.outs: list[torch.Tensor] = []
        self.nbytes = 0

    def add(self, key: int, gradient: torch.Tensor, out: torch.Tensor) -> None:
        self.keys.append(key)
        self.gradients.append(gradient)
        self.outs.append(out)
        self.nbytes += gradient.numel() * gradient.element_size()


class Stage:
    """Exchanges one job's tensors on one device through host memory. Keys are given by their positions in the job's key table.

    ``is_encoded`` says that gradients travel in another encoding than their own: the arena then has no place for them."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        shapes: Sequence[torch.Size],
        dtypes: Sequence[torch.dtype],
        *,
        is_encoded: bool = False,
    ) -> None:
        self._job = job
        self._device = device
        self._streams = torch.get_device_module(device)
        with self._on_device():
            self._out, self._back = self._streams.Stream(), self._streams.Stream()
        shared = job.shares_memory
        self._gradients = [
            self._host_tensor(job.gradient_tensor, shared and not is_encoded, key, shape, dtype)
            for key, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._parameters = [
            self._host_tensor(job.parameter_tensor, shared, key, shape, dtype)
            for key, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._pin()
        self._lock = threading.RLock()
        self._group: _Group | None = None
        """The gradients that were collected and not handed over yet."""
        self._is_closed = False
        self._backward = NO_BACKWARD
        """Autograd's number of the newest backward pass at whose end a group is handed over."""
        self._requests_to_submit: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_submit_when_copied, args=(self._requests_to_submit,), name="paramhub-stage", daemon=True
        )
        self._thread.start()
        self._close = weakref.finalize(self, self._requests_to_submit.put, None)
        _stages.add(self)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The host memory into which parameters are received, by key."""
        return self._parameters

    def push_pull(
        self, keys: list[int], gradients: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> StagedHandle:
        """Exchanges ``gradients`` with their values at this point of the current device stream, and receives into ``outs``."""
        handle = StagedHandle(self)
        self._push_pull(handle, self.current_stream(), keys, gradients, outs)
        return handle

    def collect(self, key: int, gradient: torch.Tensor, out: torch.Tensor) -> StagedHandle:
        """Exchanges a gradient as `push_pull` does, together with others that come before or after it. Its values are those at
        this point of the current device stream, or at a later one: the caller does not write to it until the end.

        It is handed over with its group when the group is large enough, when a caller asks for the end, and at the end of a
        backward pass. Outside of one the caller calls `hand_over` after the last gradient."""
        stream = self.current_stream()
        with self._lock:
            self._hand_over_after_backward()
            if self._group is not None and self._group.stream != stream:
                # The copies of a group wait for the work on one device stream.
                self.hand_over()
            if self._group is None:
                self._group = _Group(self, stream)
            group = self._group
            group.add(key, gradient, out)
            if group.nbytes >= GROUP_BYTES:
                self.hand_over()
        return group.handle

    def hand_over(self) -> None:
        """Begins the exchange of the gradients that were collected so far."""
        with self._lock:
            group, self._group = self._group, None
            if group is None:
                return
            group.handle.is_collecting = False
            self._push_pull(group.handle, group.stream, group.keys, group.gradients, group.outs)

    def exchange(
        self,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        request: Callable[[], Handle],
        copies_back: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> StagedHandle:
        """Copies the device's tensors with their values at this point of the current device stream. Submits the request when
        they are on the host, and copies its results back. ``copies`` and ``copies_back`` are pairs of tensors: copy to, from."""
        handle = StagedHandle(self)
        out, back = _columns(copies), _columns(copies_back)
        self._exchange(handle, self.current_stream(), out, request, back)
        return handle

    def _push_pull(
        self,
        handle: StagedHandle,
        stream: Any,
        keys: list[int],
        gradients: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> None:
        sends, receives = [self._gradients[key] for key in keys], [self._parameters[key] for key in keys]
        ranges = [memory_range(tensor) for tensor in sends], [memory_range(tensor) for tensor in receives]
        self._exchange(
            handle,
            stream,
            (sends, gradients),
            lambda: self._job.push_pull(keys, *ranges, self),
            (outs, receives),
        )

    def _exchange(
        self, handle: StagedHandle, stream: Any, copies: _Copies, request: Callable[[], Handle], back: _Copies
    ) -> None:
        """Makes an exchange that ``handle`` stands for, of tensors that have their values at this point of ``stream``."""
        try:
            ready = self._streams.Event()
            ready.record(stream)
            ready.wait(self._out)
            with self._streams.stream(self._out):
                _copy(copies)
                copied = self._streams.Event()
                copied.record(self._out)
        except BaseException as error:
            # Callers of a group's other tensors have the handle already.
            handle.end(error, None)
            handle.submitted()
            raise

        def copy_back(request: Handle) -> None:
            failure = request.exception()
            if failure is not None:
                handle.end(failure, None)
                return
            with self.on_results_stream():
                try:
                    _copy(back)
                    if self._device.type != "cpu":
                        # If nothing waits for a result and its tensor is dropped, the allocator must not reuse the tensor's
                        # memory before the copy has written to it.
                        for to in back[0]:
                            to.record_stream(self._back)
                    copied_back = self._streams.Event()
                    copied_back.record(self._back)
                except BaseException as error:
                    handle.end(error, None)
                else:
                    handle.end(None, copied_back)

        # These references keep the allocator from reusing the tensors' memory before they are copied.
        kept = list(copies[1])

        def submit() -> None:
            try:
                copied.synchronize()
                kept.clear()
                handle.follow(request(), copy_back)
            except BaseException as error:
                handle.end(error, None)
            finally:
                handle.submitted()

        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._requests_to_submit.put(submit)
        if is_closed:
            # The thread that would submit it has ended.
            handle.end(MisuseError(CLOSED), None)
            handle.submitted()

    def _hand_over_after_backward(self) -> None:
        """Has the group handed over at the end of the backward pass under way. If an exception ends a pass, autograd does not
        call this: then the next caller does that asks for an end or ends the step."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            if backward != NO_BACKWARD:
                torch.autograd.Variable._execution_engine.queue_callback(self.hand_over)
            self._backward = backward

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can access."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    def current_stream(self) -> Any:
        """The device stream on which the caller computes."""
        return (
            self._streams.current_stream()
            if self._device.type == "cpu"
            else self._streams.current_stream(self._device)
        )

    def on_results_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the results' device stream is the current one."""
        return self._streams.stream(self._back)

    def close(self) -> None:
        """Ends the stage's thread. Requests that were submitted before still end. Gradients that were collected and not handed
        over are not exchanged."""
        with self._lock:
            self._is_closed = True
            group, self._group = self._group, None
        if group is not None:
            group.handle.is_collecting = False
            group.handle.end(MisuseError(CLOSED), None)
            group.handle.submitted()
        self._close()

    def _host_tensor(
        self,
        job_memory: Callable[[int], Any],
        is_in_arena: bool,
        key: int,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if is_in_arena or self._device.type != "cuda":
            return torch.from_dlpack(job_memory(key)).view(shape)
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def _pin(self) -> None:
        """Registers the arena with the device. If the device refuses, copies are slower but correct."""
        if self._device.type != "cuda" or not self._job.shares_memory:
            return
        with self._on_device():
            tensors = [tensor for tensor in (*self._gradients, *self._parameters) if not tensor.is_pinned()]
            pages = _pinning.register(tensors, self._device)
        # It must be undone while the memory is still mapped, so the finalizer keeps the tensors. No copy is submitted any more
        # when it runs, because everything that submits one refers to the stage. At the end of the process the driver does it.
        release = weakref.finalize(
            self, _pinning.release, pages, tensors, self._device, (self._out, self._back)
        )
        release.atexit = False

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._device.type == "cpu" else self._streams.device(self._device)


def _columns(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> _Copies:
    return [to for to, _ in pairs], [source for _, source in pairs]


def _copy(copies: _Copies) -> None:
    """Copies on the current device stream. One call for all of them keeps the interpreter's lock free for other threads."""
    to, sources = copies
    if to:
        torch._foreach_copy_(to, sources, non_blocking=True)


def _submit_when_copied(requests: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (submit := requests.get()) is not None:
        submit()
        # It refers to the stage, which ends this thread when nothing refers to it.
        del submit


_stages: weakref.WeakSet[Stage] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Ends all threads before the interpreter shuts down. One that returned from a wait in C++ later would end the process with
    an abort."""
    for stage in list(_stages):
        stage.close()
        stage._thread.join(EXIT_TIMEOUT)
