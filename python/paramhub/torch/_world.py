"""All ranks of a training run: who they are, where they meet, and the hub they exchange through."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch.distributed as dist

from paramhub import _native
from paramhub._hub import Hub, create_job
from paramhub.errors import ConnectError, JobFailedError, MisuseError
from paramhub.torch import trace
from paramhub.torch._clocks import offset_to_rank_0
from paramhub.torch._hosts import (
    deployment_of,
    is_own_address,
    located,
    own_address_toward,
    reachable_address,
    with_port,
)
from paramhub.torch._launched import Launched, launched
from paramhub.torch._leaving import HASTE, Haste, within
from paramhub.torch._meeting import await_keys, has_agent_store, meeting_place
from paramhub.torch._trace_files import Origin

if TYPE_CHECKING:
    from paramhub.torch._collectives import Group

TIMEOUT_DEFAULT = 300.0
"""Seconds within which every rank must arrive: scheduling and importing torch take their time."""
FAREWELL_TIMEOUT = 10.0
"""Seconds for which the rank with the hub waits for the others at the end."""
FAILURE = "failure"
"""The key under which a rank that cannot join says why."""

QUANTISED = ("one-bit", "two-bit")
"""Codecs that hubs of several hosts cannot take to one another: every one would round again."""


@dataclass(frozen=True)
class HubAccess:
    """Where the run's connection manager is, and what it asks of those who create jobs."""

    url: str
    admin_token: str | None
    is_embedded: bool
    deployment: str
    """Of the hubs of this run: ``cc`` or ``cs``."""
    run: str
    """Tells this run's hosts from those of others that use the same hub."""
    hubs: int | None = None
    """How many hubs a job waits for, where it is more than the first."""


class World:
    """One run's ranks. Made by `init`; everything in `paramhub.torch` takes part through it."""

    def __init__(
        self, place: Launched, store: dist.Store, url: str | None, options: Options, *, is_apart: bool = False
    ) -> None:
        """``is_apart`` where these ranks were given as others than those of torch.distributed's process group."""
        self._is_apart = is_apart
        self._store = store
        place, first_ranks = located(place, store, options.timeout)
        self.hosts = len(set(first_ranks))
        self._first_rank = first_ranks[place.rank]
        assert place.local_rank is not None and place.local_size is not None
        self.rank = place.rank
        self.size = place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.launcher = place.launcher
        self.process = os.getpid()
        self.options = options
        self.watch_store = store.clone() if hasattr(store, "clone") else store
        """The store over a connection of its own: while one thread waits in a store, others have to wait for it."""
        self._hub: Hub | None = None
        self._host_hub: Hub | None = None
        self._sums_by_host = False
        self.is_on_one_host = place.is_on_one_host
        self._place = place
        self._jobs: list[_native.Job] = []
        self._groups: list[Group] = []
        self._group: Group | None = None
        self._labels: dict[str, int] = {}
        self._inherited = _inherited_ticket()
        self.haste = Haste()
        try:
            self.hub, traced = self._meet_hub(url, place)
            self.host = _named(self.hub.run, self._first_rank)
            self._start_host_hub()
            if traced is not None:
                self._trace(**traced)
        except Exception as error:
            self._tell_failure(FAILURE, json.dumps([self.rank, str(error)]))
            raise
        if self.rank == 0:
            say(self.describe())
            # The launcher of `paramhub run` has said so already.
            if self._inherited is None:
                for line in _native.unread_variables():
                    say(line)

    def _meet_hub(self, url: str | None, place: Launched) -> tuple[HubAccess, dict[str, Any] | None]:
        """Rank 0 decides which hub is used, and starts one if none is named, and whether a trace is made; the
        others hear of it."""
        if self.rank != 0:
            told = json.loads(self._read("hub", "rank 0 has not said which hub is used"))
            return HubAccess(**told["hub"]), told["trace"]
        url = url or os.environ.get("PARAMHUB_URL", "").strip()
        if url:
            token = os.environ.get("PARAMHUB_ADMIN_TOKEN") or None
            run = secrets.token_hex(8)
            access = HubAccess(url, token, is_embedded=False, deployment="cc", run=run, hubs=_hubs())
        else:
            access = self._start_hub(place)
        directory = os.environ.get("PARAMHUB_TRACE", "").strip()
        traced = None
        if directory:
            traced = {"directory": directory, "run": secrets.token_hex(8), "start_ns": _native.now_ns()}
        self._store.set("hub", json.dumps({"hub": access.__dict__, "trace": traced}))
        return access, traced

    def _trace(self, directory: str, run: str, start_ns: int) -> None:
        directory = os.environ.get("PARAMHUB_TRACE", "").strip() or directory
        offset = offset_to_rank_0(self._store, self.rank, self.size, _native.now_ns, self.options.timeout)
        trace._start(directory, Origin(run, self.rank, self.size, socket.gethostname(), start_ns, offset))

    def _start_hub(self, place: Launched) -> HubAccess:
        deployment, run = deployment_of(self.options.deployment, self.hosts), secrets.token_hex(8)
        cores = self.options.hub_cores or min(4, len(os.sched_getaffinity(0)))
        if place.is_on_one_host:
            deployment, token = "cc", None
            where = "rank 0 runs the hub"
            self._hub = Hub(cores=cores)
        else:
            address = reachable_address(place)
            token = secrets.token_hex(32)
            where = (
                f"each of the {self.hosts} hosts has a hub (deployment cs)"
                if deployment == "cs"
                else f"rank 0 runs the hub for all {self.hosts} hosts (deployment cc)"
            )
            self._hub = Hub(
                listen=[with_port(address, 0)],
                manager=with_port(address, 0),
                rack=_named(run, 0) if deployment == "cs" else None,
                cores=cores,
                admin_token=token,
            )
        say(
            f"no PARAMHUB_URL is set, so {where}: manager {self._hub.url} data {','.join(self._hub.addresses)} cores {cores}"
        )
        return HubAccess(self._hub.url, token, is_embedded=True, deployment=deployment, run=run)

    def _start_host_hub(self) -> None:
        """Starts a hub for the ranks of this host, below the one that all ranks use or, with ``cs``, beside those of the other
        hosts: their gradients are summed here, in shared memory, and each byte leaves the host once."""
        is_peer = self.hub.deployment == "cs"
        if is_peer:
            # The manager knows of as many hubs as there are hosts before any job begins.
            self.hub = replace(self.hub, hubs=self.hosts)
        wanted = is_peer or self.options.host_hub
        if wanted is None:
            toward = urlsplit(self.hub.url)
            wanted = not is_own_address(toward.hostname or "localhost")
        self._sums_by_host = bool(wanted)
        if (
            not wanted
            or self.rank != self._first_rank
            or self._hub is not None
            or (self.local_size == 1 and not is_peer)
        ):
            return
        cores = self.options.hub_cores or min(4, len(os.sched_getaffinity(0)))
        toward = urlsplit(self.hub.url)
        address = own_address_toward(toward.hostname or "localhost", toward.port or 80) or "127.0.0.1"
        try:
            self._host_hub = Hub(
                join=self.hub.url,
                host=None if is_peer else self.host,
                rack=self.host if is_peer else os.environ.get("PARAMHUB_RACK") or None,
                listen=[with_port(address, 0)],
                cores=cores,
                admin_token=self.hub.admin_token,
            )
        except ConnectError as error:
            if is_peer:
                raise ConnectError(
                    f"rank {self.rank}: the hub of this host cannot join those of the others at {self.hub.url}: {error}. With "
                    "PARAMHUB_DEPLOYMENT=cc on rank 0 its host has the only one"
                ) from None
            if self.options.host_hub:
                raise
            say(f"rank {self.rank}: every rank of this host exchanges with {self.hub.url} by itself: {error}")
            return
        where = "beside those of other hosts" if is_peer else f"below {self.hub.url}"
        say(f"rank {self.rank} runs a hub for the ranks of its host, {where}")

    def describe(self) -> str:
        """The effective configuration in one line."""
        hosts = "1 host" if self.hosts == 1 else f"{self.hosts} hosts"
        where = "PARAMHUB_URL"
        if self.hub.is_embedded:
            where = "in rank 0, and one on each other host" if self.hub.deployment == "cs" else "in rank 0"
        hub = f"{self.hub.url} ({where})"
        transport = self.options.transport or os.environ.get("PARAMHUB_TRANSPORT", "").strip() or "auto"
        trace = os.environ.get("PARAMHUB_TRACE", "").strip()
        return (
            f"{_native.__version__}: {self.size} rank{'s' * (self.size > 1)}, {hosts}, by {self.launcher}; hub {hub}; "
            f"transport {transport}; reproducible {'yes' if self.options.reproducible else 'no'}; "
            f"timeout {self.options.timeout:g} s" + (f"; trace {trace}" if trace else "")
        )

    def check_process_group(self) -> None:
        """Refuses to go on where torch.distributed, which may have been initialised since, has other ranks: what trains with
        these would leave out some of them."""
        if self._is_apart or not dist.is_initialized():
            return
        group = (dist.get_rank(), dist.get_world_size())
        if group != (self.rank, self.size):
            raise MisuseError(
                f"paramhub.torch took this process for rank {self.rank} of {self.size} (by {self.launcher}), but "
                f"torch.distributed's process group makes it rank {group[0]} of {group[1]}: call init_process_group before "
                "paramhub.torch.init() and whatever else of paramhub.torch comes first"
            )

    def own_address(self) -> str:
        """An IP address of this rank's host under which the other ranks reach it."""
        return "127.0.0.1" if self.is_on_one_host else reachable_address(self._place)

    def group(self) -> Group:
        """All ranks, for collectives. Made when it is first asked for, by all ranks together."""
        if self._group is None:
            from paramhub.torch._collectives import Group

            store = dist.PrefixStore("group", self._store)
            self._group = Group("world", self, store, timeout=self.options.timeout)
        return self._group

    def add_group(self, group: Group) -> None:
        """Lets `leave` leave a group too."""
        self._groups.append(group)

    def remove_group(self, group: Group) -> None:
        """A group was left by itself."""
        if group.failure() is not None:
            self.haste.has_failed()
        if group in self._groups:
            self._groups.remove(group)

    def label(self, kind: str) -> str:
        """A name for something that every rank makes in the same order: ``kind``, numbered."""
        number = self._labels.get(kind, 0)
        self._labels[kind] = number + 1
        return f"{kind}-{number}"

    def open_job(
        self,
        label: str,
        settings: dict[str, Any],
        ranks: Sequence[int] | None = None,
        *,
        shared_parameters: str = "never",
        inherits: bool = False,
        peers: bool = False,
    ) -> _native.Job:
        """Opens a job that all of ``ranks`` (by default every rank) open under the same label with the same settings.

        The first of them creates it and tells the others through the store. Settings are those of InitService, in the
        hub's names; ``reproducible`` is added from this world's options where it is left out. The job that ``paramhub run`` has
        created, with the name and the checkpoints it was asked for, goes to the first that ``inherits``: one that exchanges
        gradients, and is not opened at any time, on any thread.
        ``shared_parameters`` says whether results are read from one copy for all ranks of the host: ``never``,
        ``where possible`` or ``always``. ``peers`` is for jobs whose layers may go by factors, from rank to rank.
        """
        members = list(range(self.size)) if ranks is None else list(ranks)
        rank = members.index(self.rank)
        # Only steps of one phase, in which everybody waits for everybody, can be summed host by host.
        is_simple = settings.get("consistency", "synchronous") == "synchronous" and not settings.get(
            "two_phase"
        )
        by_hosts = "sharded" if self.hub.deployment == "cs" else "auto"
        reduction = by_hosts if is_simple and self._may_sum_by_host(settings) else "flat"
        url, namespace, secret = self._ticket(label, members, rank, inherits, reduction)
        member = _native.connect(
            url,
            namespace,
            secret,
            rank,
            transport=self.options.transport,
            host=self.host,
            rack=self.host if self.hub.deployment == "cs" else None,
            interfaces=self.options.interfaces,
            shared_parameters=shared_parameters,
            # After the manager's own, which names who is missing.
            rendezvous_timeout=self.options.timeout + 30.0,
            peers=peers,
            # Where several hosts have hubs, it is not known which one is lost.
            hub_rank=members.index(0)
            if self.hub.is_embedded and self.is_on_one_host and 0 in members
            else None,
        )
        job = member.init(json.dumps({"reproducible": self.options.reproducible, **settings}))
        self._jobs.append(job)
        return job

    def _may_sum_by_host(self, settings: dict[str, Any]) -> bool:
        """Whether hosts' sums can become those of all. What hubs cannot do so they do by serving all ranks each."""
        if settings.get("clip_norm") is not None or settings.get("scheme", "auto") == "factors":
            return False
        codecs = [settings.get("codec"), *(key.get("codec") for key in settings["keys"])]
        if any(codec in QUANTISED for codec in codecs):
            return False
        # With one rank on each host there is nothing to sum there, and layers can go from rank to rank.
        return "layers" not in settings or self.hub.deployment != "cs" or self.hosts < self.size

    def _ticket(
        self, label: str, members: list[int], rank: int, inherits: bool, reduction: str
    ) -> tuple[str, str, str]:
        # Its reduction was chosen before anybody knew the settings.
        fits = reduction != "flat" or not self._sums_by_host
        if self._inherited is not None and inherits and fits and len(members) == self.size:
            # What `paramhub run` has created for this run is for whoever comes first.
            ticket, self._inherited = self._inherited, None
            return ticket
        if rank != 0:
            told = self._read(f"job/{label}", f"rank {members[0]} has not created the job for {label}")
            ticket = tuple(json.loads(told))
            if ticket[0] is None:
                self._store.set(f"heard/{self.rank}", "")
                raise ConnectError(f"rank {members[0]} could not create the job for {label}: {ticket[1]}")
            return ticket
        name = f"{_script_name()}-{secrets.token_hex(4)}/{label}"
        try:
            ticket = create_job(
                self.hub.url,
                name,
                len(members),
                admin_token=self.hub.admin_token,
                rendezvous_timeout=self.options.timeout,
                dead_after=self.options.dead_after,
                hubs=self.hub.hubs,
                patience=10.0,
                reduction=reduction,
            )
        except Exception as error:
            self._tell_failure(f"job/{label}", json.dumps([None, str(error), ""]))
            raise
        self._store.set(f"job/{label}", json.dumps(ticket))
        return ticket

    def close_job(self, job: _native.Job, *, abandon: bool = False) -> None:
        """Leaves a job before the end of the run, or forgets it: then the end of this process tells the hub."""
        if job in self._jobs:
            self._jobs.remove(job)
        if abandon:
            job.abandon()
            return
        try:
            job.leave()
        except JobFailedError:
            self.haste.has_failed()
            raise

    def forget_job(self, job: _native.Job) -> None:
        """Leaves a job as soon as nobody else has it."""
        if job in self._jobs:
            self._jobs.remove(job)

    def _tell_failure(self, key: str, message: str) -> None:
        """Lets the others hear at once why this rank cannot go on.

        Where the store ends with this process, which is rank 0's, the process stays at its end until they have heard: a rank that
        comes after it would dial the store for as long as ranks wait for one another.
        """
        with contextlib.suppress(Exception):
            if not self._store.check([key]):
                self._store.set(key, message)
        if self.rank == 0 and not has_agent_store():
            others = [f"heard/{rank}" for rank in range(1, self.size)]
            atexit.register(_suppressed, await_keys, self._store, others, FAREWELL_TIMEOUT)

    def _read(self, key: str, problem: str) -> str:
        is_missing = await_keys(self._store, [key], self.options.timeout, unless=FAILURE)
        if is_missing and self._store.check([FAILURE]):
            rank, message = json.loads(self._store.get(FAILURE))
            self._store.set(f"heard/{self.rank}", "")
            raise ConnectError(f"rank {self.rank}: rank {rank} has failed: {message}")
        if is_missing:
            raise ConnectError(
                f"rank {self.rank}: {problem} within {self.options.timeout:g} s: did it start, and can its host be reached?"
            )
        return self._store.get(key).decode()

    def exchange_text(self, label: str, text: str, ranks: Sequence[int] | None = None) -> list[str]:
        """Every rank's text, by rank; each of ``ranks`` calls it with the same label, once."""
        members = list(range(self.size)) if ranks is None else list(ranks)
        self._store.set(f"{label}/{self.rank}", text)
        return [self._read(f"{label}/{rank}", f"rank {rank} has not arrived at {label}") for rank in members]

    def leave(self, *, abandon: bool = False) -> None:
        """Leaves every job, and ends the hub if it is here, once the others have left too.

        With ``abandon`` nothing is waited for: this rank has failed, and the others are to hear of it at once.
        """
        groups, jobs, self._jobs = list(self._groups), self._jobs, []
        if any(each.failure() is not None for each in [*groups, *jobs]):
            self.haste.has_failed()
        for group in groups:
            group.leave(abandon=abandon)
        for job in reversed(jobs):
            if abandon:
                job.abandon()
                continue
            try:
                # Requests that wait for a rank that is gone or hangs end when this process does.
                if not within(HASTE if self.haste.is_needed() else None, job.leave):
                    self.haste.has_failed()
            except JobFailedError as error:
                # Whoever used the job was told when it happened.
                say(f"rank {self.rank}: {error}")
                self.haste.has_failed()
        trace._finish()
        farewell = 0.0 if abandon else HASTE if self.haste.is_needed() else FAREWELL_TIMEOUT
        if self._host_hub is not None:
            # It has passed the last word on once it holds nothing of any job.
            deadline = time.monotonic() + farewell
            while self._host_hub.memory_bytes() > 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            self._host_hub.stop()
        if self._hub is None:
            # No answer is waited for: the store is with rank 0, which may hang.
            with contextlib.suppress(Exception):
                self._store.set(f"left/{self.rank}", "")
            return
        self._await_farewells(farewell)
        self._hub.stop()

    def _await_farewells(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        others = [f"left/{rank}" for rank in range(1, self.size)]
        with contextlib.suppress(Exception):
            while others and not self._store.check(others) and time.monotonic() < deadline:
                time.sleep(0.01)


@dataclass(frozen=True)
class Options:
    """What `init` was asked for."""

    transport: str | None = None
    reproducible: bool = False
    hub_cores: int | None = None
    timeout: float = TIMEOUT_DEFAULT
    dead_after: float = 30.0
    host_hub: bool | None = None
    deployment: str | None = None
    interfaces: str | None = None


_world: World | None = None


def init(
    url: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    store: dist.Store | None = None,
    transport: str | None = None,
    interfaces: str | None = None,
    reproducible: bool = False,
    hub_cores: int | None = None,
    timeout: float = TIMEOUT_DEFAULT,
    dead_after: float = 30.0,
    host_hub: bool | None = None,
    deployment: str | None = None,
) -> None:
    """Joins the other ranks of this run. Called again it does nothing.

    Who this rank is comes from the arguments, or from the variables of torchrun, Slurm, MPI's launchers or ``paramhub run``, or
    from torch.distributed's process group if it was initialised before; without any of them it is alone. Where two of them
    disagree that is refused; but with ``store`` too, the arguments hold beside any process group.
    The hub is the one at ``url`` (a connection manager's URL) or at ``PARAMHUB_URL``. If neither is given, rank 0 runs one on
    threads of its own process, and says so. Ranks meet through ``store``, by default torch.distributed's own if it was
    initialised, else a TCPStore at ``MASTER_ADDR:MASTER_PORT``.

    ``transport`` is ``auto`` (shared memory beside the hub, TCP elsewhere), ``tcp`` or ``shm``, by default what
    ``PARAMHUB_TRANSPORT`` says. ``interfaces`` says from which of this host's network interfaces streams to a hub elsewhere leave
    (``"eth0,eth1"``, ``"10.0.0.0/24"``, ``"^docker"``), by default what ``PARAMHUB_INTERFACES`` says, else all that lead there;
    ranks may differ. With ``reproducible`` sums are made in rank order and bit-equal from run to run. ``hub_cores``
    is how many threads a hub in rank 0 sums on, by default one for each processor and at most 4: they
    sleep while nothing arrives. ``timeout`` in seconds is
    how long ranks wait for one another, and for as many hubs at that URL as rank 0's ``PARAMHUB_HUBS`` says. ``dead_after`` is
    how long a silent rank is thought alive; one whose process ends is noticed at once.

    Where several ranks share a host that the hub is not on, the first of them runs one more for this host: gradients are summed
    there first, in shared memory, and each byte leaves the host once. ``host_hub`` says whether it does; a hub that asks for
    an admin token needs ``PARAMHUB_ADMIN_TOKEN``.

    ``deployment`` says which hosts have hubs where no hub is named, by default what rank 0's ``PARAMHUB_DEPLOYMENT`` says:
    ``cs``, every host, each of which completes the sums of its share of the chunks, so that all links carry alike; or ``cc``,
    rank 0's host alone, whose link then carries all hosts' gradients. Where neither says it is ``cs`` for several hosts.
    """
    if _world is not None:
        return
    # Ranks with a meeting place of their own may be others than torch.distributed's: those of one dimension of a mesh.
    is_apart = rank is not None and store is not None
    group = None
    if dist.is_initialized() and not is_apart:
        group = (dist.get_rank(), dist.get_world_size())
    place = launched(rank, size, local_rank, local_size, group=group)
    options = Options(
        transport, reproducible, hub_cores, timeout, dead_after, host_hub, deployment, interfaces
    )
    if store is None:
        store = meeting_place(place, timeout)
    establish(place, store, url, options, is_apart=is_apart)


def establish(
    place: Launched, store: dist.Store, url: str | None, options: Options, *, is_apart: bool = False
) -> World:
    """`init` once it is known who this rank is and where it meets the others."""
    global _world
    _world = World(place, dist.PrefixStore(_prefix(), store), url, options, is_apart=is_apart)
    atexit.register(_at_exit)
    return _world


def current() -> World | None:
    """The ranks of this run, if `init` was called."""
    return _world


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _world is not None


def shutdown(*, abandon: bool = False) -> None:
    """Leaves all jobs. It happens by itself at the end of the process.

    With ``abandon`` nothing is waited for: this rank has failed, and the others are to hear of it at once.
    """
    global _world
    world, _world = _world, None
    if world is not None:
        atexit.unregister(_at_exit)
        world.leave(abandon=abandon)


def world() -> World:
    """The ranks of this run, which are joined now if `init` was not called before."""
    if _world is None:
        init()
    assert _world is not None
    _world.check_process_group()
    return _world


def rank() -> int:
    """This process's rank, from 0."""
    return _initialised().rank


def size() -> int:
    """How many ranks there are."""
    return _initialised().size


def local_rank() -> int:
    """This process's rank among those of its host."""
    return _initialised().local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return _initialised().local_size


def _initialised() -> World:
    if _world is None:
        raise MisuseError("call paramhub.torch.init() first")
    return _world


def _at_exit() -> None:
    global _world
    world, _world = _world, None
    # A forked child that ends takes nothing of its parent's with it: not its jobs, nor its word in the store.
    if world is not None and world.process == os.getpid():
        # The interpreter notes an exception that ends it. A rank that failed must not wait for ranks that wait for it.
        world.leave(abandon=getattr(sys, "last_value", None) is not None)


_restarts = 0


def _prefix() -> str:
    """Of all keys in the store: other incarnations of the run, and earlier worlds of this process, have other ones."""
    global _restarts
    _restarts += 1
    return f"paramhub/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_restarts}"


def _suppressed(act: Callable[..., object], *arguments: object) -> None:
    with contextlib.suppress(Exception):
        act(*arguments)


def _inherited_ticket() -> tuple[str, str, str] | None:
    """The job that `paramhub run` has created for this run."""
    values = [os.environ.get(name, "") for name in ("PARAMHUB_URL", "PARAMHUB_JOB", "PARAMHUB_SECRET")]
    return (values[0], values[1], values[2]) if all(values) else None


def _hubs() -> int | None:
    """How many hubs have joined the manager at PARAMHUB_URL before a job begins."""
    text = os.environ.get("PARAMHUB_HUBS", "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise MisuseError(f"PARAMHUB_HUBS is `{text}`: how many hubs a job waits for, 1 to 1024")
    return int(text)


def _script_name() -> str:
    """The training script's name as far as a job's may have it."""
    name = os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0]
    kept = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name
    )
    return kept[:64].strip("-") or "torch"


def say(line: str) -> None:
    print(f"paramhub: {line}", file=sys.stderr, flush=True)


def _named(run: str, first_rank: int) -> str:
    """A host by its first rank, which has the hub: errors about this hub then say whose process to look at."""
    return f"{run}/host-of-rank-{first_rank}"


def names(ranks: Iterable[int]) -> str:
    """Ranks as people read them."""
    return ", ".join(map(str, ranks))
