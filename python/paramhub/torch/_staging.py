"""Tensors of a device on their way to the hub and back: one copy out, one copy in, on streams of their own.

A gradient is copied into host memory that the exchange happens in: the arena that a hub on this host shares, or pinned
memory that the network sends from. A thread waits for the copy, not the computation, and hands the request in. When the
answer is here, it is copied back on a second stream, which whoever uses the result makes its own stream wait for.

    compute stream   gradient ----.                                        .---- wait() ---- next use
    out stream                     '--- copy to host                       |
    stage's thread                               '--- request              |
    back stream                                               '--- copy ---'

The code asks torch for a device's streams and events by the device's name, so that it is the same for every accelerator. The
processor is a device too, whose streams do nothing: the tests run this code on it. On a GPU it is untested so far.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paramhub.torch._tensors import memory_range

if TYPE_CHECKING:
    from paramhub._native import Handle, Job


class StagedHandle:
    """As `paramhub.Handle`, for an exchange of device tensors. `wait` returns when the exchange is over and whatever the
    current stream does next comes after the results; the host does not wait for the copies back."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._ended = threading.Event()
        self._request: Handle | None = None
        self._landed: Any = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[StagedHandle], object]] = []

    def wait(self, timeout: float | None = None) -> None:
        """As `paramhub.Handle.wait`."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the exchange has not ended within {timeout} s")
        if self._failure is not None:
            raise self._failure
        self._landed.wait(self._stage.current_stream())

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        return self._failure

    def add_done_callback(self, callback: Callable[[StagedHandle], object]) -> None:
        """Calls ``callback(handle)`` at the end, within the stream on which the results arrive."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        with self._stage.arriving():
            callback(self)

    @property
    def submitted_ns(self) -> int:
        return self._request.submitted_ns if self._request is not None else 0

    @property
    def finished_ns(self) -> int:
        return self._request.finished_ns if self._request is not None else 0

    def _end(self, failure: BaseException | None, landed: Any) -> None:
        self._failure, self._landed = failure, landed
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Stage:
    """What one job's tensors on one device pass through. Keys are numbered as in the job's table."""

    def __init__(
        self, job: Job, device: torch.device, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype]
    ) -> None:
        self._job = job
        self._device = device
        self._streams = torch.get_device_module(device)
        with self._on_device():
            self._out, self._back = self._streams.Stream(), self._streams.Stream()
        self._gradients = [
            self._host(job.gradient_tensor, key, shape, dtype)
            for key, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._parameters = [
            self._host(job.parameter_tensor, key, shape, dtype)
            for key, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._pin()
        self._copied: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_hand_in, args=(self._copied,), name="paramhub-stage", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, self._copied.put, None)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Where parameters are received on the host, by key."""
        return self._parameters

    def push_pull(
        self, keys: list[int], gradients: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> StagedHandle:
        """Exchanges ``gradients`` as they are at this point of the current stream, and receives into ``outs``."""
        sends, receives = [self._gradients[key] for key in keys], [self._parameters[key] for key in keys]
        places = [memory_range(tensor) for tensor in sends], [memory_range(tensor) for tensor in receives]
        copies, landings = zip(sends, gradients, strict=True), zip(outs, receives, strict=True)
        return self.exchange(list(copies), lambda: self._job.push_pull(keys, *places, self), list(landings))

    def exchange(
        self,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        request: Callable[[], Handle],
        landings: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> StagedHandle:
        """Makes copies of the device's tensors as they are at this point of the current stream, hands the request in when they
        are on the host, and copies its results back. Both are pairs of tensors, to and from."""
        handle = StagedHandle(self)
        ready = self._streams.Event()
        ready.record(self.current_stream())
        ready.wait(self._out)
        with self._streams.stream(self._out):
            for to, tensor in copies:
                to.copy_(tensor, non_blocking=True)
                if self._device.type != "cpu":
                    # The allocator must not give the tensor's memory away before the copy has read it.
                    tensor.record_stream(self._out)
            copied = self._streams.Event()
            copied.record(self._out)

        def land(request: Handle) -> None:
            failure = request.exception()
            if failure is not None:
                handle._end(failure, None)
                return
            with self.arriving():
                for to, tensor in landings:
                    to.copy_(tensor, non_blocking=True)
                landed = self._streams.Event()
                landed.record(self._back)
                handle._end(None, landed)

        def submit() -> None:
            try:
                handle._request = request()
                handle._request.add_done_callback(land)
            except BaseException as error:
                handle._end(error, None)

        self._copied.put((copied, submit))
        return handle

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the device reaches by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    def current_stream(self) -> Any:
        """The stream that the caller computes on."""
        return (
            self._streams.current_stream()
            if self._device.type == "cpu"
            else self._streams.current_stream(self._device)
        )

    def arriving(self) -> contextlib.AbstractContextManager[Any]:
        """Within it the results' stream is the current one."""
        return self._streams.stream(self._back)

    def close(self) -> None:
        """Ends the stage's thread; requests handed in before are still answered."""
        self._close()

    def _host(
        self, take: Callable[[int], Any], key: int, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor:
        if self._job.shares_memory or self._device.type != "cuda":
            return torch.from_dlpack(take(key)).view(shape)
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def _pin(self) -> None:
        """Lets the device reach the arena by itself. Where that is refused copies are slower, and right all the same."""
        if self._device.type != "cuda" or not self._job.shares_memory:
            return
        ranges = [memory_range(tensor) for tensor in (*self._gradients, *self._parameters)]
        start = min(address for address, _ in ranges)
        end = max(address + size for address, size in ranges)
        with self._on_device():
            torch.cuda.cudart().cudaHostRegister(start, end - start, 0)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._device.type == "cpu" else self._streams.device(self._device)


def _hand_in(copied: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None]) -> None:
    while (entry := copied.get()) is not None:
        event, submit = entry
        event.synchronize()
        submit()
