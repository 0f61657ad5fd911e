"""Exchanges of a device's tensors through host memory, piece by piece, so that copies and exchanges overlap.

    compute stream   tensor ----.                                               .---- wait() ---- next use
    out stream                  '--- copy 1 --- copy 2 ...                      |
    thread                               '--- request 1 --- request 2 ...       |
    back stream                                     '--- copy 1 --- copy 2 ... -'

A thread waits for the copies to the host, so that the computation does not, and submits the requests. When a request has ended,
its result is copied back. The code that uses the result makes its own device stream wait for that copy.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paramhub.errors import MisuseError
from paramhub.torch._device_streams import Copies, DeviceStreams
from paramhub.torch._staged_handle import StagedHandle

if TYPE_CHECKING:
    from paramhub._native import Handle
    from paramhub.torch._work import Work

EXIT_TIMEOUT = 10.0
"""Seconds for which the end of the process waits for a thread that may be waiting for the device."""
CLOSED = "the job or the group was closed before this tensor was sent"


class Piece(NamedTuple):
    """A part of an exchange."""

    copies: Copies
    """What is copied to the host before the request."""
    request: Callable[[], Handle | Work]
    """Submits the request."""
    back: Copies
    """What is copied back when the request has ended well."""


class StagedExchanges:
    """Exchanges whose requests are submitted in the order in which the exchanges have begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._unsubmitted = 0
        self._is_closed = False
        self._submissions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._end_thread = weakref.finalize(self, self._submissions.put, None)
        _all.add(self)

    def begin(
        self,
        handle: StagedHandle,
        stream: Any,
        pieces: Sequence[Piece],
        finish: Callable[[], None] | None = None,
    ) -> None:
        """Begins the exchange that ``handle`` stands for, of tensors with their values at this point of ``stream``. ``finish()``
        goes on with the results on their device stream."""
        streams = handle.streams
        try:
            copied = streams.copy_to_host(stream, [piece.copies for piece in pieces])
        except BaseException as error:
            # Callers of a group's other tensors have the handle already.
            handle.end(error, None)
            handle.submitted()
            raise
        # These references keep the allocator from reusing the tensors' memory before they are copied.
        kept = [source for piece in pieces for source in piece.copies[1]]
        results = _Results(handle, streams, len(pieces), finish)

        def submit() -> None:
            try:
                for event, piece in zip(copied, pieces, strict=True):
                    event.synchronize()
                    handle.follow(piece.request(), results.arrival_of(piece))
            except BaseException as error:
                handle.end(error, None)
            finally:
                kept.clear()
                handle.submitted()

        if not self._put(submit):
            handle.end(MisuseError(CLOSED), None)
            handle.submitted()

    def await_submissions(self) -> None:
        """Waits until the requests of all exchanges that have begun are submitted."""
        if not self._unsubmitted:
            # Most groups have no tensors of devices, and their operations pay nothing for this.
            return
        with self._left:
            while self._unsubmitted:
                self._left.wait()

    def close(self) -> None:
        """Ends the thread. Requests that were submitted before still end."""
        with self._lock:
            self._is_closed = True
        self._end_thread()

    def _put(self, submit: Callable[[], None]) -> bool:
        """Hands a submission to the thread. Returns False if the thread has ended."""

        def counted() -> None:
            try:
                submit()
            finally:
                self._one_submitted()

        with self._lock:
            if self._is_closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(self._submissions,), name="paramhub-stage", daemon=True
                )
                self._thread.start()
            self._unsubmitted += 1
            self._submissions.put(counted)
        return True

    def _one_submitted(self) -> None:
        with self._left:
            self._unsubmitted -= 1
            self._left.notify_all()

    def join_thread(self, timeout: float) -> None:
        """Waits for the end of a closed thread."""
        if self._thread is not None:
            self._thread.join(timeout)


class _Results:
    """The results of an exchange, which arrive piece by piece in any order."""

    def __init__(
        self, handle: StagedHandle, streams: DeviceStreams, pieces: int, finish: Callable[[], None] | None
    ) -> None:
        self._handle = handle
        self._streams = streams
        self._finish = finish
        self._missing = pieces
        self._lock = threading.Lock()

    def arrival_of(self, piece: Piece) -> Callable[[Handle | Work], None]:
        """What is called at the end of the piece's request. It refers to the piece, and so to the host memory's owner."""
        return lambda request: self._arrived(request, piece)

    def _arrived(self, request: Handle | Work, piece: Piece) -> None:
        failure = request.exception()
        if failure is not None:
            self._handle.end(failure, None)
        elif not self._handle.has_failed():
            try:
                self._copy_back(piece.back)
            except BaseException as error:
                self._handle.end(error, None)

    def _copy_back(self, back: Copies) -> None:
        self._streams.copy_back(back)
        with self._lock:
            self._missing -= 1
            if self._missing:
                return
        if self._finish is not None:
            with torch.inference_mode(), self._streams.on_results_stream():
                self._finish()
        self._handle.end(None, self._streams.results_event())


def _run(submissions: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (submit := submissions.get()) is not None:
        submit()
        # It refers to what ends this thread when nothing refers to it.
        del submit


_all: weakref.WeakSet[StagedExchanges] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Ends all threads before the interpreter shuts down. One that returned from a wait in C++ later would end the process with
    an abort."""
    for exchanges in list(_all):
        exchanges.close()
        exchanges.join_thread(EXIT_TIMEOUT)
