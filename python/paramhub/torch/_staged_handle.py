"""The handle of an exchange of device tensors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paramhub.errors import JobFailedError
from paramhub.torch._work import Work

if TYPE_CHECKING:
    from paramhub._native import Handle
    from paramhub.torch._device_streams import DeviceStreams


class StagedHandle:
    """The counterpart of `paramhub.Handle` for an exchange of device tensors. `wait` returns when the exchange has ended and
    the current device stream is ordered after the copies of the results. The host does not wait for these copies.

    All tensors of a group have one handle, which ends when the exchanges of all have ended. A caller that asks for its end
    has the group handed over, so that the end comes."""

    def __init__(self, streams: DeviceStreams, hand_over: Callable[[], None] | None = None) -> None:
        """``hand_over()`` begins the exchange, if more tensors may join it before."""
        self.streams = streams
        self.is_collecting = hand_over is not None
        """True if more tensors may join the exchange, and the device does not copy them yet."""
        self._hand_over = hand_over
        self._submitted, self._ended = threading.Event(), threading.Event()
        self._requests: list[Handle] = []
        self._copied_back: Any = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[StagedHandle], object]] = []

    def wait(self, timeout: float | None = None) -> None:
        """The counterpart of `paramhub.Handle.wait`."""
        self._stop_collecting()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the exchange has not ended within {timeout} s")
        if self._failure is not None:
            raise self._failure
        self._copied_back.wait(self.streams.current_stream())

    def done(self) -> bool:
        self._stop_collecting()
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """The reason why the exchange failed, or None. None before the end."""
        self._stop_collecting()
        return self._failure

    def has_failed(self) -> bool:
        """Returns whether it has ended with an error."""
        return self._ended.is_set() and self._failure is not None

    def fail(self, message: str, culprit: int | None = None) -> None:
        """The counterpart of `paramhub.Handle.fail`."""
        failure = JobFailedError(message)
        failure.culprit = culprit
        self.end(failure, None)
        for request in list(self._requests):
            request.fail(message, culprit)

    def awaited_ranks(self) -> list[int]:
        """The counterpart of `paramhub.Handle.awaited_ranks`."""
        return sorted({rank for request in list(self._requests) for rank in request.awaited_ranks()})

    @property
    def source(self) -> int | None:
        """The counterpart of `paramhub.Handle.source`."""
        return self._requests[0].source if self._requests else None

    def await_submission(self) -> None:
        """Waits until the job has the request, or has refused it. Before, the job does not count it as a step."""
        self._stop_collecting()
        self._submitted.wait()

    def add_done_callback(self, callback: Callable[[StagedHandle], object]) -> None:
        """Calls ``callback(handle)`` at the end. If there are results, the current device stream is then the one on which they
        arrive."""
        self._stop_collecting()
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        with self.streams.on_results_stream():
            callback(self)

    @property
    def submitted_ns(self) -> int:
        """The time at which the first request was submitted, as that of `paramhub.Handle`; 0 before."""
        return min((request.submitted_ns for request in list(self._requests)), default=0)

    @property
    def finished_ns(self) -> int:
        """The time at which the last request has ended, as that of `paramhub.Handle`; 0 before."""
        if not self._ended.is_set():
            return 0
        return max((request.finished_ns for request in list(self._requests)), default=0)

    def follow(self, request: Handle | Work, on_end: Callable[[Any], None]) -> None:
        """Called when a request of the exchange is submitted. ``on_end(request)`` is called at its end; that of the last one
        calls `end`."""
        self._requests += request.handles if isinstance(request, Work) else (request,)
        request.add_done_callback(on_end)

    def submitted(self) -> None:
        """Called when all requests were submitted, one was refused, or they never are."""
        self._submitted.set()

    def end(self, failure: BaseException | None, copied_back: Any) -> None:
        """Called at the end, with the reason why it failed, or with the device's event that follows the copies of the results.
        A second call does nothing."""
        with self._lock:
            if self._ended.is_set():
                return
            self._failure, self._copied_back = failure, copied_back
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        if not callbacks:
            return
        with self.streams.on_results_stream():
            for callback in callbacks:
                try:
                    callback(self)
                except BaseException:
                    # The thread and the other callbacks go on, as with `paramhub.Handle`.
                    threading.excepthook(
                        threading.ExceptHookArgs([*sys.exc_info(), threading.current_thread()])
                    )

    def _stop_collecting(self) -> None:
        if self.is_collecting:
            assert self._hand_over is not None
            self._hand_over()
