"""The hub that the ranks of a run use, and the hubs that this process runs."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from paramhub._hub import Hub
from paramhub._hub_process import HubProcess
from paramhub.errors import ConnectError, MisuseError
from paramhub.torch._hosts import (
    choose_deployment,
    is_own_address,
    own_address_toward,
    reachable_address,
    with_port,
)
from paramhub.torch._job_options import JobOptions, variable
from paramhub.torch._log import log
from paramhub.torch._options import Options
from paramhub.torch._rank_assignment import RankAssignment
from paramhub.torch._run_record import RunRecord
from paramhub.torch._run_secret import admin_token

_DIAL_TIMEOUT = 5.0
"""Seconds in which a hub that an earlier start has left must take a connection."""

_CHUNK_BYTES_IN_MEMORY = 128 << 10
"""The size of an f32 chunk in shared memory, where larger ones than the default take less time."""


CHECKPOINT_EVERY_DEFAULT = "30s"
"""How often a hub that has a folder for checkpoints writes one, if nothing else is said."""

MANAGER_PORT = 7770
"""The port at which the command line looks for a connection manager."""

_Started = TypeVar("_Started", Hub, HubProcess)


@dataclass(frozen=True)
class HubAccess:
    """The way in which the ranks of this run reach its connection manager. Rank 0 sends it to the others."""

    url: str
    admin_token: str | None
    place: str
    """Where the hub is: ``named`` by its URL, in ``rank 0``, or in a ``process`` of its own on rank 0's host."""
    deployment: str
    """Deployment of this run's hubs: ``cc`` or ``cs``."""
    run: str
    """Identifies this run: it separates the run's hosts from those of other runs at the same hub."""
    job: JobOptions = field(default_factory=JobOptions)
    """What the run asks of its jobs. ``hubs`` is left out where a job is to wait for the first hub only."""
    checkpoints: str | None = None
    """The folder of the hubs that this run starts, if they have one."""
    chunk_bytes: int | None = None
    """The size of an f32 chunk in the jobs of this run, if not the default."""

    def with_chunk_size(self, transport: str) -> HubAccess:
        """The same access, with the size of chunks that suits the transport of rank 0."""
        # What answers at a loopback address is on the host of all ranks, and so are the hubs that have joined it.
        is_on_host = urlsplit(self.url).hostname in ("127.0.0.1", "::1", "localhost")
        return (
            replace(self, chunk_bytes=_CHUNK_BYTES_IN_MEMORY) if is_on_host and transport != "tcp" else self
        )

    @property
    def is_embedded(self) -> bool:
        """Returns whether rank 0's process runs the hub."""
        return self.place == "rank 0"


class RunHubs:
    """Chooses or starts the hub of all ranks (on rank 0), and starts the hub of this host (on the host's first rank)."""

    access: HubAccess
    """Set once rank 0 has chosen the hub."""

    def __init__(
        self,
        assignment: RankAssignment,
        first_ranks: list[int],
        record: RunRecord | None,
        options: Options,
    ) -> None:
        """``first_ranks`` has for each rank the first rank of its host. ``record`` is what stays when ranks are started again."""
        self.hosts = len(set(first_ranks))
        self.is_on_one_host = assignment.is_on_one_host
        self.sums_by_host = False
        """True if a hub on each host first sums the gradients of the host's ranks."""
        self._assignment = assignment
        self._first_rank = first_ranks[assignment.rank]
        self._record = record
        self._options = options
        self._run_hub: Hub | None = None
        self._host_hub: Hub | None = None

    @property
    def host(self) -> str:
        """The name of this host in the run."""
        return _host_name(self.access.run, self._first_rank)

    @property
    def runs_hub_of_run(self) -> bool:
        """Returns whether this process runs the hub that all ranks use."""
        return self._run_hub is not None

    def choose(self, url: str | None) -> HubAccess:
        """Returns access to the hub at ``url`` or ``PARAMHUB_URL``, or starts a hub if neither is given. Rank 0 calls it."""
        url = url or os.environ.get("PARAMHUB_URL", "").strip()
        job, folder = self._options.job, self._folder()
        has_launcher_job = "PARAMHUB_JOB" in os.environ
        if has_launcher_job:
            folder, job = None, _of_launcher(job)
        job = job.with_environment()
        if has_launcher_job or self._record is None:
            # `paramhub run` has chosen what becomes of its job, and starts single workers again.
            job = replace(job, on_worker_loss=None, max_workers=None)
        job.check()
        if folder and job.checkpoint_every is None:
            job = replace(job, checkpoint_every=CHECKPOINT_EVERY_DEFAULT)
        self._check_placement(url, job, folder)
        name = None
        if self._record is not None and (job.outlives_ranks or job.checkpoint_every or job.resume):
            name = self._record.name(self._options.run_id, self._assignment.launcher)
        if name is None:
            check_unnamed(job)
            name = secrets.token_hex(8)
        elif job.checkpoint_every and job.resume is None and not has_launcher_job:
            # After a power cut nothing is left of the run but its name and its checkpoints.
            job = replace(job, resume="auto")
        if job.checkpoint_every and not has_launcher_job:
            log(
                f"hubs write a checkpoint every {_often(job.checkpoint_every)} into {folder or 'their folder'}, as run {name}; a "
                "later start with that name as its run_id goes on from the newest"
            )
        if url:
            return HubAccess(url, admin_token(), "named", "cc", name, job)
        job = replace(job, hubs=None)
        if not job.outlives_ranks:
            return self._start_run_hub(name, job, folder)
        assert self._record is not None
        return self._lasting_hub(self._record, name, job, folder)

    def _folder(self) -> str | None:
        """The folder for checkpoints of the hubs that this run starts."""
        folder = self._options.checkpoints or os.environ.get(variable("checkpoints"), "").strip()
        return os.path.abspath(folder) if folder else None

    def _check_placement(self, url: str, job: JobOptions, folder: str | None) -> None:
        """Refuses what hubs that this run starts cannot have, and a folder for hubs that run already."""
        if url and folder:
            raise MisuseError(
                f"the folder of checkpoints is {folder!r}, but the hub at {url} has its own: start that one with "
                "`--checkpoints DIR`, and give only checkpoint_every here"
            )
        if url:
            return
        if job.hub_label:
            raise MisuseError(
                f"hub_label is {job.hub_label!r}, but this run would start its hub itself: name the connection manager of hubs "
                "that have the label by PARAMHUB_URL"
            )
        if job.replicas:
            raise MisuseError(
                f"replicas is {job.replicas}, but this run would start the only hub itself: start two hubs or more with one "
                "connection manager, and name that by PARAMHUB_URL"
            )
        if not folder and (job.checkpoint_every or job.resume not in (None, "never")):
            raise MisuseError(
                "checkpoint_every or resume is given, but this run starts its hub itself, and no folder is named in which that "
                "would write: give checkpoints=DIR, or PARAMHUB_JOB_CHECKPOINTS"
            )

    def _start_run_hub(self, run: str, job: JobOptions, folder: str | None) -> HubAccess:
        deployment = choose_deployment(self._options.deployment, self.hosts)
        if self.is_on_one_host:
            deployment = "cc"
            where = "rank 0 runs the hub"
        else:
            where = (
                f"each of the {self.hosts} hosts has a hub (deployment cs)"
                if deployment == "cs"
                else f"rank 0 runs the hub for all {self.hosts} hosts (deployment cc)"
            )
        rack = _host_name(run, 0) if deployment == "cs" else None
        token = None if self.is_on_one_host else secrets.token_hex(32)
        self._run_hub = self._start(Hub, token, rack=rack, checkpoints=folder)
        self._log_start(where, self._run_hub)
        return HubAccess(self._run_hub.url, token, "rank 0", deployment, run, job, folder)

    def _lasting_hub(self, record: RunRecord, run: str, job: JobOptions, folder: str | None) -> HubAccess:
        """Finds the hub that an earlier start of this run's ranks has left, or starts one in a process of its own."""
        if not record.is_kept:
            raise MisuseError(
                f"on_worker_loss is `{job.on_worker_loss}`, but rank 0 would run the hub, and end with it: set PARAMHUB_URL "
                "to a hub that is started apart (`paramhub hub`), or start the ranks with torchrun, whose ranks leave one behind"
            )
        if self._options.deployment == "cs" or os.environ.get("PARAMHUB_DEPLOYMENT", "").strip() == "cs":
            raise MisuseError(
                f"on_worker_loss is `{job.on_worker_loss}`, which cannot be had with the deployment cs: use cc, or hubs that "
                "are started apart and named by PARAMHUB_URL"
            )
        # A token that all ranks know need not go through the store.
        known = None if self.is_on_one_host else admin_token()
        if (kept := record.read("hub")) is not None:
            url, token = json.loads(kept)
            if _answers(url):
                return HubAccess(url, token or known, "process", "cc", run, job, folder)
            then = "training goes on from its checkpoint, if it has one" if folder else "training begins anew"
            log(f"the hub that this run has left at {url} has ended, so {then}")
        own = None if self.is_on_one_host or known is not None else secrets.token_hex(32)
        # The launcher's agent is the parent of the ranks.
        hub = self._start(partial(HubProcess, os.getppid()), own or known, checkpoints=folder)
        self._log_start("a process beside rank 0 runs the hub", hub)
        record.write("hub", json.dumps([hub.url, own]))
        return HubAccess(hub.url, own or known, "process", "cc", run, job, folder)

    def _start(self, kind: Callable[..., _Started], token: str | None, **options: Any) -> _Started:
        """Starts the hub that all ranks use. Its connection manager listens where `paramhub jobs` looks for one, if nothing else
        does, and else at any port."""
        options = {**self._hub_options(token), **options}
        address = "127.0.0.1" if self.is_on_one_host else reachable_address(self._assignment)
        # A hub that outlives its ranks is found again by its address, at which no other run's hub should ever answer.
        for port in (MANAGER_PORT, 0) if kind is Hub else (0,):
            try:
                return kind(manager=with_port(address, port), **options)
            except ConnectError:
                if port == 0:
                    raise
        raise AssertionError("the last port has returned or raised")

    def _hub_options(self, token: str | None) -> dict[str, Any]:
        """The options of the hub that all ranks use, but for the address of its connection manager."""
        options: dict[str, Any] = {"cores": self._hub_cores(), "admin_token": token}
        if not self.is_on_one_host:
            options["listen"] = [with_port(reachable_address(self._assignment), 0)]
        return options

    def _log_start(self, where: str, hub: Hub | HubProcess) -> None:
        log(
            f"no PARAMHUB_URL is set, so {where}: manager {hub.url} data {','.join(hub.addresses)} cores {self._hub_cores()}"
        )

    def start_host_hub(self) -> None:
        """Starts a hub for the ranks of this host if the run needs one and this rank is the host's first.

        The hub sums the gradients of its host in shared memory, so that each byte leaves the host once. It works below the hub
        that all ranks use or, with deployment ``cs``, beside the hubs of the other hosts.
        """
        is_peer = self.access.deployment == "cs"
        if is_peer:
            # Jobs wait until every host's hub has joined the manager.
            self.access = replace(self.access, job=replace(self.access.job, hubs=self.hosts))
        wanted = is_peer or self._options.host_hub
        if wanted and self.access.job.replicas:
            raise MisuseError(
                "host_hub and replicas are given, but the sums of hosts have no standby: leave one of them out"
            )
        # Of several managers the first shows the way to all of them.
        manager = urlsplit(self.access.url.split(",")[0].strip())
        if wanted is None:
            wanted = not self.access.job.needs_one_site and not is_own_address(
                manager.hostname or "localhost"
            )
        self.sums_by_host = bool(wanted)
        if (
            not wanted
            or self._assignment.rank != self._first_rank
            or self._run_hub is not None
            or (self._assignment.local_size == 1 and not is_peer)
        ):
            return
        address = own_address_toward(manager.hostname or "localhost", manager.port or 80) or "127.0.0.1"
        rank = self._assignment.rank
        try:
            self._host_hub = Hub(
                join=self.access.url,
                host=None if is_peer else self.host,
                rack=self.host if is_peer else os.environ.get("PARAMHUB_RACK") or None,
                listen=[with_port(address, 0)],
                cores=self._hub_cores(),
                admin_token=self.access.admin_token,
                checkpoints=self.access.checkpoints,
            )
        except ConnectError as error:
            if is_peer:
                raise ConnectError(
                    f"rank {rank}: the hub of this host cannot join those of the others at {self.access.url}: {error}. With "
                    "PARAMHUB_DEPLOYMENT=cc on rank 0 its host has the only one"
                ) from None
            if self._options.host_hub:
                raise
            log(f"rank {rank}: every rank of this host exchanges with {self.access.url} by itself: {error}")
            return
        where = "beside those of other hosts" if is_peer else f"below {self.access.url}"
        log(f"rank {rank} runs a hub for the ranks of its host, {where}")

    def describe(self) -> str:
        """The hub's URL, and where the hub runs."""
        where = {"named": "PARAMHUB_URL", "process": "in a process of its own"}.get(
            self.access.place, "in rank 0"
        )
        if self.access.deployment == "cs":
            where += ", and one on each other host"
        lasts = f", where run {self.access.run} outlives its ranks" if self.access.job.outlives_ranks else ""
        return f"{self.access.url} ({where}){lasts}"

    def stop_host_hub(self, timeout: float) -> None:
        """Stops this host's hub, if this process runs it. First waits, at most ``timeout`` seconds, until the hub holds no
        buffers of any job: then it has forwarded everything."""
        if self._host_hub is None:
            return
        deadline = time.monotonic() + timeout
        while self._host_hub.memory_bytes() > 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        self._host_hub.stop()

    def stop_run_hub(self) -> None:
        """Stops the hub that all ranks use, if this process runs it."""
        if self._run_hub is not None:
            self._run_hub.stop()

    def _hub_cores(self) -> int:
        return self._options.hub_cores or min(4, len(os.sched_getaffinity(0)))


def _of_launcher(job: JobOptions) -> JobOptions:
    """What a worker of `paramhub run` may ask of further jobs. The launcher has created the first one, and its hub."""
    given = [field.name for field in fields(job) if getattr(job, field.name) is not None]
    late = sorted(set(given) - {"codec", "consistency"})
    if late:
        log(
            f"`paramhub run` has created the first job with its own flags: {', '.join(late)} of init() hold for further jobs at "
            "most"
        )
    return replace(job, checkpoint_every=None, resume=None)


def _often(every: str) -> str:
    return every if every.endswith("s") else f"{every} steps"


def check_unnamed(job: JobOptions) -> None:
    """Refuses what a run cannot have of which no later start would know that it is the same run."""
    if job.outlives_ranks:
        raise MisuseError(
            f"on_worker_loss is `{job.on_worker_loss}`, but nothing tells the processes of a later start which run is theirs: "
            "start with torchrun, srun or `paramhub run`, or give init(run_id=) or PARAMHUB_RUN_ID a name that only this run has"
        )
    if job.resume not in (None, "never"):
        raise MisuseError(
            f"resume is {job.resume!r}, but this run has no name by which its checkpoints are found: give init(run_id=), "
            "PARAMHUB_RUN_ID or torchrun's --rdzv-id the name that the run had before"
        )


def _answers(url: str) -> bool:
    """Returns whether something listens at the URL's address."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "localhost", address.port or 80), _DIAL_TIMEOUT).close()
    except OSError:
        return False
    return True


def _host_name(run: str, first_rank: int) -> str:
    """The name of a host, with its first rank, which runs the host's hub: errors about this hub then name its process."""
    return f"{run}/host-of-rank-{first_rank}"
