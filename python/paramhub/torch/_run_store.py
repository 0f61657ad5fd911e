"""The store through which the ranks of a run coordinate before jobs and groups connect them, and after these have ended."""

from __future__ import annotations

import atexit
import contextlib
import json
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from paramhub.errors import ConnectError
from paramhub.torch._rendezvous import explained_store_errors, has_agent_store, wait_for_keys
from paramhub.torch._run_secret import RunSecret

EXIT_TIMEOUT = 10.0
"""Seconds for which the rank that runs the hub waits for the other ranks to leave."""
_FAILURE_KEY = "failure"
"""Under this key a rank that cannot join writes its rank and its reason."""


class RunStore:
    """A run's store, from the point of view of one rank."""

    secret: RunSecret
    """Set once rank 0 has chosen it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self.store = store
        self._rank = rank
        self._size = size
        self.timeout = timeout

    def write(self, key: str, text: str) -> None:
        """Writes a text for the other ranks. Raises LostStoreError if the store is lost."""
        with explained_store_errors(self.store, self._rank):
            self.store.set(key, text)

    def read(self, key: str, problem: str) -> str:
        """Waits for a key and returns its text.

        Raises ConnectError with ``problem`` if the key does not arrive in time, or with the reason of a rank that failed to join,
        and LostStoreError if the store is lost.
        """
        with explained_store_errors(self.store, self._rank):
            return self._read(key, problem)

    def _read(self, key: str, problem: str) -> str:
        is_missing = wait_for_keys(self.store, [key], self.timeout, unless=_FAILURE_KEY)
        if is_missing and self.store.check([_FAILURE_KEY]):
            rank, message = json.loads(self.store.get(_FAILURE_KEY))
            self.acknowledge_failure()
            raise ConnectError(f"rank {self._rank}: rank {rank} has failed: {message}")
        if is_missing:
            raise ConnectError(
                f"rank {self._rank}: {problem} within {self.timeout:g} s: did it start, and can its host be reached?"
            )
        return self.store.get(key).decode()

    def agree_on_secret(self, common_sources: list[str], *, is_on_one_host: bool) -> None:
        """Rank 0 chooses the run's secret, and the other ranks find it."""
        if self._rank == 0:
            self.secret, choice = RunSecret.choose(common_sources, is_on_one_host=is_on_one_host)
            self.write("secret", choice)
        else:
            choice = self.read("secret", "rank 0 has not said where the run's secret is")
            self.secret = RunSecret.find(self._rank, choice)
            self.write(f"secret-found/{self._rank}", "")

    def release_secret(self, timeout: float) -> None:
        """Frees the memory in which the others find the secret. Rank 0 may leave before they have found it, so it waits for
        them, at most ``timeout`` seconds; after that the memory lasts as long as the process."""
        if self._rank != 0:
            return
        others = [f"secret-found/{rank}" for rank in range(1, self._size)]
        with contextlib.suppress(Exception):
            if not others or not wait_for_keys(self.store, others, timeout):
                self.secret.close()

    def write_secret(self, key: str, text: str) -> None:
        """Writes what only the ranks of this run may read."""
        self.write(key, self.secret.seal(key, text))

    def read_secret(self, key: str, problem: str) -> str:
        """Reads what `write_secret` has written, as `read` does."""
        return self.secret.open(key, self.read(key, problem))

    def allgather_text(self, label: str, text: str, ranks: Sequence[int] | None = None) -> list[str]:
        """Returns every rank's text, by rank. Each of ``ranks`` (by default every rank) calls it once with the same label."""
        members = list(range(self._size)) if ranks is None else list(ranks)
        self.write(f"{label}/{self._rank}", text)
        return [self.read(f"{label}/{rank}", f"rank {rank} has not arrived at {label}") for rank in members]

    def report_join_failure(self, error: Exception) -> None:
        """Writes for the other ranks why this rank cannot join the run."""
        self.report_failure(_FAILURE_KEY, json.dumps([self._rank, str(error)]))

    def report_failure(self, key: str, message: str) -> None:
        """Writes under ``key`` why this rank cannot go on, so that the other ranks stop waiting at once.

        If the store ends with this process, which is rank 0's, the process waits at its exit until the others have acknowledged
        the failure: a rank that arrives later would dial the store for as long as ranks wait for one another.
        """
        with contextlib.suppress(Exception):
            if not self.store.check([key]):
                self.store.set(key, message)
        if self._rank == 0 and not has_agent_store():
            others = [f"failure-read/{rank}" for rank in range(1, self._size)]
            atexit.register(_call_suppressed, wait_for_keys, self.store, others, EXIT_TIMEOUT)

    def acknowledge_failure(self) -> None:
        """Writes for rank 0 that this rank has read the failure."""
        self.write(f"failure-read/{self._rank}", "")

    def announce_exit(self) -> None:
        """Writes for rank 0 that this rank has left all jobs. It waits for no answer: rank 0, which has the store, may
        hang."""
        with contextlib.suppress(Exception):
            self.write(f"left/{self._rank}", "")

    def wait_for_exits(self, timeout: float) -> None:
        """Waits at most ``timeout`` seconds until every other rank has announced its exit. Rank 0 calls it."""
        deadline = time.monotonic() + timeout
        others = [f"left/{rank}" for rank in range(1, self._size)]
        with contextlib.suppress(Exception):
            while others and not self.store.check(others) and time.monotonic() < deadline:
                time.sleep(0.01)


def _call_suppressed(function: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(Exception):
        function(*arguments)
