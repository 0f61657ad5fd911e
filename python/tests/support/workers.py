"""Workers of a job as threads of the tests' process. Requests release the GIL, so threads do as well as processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import paramhub

T = TypeVar("T")
TIMEOUT = 30.0
"""Seconds after which a wait that should end counts as hanging."""

_jobs = 0


def new_job(hub: paramhub.Hub, workers: int, **options: float | str) -> paramhub.JobTicket:
    """A job under a name of its own."""
    global _jobs
    _jobs += 1
    return hub.create_job(f"test-{_jobs}", workers, **options)


def in_threads(
    hub: paramhub.Hub,
    workers: int,
    work: Callable[[paramhub.Job], T],
    *,
    transport: str | None = None,
    peers: bool = False,
) -> list[T]:
    """The results of each rank's ``work(job)``, by rank. The jobs are connected and have no tensors yet."""
    ticket = new_job(hub, workers)

    def rank(number: int) -> T:
        with paramhub.connect(*ticket, number, transport=transport, timeout=TIMEOUT, peers=peers) as job:
            return work(job)

    with ThreadPoolExecutor(workers) as pool:
        # The pool starts all ranks before this waits for the first one, because ranks wait for one another.
        started = [pool.submit(rank, number) for number in range(workers)]
        return [future.result(2 * TIMEOUT) for future in started]
