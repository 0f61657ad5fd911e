"""Measures how soon training is at full speed again after a replica was killed, with paramhub and with torchft.

    pip install torchft-nightly
    python bench/pytorch/recovery.py
    python bench/pytorch/recovery.py --rounds 10 --millions 11 --json

In each round every way trains the same small model with AdamW in two processes. One of them is killed with SIGKILL, and started
again at once: with paramhub by ``paramhub run --on-worker-loss continue``, with torchft by this program, so that no launcher of
torchft's takes any time. ``torchft`` has the settings of torchft's own DDP example, and the lighthouse those of its manual;
``torchft-tuned`` has short ones. torchft 0.2.0 does not do: where the kill is in an all-reduce, the survivor ends with it.

The rows have the medians, and the longest, of

- the seconds from the kill until the survivor has ended the first step that it began after the kill, and that counts;
- the seconds from the kill until the new process makes steps at full speed: to the end of the first of five of its steps, with
  both processes, whose median is at most 1.5 times the usual step's;
- the seconds that the new process needs for its imports, and from their end to the end of its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WAYS = ("paramhub", "torchft", "torchft-tuned")
SURVIVOR, VICTIM = 0, 1
STEPS_BEFORE = 30
"""Steps with both processes before the kill."""
STEPS_FOR_SPEED = 5
LINE = re.compile(r"STEP (\d+) (\d+) (\S+) (\S+) (\S+) (\S+) (-?\d+)\n")
FULL_SPEED = 1.5
LIMIT_SECONDS = 180.0
LIGHTHOUSE = {
    "torchft": ("--quorum_tick_ms=100", "--join_timeout_ms=10000"),
    "torchft-tuned": ("--quorum_tick_ms=10", "--join_timeout_ms=1000", "--heartbeat_timeout_ms=500"),
}

PROGRAM = """
import os, sys, time

begun = time.monotonic()
way, millions = sys.argv[1], float(sys.argv[2])
import torch

torch.set_num_threads(1)
torch.manual_seed(0)


class Net(torch.nn.Module):
    # A small network for images, and a table that makes the exchange long: only one of its rows is used.
    def __init__(self):
        super().__init__()
        self.convolutions = torch.nn.Sequential(
            torch.nn.Conv2d(3, 6, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(6, 16, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        )
        self.table = torch.nn.Parameter(torch.randn(int(millions * 1e5), 10))
        self.classes = torch.nn.Sequential(
            torch.nn.Linear(400, 120), torch.nn.ReLU(), torch.nn.Linear(120, 84), torch.nn.ReLU(), torch.nn.Linear(84, 10)
        )

    def forward(self, images):
        return self.classes(self.convolutions(images).flatten(1)) + self.table[0]


model = Net()
if way == "paramhub":
    import paramhub.torch

    imported = time.monotonic()
    paramhub.torch.init()
    replica = int(os.environ["RANK"])
    module = model
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.AdamW(lr=1e-3))

    def end_step():
        optimizer.step()
        optimizer.synchronize()
        # The hub counts every step; a process that joins contributes from its first step on.
        return 0
else:
    from datetime import timedelta
    import torchft
    from torchft.checkpointing.pg_transport import PGTransport

    imported = time.monotonic()
    replica = int(os.environ["REPLICA_GROUP_ID"])
    # What torchrun has for each replica group.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=5))
    tuned = {"heartbeat_interval": timedelta(milliseconds=50)} if way == "torchft-tuned" else {}

    def load(state):
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        **tuned,
    )
    module = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def end_step():
        before = manager.current_step()
        optimizer.step()
        return manager.num_participants() if manager.current_step() > before else -1


imports = imported - begun
while True:
    begun = time.monotonic()
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(module(images), labels).backward()
    processes = end_step()
    line = ("STEP", replica, os.getpid(), imports, imported, begun, time.monotonic(), processes)
    os.write(1, (" ".join(map(str, line)) + "\\n").encode())
"""
"""A process's training, until it is ended. The last word of a line is how many processes took part in the step, as far as the way
says so (0 where it does not), or -1 if the step does not count."""


@dataclass(frozen=True)
class Step:
    """A step that a process has made."""

    replica: int
    pid: int
    imports: float
    imported: float
    begun: float
    ended: float
    processes: int

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    @property
    def is_shared(self) -> bool:
        return self.processes in (0, 2)


class Round:
    """One training of which a process is killed."""

    def __init__(self, way: str, millions: float, folder: Path) -> None:
        self.way = way
        self.output = folder / "output"
        self.program = folder / "train.py"
        self.program.write_text(PROGRAM)
        self.command = [sys.executable, str(self.program), way, str(millions)]
        self.started: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(self) -> dict[str, float]:
        try:
            self._begin()
            return self._measure()
        finally:
            for process in reversed(self.started):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
            for process in self.started:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _begin(self) -> None:
        if self.way == "paramhub":
            run = [sys.executable, "-m", "paramhub", "run", "-n", "2", "--on-worker-loss", "continue"]
            self._start([*run, "--max-restarts", "1", "--", *self.command])
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = "{}:{}".format(*free.getsockname())
        lighthouse = shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))
        if lighthouse is None:
            raise SystemExit("there is no torchft_lighthouse beside this Python: pip install torchft")
        self._start([lighthouse, "--bind", address, "--min_replicas=1", *LIGHTHOUSE[self.way]])
        self.environment["TORCHFT_LIGHTHOUSE"] = f"http://{address}"
        for replica in (SURVIVOR, VICTIM):
            self._start_replica(replica)

    def _start_replica(self, replica: int) -> None:
        self._start(self.command, REPLICA_GROUP_ID=str(replica))

    def _start(self, command: Sequence[str], **variables: str) -> None:
        with self.output.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**self.environment, **variables},
                start_new_session=True,
            )
        self.started.append(process)

    def _measure(self) -> dict[str, float]:
        before = self._await(_shared)
        usual = statistics.median(step.seconds for step in before if step.replica == SURVIVOR)
        victim = next(step.pid for step in before if step.replica == VICTIM)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        if self.way != "paramhub":
            self._start_replica(VICTIM)

        def survived(steps: list[Step]) -> list[Step]:
            return [
                step
                for step in steps
                if step.replica == SURVIVOR and step.begun > killed and step.processes >= 0
            ][:1]

        def at_full_speed(steps: list[Step]) -> list[Step]:
            made = [step for step in steps if step.replica == VICTIM and step.pid != victim]
            windows = (made[first : first + STEPS_FOR_SPEED] for first in range(len(made)))
            for window in windows:
                is_whole = len(window) == STEPS_FOR_SPEED and all(step.is_shared for step in window)
                if is_whole and statistics.median(step.seconds for step in window) <= FULL_SPEED * usual:
                    return window
            return []

        survivor = self._await(survived)[0]
        new = self._await(at_full_speed)[0]
        first = next(step for step in self._steps() if step.replica == VICTIM and step.pid != victim)
        return {
            "step_s": usual,
            "survivor_s": survivor.ended - killed,
            "full_speed_s": new.ended - killed,
            "imports_s": new.imports,
            "joined_s": first.ended - first.imported,
        }

    def _await(self, find: Callable[[list[Step]], list[Step]]) -> list[Step]:
        """Waits until there is what is searched for, and returns that."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            found = find(self._steps())
            if found:
                return found
            text = self.output.read_text(errors="replace")
            # The launcher or the lighthouse, and the survivor.
            has_ended = any(process.poll() is not None for process in self.started[: 1 + SURVIVOR + 1])
            if time.monotonic() > deadline or has_ended:
                raise SystemExit(f"{self.way} did not come so far:\n{text[-20000:]}")
            time.sleep(0.02)

    def _steps(self) -> list[Step]:
        text = self.output.read_text(errors="replace")
        return [_step(match.groups()) for match in LINE.finditer(text)]


def _step(words: Sequence[str]) -> Step:
    replica, pid, *times, processes = words
    imports, imported, begun, ended = map(float, times)
    return Step(int(replica), int(pid), imports, imported, begun, ended, int(processes))


def _shared(steps: list[Step]) -> list[Step]:
    """The last steps with both processes, if each has made enough."""
    shared = [
        [step for step in steps if step.replica == replica and step.is_shared]
        for replica in (SURVIVOR, VICTIM)
    ]
    if any(len(of_one) < STEPS_BEFORE for of_one in shared):
        return []
    return [step for of_one in shared for step in of_one[-STEPS_BEFORE // 2 :]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="kills for each way; the ways alternate")
    parser.add_argument("--millions", type=float, default=2.5, help="parameters of the model, in millions")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON, too")
    arguments = parser.parse_args()
    # Otherwise the processes of a round would be left.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in arguments.ways}
    for _ in range(arguments.rounds):
        for way in arguments.ways:
            with tempfile.TemporaryDirectory(prefix="paramhub-recovery-") as folder:
                found = Round(way, arguments.millions, Path(folder)).run()
            rounds[way].append(found)
            if arguments.json:
                print(json.dumps({"way": way, **found}), flush=True)
    columns = {
        "step s": "step_s",
        "survivor s": "survivor_s",
        "full speed s": "full_speed_s",
        "imports s": "imports_s",
        "joined s": "joined_s",
    }
    print(f"{'way':<14}", *(f"{title:>16}" for title in columns))
    for way in arguments.ways:
        print(
            f"{way:<14}", *(f"{_cell([each[name] for each in rounds[way]]):>16}" for name in columns.values())
        )


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} to {max(values):.3f}"


if __name__ == "__main__":
    main()
