"""Looks after a group's operations: whether they end in time, and who keeps them if they do not."""

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
from paramhub.torch._meeting import ranks
from paramhub.torch._work import Work

INTERVAL = 0.25
"""Seconds between two looks, and how long an operation goes on before other ranks are told that this one is in it."""


class _Pending(NamedTuple):
    number: int | None
    """Position among the group's collectives, from 1; none for a message."""
    name: str
    nbytes: int | None
    began: float
    limit: float
    handles: tuple[Handle, ...]

    def is_over(self) -> bool:
        return all(handle.done() for handle in self.handles)

    def __str__(self) -> str:
        return self.name if self.nbytes is None else f"{self.name} of {self.nbytes} bytes"


class Watch:
    """A group's operations that have not ended. Ranks that wait say so in the group's store, so that each can tell which
    do not."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        store: dist.Store,
        failure: Callable[[], BaseException | None],
        give_up: Callable[[str, int | None], None],
    ) -> None:
        """``failure`` tells why the group is broken, if it is; ``give_up(message, culprit)`` breaks it."""
        self.number = 0
        self._name = name
        self._rank = rank
        self._size = size
        self._store = store
        self._failure = failure
        self._give_up = give_up
        self._pending: deque[_Pending] = deque()
        self._numbers = itertools.count(1)
        self._told = 0
        _watches.add(self)
        _start()

    def add_collective(self, name: str, nbytes: int | None, work: Work, limit: float) -> None:
        self.number = next(self._numbers)
        self._pending.append(_Pending(self.number, name, nbytes, time.monotonic(), limit, work.handles))

    def add_message(self, name: str, work: Work, limit: float) -> None:
        self._pending.append(_Pending(None, name, None, time.monotonic(), limit, work.handles))

    def wait(self, timeout: float) -> bool:
        """Waits for what is under way, however it ends; whether all has."""
        deadline = time.monotonic() + timeout
        waiting = list(self._pending)
        for pending in waiting:
            for handle in pending.handles:
                with contextlib.suppress(Exception):
                    handle.wait(max(0.0, deadline - time.monotonic()))
        return all(pending.is_over() for pending in waiting)

    def fail(self, message: str, culprit: int | None) -> None:
        """Fails what is under way."""
        for pending in list(self._pending):
            for handle in pending.handles:
                handle.fail(message, culprit)

    def close(self) -> None:
        _watches.discard(self)

    def look(self) -> None:
        """Called again and again, on the watching thread."""
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
            # What goes over the mesh has heard of it; what goes through the hub may wait for a rank that is gone.
            self._give_up(str(problem), getattr(problem, "culprit", None))
            return
        if any(now - pending.began > INTERVAL for pending in waiting):
            self._tell(waiting)
        overdue = next((pending for pending in waiting if now - pending.began > pending.limit), None)
        if overdue is not None and not overdue.is_over():
            # Others that wait, but not long, tell meanwhile.
            time.sleep(2 * INTERVAL)
            culprits = self.culprits(overdue.number, overdue.handles)
            whom = (
                f"{ranks(culprits)} {'has' if len(culprits) == 1 else 'have'} not called it"
                if culprits
                else ("nobody knows which rank is late")
            )
            self._give_up(
                f"group `{self._name}`, rank {self._rank}: {overdue} has not ended within {overdue.limit:g} s: {whom}",
                culprits[0] if culprits else None,
            )

    def culprits(self, number: int | None, handles: tuple[Handle, ...]) -> list[int]:
        """Who keeps an operation: those it waits for that are not in it themselves, as far as is known."""
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

    def _tell(self, waiting: list[_Pending]) -> None:
        number = max((pending.number or 0 for pending in waiting), default=0)
        if number > self._told:
            self._told = number
            self._store.set(f"waits/{self._rank}", str(number))


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_thread: threading.Thread | None = None


def _start() -> None:
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_run, name="paramhub-watch", daemon=True)
        _thread.start()


def _run() -> None:
    while True:
        time.sleep(INTERVAL)
        for watch in list(_watches):
            # A store that has gone away must not end the watch over the other groups.
            with contextlib.suppress(Exception):
                watch.look()
