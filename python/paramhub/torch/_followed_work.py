"""Operations of which the second part depends on what the first has brought."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paramhub._native import Handle
from paramhub.torch._work import Work


class FollowedWork(Work):
    """A `Work` in two parts. The second begins when the first has ended well, whether or not a thread waits."""

    __slots__ = ("_first", "_follow", "_refusal", "_second")

    def __init__(self, first: Work, follow: Callable[[], Work]) -> None:
        """``follow()`` begins the second part. What it raises is the operation's error."""
        super().__init__(())
        self._first = first
        self._follow: Callable[[], Work] | None = follow
        self._second: Work | None = None
        self._refusal: Exception | None = None
        self._lock = threading.Lock()
        first.add_done_callback(lambda _: self._go_on())

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        self._first.name = self.name
        self._first.wait(timeout)
        self._go_on()
        if self._refusal is not None:
            raise self._refusal
        assert self._second is not None
        self._second.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def done(self) -> bool:
        if not self._first.done():
            return False
        self._go_on()
        return self._second is None or self._second.done()

    def exception(self) -> BaseException | None:
        if not self.done():
            return None
        failure = self._first.exception() or self._refusal
        return failure if self._second is None else self._second.exception()

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        def on_first_end(_: Work) -> None:
            self._go_on()
            if self._second is None:
                callback(self)
            else:
                self._second.add_done_callback(lambda _: callback(self))

        self._first.add_done_callback(on_first_end)

    @property
    def handles(self) -> tuple[Handle, ...]:
        """The handles of the requests that have been made so far. All of them have ended only if the operation has."""
        if not self._first.done():
            return self._first.handles
        self._go_on()
        return self._first.handles + (() if self._second is None else self._second.handles)

    @property
    def source(self) -> int | None:
        return None

    def _go_on(self) -> None:
        """Begins the second part if the first has ended well. Only the first call does; another one waits for it."""
        with self._lock:
            follow, self._follow = self._follow, None
            if follow is None or self._first.exception() is not None:
                return
            try:
                self._second = follow()
                self._second.name = self.name
            except Exception as refusal:
                self._refusal = refusal
