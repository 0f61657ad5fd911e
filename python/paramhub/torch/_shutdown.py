"""Whether a run ends because of a failure, and how long a rank that ends then waits for the others."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from paramhub.errors import JobFailedError

EXIT_TIMEOUT_AFTER_FAILURE = 1.0
"""Seconds that each wait at the end may take after a failure. Some rank may have ended, and the others notice the failure."""

CAUSE_CHARS_MAX = 400
"""Characters of the exception that a rank which gives up tells the others. A mesh's message has at most 1,024 bytes."""


class FailureState:
    """Returns whether this run has failed: an exchange has failed, or an exception is ending the caller."""

    def __init__(self) -> None:
        # A whole program may run within an exception handler. Its exception is no failure of the run.
        self._handled = _current()
        self._failed_at: float | None = None
        self._raised: set[str] = set()

    def record(self) -> None:
        """Records a failure. The time of the first one stays."""
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def note_raised(self, error: JobFailedError) -> None:
        """Notes that the program gets a job's error as an exception."""
        self._raised.add(str(error))

    def was_raised(self, error: JobFailedError) -> bool:
        """Returns whether the program has got this error before, so that it need not be printed."""
        return str(error) in self._raised

    def is_failing(self) -> bool:
        """Returns whether the run has failed, so that some rank may not arrive any more."""
        current = _current()
        return self._failed_at is not None or (current is not None and current is not self._handled)

    def cause(self) -> str | None:
        """The exception that ends this rank, in one line, or None."""
        current = _current()
        if current is self._handled:
            # The interpreter stores the exception with which a program has ended.
            current = getattr(sys, "last_value", None)
        if current is None:
            return None
        text = " ".join(f"{type(current).__name__}: {current}".split())
        return text if len(text) <= CAUSE_CHARS_MAX else f"{text[: CAUSE_CHARS_MAX - 3]}..."

    def wait_since_first(self, seconds: float) -> None:
        """Records a failure, and waits until ``seconds`` after the first one."""
        self.record()
        assert self._failed_at is not None
        time.sleep(max(0.0, self._failed_at + seconds - time.monotonic()))


def _current() -> BaseException | None:
    """The exception that is being handled, for instance in a `finally` block."""
    return sys.exc_info()[1]


def run_with_timeout(seconds: float | None, call: Callable[[], object]) -> bool:
    """Calls ``call`` and waits for its end, at most ``seconds`` seconds. Returns whether it has ended, and raises its exception.
    A late call goes on in its thread."""
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
        # From Python 3.12 on no thread can be started when the interpreter ends.
        call()
        return True
    thread.join(seconds)
    if thread.is_alive():
        return False
    if raised:
        raise raised[0]
    return True
