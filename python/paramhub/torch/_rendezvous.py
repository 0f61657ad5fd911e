"""The rendezvous of ranks: the store in which they meet, and exchanges through it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
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


def allgather_json(
    store: dist.Store,
    label: str,
    own: Any,
    rank: int,
    size: int,
    timeout: float,
    advice: str = "do all ranks make the same groups?",
    lost: Callable[[], tuple[int, BaseException] | None] = lambda: None,
) -> list[Any]:
    """Returns every rank's ``own``, by rank. Each rank calls it once with the same label. ``own`` must fit JSON. ``lost``
    returns a rank that may not come any more and the failure that names it; it is awaited for `LOST_GRACE` seconds."""
    store.set(f"{label}/{rank}", json.dumps(own))
    keys = [f"{label}/{each}" for each in range(size)]
    lost_since: float | None = None

    def gives_up() -> bool:
        nonlocal lost_since
        named = lost()
        if named is None or store.check([keys[named[0]]]):
            return False
        now = time.monotonic()
        lost_since = now if lost_since is None else lost_since
        return now >= lost_since + LOST_GRACE

    missing = [keys.index(key) for key in wait_for_keys(store, keys, timeout, gives_up=gives_up)]
    if missing:
        named = lost()
        if named is not None and named[0] in missing:
            raise ConnectError(
                f"rank {rank}: rank {named[0]} of {size} does not arrive: {named[1]}"
            ) from named[1]
        raise ConnectError(
            f"rank {rank}: {format_ranks(missing)} of {size} did not arrive within {timeout:g} s: did they start, and {advice}"
        )
    return [json.loads(store.get(key)) for key in keys]


def format_ranks(numbers: list[int]) -> str:
    """Ranks as text for people."""
    text = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def store_address(store: dist.Store) -> tuple[str, int] | None:
    """The store's host and port, if it is a TCPStore."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None
