"""Kills and stops the processes of jobs that outlive their workers, and checks every step that they make.

    python bench/soak/faults.py --paramhub target/release/paramhub --runs 100 --faults 10 --seed 1

Each run has a connection manager that keeps its state, two hubs, and ``paramhub run --on-worker-loss`` with four workers in
Python, which needs the package and numpy. The seed chooses what befalls them, one fault after the other: SIGKILL for
a worker, SIGSTOP for a worker for up to four seconds (it counts as lost after two), or SIGKILL for the manager, which is
started again up to three seconds later. A third of the jobs go on with any one worker (``continue``), a third need all of
them, and in a third all go back when one is lost (``rewind``).

Each worker contributes a value of its own. So the change of a chunk tells who is in the mean: the worker itself, once. In jobs
that need all workers, every fault may cost a part of one step, and all other steps have every worker; in those that go back
every step has every worker. A run is right if no
worker sees anything else, all end with equal parameters, and the launcher ends well within a bound. Each run prints its seed;
the exit code is 1 if any run was wrong. This program ends all processes that it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kills import free_ports
from processes import end_all

WORKERS = 4
BOUND_S = 120.0
"""Seconds within which the job must end after its last fault."""
PAUSES_S = (0.05, 1.0)
"""Seconds between two faults, at least and at most."""
POLICIES = (("continue", 1), ("continue", WORKERS), ("rewind", WORKERS))
"""What becomes of a job that loses a worker, and the workers that it needs for a step."""
FAULTS = ("kill", "kill", "stop", "manager")
WORKER = Path(__file__).with_name("faults_worker.py")


class Run:
    """The processes of one run, in a folder of its own."""

    def __init__(self, paramhub: str, seed: int, steps: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.paramhub, self.folder = paramhub, folder
        self.policy, self.least = self.random.choice(POLICIES)
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
        self.url = f"http://{self.addresses[0]}"
        self.log = folder / "log"
        self.output = self.log.open("wb")
        self.manager = self._start_manager()
        until = time.monotonic() + BOUND_S
        while "manager ready" not in self.text() and time.monotonic() < until:
            time.sleep(0.02)
        joined = ["--join", self.url]
        self.hubs = [self._start(["hub", "--listen", address, *joined]) for address in self.addresses[1:]]
        how = ["--on-worker-loss", self.policy, "--dead-after", "2"]
        if self.policy == "continue":
            how += ["--min-workers", str(self.least)]
        else:
            how += ["--rewind-every", str(self.random.choice((1, 5)))]
        job = ["run", "--hub", self.url, "--hubs", "2", "-n", str(WORKERS), "--name", "faults", *how]
        again = ["--linger", "60", "--max-restarts", "1000"]
        worker = [sys.executable, str(WORKER), str(steps), self.policy]
        self.launcher = self._start([*job, *again, "--", *worker])
        self.stopped: list[tuple[float, int]] = []
        self.manager_back_at = 0.0

    def _start_manager(self) -> subprocess.Popen[bytes]:
        state = ["--state", str(self.folder / "state")]
        return self._start(["manager", "--listen", self.addresses[0], *state])

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([self.paramhub, *arguments], stdout=self.output, stderr=self.output)

    def has_begun(self) -> bool:
        """Returns whether every worker has made a step. Before that a job does not outlive a worker."""
        return len(set(re.findall(r"rank (\d) has begun", self.text()))) == WORKERS

    def keep_up(self) -> None:
        """Wakes workers that have been stopped for long enough, and starts a manager that was killed."""
        now = time.monotonic()
        for due in [each for each in self.stopped if each[0] <= now]:
            self.stopped.remove(due)
            with contextlib.suppress(ProcessLookupError):
                os.kill(due[1], signal.SIGCONT)
        if self.manager.poll() is not None and now >= self.manager_back_at:
            self.manager = self._start_manager()

    def strike(self) -> str | None:
        """Does what the seed chooses next. Returns what that was, or None if nobody was there for it."""
        fault = self.random.choice(FAULTS)
        seconds, choice = self.random.random(), self.random.random()
        if fault == "manager":
            if self.manager.poll() is not None:
                return None
            self.manager.kill()
            self.manager_back_at = time.monotonic() + 3 * seconds
            return fault
        stopped = {process for _, process in self.stopped}
        workers = [process for process in self._workers() if process not in stopped]
        if not workers:
            return None
        worker = workers[int(choice * len(workers))]
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "stop":
            self.stopped.append((time.monotonic() + 4 * seconds, worker))
        return fault

    def _workers(self) -> list[int]:
        """The processes of ranks."""
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_worker = (
                    process.name.isdigit()
                    and (process / "cmdline").read_bytes().split(b"\0")[1:2] == [str(WORKER).encode()]
                    and str(self.folder).encode() in (process / "environ").read_bytes()
                )
                if is_worker:
                    found.append(int(process.name))
        return sorted(found)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        for _, process in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        end_all((self.launcher, *self.hubs, self.manager))
        self.output.close()


def disturbed(arguments: argparse.Namespace, seed: int) -> str | None:
    """Runs a job with faults. Returns what was wrong with it, or None."""
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="paramhub-faults-") as folder:
        # The workers of this run are known by it.
        os.environ["PARAMHUB_TEST_FAULTS"] = folder
        run = Run(arguments.paramhub, seed, arguments.steps, Path(folder))
        began = time.monotonic()
        problem = None
        try:
            problem = play(run, arguments.faults, done)
        finally:
            run.close()
        if problem is not None:
            print(run.text()[-8000:], file=sys.stderr)
    faults = ", ".join(f"{count} x {fault}" for fault, count in sorted(done.items()))
    seconds = time.monotonic() - began
    print(
        f"seed {seed}, {run.policy} with {run.least} or more workers: {faults}; {seconds:.0f} s: {problem or 'right'}",
        flush=True,
    )
    if problem is None and done.total() < arguments.faults:
        problem = f"it ended after {done.total()} faults: give --steps more"
        print(problem, flush=True)
    return problem


def play(run: Run, faults: int, done: Counter[str]) -> str | None:
    until = time.monotonic() + BOUND_S
    while not run.has_begun():
        if time.monotonic() > until or run.launcher.poll() is not None:
            return "the job has not begun"
        time.sleep(0.02)
    while done.total() < faults and run.launcher.poll() is None:
        until = time.monotonic() + run.random.uniform(*PAUSES_S)
        while time.monotonic() < until:
            run.keep_up()
            time.sleep(0.02)
        if (fault := run.strike()) is not None:
            done[fault] += 1
    until = time.monotonic() + BOUND_S
    while run.launcher.poll() is None:
        run.keep_up()
        if time.monotonic() > until:
            return f"the job has not ended {BOUND_S:.0f} s after the last fault"
        time.sleep(0.05)
    text = run.text()
    if wrong := re.findall(r"WRONG.*", text):
        return wrong[0]
    lacking = set(re.findall(r"step (\d+) lacks a rank", text))
    if run.least == WORKERS and len(lacking) > done["kill"] + done["stop"]:
        return f"{len(lacking)} steps lack a rank, of a job that needs all"
    if run.launcher.returncode != 0:
        return f"the launcher has ended with {run.launcher.returncode}"
    ends = set(re.findall(r"rank \d ends with (\w+)", text))
    if len(ends) != 1:
        return f"the ranks end with {len(ends)} different parameters"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--paramhub", default="paramhub", help="the program")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=10, help="of each run")
    parser.add_argument(
        "--steps", type=int, default=1500, help="of the job: it must not end before the last fault"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first run; each further one has the next"
    )
    arguments = parser.parse_args()
    first = arguments.seed if arguments.seed is not None else random.randrange(1 << 32)
    wrong = [seed for seed in range(first, first + arguments.runs) if disturbed(arguments, seed)]
    print(
        f"{arguments.runs} runs of {arguments.faults} faults: {len(wrong)} wrong"
        f"{f', seeds {wrong}' if wrong else ''}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
