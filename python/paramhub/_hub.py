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
    reduction: str = "auto",
    optimize_at: str = "every_site",
    on_interface_down: str = "fail",
    stragglers: str = "wait",
    progress_timeout: float | None = None,
    checkpoint_every: str | None = None,
    resume: str | None = None,
) -> JobTicket:
    """Creates a job of ``workers`` ranks at the connection manager at ``url``.

    ``name`` must be that of no living job. ``admin_token`` is asked for by a manager that listens beyond loopback. All times
    are in seconds: ``rendezvous_timeout`` is how long ranks wait for one another, ``lease`` how long a job without any sign of
    its workers is kept, ``dead_after`` how long a worker may be silent before the job fails, ``patience`` how long a manager that
    is just starting is dialled. Ranks wait for ``hubs`` hubs, too, all of which serve the job; by default the first is enough,
    and a job of collectives alone, as of `paramhub.kvstore`, may have 0.

    Where hubs serve racks or hosts, ``reduction`` says how their sums become those of all workers: ``auto``, ``flat``, ``tree``,
    ``ring`` or ``sharded``; and ``optimize_at`` where the optimizer runs: at ``every_site`` on the same gradient, or at each
    chunk's ``owner``.

    ``on_interface_down`` says what becomes of the job when a network interface goes down: ``fail``, or ``continue`` over those
    that are left; the latter asks for synchronous consistency, no ``clip_norm`` and a ``dead_after`` of 15 or more.

    ``stragglers`` says what becomes of a worker that comes late to a step: ``wait`` for it; ``drop:FRACTION``, end the step
    without it when so much longer has gone by as this fraction of the time that the median worker took; or ``backup:N``, end
    it without the last N. A late contribution is dropped, and its sender goes on with the newest parameters. The latter two ask
    for synchronous consistency, an optimizer at the hub, no ``reproducible`` and no ``clip_norm``.

    A rank that keeps the others waiting for longer than the job's recent steps explain is named in every rank's log. With
    ``progress_timeout`` the job ends, with that rank's name, when they have waited so long.
    ``checkpoint_every`` is how often the hubs, which must be started with a folder for them, write a checkpoint: ``"1000"``
    steps, or ``"30s"``. ``resume`` has the job begin with the one that a job of the same name has left, ``"latest"`` or that of a
    step.
    """
    options = {
        "rendezvous_timeout_s": rendezvous_timeout,
        "lease_s": lease,
        "dead_after_s": dead_after,
        "reduction": reduction,
        "optimize_at": optimize_at,
        "on_interface_down": on_interface_down,
        "stragglers": stragglers,
        "hubs": hubs,
    }
    # Left out where nothing is asked for, so that older managers understand it.
    wishes = {
        "checkpoint_every": checkpoint_every,
        "resume": resume,
        "progress_timeout_s": progress_timeout,
    }
    options |= {option: wish for option, wish in wishes.items() if wish is not None}
    namespace, secret = _native.create_job(
        url, name, workers, admin_token=admin_token, options=json.dumps(options), patience=patience
    )
    return JobTicket(url, namespace, secret)


class Hub:
    """A hub inside this process, with its connection manager, on threads of its own. It ends with the process.

    By default it listens on free ports of the loopback interface and has one core. ``listen`` are the data addresses
    (``IP:PORT``, port 0 for any), ``manager`` that of its connection manager; one that others can reach needs an
    ``admin_token``. ``memory`` bounds the bytes of all jobs' buffers. Without ``shared_memory`` workers of this host use TCP too.

    With ``join`` it joins the connection manager at that URL instead, under its ``admin_token``. It then may serve the workers
    of one ``rack``, or of one ``host``, alone: those that connect under the same name. Their sums go on to the other hubs.
    """

    def __init__(
        self,
        *,
        listen: Sequence[str] | None = None,
        manager: str | None = None,
        join: str | None = None,
        rack: str | None = None,
        host: str | None = None,
        cores: int = 1,
        admin_token: str | None = None,
        memory: int | None = None,
        shared_memory: bool = True,
    ) -> None:
        self._admin_token = admin_token
        self._native = _native.Hub(
            listen=list(listen) if listen is not None else None,
            manager=manager,
            join=join,
            rack=rack,
            host=host,
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

    def memory_bytes(self) -> int:
        """Bytes of the buffers of all jobs here; 0 while there is no job."""
        return self._native.memory_bytes()

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
