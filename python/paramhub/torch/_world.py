"""All ranks of a training run, from the point of view of one rank: its host, the run's hub, its jobs and its groups."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._clocks import offset_to_rank_0
from paramhub.torch._collectives import Group
from paramhub.torch._hosts import locate_hosts, reachable_address
from paramhub.torch._job_options import JobOptions
from paramhub.torch._join import Joins
from paramhub.torch._log import log
from paramhub.torch._options import Options
from paramhub.torch._rank_assignment import RankAssignment
from paramhub.torch._rendezvous import explained_store_errors
from paramhub.torch._run_hubs import HubAccess, RunHubs
from paramhub.torch._run_jobs import RunJobs
from paramhub.torch._run_record import RunRecord
from paramhub.torch._run_secret import RunSecret
from paramhub.torch._run_store import EXIT_TIMEOUT, RunStore
from paramhub.torch._shutdown import EXIT_TIMEOUT_AFTER_FAILURE, FailureState
from paramhub.torch._trace_files import Origin

if TYPE_CHECKING:
    from paramhub.torch._process_sets import ProcessSet


class World:
    """One run's ranks. `paramhub.torch.init` makes it; everything in `paramhub.torch` exchanges through it."""

    def __init__(
        self,
        assignment: RankAssignment,
        store: dist.Store,
        record: RunRecord | None,
        url: str | None,
        options: Options,
        *,
        is_separate: bool = False,
        takes_launcher_job: bool = True,
    ) -> None:
        """Joins the other ranks. ``record`` is what stays of the run when its ranks are started again, if anything
        is to. ``is_separate`` says that these ranks are not those of torch.distributed's process group, and
        ``takes_launcher_job`` that they are those for which `paramhub run` has created a job, if it has."""
        self._is_separate = is_separate
        assignment, first_ranks, common_sources = locate_hosts(assignment, store, options.timeout)
        assert assignment.local_rank is not None and assignment.local_size is not None
        self.rank = assignment.rank
        self.size = assignment.size
        self.local_rank = assignment.local_rank
        self.local_size = assignment.local_size
        self.launcher = assignment.launcher
        self.process = os.getpid()
        self.options = options
        with explained_store_errors(store, self.rank):
            self.watch_store = store.clone() if hasattr(store, "clone") else store
        """The same store over another connection: while one thread waits in a store, other threads cannot use it."""
        self._assignment = assignment
        self._groups: list[Group] = []
        self._group: Group | None = None
        self._labels: dict[str, int] = {}
        self.first_ranks = first_ranks
        """For each rank the first rank of its host."""
        self.process_sets: dict[int, ProcessSet] = {}
        """Horovod's process sets of this world by their numbers, without that of all ranks."""
        self._process_sets_made = 0
        self.joins = Joins(self)
        self.failures = FailureState()
        self.hubs = RunHubs(assignment, first_ranks, record, options)
        self._store = RunStore(store, self.rank, self.size, options.timeout)
        self.jobs = RunJobs(
            self.rank,
            self.size,
            self.hubs,
            self._store,
            options,
            self.failures,
            takes_launcher_job=takes_launcher_job,
        )
        try:
            self._store.agree_on_secret(common_sources, is_on_one_host=assignment.is_on_one_host)
            self.hubs.access, trace_settings = self._agree_on_hub(url)
            self.hubs.start_host_hub()
            if trace_settings is not None:
                self._start_trace(**trace_settings)
        except BaseException as error:
            if isinstance(error, Exception):
                self._store.report_join_failure(error)
            # The program may go on, and join other ranks.
            self.hubs.stop_host_hub(0.0)
            self.hubs.stop_run_hub()
            raise
        if self.rank == 0:
            log(self.describe())
            if self._store.secret.is_exposed:
                log(
                    "the secrets of this run go through torch's store, and whoever can listen or connect to the store can read "
                    "them, join the run's jobs, and stop them. PARAMHUB_ADMIN_TOKEN_FILE with the same token at every rank, or "
                    "`paramhub run`, keeps them from that"
                )
            # With a job of `paramhub run`, the launcher has printed these lines already.
            if not self.jobs.has_launcher_job:
                for line in _native.unread_variables():
                    log(line)

    def _agree_on_hub(self, url: str | None) -> tuple[HubAccess, dict[str, Any] | None]:
        """Rank 0 chooses the hub, or starts one, and decides whether a trace is made; the other ranks read its choice."""
        if self.rank != 0:
            choice = json.loads(self._store.read_secret("hub", "rank 0 has not said which hub is used"))
            hub = {**choice["hub"], "job": JobOptions(**choice["hub"]["job"])}
            return HubAccess(**hub), choice["trace"]
        access = self.hubs.choose(url).with_chunk_size(self.transport)
        directory = os.environ.get("PARAMHUB_TRACE", "").strip()
        trace_settings = None
        if directory:
            trace_settings = {
                "directory": directory,
                "run": secrets.token_hex(8),
                "start_ns": _native.now_ns(),
            }
        self._store.write_secret("hub", json.dumps({"hub": asdict(access), "trace": trace_settings}))
        return access, trace_settings

    def _start_trace(self, directory: str, run: str, start_ns: int) -> None:
        directory = os.environ.get("PARAMHUB_TRACE", "").strip() or directory
        with explained_store_errors(self._store.store, self.rank):
            offset = offset_to_rank_0(
                self._store.store, self.rank, self.size, _native.now_ns, self.options.timeout
            )
        trace._start(directory, Origin(run, self.rank, self.size, socket.gethostname(), start_ns, offset))

    @property
    def transport(self) -> str:
        """``auto``, ``tcp`` or ``shm``."""
        return self.options.transport or os.environ.get("PARAMHUB_TRANSPORT", "").strip() or "auto"

    def codec(self, given: str | None) -> str | None:
        """The encoding of gradients in frames: ``given``, else what the run asks for."""
        return given or self.hubs.access.job.codec

    def describe(self) -> str:
        """The effective configuration in one line."""
        hosts = "1 host" if self.hubs.hosts == 1 else f"{self.hubs.hosts} hosts"
        trace = os.environ.get("PARAMHUB_TRACE", "").strip()
        return (
            f"{_native.__version__}: {self.size} rank{'s' * (self.size > 1)}, {hosts}, by {self.launcher}; "
            f"hub {self.hubs.describe()}; "
            f"transport {self.transport}; reproducible {'yes' if self.options.reproducible else 'no'}; "
            f"timeout {self.options.timeout:g} s" + (f"; trace {trace}" if trace else "")
        )

    def check_process_group(self) -> None:
        """Raises MisuseError if torch.distributed has other ranks than this world: training would leave some of them out.
        The process group may have been initialised after this world."""
        if self._is_separate or not dist.is_initialized():
            return
        group = (dist.get_rank(), dist.get_world_size())
        if group != (self.rank, self.size):
            raise MisuseError(
                f"paramhub.torch took this process for rank {self.rank} of {self.size} (by {self.launcher}), but "
                f"torch.distributed's process group makes it rank {group[0]} of {group[1]}: call init_process_group before "
                "paramhub.torch.init() and whatever else of paramhub.torch comes first"
            )

    def own_address(self) -> str:
        """An IP address of this rank's host that the other ranks can reach."""
        return "127.0.0.1" if self.hubs.is_on_one_host else reachable_address(self._assignment)

    def group(self) -> Group:
        """The group of all ranks, for collectives. The first call makes it; every rank makes that call."""
        if self._group is None:
            self._group = Group("world", self, self.store("group"), timeout=self.options.timeout)
        return self._group

    def store(self, prefix: str) -> dist.Store:
        """A part of the store in which the ranks meet, whose keys begin with ``prefix``."""
        return dist.PrefixStore(prefix, self._store.store)

    def next_process_set(self) -> int:
        """A number for a new process set. All ranks make the same sets in the same order."""
        self._process_sets_made += 1
        return self._process_sets_made

    def add_group(self, group: Group) -> None:
        """Registers a group, so that `leave` leaves it too."""
        self._groups.append(group)

    def remove_group(self, group: Group) -> None:
        """Unregisters a group that leaves on its own."""
        if group.failure() is not None:
            self.failures.record()
        if group in self._groups:
            self._groups.remove(group)

    def lost_among(self, ranks: Sequence[int]) -> tuple[int, BaseException] | None:
        """The position of one of ``ranks`` that a group of this run names as the reason of its failure, and that failure."""
        for group in self._groups:
            failure = group.failure()
            culprit = getattr(failure, "culprit", None)
            if failure is None or culprit is None or culprit >= group.size:
                continue
            rank = group.members[culprit]
            if rank != self.rank and rank in ranks:
                return ranks.index(rank), failure
        return None

    def is_quiet(self) -> bool:
        """Returns whether no group has failed, and no group's operation is under way."""
        return all(group.failure() is None and group.is_idle() for group in self._groups)

    def give_up_groups(self, reason: str) -> None:
        """Fails all groups, in every rank: operations under way and all later ones raise an error with this reason."""
        for group in self._groups:
            group.give_up(f"{reason}: group `{group.name}` is no more")

    def set_timeout(self, seconds: float) -> None:
        """Sets how long ranks wait for one another from now on."""
        self.options = replace(self.options, timeout=seconds)
        self.jobs.options = self.options
        self._store.timeout = seconds

    def label(self, kind: str) -> str:
        """A numbered name for something that every rank makes in the same order: ``kind``-0, ``kind``-1, and so on."""
        number = self._labels.get(kind, 0)
        self._labels[kind] = number + 1
        return f"{kind}-{number}"

    @property
    def run_secret(self) -> RunSecret:
        """The secret that all ranks share."""
        return self._store.secret

    def allgather_text(self, label: str, text: str) -> list[str]:
        """Returns every rank's text, by rank. Each rank calls it once with the same label."""
        return self._store.allgather_text(label, text)

    def leave(self, *, abandon: bool = False) -> None:
        """Leaves every group and job, and stops the hubs of this process once the other ranks have left too.

        With ``abandon`` it waits for nothing: this rank has failed, and the other ranks must fail at once, too.
        """
        groups, jobs = list(self._groups), self.jobs.take_all()
        if any(each.failure() is not None for each in [*groups, *jobs]):
            self.failures.record()
        for group in groups:
            group.leave(abandon=abandon)
        self.jobs.leave(jobs, abandon=abandon)
        trace._finish()
        timeout = (
            0.0 if abandon else EXIT_TIMEOUT_AFTER_FAILURE if self.failures.is_failing() else EXIT_TIMEOUT
        )
        self._store.release_secret(timeout)
        self.hubs.stop_host_hub(timeout)
        if not self.hubs.runs_hub_of_run:
            self._store.announce_exit()
            return
        self._store.wait_for_exits(timeout)
        self.hubs.stop_run_hub()
