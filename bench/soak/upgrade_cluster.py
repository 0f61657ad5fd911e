"""The programs of one upgrade or loss: a manager, hubs, jobs and their workers, and what came of the jobs."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import statistics
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kills import free_ports
from processes import end_all

WORKER = Path(__file__).with_name("upgrade_worker.py")
JOBS = ("first", "second")
WORKERS = 2
HUBS = 3
BOUND_S = 120.0
"""Seconds within which each part of the upgrade must be done."""
STEPS_BEFORE = 50
STEPS_AFTER = 200
"""The steps that a job makes after the upgrade, at least. A worker reads in time that they are the last ones."""


class Stuck(Exception):
    """Something has failed, or has not come about within the bound."""


@dataclass
class JobResult:
    """What came of a job."""

    job: str
    steps: int
    lost: int
    longest_s: float
    longest_in: str
    median_s: float
    bits: list[str]


class Cluster:
    """A manager, hubs and jobs, in a folder of their own."""

    def __init__(
        self, arguments: argparse.Namespace, folder: Path, run_options: tuple[str, ...] = ()
    ) -> None:
        self.arguments, self.folder, self.run_options = arguments, folder, run_options
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(1 + HUBS)]
        self.url = f"http://{self.addresses[0]}"
        self.program = arguments.before
        """The version of the manager, and of the commands that are given to it."""
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.phases: list[tuple[float, str]] = []
        """When each part of the upgrade began."""

    def start(self) -> None:
        """Starts everything of the older version, and waits until all workers make steps."""
        self._start_manager(self.arguments.before)
        for number in range(1, 1 + HUBS):
            self._start_hub(number, self.arguments.before)
        for name in JOBS:
            how = ["--hubs", str(HUBS), "--replicas", "1", "--name", name, *self.run_options]
            worker = [
                self.arguments.workers,
                str(WORKER),
                str(self.folder),
                name,
                str(self.arguments.compute_ms),
            ]
            run = ["run", "--hub", self.url, "-n", str(WORKERS), *how, "--", *worker]
            self.jobs[name] = self._start(f"job-{name}", [self.arguments.before, *run])

    def upgrade(self) -> None:
        """Replaces all hubs, and the manager if it is to be."""
        self._await_beginning()
        if self.arguments.manager == "first":
            self._upgrade_manager()
        for number in range(1, 1 + HUBS):
            self._upgrade_hub(number)
        if self.arguments.manager == "last":
            self._upgrade_manager()
        self._begin("end")
        time.sleep(self.arguments.pause)

    def lose_hub(self, number: int, pause_s: float, is_frozen: bool) -> None:
        """Kills a hub, or freezes it until all jobs have gone on without it. The jobs have no standbys then."""
        self._await_beginning()
        time.sleep(pause_s)
        known = self._hub_at(number)
        self._begin("loss")
        hub = self.servers[number]
        hub.send_signal(signal.SIGSTOP if is_frozen else signal.SIGKILL)
        took_over = rf"hub {known} \(.*\) was lost.* takes over"
        try:
            self._await("its standbys", lambda: all(re.search(took_over, each) for each in self._reasons()))
        finally:
            if is_frozen:
                hub.send_signal(signal.SIGCONT)
        self._begin("end")
        time.sleep(self.arguments.pause)

    def _reasons(self) -> list[str]:
        return [str(self._get(f"jobs/{name}")["message"]) for name in JOBS]

    def _await_beginning(self) -> None:
        self._await("steps of all workers", lambda: all(self._made(name) > STEPS_BEFORE for name in JOBS))
        self._await("standbys of all jobs", self._have_standbys)

    def _upgrade_hub(self, number: int) -> None:
        known = self._hub_at(number)
        self._begin(f"drain {number}")
        command = [self.program, "hubs", "drain", str(known), "--hub", self.url, "--timeout", str(BOUND_S)]
        drained = subprocess.run(command, check=False, capture_output=True, text=True)
        (self.folder / f"drain-{number}.log").write_text(drained.stdout + drained.stderr)
        if drained.returncode != 0:
            raise Stuck(f"hub {known} has not been drained: {drained.stdout}{drained.stderr}")
        self._begin(f"wait {number}")
        time.sleep(self.arguments.idle)
        self._begin(f"stop {number}")
        self._end(number)
        self._begin(f"start {number}")
        self._start_hub(number, self.arguments.after)
        self._await(f"hub {number} to join", lambda: self._hub_at(number) not in (known, None))
        self._begin(f"standbys {number}")
        self._await("standbys of all jobs", self._have_standbys)
        self._begin(f"pause {number}")
        time.sleep(self.arguments.pause)

    def _upgrade_manager(self) -> None:
        self._begin("manager")
        self._end(0)
        self.program = self.arguments.after
        self._start_manager(self.program)
        began = time.monotonic()
        self._await("hubs to call the new manager", lambda: self._has_heard_hubs_since(began))
        self._await("standbys of all jobs", self._have_standbys)
        self._begin("pause after the manager")
        time.sleep(self.arguments.pause)

    def finish(self, steps: dict[str, int] | None = None) -> list[JobResult]:
        """Lets each job end after so many steps, or after some more than it has made, and returns what came of them."""
        for name in JOBS:
            last = steps[name] if steps is not None else self._made(name) + STEPS_AFTER
            (self.folder / "new").write_text(str(last))
            (self.folder / "new").rename(self.folder / f"{name}.end")
        self._await("the end of all jobs", self._have_ended, 10 * BOUND_S)
        return [self._result(name) for name in JOBS]

    def _result(self, name: str) -> JobResult:
        begun = self.phases[0][0] if self.phases else 0.0
        of_ranks = [self._steps(name, rank) for rank in range(WORKERS)]
        steps = int((self.folder / f"{name}.end").read_text())
        lost = 0
        for of_rank in of_ranks:
            counts = Counter(step for step, _ in of_rank)
            lost += sum(abs(counts[step] - (step < steps)) for step in {*range(steps), *counts})
        ends = [[at for _, at in of_rank] for of_rank in of_ranks]
        gaps = [gap for at in ends for gap in itertools.pairwise(at) if gap[1] > begun]
        longest = max(gaps, key=lambda gap: gap[1] - gap[0])
        bits = sorted({(self.folder / f"{name}-{rank}.bits").read_text() for rank in range(WORKERS)})
        seconds = [end - begin for begin, end in gaps]
        return JobResult(
            name, steps, lost, max(seconds), self._phase(longest), statistics.median(seconds), bits
        )

    def _phase(self, gap: tuple[float, float]) -> str:
        """What happened in this time."""
        names = ["undisturbed"]
        for at, name in self.phases:
            if at <= gap[0]:
                names = [name]
            elif at <= gap[1]:
                names.append(name)
        return ", ".join(names)

    def _begin(self, phase: str) -> None:
        self.phases.append((time.monotonic(), phase))
        with (self.folder / "phases").open("a") as file:
            file.write(f"{self.phases[-1][0]} {phase}\n")

    def _start_manager(self, program: str) -> None:
        command = ["manager", "--listen", self.addresses[0], "--state", str(self.folder / "state")]
        self.servers[0] = self._start(f"manager-{len(self.phases)}", [program, *command])
        self._await("the manager", lambda: self._answers() or self._is_running(0))

    def _start_hub(self, number: int, program: str) -> None:
        command = ["hub", "--listen", self.addresses[number], "--join", self.url]
        self.servers[number] = self._start(f"hub-{number}-{len(self.phases)}", [program, *command])
        self._await(f"hub {number}", lambda: self._hub_at(number) is not None or self._is_running(number))

    def _is_running(self, number: int) -> bool:
        """Returns False, and raises if the server has ended."""
        if self.servers[number].poll() is not None:
            raise Stuck(f"server {number} has ended: see its log")
        return False

    def _end(self, number: int) -> None:
        server = self.servers[number]
        end_all([server])
        if server.returncode != 0:
            raise Stuck(f"server {number} has ended with {server.returncode}")

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _answers(self) -> bool:
        try:
            self._get("hubs")
        except OSError:
            return False
        return True

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/v1/{path}", timeout=20) as answer:
            return json.load(answer)

    def _hub_at(self, number: int) -> int | None:
        """The number that the manager has given to the hub at this address, if it knows one."""
        at = {each["shape"]["interfaces"][0]["address"]: each["hub"] for each in self._get("hubs")}
        return at.get(self.addresses[number])

    def _have_ended(self) -> bool:
        return all(job.poll() == 0 for job in self.jobs.values())

    def _has_heard_hubs_since(self, moment: float) -> bool:
        hubs, seconds = self._get("hubs"), time.monotonic() - moment
        return len(hubs) == HUBS and all(hub["silent_s"] < seconds for hub in hubs)

    def _have_standbys(self) -> bool:
        jobs = [self._get(f"jobs/{name}") for name in JOBS]
        return all(job["standbys"]["ready"] == job["standbys"]["shares"] > 0 for job in jobs)

    def _steps(self, name: str, rank: int) -> list[tuple[int, float]]:
        """The steps of a worker, and when each ended."""
        try:
            lines = (self.folder / f"{name}-{rank}.steps").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(step), float(at)) for step, at in (line.split() for line in lines)]

    def _made(self, name: str) -> int:
        """The steps that all workers of the job have made."""
        return min(len(self._steps(name, rank)) for rank in range(WORKERS))

    def _await(self, what: str, is_there: Callable[[], bool], bound_s: float = BOUND_S) -> None:
        until = time.monotonic() + bound_s
        while not is_there():
            for name, job in self.jobs.items():
                if job.poll() not in (None, 0):
                    raise Stuck(f"job {name} has failed while the program waited for {what}")
            if time.monotonic() > until:
                raise Stuck(f"waited for {bound_s:.0f} s for {what}")
            time.sleep(0.02)

    def logs(self) -> str:
        """The end of what each program has said."""
        return "\n".join(
            f"{log.name}:\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        end_all(
            [*self.jobs.values(), *(self.servers[number] for number in sorted(self.servers, reverse=True))]
        )
