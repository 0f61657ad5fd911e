"""The hub that the ranks of a run use, and the hubs that this process runs."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
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
from paramhub.torch._log import log
from paramhub.torch._options import Options
from paramhub.torch._rank_assignment import RankAssignment
from paramhub.torch._run_record import RunRecord
from paramhub.torch._run_secret import admin_token

_DIAL_TIMEOUT = 5.0
"""Seconds in which a hub that an earlier start has left must take a connection."""

_CHUNK_BYTES_IN_MEMORY = 128 << 10
"""The size of an f32 chunk in shared memory, where larger ones than the default take less time."""


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
    hubs: int | None = None
    """The number of hubs that a job waits for, if it waits for more than the first."""
    on_worker_loss: str = "fail"
    """What becomes of the jobs of optimizers when a rank is lost: ``fail``, or they stay at the hub: ``continue``, ``rewind``."""
    linger: float | None = None
    """Seconds for which they stay, if not the manager's default."""
    rewind_every: int | None = None
    """With ``rewind``, the number of steps from one to which they can go back to the next, if not the manager's default."""
    max_workers: int | None = None
    """With ``rewind``, the most ranks that a later start may have, if their number may change."""
    program_state_bytes: int | None = None
    """The largest program state of a rank, if not the default."""
    checkpoint_every: str | None = None
    """How often their hubs write checkpoints, if at all."""
    replicas: int = 0
    """The number of standbys of each chunk in the jobs of this run."""
    max_hubs: int | None = None
    """The most hubs that serve a job of this run, if not all."""
    hub_label: str | None = None
    """The label that they must have, if any."""
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
    def outlives_ranks(self) -> bool:
        """Returns whether the jobs of optimizers stay at the hub when ranks are lost."""
        return self.on_worker_loss != "fail"

    @property
    def is_embedded(self) -> bool:
        """Returns whether rank 0's process runs the hub."""
        return self.place == "rank 0"


class _Lasting(NamedTuple):
    """The fields of `HubAccess` that concern jobs which stay when ranks are lost."""

    on_worker_loss: str
    linger: float | None
    rewind_every: int | None
    max_workers: int | None
    program_state_bytes: int | None
    checkpoint_every: str | None


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
        copies, label = replicas(self._options.replicas), hub_label(self._options.hub_label)
        if label and not url:
            raise MisuseError(
                f"hub_label is {label!r}, but this run would start its hub itself: name the connection manager of hubs that have "
                "the label by PARAMHUB_URL"
            )
        chosen = {"replicas": copies, "max_hubs": max_hubs(self._options.max_hubs), "hub_label": label}
        if copies and not url:
            raise MisuseError(
                f"replicas is {copies}, but this run would start the only hub itself: start two hubs or more with one connection "
                "manager, and name that by PARAMHUB_URL"
            )
        # `paramhub run` has chosen what becomes of its job, and starts single workers again.
        policy = "fail" if "PARAMHUB_JOB" in os.environ else on_worker_loss(self._options.on_worker_loss)
        folder, every = checkpoints(self._options.checkpoints, self._options.checkpoint_every)
        if policy == "fail" and (folder or every) and "PARAMHUB_JOB" not in os.environ:
            raise MisuseError(
                "checkpoints (`checkpoints`, `checkpoint_every`) are those of a run that is known again: give init() "
                'on_worker_loss="rewind" or "continue", or start the ranks with `paramhub run`, which has checkpoints of '
                "its own"
            )
        if self._record is None or policy == "fail":
            if not url:
                return self._start_run_hub()
            run = secrets.token_hex(8)
            return HubAccess(url, admin_token(), "named", "cc", run, _hubs_to_wait_for(), **chosen)
        run = self._record.name(self._assignment.launcher, policy)
        most = max_workers(self._options.max_workers)
        if most is not None and policy != "rewind":
            raise MisuseError(
                f'max_workers is {most}, but on_worker_loss is `{policy}`: a launcher can start more or fewer ranks with "rewind"'
            )
        lasting = _Lasting(
            policy,
            linger(self._options.linger),
            rewind_every(self._options.rewind_every),
            most,
            self._options.program_state_bytes,
            every,
        )
        if not url:
            return self._lasting_hub(self._record, run, lasting, folder)
        if folder:
            raise MisuseError(
                f"the folder of checkpoints is {folder!r}, but the hub at {url} has its own: start that one with "
                "`--checkpoints DIR`, and give only checkpoint_every here"
            )
        return HubAccess(url, admin_token(), "named", "cc", run, _hubs_to_wait_for(), *lasting, **chosen)

    def _start_run_hub(self) -> HubAccess:
        deployment, run = choose_deployment(self._options.deployment, self.hosts), secrets.token_hex(8)
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
        self._run_hub = Hub(**self._hub_options(token), rack=rack)
        self._log_start(where, self._run_hub)
        return HubAccess(self._run_hub.url, token, "rank 0", deployment, run)

    def _lasting_hub(self, record: RunRecord, run: str, lasting: _Lasting, folder: str | None) -> HubAccess:
        """Finds the hub that an earlier start of this run's ranks has left, or starts one in a process of its own."""
        if not record.is_kept:
            raise MisuseError(
                f"on_worker_loss is `{lasting.on_worker_loss}`, but rank 0 would run the hub, and end with it: set PARAMHUB_URL "
                "to a hub that is started apart (`paramhub hub`), or start the ranks with torchrun, whose ranks leave one behind"
            )
        if self._options.deployment == "cs" or os.environ.get("PARAMHUB_DEPLOYMENT", "").strip() == "cs":
            raise MisuseError(
                f"on_worker_loss is `{lasting.on_worker_loss}`, which cannot be had with the deployment cs: use cc, or hubs that "
                "are started apart and named by PARAMHUB_URL"
            )
        # A token that all ranks know need not go through the store.
        known = None if self.is_on_one_host else admin_token()
        if (kept := record.read("hub")) is not None:
            url, token = json.loads(kept)
            if _answers(url):
                return HubAccess(url, token or known, "process", "cc", run, None, *lasting)
            then = "training goes on from its checkpoint, if it has one" if folder else "training begins anew"
            log(f"the hub that this run has left at {url} has ended, so {then}")
        own = None if self.is_on_one_host or known is not None else secrets.token_hex(32)
        # The launcher's agent is the parent of the ranks.
        hub = HubProcess(os.getppid(), checkpoints=folder, **self._hub_options(own or known))
        self._log_start("a process beside rank 0 runs the hub", hub)
        record.write("hub", json.dumps([hub.url, own]))
        return HubAccess(hub.url, own or known, "process", "cc", run, None, *lasting)

    def _hub_options(self, token: str | None) -> dict[str, Any]:
        """The options of the hub that all ranks use."""
        options: dict[str, Any] = {"cores": self._hub_cores(), "admin_token": token}
        if not self.is_on_one_host:
            address = reachable_address(self._assignment)
            options |= {"listen": [with_port(address, 0)], "manager": with_port(address, 0)}
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
            self.access = replace(self.access, hubs=self.hosts)
        wanted = is_peer or self._options.host_hub
        if wanted and self.access.replicas:
            raise MisuseError(
                "host_hub and replicas are given, but the sums of hosts have no standby: leave one of them out"
            )
        # Of several managers the first shows the way to all of them.
        manager = urlsplit(self.access.url.split(",")[0].strip())
        if wanted is None:
            # A hub of this host would end with its ranks.
            may_end = not self.access.outlives_ranks and not self.access.replicas
            wanted = may_end and not is_own_address(manager.hostname or "localhost")
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
        lasts = f", where run {self.access.run} outlives its ranks" if self.access.outlives_ranks else ""
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


def _hubs_to_wait_for() -> int | None:
    """The number of hubs that must join the manager at PARAMHUB_URL before a job begins."""
    text = os.environ.get("PARAMHUB_HUBS", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise MisuseError(f"PARAMHUB_HUBS is `{text}`: how many hubs a job waits for, 1 to 1024")
    return int(text)


def on_worker_loss(given: str | None) -> str:
    """What becomes of the jobs of optimizers when a rank is lost: ``given``, else ``PARAMHUB_ON_WORKER_LOSS``, else ``fail``."""
    chosen = given or os.environ.get("PARAMHUB_ON_WORKER_LOSS", "").strip() or "fail"
    if chosen not in ("fail", "continue", "rewind"):
        raise MisuseError(f"on_worker_loss is `fail`, `continue` or `rewind`, not {chosen!r}")
    return chosen


def linger(given: float | None) -> float | None:
    """Seconds for which a job waits for processes in the place of those that were lost: ``given``, else ``PARAMHUB_LINGER``."""
    text = os.environ.get("PARAMHUB_LINGER", "").strip()
    if given is not None or not text:
        return given
    try:
        return float(text)
    except ValueError:
        raise MisuseError(f"PARAMHUB_LINGER is {text!r}: a number of seconds") from None


def rewind_every(given: int | None) -> int | None:
    """The number of steps from one to which jobs can go back to the next: ``given``, else ``PARAMHUB_REWIND_EVERY``."""
    return _number(given, "PARAMHUB_REWIND_EVERY", "steps")


def max_workers(given: int | None) -> int | None:
    """The most ranks that a later start of the run may have, if their number may change: ``given``, else
    ``PARAMHUB_MAX_WORKERS``."""
    return _number(given, "PARAMHUB_MAX_WORKERS", "ranks")


def replicas(given: int | None) -> int:
    """The number of standbys of each chunk: ``given``, else ``PARAMHUB_REPLICAS``, else 0."""
    return _number(given, "PARAMHUB_REPLICAS", "standbys of each chunk, 0 or 1") or 0


def max_hubs(given: int | None) -> int | None:
    """The most hubs that serve a job: ``given``, else ``PARAMHUB_JOB_MAX_HUBS``."""
    return _number(given, "PARAMHUB_JOB_MAX_HUBS", "hubs")


def hub_label(given: str | None) -> str | None:
    """The label of the hubs that serve a job: ``given``, else ``PARAMHUB_JOB_HUB_LABEL``."""
    return given or os.environ.get("PARAMHUB_JOB_HUB_LABEL", "").strip() or None


def _number(given: int | None, variable: str, what: str) -> int | None:
    text = os.environ.get(variable, "").strip()
    if given is not None or not text:
        return given
    if not (text.isascii() and text.isdigit()):
        raise MisuseError(f"{variable} is {text!r}: a number of {what}")
    return int(text)


def checkpoints(folder: str | None, every: str | None) -> tuple[str | None, str | None]:
    """The folder of the run's own hub and how often it writes a checkpoint: as given, else ``PARAMHUB_CHECKPOINTS`` and
    ``PARAMHUB_CHECKPOINT_EVERY``. With a folder it is every 30 seconds if nothing else is said."""
    folder = folder or os.environ.get("PARAMHUB_CHECKPOINTS", "").strip() or None
    every = every or os.environ.get("PARAMHUB_CHECKPOINT_EVERY", "").strip() or None
    if folder and not every:
        every = "30s"
    return (os.path.abspath(folder) if folder else None), every


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
