"""Measures how soon training goes on after one of two hubs without standbys was killed, and how many steps are made again.

    python bench/pytorch/lost_hubs.py
    python bench/pytorch/lost_hubs.py --rounds 8 --millions 11 --every 20 --seed 1 --json
    python bench/pytorch/lost_hubs.py --same-address

A manager has two hubs with one folder of checkpoints, and torchrun has two ranks with a ``HubOptimizer``, whose job has a
checkpoint every K steps and ``on_worker_loss="rewind"``. In each round a hub is killed with SIGKILL, in one of the K steps after
the second checkpoint is due. The seed chooses the hub and the moment. Another hub is started at once, with ``--same-address`` at
the address of the one that was killed. All ranks go back to the newest checkpoint and go on to the end.

Each round prints, and the last lines have the median and the worst of,

- the seconds from the kill to the end of the first step that a rank has made after it went back;
- the steps that are made a second time. Hubs write a checkpoint while training goes on, so the newest one is not always whole at
  the time of the kill. Then the one before counts, and more than K steps are made again;
- whether both ranks end with the parameters of a run that nothing has disturbed, to the bit. The program begins with such a run.

The exit code is 1 if a round is above a bar: 10 s, K steps, or other bits. This program ends all processes that it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PARAMHUB = (sys.executable, "-m", "paramhub")
RANKS = 2
KILLED_AFTER = 2
"""Checkpoints that are due before the first step in which a hub may be killed."""
PERIODS = 5
"""Length of the training in periods of K steps."""
LIMIT_SECONDS = 180.0
BAR_SECONDS = 10.0

PROGRAM = """
import os, sys, time, zlib
import torch
import paramhub
import paramhub.torch

millions, every, end = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def say(*words):
    os.write(1, (" ".join(map(str, ("EVENT", rank, *words))) + "\\n").encode())


torch.set_num_threads(1)
paramhub.torch.init(on_worker_loss="rewind", checkpoint_every=every, reproducible=True)
rank = paramhub.torch.rank()
torch.manual_seed(0)
width = int((millions * 1e6 / 4) ** 0.5)
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=1e-3, momentum=0.9))
# The data comes from the generator whose state the program's state carries.
torch.manual_seed(rank)
state = paramhub.torch.State(optimizer, batch=0)


@paramhub.torch.run(state)
def train():
    say("begins", optimizer.resumed_step or 0, time.monotonic())
    while state.batch < end:
        optimizer.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        state.batch += 1
        state.commit()
        optimizer.synchronize()
        say("step", state.batch, time.monotonic())


train()
say("ends", f"{zlib.crc32(b''.join(each.detach().numpy().tobytes() for each in model.parameters())):08x}")
"""
"""A rank's training. Steps count from 1, so that a checkpoint of step 40 has what step 40 has made."""


class Round:
    """One training at hubs of its own."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.started: list[subprocess.Popen[bytes]] = []
        self.ranks: subprocess.Popen[bytes] | None = None
        self.url = ""

    def run(self, chance: random.Random | None) -> dict[str, Any]:
        """Trains, and kills a hub if there is something that chooses when. Returns what came of it."""
        try:
            _, self.url = self._server("manager", r"manager ready: (\S+)", "--listen", "127.0.0.1:0")
            hubs = [self._hub("127.0.0.1:0") for _ in range(2)]
            self._launch()
            found = {} if chance is None else self._kill(chance, hubs)
            self._await(r"EVENT \d ends (\w+)", RANKS)
            assert self.ranks is not None
            if self.ranks.wait(LIMIT_SECONDS) != 0:
                raise self._failure("the ranks have failed at their end")
            return {**found, "ends": sorted({each[0] for each in self._found(r"EVENT \d ends (\w+)")})}
        finally:
            self._close()

    def _server(self, what: str, ready: str, *options: str) -> tuple[subprocess.Popen[bytes], str]:
        """Starts a manager or a hub, and waits until it is ready."""
        path = self.folder / f"{what}-{len(self.started)}"
        server = self._start(path, *PARAMHUB, what, *options)
        deadline = time.monotonic() + LIMIT_SECONDS
        while (found := re.search(ready, path.read_text(errors="replace"))) is None:
            if time.monotonic() > deadline or server.poll() is not None:
                raise SystemExit(f"a {what} has not become ready:\n{path.read_text(errors='replace')}")
            time.sleep(0.01)
        return server, found[1]

    def _hub(self, address: str) -> tuple[subprocess.Popen[bytes], str]:
        kept = ("--checkpoints", str(self.folder / "checkpoints"))
        return self._server(
            "hub", r"hub ready: .* data (\S+)", "--listen", address, "--join", self.url, *kept
        )

    def _start(self, output: Path, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.started.append(started)
        return started

    def _launch(self) -> None:
        program, every = self.folder / "train.py", self.arguments.every
        program.write_text(PROGRAM)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--rdzv-backend=c10d")
        ranks = ("--rdzv-endpoint=127.0.0.1:0", f"--nproc-per-node={RANKS}")
        training = (str(program), str(self.arguments.millions), str(every), str(PERIODS * every))
        environment = {"PARAMHUB_URL": self.url, "PARAMHUB_JOB_HUBS": "2", "PARAMHUB_RUN_ID": "lost-hubs"}
        command = (*torchrun, *ranks, *training)
        self.ranks = self._start(self.folder / "output", *command, OMP_NUM_THREADS="1", **environment)

    def _kill(self, chance: random.Random, hubs: list[tuple[subprocess.Popen[bytes], str]]) -> dict[str, Any]:
        """Kills a hub at any moment of K steps, starts another, and returns what the ranks have made of that."""
        every = self.arguments.every
        moment, (victim, address) = chance.uniform(0, every), chance.choice(hubs)
        before = KILLED_AFTER * every + int(moment)
        ended = float(self._await(rf"EVENT 0 step {before} (\S+)", 1)[0][0])
        previous = float(self._await(rf"EVENT 0 step {before - 1} (\S+)", 1)[0][0])
        time.sleep(moment % 1 * (ended - previous))
        killed, killed_at = time.monotonic(), time.strftime("%H:%M:%S", time.gmtime())
        victim.kill()
        victim.wait()
        self._hub(address if self.arguments.same_address else "127.0.0.1:0")
        ready = time.monotonic()
        # The ranks begin once at the start and once after the kill.
        began = self._await(r"EVENT \d begins (\d+) (\S+)", 2 * RANKS)[RANKS:]
        resumed, back = int(began[0][0]), min(float(each[1]) for each in began)
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (after := self._ends_of_steps(back)):
            if time.monotonic() > deadline:
                raise self._failure("no step was made after the hub was lost")
            time.sleep(0.01)
        made = max(int(step) for step, at in self._found(r"EVENT \d step (\d+) (\S+)") if float(at) < back)
        return {
            "killed_after": before + moment % 1,
            "killed_at": killed_at,
            "hub_ready_s": ready - killed,
            "back_s": back - killed,
            "from_kill_s": min(after) - killed,
            "resumed": resumed,
            "again": made - resumed,
            "step_s": ended - previous,
        }

    def _ends_of_steps(self, since: float) -> list[float]:
        ends = (float(at) for (at,) in self._found(r"EVENT \d step \d+ (\S+)"))
        return [at for at in ends if at > since]

    def _found(self, pattern: str) -> list[tuple[str, ...]]:
        """The groups of each line that matches so far."""
        output = (self.folder / "output").read_text(errors="replace")
        return [each.groups() for each in re.finditer(pattern + r"\n", output)]

    def _await(self, pattern: str, count: int) -> list[tuple[str, ...]]:
        """Waits until so many lines match, and returns the groups of each."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(found := self._found(pattern)) < count:
            if time.monotonic() > deadline or self.ranks is None or self.ranks.poll() not in (None, 0):
                raise self._failure(f"the ranks did not come to {pattern!r}")
            time.sleep(0.005)
        return found

    def _failure(self, what: str) -> SystemExit:
        logs = sorted(path for path in self.folder.iterdir() if path.is_file() and path.suffix != ".py")
        texts = (f"{path.name}:\n{path.read_text(errors='replace')[-6000:]}" for path in logs)
        return SystemExit("\n".join((f"{what}. All that was said:", *texts)))

    def _close(self) -> None:
        """Ends all that was started, the ranks first."""
        for process in reversed(self.started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in reversed(self.started):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="kills")
    parser.add_argument("--millions", type=float, default=11.0, help="parameters of the model, in millions")
    parser.add_argument("--every", type=int, default=20, help="K, the steps from one checkpoint to the next")
    parser.add_argument(
        "--same-address", action="store_true", help="start the next hub where the killed one was"
    )
    parser.add_argument("--seed", type=int, help="chooses hubs and moments [default: any, and printed]")
    parser.add_argument("--logs", type=Path, help="a folder to which what all programs have said is copied")
    parser.add_argument("--json", action="store_true", help="print the rounds as JSON, too")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(2**32)
    print(f"seed {seed}", flush=True)
    chance = random.Random(seed)
    expected = one(arguments, None, 0)["ends"]
    print(f"undisturbed: ends with {expected}", flush=True)
    rounds = []
    for number in range(1, arguments.rounds + 1):
        found = one(arguments, chance, number)
        found["same_bits"] = found.pop("ends") == expected
        rounds.append(found)
        print(line(number, found), flush=True)
        if arguments.json:
            print(json.dumps(found), flush=True)
    for name, title in (("from_kill_s", "seconds to the next step"), ("again", "steps made again")):
        values = [each[name] for each in rounds]
        print(f"{title}: median {statistics.median(values):.2f}, worst {max(values):.2f}")
    right = sum(each["same_bits"] for each in rounds)
    print(f"{right} of {len(rounds)} rounds end with the bits of the undisturbed run")
    is_right = all(
        each["from_kill_s"] <= BAR_SECONDS and each["again"] <= arguments.every and each["same_bits"]
        for each in rounds
    )
    return 0 if is_right else 1


def one(arguments: argparse.Namespace, chance: random.Random | None, number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paramhub-lost-hubs-") as folder:
        try:
            return Round(arguments, Path(folder)).run(chance)
        finally:
            if arguments.logs is not None:
                without = shutil.ignore_patterns("checkpoints")
                shutil.copytree(folder, arguments.logs / str(number), ignore=without, dirs_exist_ok=True)


def line(number: int, found: dict[str, Any]) -> str:
    return (
        f"round {number}, {found['killed_at']}: killed after {found['killed_after']:.2f} steps of {found['step_s']:.2f} s; "
        f"the next hub ready after {found['hub_ready_s']:.2f} s, ranks back after {found['back_s']:.2f} s, "
        f"next step after {found['from_kill_s']:.2f} s; "
        f"back to step {found['resumed']}, {found['again']} steps again; {'equal' if found['same_bits'] else 'OTHER'} bits"
    )


if __name__ == "__main__":
    sys.exit(main())
