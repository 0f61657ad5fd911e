"""The jobs of a run: ranks open each job together at the run's hub, and leave it together."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paramhub import _native
from paramhub._hub import create_job
from paramhub.errors import ConnectError, JobFailedError, MisuseError, Rewound
from paramhub.torch._job_options import LINGER_DEFAULT
from paramhub.torch._log import log
from paramhub.torch._options import Options
from paramhub.torch._run_hubs import RunHubs
from paramhub.torch._run_store import RunStore
from paramhub.torch._shutdown import EXIT_TIMEOUT_AFTER_FAILURE, FailureState, run_with_timeout


@dataclass(frozen=True)
class _Opening:
    """How this rank has joined a job, so that it can join again."""

    url: str
    namespace: str
    secret: str
    rank: int
    settings: str
    shared_parameters: str
    peers: bool
    hub_rank: int | None


class RunJobs:
    """The jobs that this rank has open."""

    def __init__(
        self,
        rank: int,
        size: int,
        hubs: RunHubs,
        store: RunStore,
        options: Options,
        failures: FailureState,
        *,
        takes_launcher_job: bool = True,
    ) -> None:
        self._rank = rank
        self._size = size
        self._hubs = hubs
        self._store = store
        self.options = options
        self._failures = failures
        self._openings: dict[_native.Job, _Opening] = {}
        """The open jobs, oldest first, and how they were opened."""
        self._launcher_ticket = _launcher_ticket() if takes_launcher_job else None
        self._former: tuple[bool, int, str] | None = None
        """How the job ended that an earlier start of this run had in the place of the newest one, if it has."""

    @property
    def has_launcher_job(self) -> bool:
        """Returns whether `paramhub run` has created a job for this run that is not open yet."""
        return self._launcher_ticket is not None

    def open(
        self,
        label: str,
        settings: dict[str, Any],
        ranks: Sequence[int] | None = None,
        *,
        shared_parameters: str = "never",
        inherits: bool = False,
        is_of_optimizer: bool = False,
        replaces: bool = False,
        peers: bool = False,
    ) -> _native.Job:
        """Opens a job that all of ``ranks`` (by default every rank) open under the same label with the same settings.

        The first of them creates it and sends its ticket to the others through the store. Settings are those of InitService, in
        the hub's names; ``reproducible`` is added from the run's options if it is left out. The job that ``paramhub run`` has
        created, with its name and its checkpoints, goes to the first call of all ranks with ``inherits``: a job that exchanges
        gradients, and that they open at the same point.
        ``is_of_optimizer`` says that the parameters are at the hub. The job then has the run's consistency, checkpoints and
        treatment of stragglers, and stays when ranks are lost, if the run asks for it: a later start of the run finds it by its
        name.
        ``replaces`` says that the job takes the place of one that this rank has left, and which went on from the checkpoint that
        the run asked for.
        ``shared_parameters`` says whether results are read from one copy for all ranks of the host: ``never``,
        ``where possible`` or ``always``. ``peers`` is for jobs whose layers may be exchanged as factors, from rank to rank.
        """
        members = list(range(self._size)) if ranks is None else list(ranks)
        rank = members.index(self._rank)
        hub = self._hubs.access
        of_run = {"reproducible": self.options.reproducible}
        if hub.chunk_bytes is not None:
            of_run["chunk_bytes"] = hub.chunk_bytes
        if is_of_optimizer and (consistency := hub.job.consistency_setting()) is not None:
            of_run["consistency"] = consistency
        settings = {**of_run, **settings}
        text = json.dumps(settings)
        # A ring gives each link one stream each way: docs/decisions/pytorch.md.
        by_hosts = "ring" if hub.deployment == "cs" else "auto"
        waits = settings.get("consistency", "synchronous") == "synchronous" and not (
            is_of_optimizer and hub.job.leaves_out_late
        )
        is_flat = bool(hub.job.replicas) or not self._may_sum_by_host(settings, text, waits)
        reduction = "flat" if is_flat else hub.job.reduction or by_hosts
        stays = is_of_optimizer and hub.job.outlives_ranks
        opening = _Opening(
            *self._ticket(label, members, rank, inherits, is_of_optimizer, replaces, reduction),
            rank=rank,
            settings=text,
            shared_parameters=shared_parameters,
            peers=peers,
            # If several hosts have hubs, a worker cannot know which hub is lost.
            hub_rank=members.index(0)
            if hub.is_embedded and self._hubs.is_on_one_host and 0 in members
            else None,
        )
        job = self._join(opening, len(members) if stays and hub.job.on_worker_loss == "rewind" else None)
        self._say_what_has_ended(job)
        if stays and hub.job.on_worker_loss == "continue":
            self._check_steps(label, job, members)
        return job

    def _say_what_has_ended(self, job: _native.Job) -> None:
        """Warns if the run's earlier start has ended, so that this one does not go on with it. Rank 0 of the job knows."""
        former, self._former = self._former, None
        if former is None or job.resumed_step is not None:
            return
        has_finished, steps, why = former
        run = self._hubs.access.run
        if has_finished:
            log(
                f"WARNING: run {run} finished at step {steps}: all of its ranks had left, and its hub has freed the parameters. "
                "This start begins anew, at step 0. What may fail after the training loop, such as an evaluation, belongs "
                "before optimizer.close() and paramhub.torch.shutdown()"
            )
        else:
            log(
                f"WARNING: run {run} had failed at step {steps} ({why}), and its hub has freed the parameters. This start begins "
                "anew, at step 0"
            )

    def rejoin(self, job: _native.Job) -> _native.Job:
        """Joins a job again whose ranks go back to an earlier step, with the settings with which it was opened. Returns this
        rank's new part in it."""
        opening = self._openings[job]
        self.close(job, abandon=True)
        return self._join(opening, patience=self._patience())

    def _patience(self) -> float:
        """How long a rank that goes back waits for a connection manager that has ended with its hub."""
        linger = self._hubs.access.job.linger
        return LINGER_DEFAULT if linger is None else linger

    def _join(
        self, opening: _Opening, workers: int | None = None, patience: float | None = None
    ) -> _native.Job:
        """Joins a job. ``workers`` is the number of ranks that have been started together, if this process begins with it.
        ``patience`` is how long it calls a connection manager that is away, if not the default."""
        hub = self._hubs.access
        while True:
            try:
                member = _native.connect(
                    opening.url,
                    opening.namespace,
                    opening.secret,
                    opening.rank,
                    transport=self.options.transport,
                    host=self._hubs.host,
                    rack=self._hubs.host if hub.deployment == "cs" else None,
                    interfaces=self.options.interfaces,
                    shared_parameters=opening.shared_parameters,
                    # The manager's own timeout, which names the missing ranks, ends first.
                    rendezvous_timeout=self.options.timeout + 30.0,
                    peers=opening.peers,
                    hub_rank=opening.hub_rank,
                    workers=workers,
                    manager_patience=patience,
                )
                job = member.init(opening.settings)
            except Rewound:
                # Another rank was lost while this one joined. The manager bounds how long the job waits for its ranks. If a
                # launcher has started all again, their number counts, and not that of this start.
                workers, patience = None, self._patience()
                continue
            self._openings[job] = opening
            return job

    def _check_steps(self, label: str, job: _native.Job, members: list[int]) -> None:
        """Checks that all ranks begin a job at one step. No rank goes on, and perhaps leaves, before all have joined.

        A hub that had not yet noticed the end of a rank may have let others join before that rank was lost, at an earlier step.
        """
        steps = self._store.allgather_text(f"joined/{label}", str(job.resumed_step), members)
        if len(set(steps)) > 1:
            raise ConnectError(
                f"rank {self._rank}: the ranks would go on from different steps ({', '.join(steps)}, by rank), since the hub "
                "noticed late that an earlier process of a rank had ended: start all ranks again"
            )

    def _may_sum_by_host(self, settings: dict[str, Any], text: str, waits: bool) -> bool:
        """Returns whether the hosts' hubs can sum for their ranks in a job with these settings, whose JSON is ``text``, and of
        which ``waits`` says whether every step waits for all ranks. If they cannot, every rank exchanges with every hub."""
        if _native.conflict(["several-sites"], text) is not None:
            return False
        # Ranks of one host would wait for one another, where the run asks that no rank waits for all others.
        is_asked = self._hubs.access.job.reduction not in (None, "auto")
        if not waits and not is_asked:
            return False
        # With one rank on each host there is nothing to sum there, and layers can go from rank to rank.
        return (
            "layers" not in settings or self._hubs.access.deployment != "cs" or self._hubs.hosts < self._size
        )

    def _ticket(
        self,
        label: str,
        members: list[int],
        rank: int,
        inherits: bool,
        is_of_optimizer: bool,
        replaces: bool,
        reduction: str,
    ) -> tuple[str, str, str]:
        """The job's URL, namespace and secret: from the launcher, from the member that creates the job, or created here."""
        # The launcher chose its job's reduction before the settings were known.
        asked, hubs = self._hubs.access.job.reduction, self._hubs
        fits = reduction != "flat" or asked == "flat" or not (hubs.hosts > 1 or hubs.sums_by_host)
        if self._launcher_ticket is not None and inherits and fits and len(members) == self._size:
            ticket, self._launcher_ticket = self._launcher_ticket, None
            _taken.append(ticket)
            return ticket
        if rank != 0:
            text = self._store.read(f"job/{label}", f"rank {members[0]} has not created the job for {label}")
            if text.startswith("["):
                self._store.acknowledge_failure()
                raise ConnectError(
                    f"rank {members[0]} could not create the job for {label}: {json.loads(text)[0]}"
                )
            return tuple(json.loads(self._store.secret.open(f"job/{label}", text)))
        hub = self._hubs.access
        options: dict[str, Any] = hub.job.of_every_job()
        if inherits:
            options |= hub.job.of_gradients_job(reduction)
        if is_of_optimizer:
            options |= hub.job.of_optimizers_job(len(members))
        if replaces and "resume" in options:
            options["resume"] = "auto"
        finds = is_of_optimizer and hub.job.outlives_ranks
        # What a later start is to find has the same name then. Of other jobs another start may still be there.
        is_kept = finds or "checkpoint_every" in options or "resume" in options
        run = hub.run if is_kept else secrets.token_hex(4)
        name = f"{_script_name()}-{run}/{label}"
        try:
            self._check_places(options)
            if finds:
                self._former = _native.ended_job(hub.url, name, admin_token=hub.admin_token, patience=10.0)
            ticket = create_job(
                hub.url,
                name,
                len(members),
                admin_token=hub.admin_token,
                rendezvous_timeout=self.options.timeout,
                dead_after=self.options.dead_after,
                patience=10.0,
                reduction=reduction,
                find=finds,
                **options,
            )
        except Exception as error:
            self._store.report_failure(f"job/{label}", json.dumps([str(error)]))
            raise
        self._store.write_secret(f"job/{label}", json.dumps(ticket))
        return ticket

    def _check_places(self, options: dict[str, Any]) -> None:
        """Raises MisuseError if the run asks how hosts and racks sum, and its only hub serves all ranks of one host. The
        connection manager would wait until the timeout, since hubs of racks might come."""
        hubs = self._hubs
        if not (hubs.access.is_embedded and hubs.is_on_one_host) or hubs.sums_by_host:
            return
        asked = {
            "rounded-sums": options.get("between_sites") not in (None, "f32"),
            "optimizer-at-owner": options.get("optimize_at") == "owner",
        }
        conflict = _native.conflict(
            ["unplaced-hubs", *(name for name, is_asked in asked.items() if is_asked)]
        )
        if conflict is not None:
            raise MisuseError(conflict[0])

    def close(self, job: _native.Job, *, abandon: bool = False) -> None:
        """Leaves a job before the end of the run. With ``abandon`` it does not wait; the hub then notices the end of this
        process."""
        self._openings.pop(job, None)
        if abandon:
            job.abandon()
            return
        try:
            job.leave()
        except JobFailedError:
            self._failures.record()
            raise

    def forget(self, job: _native.Job) -> None:
        """Drops the run's reference to a job: the job ends when its last user drops it."""
        self._openings.pop(job, None)

    def take_all(self) -> list[_native.Job]:
        """Returns the open jobs, for `leave`, and drops them here."""
        jobs, self._openings = list(self._openings), {}
        return jobs

    def leave(self, jobs: Sequence[_native.Job], *, abandon: bool) -> None:
        """Leaves jobs at the end of the run, the newest first."""
        for job in reversed(jobs):
            if abandon:
                job.abandon()
                continue
            try:
                # After a failure, requests may wait for a rank that has ended or hangs. They end when this process does.
                timeout = EXIT_TIMEOUT_AFTER_FAILURE if self._failures.is_failing() else None
                if not run_with_timeout(timeout, job.leave):
                    self._failures.record()
            except JobFailedError as error:
                # Without a request after the failure, the program has not got the error.
                if not self._failures.was_raised(error):
                    log(f"rank {self._rank}: {error}")
                self._failures.record()


_taken: list[tuple[str, str, str]] = []
"""The launcher's job, once a world of this process has taken it."""


def _launcher_ticket() -> tuple[str, str, str] | None:
    """The job that `paramhub run` has created for this run, unless an earlier world of this process has taken it."""
    values = [os.environ.get(name, "") for name in ("PARAMHUB_URL", "PARAMHUB_JOB", "PARAMHUB_SECRET")]
    return (values[0], values[1], values[2]) if all(values) and not _taken else None


def _script_name() -> str:
    """The training script's name, in characters that a job's name may have."""
    name = os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0]
    kept = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name
    )
    return kept[:64].strip("-") or "torch"
