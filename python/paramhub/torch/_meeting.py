"""What ranks tell one another through a store before there is anything faster between them."""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

from paramhub.errors import ConnectError

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


def exchange_text(store: dist.Store, label: str, own: Any, rank: int, size: int, timeout: float) -> list[Any]:
    """What every rank tells, by rank. Each calls it once with a label; what it tells must fit JSON."""
    store.set(f"{label}/{rank}", json.dumps(own))
    keys = [f"{label}/{each}" for each in range(size)]
    missing = [keys.index(key) for key in await_keys(store, keys, timeout)]
    if missing:
        raise ConnectError(
            f"rank {rank}: {ranks(missing)} of {size} did not arrive within {timeout:g} s: did they start, and do all ranks "
            "make the same groups?"
        )
    return [json.loads(store.get(key)) for key in keys]


def ranks(numbers: list[int]) -> str:
    """Ranks as people read them."""
    text = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"
