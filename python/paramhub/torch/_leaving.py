"""How long a rank that ends waits for the others."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

HASTE = 1.0
"""Seconds that each wait at the end may take where something has failed: some rank may be gone, and the others have been told."""


class Haste:
    """Whether this run ends because something has failed: an exchange, or what an exception on its way out of the caller says."""

    def __init__(self) -> None:
        # A whole program may run where an exception is handled.
        self._handled = _current()
        self._failed_at: float | None = None

    def has_failed(self) -> None:
        """Something has failed, now or before."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def is_needed(self) -> bool:
        """Whether the others may not come any more."""
        current = _current()
        return self._failed_at is not None or (current is not None and current is not self._handled)

    def wait(self, seconds: float) -> None:
        """Waits until so long after the first failure, of which this is one."""
        self.has_failed()
        assert self._failed_at is not None
        time.sleep(max(0.0, self._failed_at + seconds - time.monotonic()))


def _current() -> BaseException | None:
    """The exception that is being handled, as within `finally` where one passes."""
    return sys.exc_info()[1]


def within(seconds: float | None, call: Callable[[], object]) -> bool:
    """Calls, and waits for the end for at most so long; whether it has ended. What it raises is raised here. One that is late
    goes on unwatched."""
    if seconds is None:
        call()
        return True
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="paramhub-leave", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on no thread is started any more when the interpreter ends.
        call()
        return True
    thread.join(seconds)
    if thread.is_alive():
        return False
    if raised:
        raise raised[0]
    return True
