"""The hub that the ranks of a run use, and the hubs that this process runs."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from paramhub._hub import Hub
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
from paramhub.torch._run_secret import admin_token


@dataclass(frozen=True)
class HubAccess:
    """The way in which the ranks of this run reach its connection manager. Rank 0 sends it to the others."""

    url: str
    admin_token: str | None
    is_embedded: bool
    """True if rank 0's process runs the hub."""
    deployment: str
    """Deployment of this run's hubs: ``cc`` or ``cs``."""
    run: str
    """Identifies this run: it separates the run's hosts from those of other runs at the same hub."""
    hubs: int | None = None
    """The number of hubs that a job waits for, if it waits for more than the first."""


class RunHubs:
    """Chooses or starts the hub of all ranks (on rank 0), and starts the hub of this host (on the host's first rank)."""

    access: HubAccess
    """Set once rank 0 has chosen the hub."""

    def __init__(self, assignment: RankAssignment, first_ranks: list[int], options: Options) -> None:
        """``first_ranks`` has for each rank the first rank of its host."""
        self.hosts = len(set(first_ranks))
        self.is_on_one_host = assignment.is_on_one_host
        self.sums_by_host = False
        """True if a hub on each host first sums the gradients of the host's ranks."""
        self._assignment = assignment
        self._first_rank = first_ranks[assignment.rank]
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
        if not url:
            return self._start_run_hub()
        token = admin_token()
        run = secrets.token_hex(8)
        return HubAccess(url, token, is_embedded=False, deployment="cc", run=run, hubs=_hubs_to_wait_for())

    def _start_run_hub(self) -> HubAccess:
        deployment, run = choose_deployment(self._options.deployment, self.hosts), secrets.token_hex(8)
        cores = self._hub_cores()
        if self.is_on_one_host:
            deployment, token = "cc", None
            where = "rank 0 runs the hub"
            self._run_hub = Hub(cores=cores)
        else:
            address = reachable_address(self._assignment)
            token = secrets.token_hex(32)
            where = (
                f"each of the {self.hosts} hosts has a hub (deployment cs)"
                if deployment == "cs"
                else f"rank 0 runs the hub for all {self.hosts} hosts (deployment cc)"
            )
            self._run_hub = Hub(
                listen=[with_port(address, 0)],
                manager=with_port(address, 0),
                rack=_host_name(run, 0) if deployment == "cs" else None,
                cores=cores,
                admin_token=token,
            )
        log(
            f"no PARAMHUB_URL is set, so {where}: manager {self._run_hub.url} "
            f"data {','.join(self._run_hub.addresses)} cores {cores}"
        )
        return HubAccess(self._run_hub.url, token, is_embedded=True, deployment=deployment, run=run)

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
        manager = urlsplit(self.access.url)
        if wanted is None:
            wanted = not is_own_address(manager.hostname or "localhost")
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
        where = "PARAMHUB_URL"
        if self.access.is_embedded:
            where = "in rank 0, and one on each other host" if self.access.deployment == "cs" else "in rank 0"
        return f"{self.access.url} ({where})"

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


def _host_name(run: str, first_rank: int) -> str:
    """The name of a host, with its first rank, which runs the host's hub: errors about this hub then name its process."""
    return f"{run}/host-of-rank-{first_rank}"
