"""The handle of an exchange of device tensors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paramhub._native import Handle
    from paramhub.torch._staging import Stage


class StagedHandle:
    """The counterpart of `paramhub.Handle` for an exchange of device tensors. `wait` returns when the exchange has ended and
    the current device stream is ordered after the copies of the results. The host does not wait for these copies.

    All tensors of a group have one handle, which ends when the exchanges of all have ended. A caller that asks for its end
    has the group handed over, so that the end comes."""

    def __init__(self, stage: Stage, is_collecting: bool = False) -> None:
        self.is_collecting = is_collecting
        """True if more tensors may join the exchange, and the device does not copy them yet."""
        self._stage = stage
        self._submitted, self._ended = threading.Event(), threading.Event()
        self._request_handle: Handle | None = None
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
        self._copied_back.wait(self._stage.current_stream())

    def done(self) -> bool:
        self._stop_collecting()
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        """The reason why the exchange failed, or None. None before the end."""
        self._stop_collecting()
        return self._failure

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
        with self._stage.on_results_stream():
            callback(self)

    @property
    def submitted_ns(self) -> int:
        return self._request_handle.submitted_ns if self._request_handle is not None else 0

    @property
    def finished_ns(self) -> int:
        return self._request_handle.finished_ns if self._request_handle is not None else 0

    def follow(self, request: Handle, copy_back: Callable[[Handle], None]) -> None:
        """Called when the job has the request. ``copy_back`` is called at the request's end, and then calls `end`."""
        self._request_handle = request
        request.add_done_callback(copy_back)

    def submitted(self) -> None:
        """Called when the job has the request, has refused it, or never gets it."""
        self._submitted.set()

    def end(self, failure: BaseException | None, copied_back: Any) -> None:
        """Called at the end, with the reason why it failed, or with the device's event that follows the copies of the results."""
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

    def _stop_collecting(self) -> None:
        if self.is_collecting:
            self._stage.hand_over()
