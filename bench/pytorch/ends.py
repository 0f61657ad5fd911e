"""Measures how the other ranks end when one of them ends, for every way to train under PyTorch.

    python bench/pytorch/ends.py
    python bench/pytorch/ends.py --way backend --death stalled --json

Ranks are processes on this host, with the variables that torchrun sets. One of them, by default rank 1, raises an exception
after some steps, is killed, ends early, or stalls. For every other rank a row has its process's end (from 0 an exit code, below 0
a signal), the time from the death to the rank's exception, the times from there until this library had left and until the
process had ended, and the exception's message. A rank that has not ended within the limit is killed. Its code is then that of
SIGKILL, and standard error has its stacks.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WAYS = ["optimizer", "hook", "distributed", "backend", "backend-small"]
"""With `backend-small` gradients go over the mesh; with all others they go through the hub."""
TORCHS_OWN = "gloo"
"""DDP over gloo, for comparison. This way does not even import this library."""
DEATHS = ["raised", "killed", "ended", "stalled"]
STALL_SECONDS = 3.0
"""Seconds that a collective may take if a rank stalls in its own code."""
SILENCE_SECONDS = 4.0
"""Seconds after which a silent rank counts as lost, if its whole process stops."""
STEPS_BEFORE = 3


@dataclass(frozen=True)
class Case:
    way: str
    death: str
    ranks: int
    victim: int
    cleans_up: bool
    device: str


@dataclass(frozen=True)
class Row:
    """The end of one surviving rank."""

    way: str
    death: str
    rank: int
    code: int
    error_s: float | None
    """Seconds from the death to the exception."""
    left_s: float | None
    """Seconds from the exception to the end of the functions registered at ``atexit``."""
    end_s: float | None
    """Seconds from the exception to the end of the process. Under load, torch alone can take seconds of it."""
    message: str


class Part:
    """The program of one rank in a case."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self.case = case
        self.rank = rank
        self.folder = folder

    def play(self) -> None:
        # atexit calls in reverse order, so this runs last.
        atexit.register(self._note, "left", "")
        try:
            self._train()
        except BaseException as error:
            self._note("raised", f"{type(error).__name__}: {error}")
            raise
        finally:
            if self.case.cleans_up:
                self._clean_up()

    def _train(self) -> None:
        case = self.case
        stalls = case.death == "stalled"
        if case.way != TORCHS_OWN:
            import paramhub.torch
        model = (small_model() if case.way == "backend-small" else large_model()).to(case.device)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step = model
        if case.way.startswith("backend"):
            dist.init_process_group("paramhub")
            step = DistributedDataParallel(model, bucket_cap_mb=0.3)
        elif case.way == TORCHS_OWN:
            dist.init_process_group("gloo", timeout=timedelta(seconds=STALL_SECONDS if stalls else 300.0))
            step = DistributedDataParallel(model, bucket_cap_mb=0.3)
        else:
            if case.way == "hook":
                dist.init_process_group("gloo")
            paramhub.torch.init(dead_after=SILENCE_SECONDS if stalls else 30.0)
        if case.way == "hook":
            step = DistributedDataParallel(model, bucket_cap_mb=0.3)
            step.register_comm_hook(paramhub.torch.HubState(ddp=step), paramhub.torch.hub_hook)
        elif case.way == "optimizer":
            optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.01))
        elif case.way == "distributed":
            optimizer = paramhub.torch.DistributedOptimizer(optimizer, model.named_parameters())
        # DDP rebuilds its buckets in the second step, by a collective of its own group.
        for number in range(100):
            optimizer.zero_grad()
            loss = step(torch.randn(4, model[0].in_features, device=case.device)).square().mean()
            if number == STEPS_BEFORE:
                if stalls and case.way.startswith("backend"):
                    dist.group.WORLD.set_timeout(timedelta(seconds=STALL_SECONDS))
                if self.rank == case.victim and self._die():
                    return
            loss.backward()
            optimizer.step()

    def _die(self) -> bool:
        """Ends the rank as the case says. Returns True if the rank must return early."""
        death = self.case.death
        if death == "ended":
            self._note("died", "")
            return True
        if death == "raised":
            raise RuntimeError(f"rank {self.rank} fails on purpose")
        self._note("died", "")
        if death == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.case.way.startswith(("backend", TORCHS_OWN)):
            # Its connections still answer, but it does not call the collective.
            time.sleep(3600)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("it cannot come here")

    def _clean_up(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.case.way != TORCHS_OWN:
            import paramhub.torch

            paramhub.torch.shutdown()

    def _note(self, what: str, message: str) -> None:
        note = self.folder / f"{what}-{self.rank}"
        partial = note.with_suffix(".partial")
        partial.write_text(json.dumps([time.monotonic(), message]))
        partial.replace(note)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def large_model() -> nn.Sequential:
    """A model whose gradients are several buckets of DDP, each large enough for the hub."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())), nn.Linear(256, 10))


def main() -> Part | None:
    """Returns a `Part` in the processes that are ranks, and None in this program's own."""
    arguments = parse()
    # Ranks are forked from this process, which makes the slow imports once for all of them. So it must have one thread.
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    # To free these objects at the end of every rank would take longer than the measured times.
    gc.freeze()
    cases = [
        Case(way, death, arguments.ranks, arguments.victim, arguments.cleans_up, arguments.device)
        for way in arguments.way or WAYS
        for death in arguments.death or DEATHS
    ]
    rows: list[Row] = []
    if not arguments.json:
        print(
            f"{'way':<14} {'death':<8} {'rank':>4} {'code':>5} {'error s':>7} {'left s':>7} {'end s':>7}  message"
        )
    for case in cases:
        folder = Path(tempfile.mkdtemp(prefix="paramhub-ends-"))
        found = run(case, folder, arguments.limit)
        if isinstance(found, Part):
            return found
        shutil.rmtree(folder)
        rows += found
        if not arguments.json:
            for row in found:
                print(line(row), flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    return None


def run(case: Case, folder: Path, limit: float) -> list[Row] | Part:
    """Starts a case's ranks and waits for their ends. In a rank's process it returns at once."""
    port = free_port()
    processes: dict[int, int] = {}
    for rank in range(case.ranks):
        process = os.fork()
        if process == 0:
            become(case, rank, port, folder)
            return Part(case, rank, folder)
        processes[rank] = process
    ended: dict[int, tuple[float, int]] = {}
    others = set(processes) - {case.victim}
    wait_for(processes, others, ended, limit)
    if late := others - ended.keys():
        for rank in late:
            os.kill(processes[rank], signal.SIGUSR1)
        time.sleep(1.0)
        for rank in late:
            print(f"rank {rank} had not ended after {limit:g} s:", file=sys.stderr)
            print((folder / f"output-{rank}").read_text(errors="replace"), file=sys.stderr, flush=True)
    for rank in processes.keys() - ended.keys():
        os.kill(processes[rank], signal.SIGKILL)
    wait_for(processes, set(processes), ended, limit)
    died, _ = noted(folder, "died", case.victim) or noted(folder, "raised", case.victim) or (None, "")
    return [row(case, folder, rank, died, *ended[rank]) for rank in sorted(others)]


def become(case: Case, rank: int, port: int, folder: Path) -> None:
    """Turns a forked process into a rank."""
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": case.ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in (place | meeting).items()})


def wait_for(
    processes: dict[int, int], ranks: set[int], ended: dict[int, tuple[float, int]], limit: float
) -> None:
    """Stores when and how processes end, until all of ``ranks`` have ended or the limit is over."""
    deadline = time.monotonic() + limit
    files = {os.pidfd_open(process): rank for rank, process in processes.items() if rank not in ended}
    while ranks - ended.keys() and (left := deadline - time.monotonic()) > 0:
        for file in select.select(list(files), [], [], left)[0]:
            rank = files.pop(file)
            os.close(file)
            _, status = os.waitpid(processes[rank], 0)
            ended[rank] = time.monotonic(), os.waitstatus_to_exitcode(status)
    for file in files:
        os.close(file)


def row(case: Case, folder: Path, rank: int, died: float | None, end: float, code: int) -> Row:
    raised, message = noted(folder, "raised", rank) or (None, "")
    left, _ = noted(folder, "left", rank) or (None, "")
    times = (between(died, raised), between(raised, left), between(raised, end))
    return Row(case.way, case.death, rank, code, *times, message)


def between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


def noted(folder: Path, what: str, rank: int) -> tuple[float, str] | None:
    note = folder / f"{what}-{rank}"
    return tuple(json.loads(note.read_text())) if note.exists() else None


def line(row: Row) -> str:
    seconds = (row.error_s, row.left_s, row.end_s)
    times = " ".join(f"{'-' if each is None else format(each, '.2f'):>7}" for each in seconds)
    message = row.message.splitlines()[0] if row.message else "none"
    return f"{row.way:<14} {row.death:<8} {row.rank:>4} {row.code:>5} {times}  {message}"


def free_port() -> int:
    """A loopback port below those that the system gives to connections, so that no connection takes it meanwhile."""
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--way",
        choices=[*WAYS, TORCHS_OWN],
        action="append",
        help=f"may be given several times; all but {TORCHS_OWN} by default",
    )
    parser.add_argument("--death", choices=DEATHS, action="append", help="likewise")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--victim", type=int, default=1, help="the rank that ends")
    parser.add_argument(
        "--cleans-up",
        action="store_true",
        help="every rank destroys its process group and calls shutdown() in a `finally`",
    )
    parser.add_argument("--device", default="cpu", help="the device of the models, which all ranks share")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a case may take")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    part = main()
    if part is not None:
        part.play()
