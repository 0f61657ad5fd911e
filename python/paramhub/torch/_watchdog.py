"""The watchdog of a group's operations: it finds operations that do not end in time, and the ranks that delay them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from paramhub._native import Handle
from paramhub.torch._rendezvous import format_ranks
from paramhub.torch._work import Work

INTERVAL = 0.25
"""Seconds between two checks. An operation that takes longer is reported to the other ranks."""


class _Pending(NamedTuple):
    number: int | None
    """Position among the group's collectives, from 1; none for a message."""
    name: str
    nbytes: int | None
    began: float
    limit: float
    work: Work

    @property
    def handles(self) -> tuple[Handle, ...]:
        return self.work.handles

    def is_over(self) -> bool:
        return all(handle.done() for handle in self.handles)

    def __str__(self) -> str:
        return self.name if self.nbytes is None else f"{self.name} of {self.nbytes} bytes"


class Watchdog:
    """A group's operations that have not ended. A rank that waits for long writes the number of its operation into the group's
    store, so that the ranks can find those that have not called it."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        store: dist.Store,
        failure: Callable[[], BaseException | None],
        give_up: Callable[[str, int | None], None],
    ) -> None:
        """``failure()`` returns why the group has failed, or None; ``give_up(message, culprit)`` fails it."""
        self.number = 0
        self._name = name
        self._rank = rank
        self._size = size
        self._store = store
        self._failure = failure
        self._give_up = give_up
        self._pending: deque[_Pending] = deque()
        self._numbers = itertools.count(1)
        self._reported_number = 0
        _watchdogs.add(self)
        _start_thread()

    def add_collective(self, name: str, nbytes: int | None, work: Work, limit: float) -> None:
        self.number = next(self._numbers)
        self._pending.append(_Pending(self.number, name, nbytes, time.monotonic(), limit, work))

    def add_message(self, name: str, work: Work, limit: float) -> None:
        self._pending.append(_Pending(None, name, None, time.monotonic(), limit, work))

    def wait(self, timeout: float) -> bool:
        """Waits until the operations under way have ended, well or not. Returns whether all have ended."""
        deadline = time.monotonic() + timeout
        waiting = list(self._pending)
        for pending in waiting:
            # An operation in two parts has handles of the second when those of the first have ended.
            while not pending.is_over() and time.monotonic() < deadline:
                for handle in pending.handles:
                    with contextlib.suppress(Exception):
                        handle.wait(max(0.0, deadline - time.monotonic()))
        return all(pending.is_over() for pending in waiting)

    def fail(self, message: str, culprit: int | None) -> None:
        """Fails the operations under way."""
        for pending in list(self._pending):
            for handle in pending.handles:
                handle.fail(message, culprit)

    def close(self) -> None:
        _watchdogs.discard(self)

    def check(self) -> None:
        """Drops operations that have ended, and fails the group if one is overdue. The watchdog thread calls it periodically."""
        for _ in range(len(self._pending)):
            pending = self._pending.popleft()
            if not pending.is_over():
                self._pending.append(pending)
        if not self._pending:
            return
        waiting = list(self._pending)
        now = time.monotonic()
        problem = self._failure()
        if problem is not None:
            # The mesh has failed its own operations. Operations through the hub may still wait for a rank that has ended.
            self._give_up(str(problem), getattr(problem, "culprit", None))
            return
        if any(now - pending.began > INTERVAL for pending in waiting):
            self._report_waiting(waiting)
        overdue = next((pending for pending in waiting if now - pending.began > pending.limit), None)
        if overdue is not None and not overdue.is_over():
            # Meanwhile, ranks that began to wait a short time ago report it.
            time.sleep(2 * INTERVAL)
            culprits = self.culprits(overdue.number, overdue.handles)
            missing = (
                f"{format_ranks(culprits)} {'has' if len(culprits) == 1 else 'have'} not called it"
                if culprits
                else "it is unknown which rank is late"
            )
            self._give_up(
                f"group `{self._name}`, rank {self._rank}: {overdue} has not ended within {overdue.limit:g} s: {missing}",
                culprits[0] if culprits else None,
            )

    def culprits(self, number: int | None, handles: tuple[Handle, ...]) -> list[int]:
        """The ranks that delay an operation, as far as this rank knows: it waits for them, and they have not called it."""
        awaited = sorted({rank for handle in handles for rank in handle.awaited_ranks()})
        late = self._late(number) if number is not None else awaited
        return [rank for rank in awaited if rank in late] or late or awaited

    def _late(self, number: int) -> list[int]:
        late = []
        for rank in range(self._size):
            key = f"waits/{rank}"
            if rank != self._rank and (not self._store.check([key]) or int(self._store.get(key)) < number):
                late.append(rank)
        return late

    def _report_waiting(self, waiting: list[_Pending]) -> None:
        number = max((pending.number or 0 for pending in waiting), default=0)
        if number > self._reported_number:
            self._reported_number = number
            self._store.set(f"waits/{self._rank}", str(number))


_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()
_thread: threading.Thread | None = None


def replace_thread() -> None:
    """Has another thread do the checks. The present one may wait without end in the store of a process that has stopped, which
    no watchdog that is not closed should ask again."""
    global _thread
    if _thread is not None:
        _thread = None
        _start_thread()


def _start_thread() -> None:
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_run, name="paramhub-watch", daemon=True)
        _thread.start()


def _run() -> None:
    while threading.current_thread() is _thread:
        time.sleep(INTERVAL)
        for watchdog in list(_watchdogs):
            # This group's store may have ended. The watchdog thread must still check the other groups.
            with contextlib.suppress(Exception):
                watchdog.check()
