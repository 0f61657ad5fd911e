"""Measures how soon training goes on after torchrun has started all ranks again, against DDP over gloo, which begins anew.

    python bench/pytorch/restarts.py
    python bench/pytorch/restarts.py --rounds 10 --ranks 4 --millions 25 --json

In each round a training with the hub runs under ``torchrun --max-restarts 1``. Its rank 1 is killed in the middle of a step, and
the ranks go on at that step. The round's other training is the same script on gloo, which is only started: torchrun needs as long
to start it again, if that works, and without a file it begins with step 0. The rows have the medians, and the longest, of the
seconds from the kill to the end of the next step of all ranks, and from the begin of the ranks' programs to the end of their
first step; and how many steps were made a second time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("hub", "gloo")
STEPS_BEFORE = 5
"""Steps before the kill."""
STEPS_AFTER = 3
LIMIT_SECONDS = 180.0

PROGRAM = """
import os, sys, time

begun = time.monotonic()
way, millions, before, after = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
import torch

rank, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def say(*words):
    os.write(1, (" ".join(map(str, ("EVENT", rank, start, *words))) + "\\n").encode())


say("begun", begun)
torch.set_num_threads(1)
torch.manual_seed(0)
width = int((millions * 1e6 / 4) ** 0.5)
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
first, step_of = 0, model
if way == "hub":
    import paramhub.torch

    paramhub.torch.init(on_worker_loss="rewind")
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=1e-3, momentum=0.9))
    first = optimizer.resumed_step or 0
else:
    torch.distributed.init_process_group("gloo")
    step_of = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
for step in range(first, before + after):
    optimizer.zero_grad()
    step_of(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    if way == "hub":
        optimizer.synchronize()
    say("step", step, time.monotonic(), os.getpid())
    if start == 0 and step == before - 1:
        time.sleep(600 if rank == 1 else 0)
"""
"""A rank's training. Rank 1 sleeps when it is to be killed; the others wait for it in the middle of the next step."""


class Round:
    """One training of which a rank is killed."""

    def __init__(self, way: str, ranks: int, millions: float, folder: Path) -> None:
        self.way = way
        self.output = folder / "output"
        program = folder / "train.py"
        program.write_text(PROGRAM)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d"),
            *("--rdzv-endpoint=127.0.0.1:0", f"--nproc-per-node={ranks}", "--max-restarts=1"),
            *(
                "--monitor-interval=0.1",
                str(program),
                way,
                str(millions),
                str(STEPS_BEFORE),
                str(STEPS_AFTER),
            ),
        ]
        self.ranks = ranks
        with self.output.open("wb") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.launcher = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def run(self) -> dict[str, float]:
        start, killed, first = 0, None, 0
        try:
            if self.way == "hub":
                start, killed = 1, self._kill()
                first = int(self._await(r"EVENT 0 1 step (\d+) ", 1)[0][0])
            begun = self._await(rf"EVENT \d+ {start} begun (\S+)", self.ranks)
            ends = self._await(rf"EVENT \d+ {start} step {first} (\S+)", self.ranks)
            end = max(float(each[0]) for each in ends)
            if killed is not None and self.launcher.wait(LIMIT_SECONDS) != 0:
                raise SystemExit(f"{self.way} has failed:\n{self.output.read_text(errors='replace')}")
        finally:
            if self.launcher.poll() is None:
                os.killpg(self.launcher.pid, signal.SIGTERM)
                self.launcher.wait()
        found = {"from_begin_s": end - min(float(each[0]) for each in begun)}
        if killed is not None:
            found |= {"from_kill_s": end - killed, "again": STEPS_BEFORE - first}
        return found

    def _kill(self) -> float:
        """Kills rank 1 in the middle of a step, and returns when."""
        victim = int(self._await(rf"EVENT 1 0 step {STEPS_BEFORE - 1} \S+ (\d+)", 1)[0][0])
        # The other ranks are in the middle of the next step.
        time.sleep(0.5)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        return killed

    def _await(self, pattern: str, count: int) -> list[tuple[str, ...]]:
        """Waits until so many lines match, and returns the groups of each."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            found = [each.groups() for each in re.finditer(pattern, self.output.read_text(errors="replace"))]
            if len(found) >= count:
                return found
            if time.monotonic() > deadline or self.launcher.poll() not in (None, 0):
                raise SystemExit(
                    f"{self.way} did not come to {pattern!r}:\n{self.output.read_text(errors='replace')}"
                )
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="kills for each way; the ways alternate")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=float, default=11.0, help="parameters of the model, in millions")
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON, too")
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error("--ranks: one rank is killed and another waits for it, so give 2 or more")
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            with tempfile.TemporaryDirectory(prefix="paramhub-restarts-") as folder:
                found = Round(way, arguments.ranks, arguments.millions, Path(folder)).run()
            rounds[way].append(found)
            if arguments.json:
                print(json.dumps({"way": way, **found}), flush=True)
    print(f"{'way':<6} {'from kill s':>14} {'from begin s':>14} {'steps again':>12}")
    for way in WAYS:
        cells = [_cell(rounds[way], name) for name in ("from_kill_s", "from_begin_s")]
        again = max(each.get("again", 0) for each in rounds[way]) if way == "hub" else STEPS_BEFORE
        print(f"{way:<6} {cells[0]:>14} {cells[1]:>14} {again:>12.0f}")


def _cell(rounds: list[dict[str, float]], name: str) -> str:
    values = [each[name] for each in rounds if name in each]
    return f"{statistics.median(values):.2f} to {max(values):.2f}" if values else "-"


if __name__ == "__main__":
    main()
