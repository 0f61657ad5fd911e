"""Copies a device's tensors to host memory for the exchange, and the results back, on device streams of their own.

A gradient is copied into the host memory from which it is exchanged: the arena that a hub on this host shares, or pinned
memory that the network sends from. A thread waits for the copy, so that the computation does not, and submits the request.
When the request has ended, its result is copied back on a second device stream. The code that uses the result makes its own
device stream wait for that copy.

    compute stream   gradient ----.                                        .---- wait() ---- next use
    out stream                     '--- copy to host                       |
    stage's thread                               '--- request              |
    back stream                                               '--- copy ---'

Except for pinned memory, which only CUDA has, the code is the same for every accelerator: it gets the streams and events of a
device from torch by the device's name. The CPU is such a device too; its streams do nothing, and the tests run this code on it.
On a GPU the code is untested so far.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paramhub.torch import _pinning
from paramhub.torch._tensors import memory_range

if TYPE_CHECKING:
    from paramhub._native import Handle, Job

EXIT_TIMEOUT = 10.0
"""Seconds for which the end of the process waits for a stage's thread, which may be waiting for the device."""


class StagedHandle:
    """The counterpart of `paramhub.Handle` for an exchange of device tensors. `wait` returns when the exchange has ended and
    the current device stream is ordered after the copies of the results. The host does not wait for these copies."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._submitted, self._ended = threading.Event(), threading.Event()
        self._request_handle: Handle | None = None
        self._copied_back: Any = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[StagedHandle], object]] = []

    def wait(self, timeout: float | None = None) -> None:
        """The counterpart of `paramhub.Handle.wait`."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the exchange has not ended within {timeout} s")
        if self._failure is not None:
            raise self._failure
        self._copied_back.wait(self._stage.current_stream())

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """The reason why the exchange failed, or None. None before the end."""
        return self._failure

    def await_submission(self) -> None:
        """Waits until the job has the request, or has refused it. Before, the job does not count it as a step."""
        self._submitted.wait()

    def add_done_callback(self, callback: Callable[[StagedHandle], object]) -> None:
        """Calls ``callback(handle)`` at the end. If there are results, the current device stream is then the one on which they
        arrive."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        with self._stage.on_results_stream():
            callback(self)

    @property
    def submitted_ns(self) -> int:
        return self._request_handle.submitted_ns if self._request_handle is not None else 0

    @property
    def finished_ns(self) -> int:
        return self._request_handle.finished_ns if self._request_handle is not None else 0

    def _end(self, failure: BaseException | None, copied_back: Any) -> None:
        self._failure, self._copied_back = failure, copied_back
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except BaseException:
                # The thread and the other callbacks go on, as with `paramhub.Handle`.
                threading.excepthook(threading.ExceptHookArgs([*sys.exc_info(), threading.current_thread()]))


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
        sends, receives = [self._gradients[key] for key in keys], [self._parameters[key] for key in keys]
        ranges = [memory_range(tensor) for tensor in sends], [memory_range(tensor) for tensor in receives]
        copies, copies_back = zip(sends, gradients, strict=True), zip(outs, receives, strict=True)
        return self.exchange(
            list(copies), lambda: self._job.push_pull(keys, *ranges, self), list(copies_back)
        )

    def exchange(
        self,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        request: Callable[[], Handle],
        copies_back: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> StagedHandle:
        """Copies the device's tensors with their values at this point of the current device stream. Submits the request when
        they are on the host, and copies its results back. ``copies`` and ``copies_back`` are pairs of tensors: copy to, from."""
        handle = StagedHandle(self)
        ready = self._streams.Event()
        ready.record(self.current_stream())
        ready.wait(self._out)
        with self._streams.stream(self._out):
            for to, tensor in copies:
                to.copy_(tensor, non_blocking=True)
                if self._device.type != "cpu":
                    # The allocator must not reuse the tensor's memory before the copy has read it.
                    tensor.record_stream(self._out)
            copied = self._streams.Event()
            copied.record(self._out)

        def copy_back(request: Handle) -> None:
            failure = request.exception()
            if failure is not None:
                handle._end(failure, None)
                return
            with self.on_results_stream():
                try:
                    for to, tensor in copies_back:
                        to.copy_(tensor, non_blocking=True)
                        if self._device.type != "cpu":
                            # If nothing waits for the result and its tensor is dropped, the same holds for this copy.
                            to.record_stream(self._back)
                    copied_back = self._streams.Event()
                    copied_back.record(self._back)
                except BaseException as error:
                    handle._end(error, None)
                else:
                    handle._end(None, copied_back)

        def submit() -> None:
            try:
                copied.synchronize()
                handle._request_handle = request()
                handle._request_handle.add_done_callback(copy_back)
            except BaseException as error:
                handle._end(error, None)
            finally:
                handle._submitted.set()

        self._requests_to_submit.put(submit)
        return handle

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
        """Ends the stage's thread. Requests that were submitted before still end."""
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
