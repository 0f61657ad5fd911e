"""Kills a training's processes at random and checks that it ends bit-equal to an undisturbed training.

    python bench/soak/kills.py --paramhub target/release/paramhub --runs 20 --kills 10 --seed 1

Each run has a connection manager, two hubs that share a folder of checkpoints, and ``paramhub train --reproducible`` with three
workers. The program ends processes that the seed chooses with SIGKILL, one after the other: workers, hubs, manager, or launcher.
Then it does what an operator would do: it starts a killed hub or manager again at its address, and a launcher that has ended with
an error again with ``--resume``. A run is right if the training ends within a bound, with parameters that are bit-equal to those
of the undisturbed training. Each run prints its seed; the exit code is 1 if any run was wrong. This program ends all processes
that it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from processes import end_all

WORKERS = 3
TRAIN = ["--workers", str(WORKERS), "--reproducible", "--net", "mlp", "--batch", "8"]
EVERY = ["--checkpoint-every", "50"]
BOUND_S = 120.0
"""Seconds within which the training must end after its last launch."""
PAUSES_S = (0.1, 2.0)
"""Seconds between two kills, at least and at most."""
TARGETS = ("worker", "hub", "manager", "launcher")


class Stuck(Exception):
    """The training has not ended within the bound, or the undisturbed training failed."""


class Run:
    """The processes of one run, in a folder of its own."""

    def __init__(self, paramhub: str, epochs: int, folder: Path) -> None:
        self.paramhub, self.epochs, self.folder = paramhub, epochs, folder
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
        self.url = f"http://{self.addresses[0]}"
        self.log = (folder / "log").open("w")
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.launcher: subprocess.Popen[bytes] | None = None
        self.launches = 0

    def keep_up(self) -> None:
        """Starts servers that have ended again, and a launcher that has failed."""
        for number in range(len(self.addresses)):
            process = self.servers.get(number)
            if process is None or process.poll() is not None:
                self.servers[number] = self._start(self._server(number))
        if (self.launcher is None or self.launcher.poll() not in (None, 0)) and self.manager_answers():
            self.launches += 1
            # Without a complete checkpoint `--resume` would fail.
            resume = ["--resume"] if self.has_checkpoint() else []
            job = ["train", "--hub", self.url, "--hubs", "2", "--name", "killed", *EVERY, *resume]
            self.launcher = self._start(
                [*job, *TRAIN, "--epochs", str(self.epochs), "--save", str(self.saved)]
            )

    def _server(self, number: int) -> list[str]:
        address = self.addresses[number]
        if number == 0:
            state = str(self.folder / "state")
            return ["manager", "--listen", address, "--state", state, "--hub-dead-after", "2"]
        return [
            "hub",
            "--listen",
            address,
            "--join",
            self.url,
            "--checkpoints",
            str(self.folder / "checkpoints"),
        ]

    def _start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([self.paramhub, *arguments], stdout=self.log, stderr=self.log)

    def manager_answers(self) -> bool:
        host, _, port = self.addresses[0].partition(":")
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
        except OSError:
            return False
        return True

    def has_checkpoint(self) -> bool:
        """Returns whether both hubs have written their parts of some checkpoint."""
        steps = (self.folder / "checkpoints" / "killed").glob("step-*")
        return any(all((step / f"hub-{hub}.json").exists() for hub in range(2)) for step in steps)

    @property
    def saved(self) -> Path:
        return self.folder / "parameters.safetensors"

    def has_ended(self) -> bool:
        return self.launcher is not None and self.launcher.poll() == 0

    def kill(self, target: str, random_: random.Random) -> bool:
        """Kills a process of this kind. Returns whether there was one."""
        if target == "manager":
            processes = [self.servers[0].pid]
        elif target == "hub":
            processes = [process.pid for number, process in self.servers.items() if number > 0]
        elif self.launcher is None or self.launcher.poll() is not None:
            return False
        else:
            processes = workers_of(self.launcher.pid) if target == "worker" else [self.launcher.pid]
        if not processes:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(random_.choice(processes), signal.SIGKILL)
        return True

    def close(self) -> None:
        end_all(process for process in (self.launcher, *self.servers.values()) if process is not None)
        self.log.close()


def workers_of(launcher: int) -> list[int]:
    """The processes that a launcher has started as ranks."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # The process has just ended.
        if int(parent) == launcher and b"train-worker" in command:
            found.append(int(folder.name))
    return sorted(found)


def free_ports(count: int) -> list[int]:
    """Loopback ports below those that the system gives to connections, so that they stay free while their server is down."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(10_000, max(first, 10_100))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def undisturbed(arguments: argparse.Namespace, bound_s: float = BOUND_S) -> bytes:
    with tempfile.TemporaryDirectory(prefix="paramhub-kills-") as folder:
        run = Run(arguments.paramhub, arguments.epochs, Path(folder))
        try:
            run.keep_up()
            await_end(run, bound_s)
            if run.launches > 1:
                raise Stuck(f"the undisturbed training failed: {(run.folder / 'log').read_text()}")
            return run.saved.read_bytes()
        finally:
            run.close()


def disturbed(arguments: argparse.Namespace, seed: int, expected: bytes) -> str | None:
    """Runs a training with kills. Returns what was wrong with it, or None."""
    random_ = random.Random(seed)
    kills: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="paramhub-kills-") as folder:
        run = Run(arguments.paramhub, arguments.epochs, Path(folder))
        began = time.monotonic()
        try:
            run.keep_up()
            while kills.total() < arguments.kills and not run.has_ended():
                until = time.monotonic() + random_.uniform(*PAUSES_S)
                while time.monotonic() < until:
                    run.keep_up()
                    time.sleep(0.05)
                target = random_.choice(TARGETS)
                if run.kill(target, random_):
                    kills[target] += 1
            await_end(run)
            right = run.saved.read_bytes() == expected
            problem = None if right else "other parameters than undisturbed"
        except Stuck as stuck:
            problem = str(stuck)
        finally:
            run.close()
        if problem is not None:
            print((run.folder / "log").read_text()[-8000:], file=sys.stderr)
    killed = ", ".join(f"{count} x {target}" for target, count in sorted(kills.items()))
    seconds = time.monotonic() - began
    print(
        f"seed {seed}: {killed}; {run.launches} launches, {seconds:.0f} s: {problem or 'right'}", flush=True
    )
    if problem is None and kills.total() < arguments.kills:
        problem = f"it ended after {kills.total()} kills: give --epochs more"
        print(problem, flush=True)
    return problem


def await_end(run: Run, bound_s: float = BOUND_S) -> None:
    """Waits until the training ends. The bound begins anew with every launch, because a job's name becomes free only after a
    while."""
    launches, since = run.launches, time.monotonic()
    first = since
    while not run.has_ended():
        run.keep_up()
        if run.launches != launches:
            launches, since = run.launches, time.monotonic()
        now = time.monotonic()
        if now - since > bound_s or now - first > 5 * bound_s:
            raise Stuck(f"the training has not ended, {now - first:.0f} s after the last kill")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--paramhub", default="paramhub", help="the program")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10, help="of each run")
    parser.add_argument(
        "--epochs", type=int, default=400, help="of the training: it must not end before the last kill"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first run; each further one has the next"
    )
    arguments = parser.parse_args()
    first = arguments.seed if arguments.seed is not None else random.randrange(1 << 32)
    expected = undisturbed(arguments)
    wrong = [seed for seed in range(first, first + arguments.runs) if disturbed(arguments, seed, expected)]
    print(
        f"{arguments.runs} runs of {arguments.kills} kills: {len(wrong)} wrong{f', seeds {wrong}' if wrong else ''}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
