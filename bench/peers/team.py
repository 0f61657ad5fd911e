"""A team's processes and the messages to and from them."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import processes
import rows
from json_connection import JsonConnection

HERE = Path(__file__).resolve().parent
# Seconds for four processes to import PyTorch on two busy processors.
START_TIMEOUT = 120.0
# Seconds for a very large exchange, or for the check of its numbers.
ANSWER_TIMEOUT = 600.0
PART_TIMEOUT = 5.0
# Seconds from the first order to the start, in which all ranks receive their orders.
LEAD = 0.005


class Failed(Exception):
    """A team cannot continue; the others can."""


@dataclass
class Timed:
    """One iteration."""

    # The time of the slowest rank.
    seconds: float
    # The mean over the ranks, each during its own exchange.
    cpu_seconds_worker: float
    # Servers and launchers, from before the order to after the last answer.
    cpu_seconds_server: float
    cpu_seconds_all: float
    # It counts all processes on this machine, so it is an upper bound.
    loopback_bytes: int


class TeamProcesses:
    """A started team."""

    def __init__(self, team: rows.Team, binaries: Path, task: dict, scratch: Path, enter_commands: list):
        self.team, self.enter_commands = team, enter_commands
        self.lines, self.ranks, self.started = [], [], []
        # The paths of shared memory segments.
        self.segments = set()
        self.version = ""
        self.scratch = scratch
        self.asleep_since = None
        self.idle_seconds = self.idle_cpu_seconds = 0.0
        self.log = open(scratch / "log", "w+b")
        try:
            self._start(binaries, task)
        except BaseException:
            self.stop()
            raise

    def _start(self, binaries: Path, task: dict) -> None:
        workers = task["workers"]
        path = str(self.scratch / "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(workers)
        variables = environment(self.team, workers)
        rank = [str(binaries / "python"), str(HERE / "rank.py"), self.team.module, path]
        for role in self.team.helpers:
            # MXNet's documentation says that importing the module runs the server.
            self._spawn([str(binaries / "python"), "-c", "import mxnet"], {**variables, "DMLC_ROLE": role})
        if self.team.launcher and self.enter_commands:
            raise Failed("its launcher starts ranks on this machine only")
        if self.team.launcher:
            launcher = [word.format(bin=binaries, workers=workers) for word in self.team.launcher]
            self._spawn(launcher + rank, variables)
        else:
            for enter_command in self.enter_commands or [[]] * workers:
                self._spawn([*enter_command, *rank], variables)
        self._accept(listener, workers)
        for number, line in enumerate(self.lines):
            line.send({**task, "rank": number, "scratch": str(self.scratch)})
        self.version = self._receive_all()[0]["version"]
        self.sleep()

    def _spawn(self, command: list, variables: dict) -> None:
        self.started.append(
            subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                # A process group of its own: only the driver handles Ctrl-C, and ends all processes in order.
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        )

    def _accept(self, listener: socket.socket, workers: int) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        listener.settimeout(0.2)
        while len(self.lines) < workers:
            try:
                connected, _ = listener.accept()
            except socket.timeout:
                ended = [process for process in self.started if process.poll() is not None]
                if ended or time.monotonic() > deadline:
                    raise Failed(self._complaint("did not start")) from None
                continue
            connected.settimeout(ANSWER_TIMEOUT)
            line = JsonConnection(connected)
            self.lines.append(line)
            self.ranks.append(line.receive()["pid"])
        listener.close()

    def iterate(self, form: str) -> Timed:
        self._order({"do": "prepare", "form": form})
        helpers = self._cpu_of_helpers()
        loopback = processes.loopback_bytes()
        reports = self._order({"do": "exchange", "form": form, "start": time.monotonic() + LEAD})
        loopback = processes.loopback_bytes() - loopback
        helpers = self._cpu_of_helpers() - helpers
        cpu_seconds = [report["cpu_seconds"] for report in reports]
        return Timed(
            seconds=max(report["seconds"] for report in reports),
            cpu_seconds_worker=sum(cpu_seconds) / len(cpu_seconds),
            cpu_seconds_server=helpers,
            cpu_seconds_all=sum(cpu_seconds) + helpers,
            loopback_bytes=loopback,
        )

    def check(self, form: str) -> dict:
        reports = self._order({"do": "check", "form": form})
        return {
            "wrong": sum(report["wrong"] for report in reports),
            "max_abs_error": max(report["max_abs_error"] for report in reports),
        }

    def wake(self) -> None:
        """Adds the processor time that the team used while it should have slept."""
        self.idle_seconds += time.monotonic() - self.asleep_since
        self.idle_cpu_seconds += self._cpu_of_all() - self.cpu_then

    def sleep(self) -> None:
        for pid in self.ranks:
            self.segments |= processes.shared_segments(pid)
        self.asleep_since, self.cpu_then = time.monotonic(), self._cpu_of_all()

    def idle_share(self) -> float:
        """The share of one processor that the team used in all its sleeps."""
        return self.idle_cpu_seconds / max(self.idle_seconds, 1e-9)

    def stop(self) -> None:
        for line in self.lines:
            line.hang_up()
        deadline = time.monotonic() + PART_TIMEOUT
        # A rank without a task may wait for other ranks that never start, so only a started team is waited for.
        if self.version:
            for process in self.started:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
        left = [pid for process in self.started for pid in processes.descendants(process.pid)]
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
        # Only descendants of this process are killed, because an id may belong to another process by now.
        mine = set(processes.descendants(os.getpid()))
        processes.kill([pid for pid in {*left, *self.ranks} if pid in mine])
        for process in self.started:
            process.wait()
        # If one rank is killed, mpirun kills the others before they can remove their shared memory.
        for segment in self.segments:
            Path(segment).unlink(missing_ok=True)
        self.log.close()

    def _order(self, order: dict) -> list:
        try:
            for line in self.lines:
                line.send(order)
        except OSError:
            raise Failed(self._complaint("ended too early")) from None
        return self._receive_all()

    def _receive_all(self) -> list:
        reports = []
        deadline = time.monotonic() + ANSWER_TIMEOUT
        for number, line in enumerate(self.lines):
            self._await(line, f"rank {number}", deadline)
            try:
                report = line.receive()
            except OSError:
                report = None
            if report is None:
                raise Failed(self._complaint(f"rank {number} ended too early"))
            if "failed" in report:
                raise Failed(f"rank {number}: {report['failed']}")
            reports.append(report)
        return reports

    def _await(self, line: JsonConnection, name: str, deadline: float) -> None:
        """Waits for a rank's answer. Checks meanwhile whether the team's processes live: a rank whose server has ended would
        wait for it forever."""
        while not select.select([line.socket], [], [], 0.5)[0]:
            if any(process.poll() is not None for process in self.started):
                raise Failed(self._complaint("one of its processes ended too early"))
            if time.monotonic() > deadline:
                raise Failed(self._complaint(f"{name} does not answer"))

    def _cpu_of_helpers(self) -> float:
        ranks = set(self.ranks)
        return sum(processes.cpu_seconds(process.pid) for process in self.started if process.pid not in ranks)

    def _cpu_of_all(self) -> float:
        return self._cpu_of_helpers() + sum(processes.cpu_seconds(pid) for pid in self.ranks)

    def _complaint(self, what: str) -> str:
        """The complaint with the last lines that the team's processes printed, which say more than that they have ended."""
        self.log.flush()
        text = (self.scratch / "log").read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip(" -")]
        return f"{what}: {' | '.join(lines[-3:])[:400]}" if lines else what


def environment(team: rows.Team, workers: int) -> dict:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    variables = {**inherited, **rows.ONE_THREAD, **team.variables}
    if team.helpers:
        variables |= {
            "DMLC_ROLE": "worker",
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(free_port()),
            "DMLC_NUM_SERVER": "1",
            "DMLC_NUM_WORKER": str(workers),
        }
    return variables


def free_port() -> int:
    """A port that was free a moment ago, because MXNet's scheduler cannot choose one itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
