"""Hubs inside this process, and the creation of jobs at any connection manager."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from paramhub import _native
from paramhub.errors import MisuseError


class JobTicket(NamedTuple):
    """The credentials that the workers of a job need to join it; see `paramhub.connect`."""

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
    max_hubs: int | None = None,
    hub_label: str | None = None,
    weight: int | None = None,
    patience: float = 0.0,
    reduction: str = "auto",
    optimize_at: str = "every_site",
    between_sites: str | None = None,
    on_interface_down: str = "fail",
    redial_grace: float | None = None,
    on_worker_loss: str = "fail",
    min_workers: int | None = None,
    max_workers: int | None = None,
    rewind_every: int | None = None,
    replicas: int | None = None,
    linger: float | None = None,
    program_state_bytes: int | None = None,
    stragglers: str = "wait",
    progress_timeout: float | None = None,
    checkpoint_every: str | None = None,
    resume: str | None = None,
    encrypt: bool | None = None,
    find: bool = False,
) -> JobTicket:
    """Creates a job of ``workers`` ranks at the connection manager at ``url``, or at the one that leads of several, whose URLs
    are separated by commas.

    No living job may have the same ``name``. A manager that listens beyond loopback requires ``admin_token``.

    All times are in seconds. ``rendezvous_timeout`` is how long ranks wait for one another. ``lease`` is how long the manager
    keeps a job without any sign of its workers. ``dead_after`` is how long a worker may be silent before the job fails.
    ``patience`` is how long this call dials a manager that is still starting. ``weight``, 1 to 100, is the job's share of a hub
    core's time against that of other jobs; theirs is 1 unless they say so, too.

    Ranks also wait for ``hubs`` hubs. By default the first hub is enough. All hubs that have joined serve the job, with
    ``hub_label`` those that have this label (``paramhub hub --label``), or of those that serve all workers the ``max_hubs`` with
    the fewest jobs: whatever happens to another hub leaves the job alone. A job of collectives alone, for instance of
    `paramhub.kvstore`, may have 0.

    Where hubs serve racks or hosts, ``reduction`` is how sites combine their sums: ``auto``, ``flat``, ``tree``, ``ring``,
    ``sharded`` or ``line``. ``optimize_at`` is where the optimizer runs: at ``every_site`` on the same gradient, or at each
    chunk's ``owner``. ``between_sites`` is the encoding in which sums cross between racks and hosts: ``f32``; ``bf16``, which
    takes half the bytes; or with error feedback, which needs finite gradients, ``int8`` or, for matrices, ``one-bit`` or
    ``two-bit``.

    ``on_interface_down`` is what the job does when a network interface goes down: ``fail``, or ``continue`` over the other
    interfaces. ``continue`` needs synchronous consistency, one site and a ``dead_after`` of 15 or more.

    ``redial_grace`` is how long a hub waits for a worker whose connection was cut, 0.5 by default and at most 60; the worker
    dials again meanwhile, and the step goes on as if nothing had happened. A worker whose process has ended is lost at once.
    Asynchronous jobs and those that leave out late workers do not wait.

    ``on_worker_loss`` is what the job does when a worker is lost: ``fail``, or ``continue`` with the workers that are left,
    until another process takes the rank: it joins the job with the same ticket, and begins with the parameters at the hubs
    and the step in ``resumed_step``. Steps need ``min_workers``, 1 by default; with fewer the job waits for ``linger``, 300 by
    default, and then fails. ``continue`` needs synchronous consistency, an optimizer at the hub, no ``reproducible`` and no
    ``clip_norm``.

    With ``continue`` and ``max_workers`` the job has that many ranks, and begins with the first ``workers`` of them; processes
    with the same ticket may join in the other ranks while it runs. With ``rewind`` and ``max_workers`` each start of all ranks
    may have as many as that: see `connect`.

    With ``rewind`` all ranks go back to an earlier step instead, and go on from there when each rank has a process again, so
    that no update lacks a contribution. The requests of the other ranks fail with `Rewound`; they join anew. The hubs keep
    a copy of parameters and optimizer state from before every ``rewind_every``-th step, 1 by default. ``rewind`` needs
    synchronous consistency and an optimizer at the hub, and every rank must exchange all keys in every step.

    With ``replicas=1`` another hub stands by for each chunk: it has all that workers were answered, and takes over inside the
    step when the hub is lost. The job waits for two hubs. It needs synchronous consistency, one site and no ``clip_norm``. With
    ``on_worker_loss`` ``rewind`` it also needs ``checkpoint_every``: its ranks go back to the newest checkpoint when one is lost.

    ``program_state_bytes`` is the largest number of bytes that a rank can save with `Job.save_program_state`, at most 64 MiB. By
    default none can be saved.

    ``stragglers`` is what the hub does when a worker's contribution to a step is late. ``wait`` waits for it. ``drop:FRACTION``
    ends the step without it once, after the median contribution, FRACTION of the median worker's time has passed.
    ``backup:N`` ends the step without the last N contributions. The hub drops a late contribution, and its worker continues
    with the newest parameters. ``drop`` and ``backup`` need synchronous consistency, an optimizer at the hub, no
    ``reproducible`` and no ``clip_norm``.

    If ranks wait for a rank for longer than the job's recent steps explain, every rank's log names that rank. With
    ``progress_timeout`` the job ends once ranks have waited for that long; the error names the rank.
    ``checkpoint_every`` is how often the hubs write a checkpoint: ``"1000"`` steps, or ``"30s"``. The hubs must be started with
    a folder for checkpoints. With ``resume`` the job starts from a checkpoint of an earlier job of the same name: ``"latest"``,
    the number of its step, or ``"auto"``, the newest of the last run of this name if that has not finished; if there is none
    of that kind, the job begins anew.

    With ``find`` the ticket is that of the living job of this name, if there is one and it takes workers: its ranks still
    connect, or it goes on when a worker is lost. So a program that is started again finds its job.

    With ``encrypt`` the streams between hosts are encrypted: those of workers to hubs, and of hubs to one another. By default
    they are if ``PARAMHUB_JOB_ENCRYPT`` is true, or if a hub of the job demands it.
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
    # Options with the value None are not sent, because older managers do not know them.
    wishes = {
        "between_sites": between_sites,
        "max_hubs": max_hubs,
        "hub_label": hub_label,
        "weight": weight,
        "redial_grace_s": redial_grace,
        "on_worker_loss": None if on_worker_loss == "fail" else on_worker_loss,
        "min_workers": min_workers,
        "rewind_every": rewind_every,
        "replicas": replicas,
        "linger_s": linger,
        "program_state_bytes": program_state_bytes,
        "checkpoint_every": checkpoint_every,
        "resume": resume,
        "progress_timeout_s": progress_timeout,
        "encrypt": (_encrypts_by_default() if encrypt is None else encrypt) or None,
    }
    if max_workers is not None and max_workers < workers:
        raise MisuseError(
            f"max_workers is {max_workers}, less than the {workers} workers with which the job begins"
        )
    # With `rewind` a job that begins with all may have fewer later.
    if max_workers is not None and (max_workers != workers or on_worker_loss == "rewind"):
        wishes["start_workers"] = workers
        workers = max_workers
    options |= {option: wish for option, wish in wishes.items() if wish is not None}
    url_for_workers, namespace, secret = _native.create_job(
        url, name, workers, admin_token=admin_token, options=json.dumps(options), patience=patience, find=find
    )
    return JobTicket(url_for_workers, namespace, secret)


def truth_value(text: str, variable: str) -> bool:
    """The truth value that a variable of the environment names, in the words that the command line takes. Raises MisuseError if
    it names none."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on", "t", "y"):
        return True
    if word in ("0", "false", "no", "off", "f", "n"):
        return False
    raise MisuseError(f"{variable} is {text!r}: true or false")


def _encrypts_by_default() -> bool:
    text = os.environ.get("PARAMHUB_JOB_ENCRYPT", "").strip()
    return bool(text) and truth_value(text, "PARAMHUB_JOB_ENCRYPT")


class Hub:
    """A hub with its connection manager inside this process, on threads of their own. The hub ends with the process.

    By default it listens on free ports of the loopback interface and has one core. ``listen`` are its data addresses
    (``IP:PORT``, where port 0 is any free port). ``manager`` is the address of its connection manager. A manager that other
    hosts can reach needs an ``admin_token``. ``memory`` bounds the bytes of the buffers of all jobs. Without ``shared_memory``
    workers of this host use TCP too.

    With ``join`` the hub has no connection manager and joins the one at that URL, with that manager's ``admin_token``. It may
    then serve only the workers of one ``rack`` or of one ``host``, which connect under the same name. It sends their sums on to
    the other hubs.

    ``checkpoints`` is a folder, where it keeps the three newest of each job whose creator asks for any.
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
        checkpoints: str | None = None,
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
            checkpoints=checkpoints,
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
        """`paramhub.create_job` at this hub's connection manager."""
        return create_job(self.url, name, workers, admin_token=self._admin_token, **options)

    def memory_bytes(self) -> int:
        """Bytes of the buffers of all jobs at this hub; 0 while there is no job."""
        return self._native.memory_bytes()

    def failure(self) -> str | None:
        """Returns the reason why the hub cannot go on, if it cannot."""
        return self._native.failure()

    def stop(self) -> None:
        """Ends the hub within a second; its jobs fail. A second call does nothing."""
        self._native.stop()

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
