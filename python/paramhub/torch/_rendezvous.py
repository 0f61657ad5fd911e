"""The rendezvous of ranks: the store in which they meet, and exchanges through it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paramhub.errors import ConnectError, MisuseError
from paramhub.torch._rank_assignment import RankAssignment

_PAUSE_FIRST = 0.001
_PAUSE_MAX = 0.05

LOST_GRACE = 5.0
"""Seconds for which ranks wait for one that another group has named as the reason of its failure. Its process may live and
recover from the failure as the others do."""


class LostStoreError(ConnectError):
    """The store in which the ranks meet does not answer any more. ``reason`` is what torch says of it."""

    reason = ""


@contextlib.contextmanager
def explained_store_errors(store: dist.Store, rank: int) -> Iterator[None]:
    """Raises LostStoreError where torch says that the store has failed, which it does in the words of a socket. The process
    that runs the store may end at any moment, and a program that goes on without it awaits this package's errors."""
    try:
        yield
    except dist.DistError as error:
        address = store_address(store)
        where = "" if address is None else f", at {address[0]}:{address[1]},"
        reason = str(error).splitlines()[0]
        lost = LostStoreError(
            f"rank {rank}: the store in which the ranks meet{where} does not answer any more ({reason}): has the process that "
            "runs it ended? It is rank 0's, or the launcher's"
        )
        lost.reason = reason
        raise lost from None


def wait_for_keys(
    store: dist.Store,
    keys: list[str],
    timeout: float,
    unless: str | None = None,
    gives_up: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Waits until the store has all keys, or the key ``unless``, or ``gives_up`` says so, at most ``timeout`` seconds. Returns
    the missing keys.

    It polls the store, because Ctrl-C does not interrupt a store's own ``wait``, and because other threads of this process
    cannot use the store while one waits in it.
    """
    deadline = time.monotonic() + timeout
    pause = _PAUSE_FIRST
    while not store.check(keys):
        if time.monotonic() >= deadline or (unless is not None and store.check([unless])) or gives_up():
            return [key for key in keys if not store.check([key])]
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_MAX)
    return []


def rendezvous_store(assignment: RankAssignment, timeout: float) -> dist.Store:
    """The store in which all ranks meet: torch.distributed's own, or one at the launcher's address."""
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    if store is not None:
        return store
    if assignment.size == 1:
        return dist.HashStore()
    if assignment.master is None:
        raise MisuseError(
            f"rank {assignment.rank} of {assignment.size} (by {assignment.launcher}) does not know where to meet the others: "
            "start with torchrun, srun or `paramhub run`, or set MASTER_ADDR and MASTER_PORT to an address and a free port of "
            "rank 0's host (`mpirun -x MASTER_ADDR=... -x MASTER_PORT=...`), or call init_process_group first"
        )
    host, port = assignment.master
    try:
        return dist.TCPStore(
            host,
            port,
            assignment.size,
            is_master=assignment.rank == 0 and not has_agent_store(),
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except Exception as error:
        raise ConnectError(
            f"rank {assignment.rank}: no meeting with the others at {host}:{port}: {str(error).splitlines()[0]}"
        ) from None


def has_agent_store() -> bool:
    """Returns whether torchrun's agent runs the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class LostRank:
    """A rank of ``size`` that may not come any more, and for how long this rank awaits it."""

    def __init__(self, rank: int, size: int, lost: Callable[[], tuple[int, BaseException] | None]) -> None:
        """``lost()`` returns such a rank and the failure that names it, or None."""
        self._rank = rank
        self._size = size
        self._lost = lost
        self._since: float | None = None

    def is_overdue(self, is_missing: Callable[[int], bool]) -> bool:
        """Returns whether a lost rank has been missing for `LOST_GRACE` seconds. It is asked again and again."""
        named = self._lost()
        if named is None or not is_missing(named[0]):
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return now >= self._since + LOST_GRACE

    def check(self, missing: Collection[int]) -> None:
        """Raises ConnectError if `is_overdue`."""
        if self.is_overdue(missing.__contains__):
            self.report(missing)

    def report(self, missing: Collection[int]) -> None:
        """Raises ConnectError if one of the ranks that are missing is lost."""
        named = self._lost()
        if named is not None and named[0] in missing:
            raise ConnectError(
                f"rank {self._rank}: rank {named[0]} of {self._size} does not arrive: {named[1]}"
            ) from named[1]


def allgather_json(
    store: dist.Store,
    label: str,
    own: Any,
    rank: int,
    size: int,
    timeout: float,
    advice: str = "do all ranks make the same groups?",
    lost: LostRank | None = None,
) -> list[Any]:
    """Returns every rank's ``own``, by rank. Each rank calls it once with the same label. ``own`` must fit JSON. ``lost`` is
    not awaited for the whole ``timeout``.

    Raises ConnectError if a rank does not come, and LostStoreError if the store is lost."""
    keys = [f"{label}/{each}" for each in range(size)]

    def gives_up() -> bool:
        return lost is not None and lost.is_overdue(lambda other: not store.check([keys[other]]))

    with explained_store_errors(store, rank):
        store.set(keys[rank], json.dumps(own))
        missing = [keys.index(key) for key in wait_for_keys(store, keys, timeout, gives_up=gives_up)]
        if not missing:
            return [json.loads(store.get(key)) for key in keys]
    if lost is not None:
        lost.report(missing)
    raise ConnectError(
        f"rank {rank}: {format_ranks(missing)} of {size} did not arrive within {timeout:g} s: did they start, and {advice}"
    )


def format_ranks(numbers: list[int]) -> str:
    """Ranks as text for people."""
    text = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def store_address(store: dist.Store) -> tuple[str, int] | None:
    """The store's host and port, if it is a TCPStore."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None
