"""Hubs inside this process, and the jobs of any hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from paramhub import _native


class JobTicket(NamedTuple):
    """What the workers of a job need to join it; see `paramhub.connect`."""

    url: str
    job: str
    secret: str


def create_job(
    url: str,
    name: str,
    workers: int,
    *,
    admin_token: str | None = None,
    rendezvous_timeout: float = 60.0,
    lease: float = 120.0,
    dead_after: float = 30.0,
    hubs: int | None = None,
    patience: float = 0.0,
) -> JobTicket:
    """Creates a job of ``workers`` ranks at the connection manager at ``url``.

    ``name`` must be that of no living job. ``admin_token`` is asked for by a manager that listens beyond loopback. All times
    are in seconds: ``rendezvous_timeout`` is how long ranks wait for one another, ``lease`` how long a job without any sign of
    its workers is kept, ``dead_after`` how long a worker may be silent before the job fails, ``patience`` how long a manager that
    is just starting is dialled. Ranks wait for ``hubs`` hubs, too, all of which serve the job; by default the first is enough.
    """
    options = {
        "rendezvous_timeout_s": rendezvous_timeout,
        "lease_s": lease,
        "dead_after_s": dead_after,
        "hubs": hubs,
    }
    namespace, secret = _native.create_job(
        url, name, workers, admin_token=admin_token, options=json.dumps(options), patience=patience
    )
    return JobTicket(url, namespace, secret)


class Hub:
    """A hub with its connection manager inside this process, on threads of its own. It ends with the process.

    By default it listens on free ports of the loopback interface and has one core. ``listen`` are the data addresses
    (``IP:PORT``, port 0 for any), ``manager`` that of its connection manager; one that others can reach needs an
    ``admin_token``. ``memory`` bounds the bytes of all jobs' buffers. Without ``shared_memory`` workers of this host use TCP too.
    """

    def __init__(
        self,
        *,
        listen: Sequence[str] | None = None,
        manager: str | None = None,
        cores: int = 1,
        admin_token: str | None = None,
        memory: int | None = None,
        shared_memory: bool = True,
    ) -> None:
        self._admin_token = admin_token
        self._native = _native.Hub(
            listen=list(listen) if listen is not None else None,
            manager=manager,
            cores=cores,
            admin_token=admin_token,
            memory=memory,
            shared_memory=shared_memory,
        )

    @property
    def url(self) -> str:
        """The connection manager's URL."""
        return self._native.url

    @property
    def addresses(self) -> list[str]:
        """The data addresses."""
        return self._native.addresses

    def create_job(self, name: str, workers: int, **options: Any) -> JobTicket:
        """`paramhub.create_job` at this hub."""
        return create_job(self.url, name, workers, admin_token=self._admin_token, **options)

    def failure(self) -> str | None:
        """Why the hub cannot go on, if it cannot."""
        return self._native.failure()

    def stop(self) -> None:
        """Ends it within a second; its jobs fail. Again it does nothing."""
        self._native.stop()

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
