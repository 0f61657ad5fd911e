"""Operations under way, which the methods of `paramhub.torch._collectives.Group` return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paramhub._native import Handle
from paramhub.errors import JobFailedError
from paramhub.torch import trace
from paramhub.torch._host_memory import Finish

REASON_TIMEOUT = 0.5
"""Seconds for which a failed wait waits for a better reason: the rank at fault may become known after the hub's error."""


class Work:
    """An operation under way. It goes on whether or not a caller waits."""

    __slots__ = ("_concluded", "_explain", "_finish", "_handles", "_lock", "_problem", "name")

    def __init__(
        self,
        handles: tuple[Handle, ...],
        finish: Finish | None = None,
        explain: Callable[[JobFailedError, float], JobFailedError] | None = None,
    ) -> None:
        """``explain(failure, patience)`` returns a failure with the rank at fault, for which it may wait ``patience`` seconds."""
        self.name = "an operation"
        self._handles = handles
        self._finish = finish
        self._explain = explain
        if finish is not None:
            self._lock = threading.Lock()
            self._concluded = False
            self._problem: Exception | None = None
            # Copies results back into the tensors even if no thread waits.
            self._after_handles(self.conclude)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end. Raises TimeoutError after ``timeout`` seconds, and the error if the operation failed."""
        try:
            if trace.active and not all(handle.done() for handle in self._handles):
                with trace.wait(self.name):
                    self._wait(timeout)
            else:
                self._wait(timeout)
        except JobFailedError as failure:
            if self._explain is None:
                raise
            raise self._explain(failure, REASON_TIMEOUT) from None
        if self._finish is not None:
            self.conclude()
            if self._problem is not None:
                raise self._problem

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            for handle in self._handles:
                handle.wait()
            return
        deadline = time.monotonic() + timeout
        for handle in self._handles:
            handle.wait(max(0.0, deadline - time.monotonic()))

    def done(self) -> bool:
        """Returns whether the operation has ended, with or without an error."""
        if not all(handle.done() for handle in self._handles):
            return False
        if self._finish is not None:
            self.conclude()
        return True

    def exception(self) -> BaseException | None:
        """The error of a failed operation; None if it has not failed or has not ended."""
        for handle in self._handles:
            failure = handle.exception()
            if failure is not None:
                if self._explain is not None and isinstance(failure, JobFailedError):
                    return self._explain(failure, 0.0)
                return failure
        return self._problem if self._finish is not None and self.done() else None

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Calls ``callback(work)`` once the operation has ended: on a thread of this package, or at once if it has ended."""

        def on_end() -> None:
            if self._finish is not None:
                self.conclude()
            callback(self)

        self._after_handles(on_end)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The handles of the operation's requests."""
        return self._handles

    @property
    def source(self) -> int | None:
        """The rank from which a receive got its elements; None before its end."""
        return self._handles[0].source if self._handles else None

    def awaited_ranks(self) -> list[int]:
        """The ranks that the operation waits for, as far as this rank knows."""
        return sorted({rank for handle in self.handles for rank in handle.awaited_ranks()})

    def _after_handles(self, call: Callable[[], object]) -> None:
        if len(self._handles) == 1:
            self._handles[0].add_done_callback(lambda _: call())
            return
        if not self._handles:
            call()
            return
        left = len(self._handles)
        lock = threading.Lock()

        def count(_: Handle) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = left == 0
            if is_last:
                call()

        for handle in self._handles:
            handle.add_done_callback(count)

    @property
    def has_to_conclude(self) -> bool:
        return self._finish is not None

    def conclude(self) -> None:
        """Runs `Finish` once the handles have ended. Only the first call runs it; a second caller waits for the first."""
        with self._lock:
            if self._concluded:
                return
            self._concluded = True
            if any(handle.exception() is not None for handle in self._handles):
                return
            assert self._finish is not None
            try:
                self._finish()
            except Exception as problem:
                self._problem = problem
