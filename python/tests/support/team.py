"""Runs a function in several fresh processes, which are the ranks of a run. See the fixture `team` in conftest.py."""

from __future__ import annotations

import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rank_tasks import Ended, RankTask, Signal

GRACE = 10.0
"""Seconds that the other ranks have to end once one has failed."""
LAUNCHERS = ("PARAMHUB_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "HOROVOD_")
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Rank:
    """The argument of a rank's function: its rank, and a folder that all ranks of the team share."""

    rank: int
    size: int
    folder: Path

    def mark(self, name: str) -> None:
        """Sets a mark that the other ranks and the test can wait for."""
        (self.folder / f"mark-{name}").touch()

    def await_mark(self, name: str, timeout: float = 60.0) -> None:
        """Waits until a rank or the test has set the mark."""
        await_file(self.folder / f"mark-{name}", timeout)


@dataclass(frozen=True)
class Died:
    """The result of a rank that was expected to die: its exit code, negative for a signal."""

    code: int


class TeamError(AssertionError):
    """Some ranks have failed. The message has every rank's end and what it printed."""


def await_file(path: Path, timeout: float) -> None:
    """Waits until a file exists."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name} was not written within {timeout:g} s")
        time.sleep(0.005)


def clean_environment(**added: str) -> dict[str, str]:
    """The caller's environment without the variables of launchers, and with one thread for each rank's libraries."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in PLACES
    }
    return {**kept, **ONE_THREAD, **added}


def free_port() -> int:
    """A loopback port on which no process listens. It lies below the ports that the system chooses for connections and
    listeners, so that no other process gets it before it is used."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    for _ in range(1000):
        port = random.randrange(10000, max(first, 10100))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")


class ForkServer:
    """The process that forks ranks. There is one for all tests, started with the first team."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            program = Path(__file__).with_name("fork_server.py")
            self._process = subprocess.Popen(
                [sys.executable, str(program), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=clean_environment(),
                start_new_session=True,
            )
        self.socket = Connection(ours.detach())
        self.teams = 0
        # No team's timeout includes the import of torch.
        if not self.socket.poll(300):
            raise TimeoutError("the fork server takes more than 300 s to import torch")
        self.socket.recv()

    def close(self) -> None:
        """Ends the fork server, and with it all remaining ranks."""
        self.socket.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass
class _Run:
    """One team's processes."""

    fork_server: ForkServer
    number: int
    folder: Path
    size: int
    ended: dict[int, int]

    def output(self, rank: int) -> str:
        path = self.folder / f"output-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def outcome(self, rank: int) -> tuple[bool, Any] | None:
        path = self.folder / f"outcome-{rank}"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def listen(self, seconds: float) -> bool:
        """Handles one message, if one arrives in time. Returns whether it did."""
        if not self.fork_server.socket.poll(max(0.0, seconds)):
            return False
        try:
            message = self.fork_server.socket.recv()
        except (EOFError, ConnectionError):
            raise TeamError("the fork server has died: its error is among what the tests print") from None
        if isinstance(message, Ended) and message.team == self.number:
            self.ended[message.rank] = message.code
        return True

    def is_over(self) -> bool:
        return len(self.ended) == self.size

    def signal(self, number: int, *, whole_group: bool = False) -> None:
        self.fork_server.socket.send(Signal(self.number, number, whole_group=whole_group))

    def end(self) -> None:
        """Kills the remaining ranks, and returns when they have ended."""
        if self.is_over():
            return
        self.signal(signal.SIGKILL, whole_group=True)
        while not self.is_over():
            if not self.listen(30):
                raise TeamError("ranks survive SIGKILL")


class Team:
    """Runs functions in fresh processes. The fixture `team` documents how to call it."""

    def __init__(self, start_fork_server: Callable[[], ForkServer], folder: Path) -> None:
        self._start_fork_server = start_fork_server
        self._folder = folder

    def __call__(
        self,
        work: Callable[..., Any],
        *arguments: Any,
        ranks: int = 4,
        env: dict[str, str] | None = None,
        timeout: float = 120.0,
        dies: Iterable[int] = (),
    ) -> list[Any]:
        __tracebackhide__ = True
        fork_server = self._start_fork_server()
        fork_server.teams += 1
        folder = self._folder / f"team-{fork_server.teams}"
        folder.mkdir(parents=True)
        run = _Run(fork_server, fork_server.teams, folder, ranks, {})
        place = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        try:
            for rank in range(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **place, **(env or {})}
                fork_server.socket.send(
                    RankTask(
                        team=run.number,
                        rank=rank,
                        environment=clean_environment(**own),
                        path=sys.path,
                        module=work.__module__,
                        file=work.__code__.co_filename,
                        function=work.__qualname__,
                        arguments=pickle.dumps((Rank(rank, ranks, folder), *arguments)),
                        folder=str(folder),
                        outcome=str(folder / f"outcome-{rank}"),
                        output=str(folder / f"output-{rank}"),
                    )
                )
            hung = _await_end(run, frozenset(dies), timeout)
        finally:
            run.end()
        return _results(run, frozenset(dies), hung)


def _await_end(run: _Run, dies: frozenset[int], timeout: float) -> str | None:
    """Waits for the ranks' end. Returns why the running ranks must be killed, or None if all have ended."""
    deadline, reason = time.monotonic() + timeout, f"had not ended after {timeout:g} s"
    failed = False
    while not run.is_over() and time.monotonic() < deadline:
        run.listen(deadline - time.monotonic())
        if not failed and any(code != 0 and rank not in dies for rank, code in run.ended.items()):
            failed = True
            if time.monotonic() + GRACE < deadline:
                deadline, reason = (
                    time.monotonic() + GRACE,
                    f"had not ended {GRACE:g} s after another had failed",
                )
    if run.is_over():
        return None
    # At this signal ranks print the stacks of their threads.
    run.signal(signal.SIGUSR1)
    stacks_until = time.monotonic() + 1.0
    while not run.is_over() and time.monotonic() < stacks_until:
        run.listen(stacks_until - time.monotonic())
    return reason


def _results(run: _Run, dies: frozenset[int], hung: str | None) -> list[Any]:
    __tracebackhide__ = True
    results: list[Any] = []
    problems: list[str] = []
    for rank in range(run.size):
        code, outcome = run.ended[rank], run.outcome(rank)
        if rank in dies and code != 0:
            results.append(Died(code))
            continue
        if hung is not None and code == -signal.SIGKILL:
            problem = f"{hung}, and was killed; where it was is below"
        elif rank in dies:
            problem = "was to die, but ended well"
        elif code == 0 and outcome is not None and outcome[0]:
            results.append(outcome[1])
            continue
        elif outcome is None:
            problem = _exit(code) + " without a result"
        elif outcome[0]:
            problem = _exit(code) + " after its function had returned"
        else:
            problem = f"raised {str(outcome[1]).strip().splitlines()[-1]}"
        problems.append(f"rank {rank} {problem}")
    if problems:
        outputs = [f"---- rank {rank} printed\n{run.output(rank).rstrip()}" for rank in range(run.size)]
        raise TeamError("\n".join([*problems, *outputs]))
    return results


def _exit(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
