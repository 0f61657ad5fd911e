"""One clock for all ranks: the offset of each host's monotonic clock from rank 0's."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from paramhub.errors import ConnectError
from paramhub.torch._rendezvous import wait_for_keys

PINGS = 9
"""The number of round trips that measure a clock's offset."""


def clock_identity() -> str:
    """The identity of the monotonic clock: processes with the same identity read the same time. A boot has one
    clock, and a time namespace shifts it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return boot  # A kernel without time namespaces, or a /proc without them.


def offset_to_rank_0(
    store: dist.Store,
    rank: int,
    size: int,
    now_ns: Callable[[], int],
    timeout: float,
    identity: str | None = None,
) -> int:
    """Nanoseconds to add to this rank's clock to get rank 0's. All ranks call it together.

    For ranks that share rank 0's clock the offset is 0. The others ask rank 0 for its time through the store,
    and take it for the time in the middle of the round trip. The shortest of several round trips counts: the
    error is at most half of it.

    Raises ConnectError if a rank does not arrive within ``timeout`` seconds.
    """
    identity = identity or clock_identity()
    if rank == 0:
        store.set("clock/0", identity)
        for other in range(1, size):
            if _read(store, f"clock/{other}", other, timeout) != identity:
                for ping in range(PINGS):
                    _read(store, f"clock/{other}/ping/{ping}", other, timeout, at_once=True)
                    store.set(f"clock/{other}/pong/{ping}", str(now_ns()))
        return 0
    store.set(f"clock/{rank}", identity)
    if _read(store, "clock/0", 0, timeout) == identity:
        return 0
    trips: list[tuple[int, int]] = []
    for ping in range(PINGS):
        begin = now_ns()
        store.set(f"clock/{rank}/ping/{ping}", "")
        rank_0_ns = int(_read(store, f"clock/{rank}/pong/{ping}", 0, timeout, at_once=True))
        end = now_ns()
        # The first ping waits until rank 0 has answered all lower ranks. Its trip is then too long to count.
        trips.append((end - begin, rank_0_ns - (begin + end) // 2))
    return min(trips)[1]


def _read(store: dist.Store, key: str, rank: int, timeout: float, *, at_once: bool = False) -> str:
    """Reads a key that another rank sets. ``at_once`` is for measurements: it loses no time, but Ctrl-C does not
    interrupt it."""
    try:
        if at_once:
            store.wait([key], timedelta(seconds=timeout))
        elif wait_for_keys(store, [key], timeout):
            raise TimeoutError
        return store.get(key).decode()
    except Exception as error:
        raise ConnectError(
            f"rank {rank} has not compared its clock for the trace within {timeout:g} s: "
            f"did it start? ({type(error).__name__})"
        ) from None
