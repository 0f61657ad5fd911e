"""What ranks tell one another through a store before there is anything faster between them."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paramhub.errors import ConnectError, MisuseError
from paramhub.torch._launched import Launched

_PAUSE_FIRST = 0.001
_PAUSE_MAX = 0.05


def await_keys(store: dist.Store, keys: list[str], timeout: float, unless: str | None = None) -> list[str]:
    """Waits until all keys are there, or the key ``unless`` is, at most ``timeout`` seconds; returns those that are not there.

    It asks again and again: a store's own ``wait`` answers no Ctrl-C, and while one thread is in it, others of this process
    cannot use the store.
    """
    deadline = time.monotonic() + timeout
    pause = _PAUSE_FIRST
    while not store.check(keys):
        if time.monotonic() >= deadline or (unless is not None and store.check([unless])):
            return [key for key in keys if not store.check([key])]
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_MAX)
    return []


def meeting_place(place: Launched, timeout: float) -> dist.Store:
    """The store in which all ranks meet: torch.distributed's own, or one at the launcher's address."""
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    if store is not None:
        return store
    if place.size == 1:
        return dist.HashStore()
    if place.master is None:
        raise MisuseError(
            f"rank {place.rank} of {place.size} (by {place.launcher}) does not know where to meet the others: start with "
            "torchrun, srun or `paramhub run`, or set MASTER_ADDR and MASTER_PORT to an address and a free port of rank 0's "
            "host (`mpirun -x MASTER_ADDR=... -x MASTER_PORT=...`), or call init_process_group first"
        )
    host, port = place.master
    try:
        return dist.TCPStore(
            host,
            port,
            place.size,
            is_master=place.rank == 0 and not has_agent_store(),
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except Exception as error:
        raise ConnectError(
            f"rank {place.rank}: no meeting with the others at {host}:{port}: {str(error).splitlines()[0]}"
        ) from None


def has_agent_store() -> bool:
    """Whether torchrun has the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def exchange_text(
    store: dist.Store,
    label: str,
    own: Any,
    rank: int,
    size: int,
    timeout: float,
    advice: str = "do all ranks make the same groups?",
) -> list[Any]:
    """What every rank tells, by rank. Each calls it once with a label; what it tells must fit JSON."""
    store.set(f"{label}/{rank}", json.dumps(own))
    keys = [f"{label}/{each}" for each in range(size)]
    missing = [keys.index(key) for key in await_keys(store, keys, timeout)]
    if missing:
        raise ConnectError(
            f"rank {rank}: {ranks(missing)} of {size} did not arrive within {timeout:g} s: did they start, and {advice}"
        )
    return [json.loads(store.get(key)) for key in keys]


def ranks(numbers: list[int]) -> str:
    """Ranks as people read them."""
    text = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def address_of(store: dist.Store) -> tuple[str, int] | None:
    """Where rank 0 can be met, if it has the store."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None
