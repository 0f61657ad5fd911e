"""Makes real jobs suffer faults that a seed chooses, and checks every step that they make and every line that names a fault.

    python bench/soak/faults.py --paramhub target/release/paramhub --runs 100 --faults 10 --seed 1

Each run has a connection manager that keeps its state, two or three hubs with checkpoints, and ``paramhub run`` with four workers
in Python, which needs the package and numpy. A fifth of the jobs go on with any one worker (``--on-worker-loss continue``), a
fifth need all of them, in a fifth all go back when a worker or a hub is lost (``rewind``), a fifth have standbys
(``--replicas 1``), and a fifth have both. The seed chooses what befalls them, one fault after the other:

- kill: SIGKILL for a worker.
- stop: SIGSTOP for a worker, for up to four seconds. It counts as lost after two.
- manager: SIGKILL for the manager, which is started again up to three seconds later.
- launcher: SIGKILL for the launcher. All workers end with it. The same command is given again up to three seconds later, and the
  job goes on from its newest checkpoint.
- cut: the connections of a worker to one hub or both are reset, at one of their ends. The worker dials again within the step.
- partition: packets to a worker's host, from it, or both are dropped without a word, for up to four seconds.
- disk: the disk of the manager's state or that of the checkpoints is full, for up to three seconds.
- hub: SIGKILL for a hub, which is started again up to three seconds later.
- freeze: SIGSTOP for a hub, for up to four seconds.
- isolate: packets to a hub's host, from it, or both are dropped without a word, for up to four seconds.
- separate: the same for the packets between two hubs.

A job outlives its hubs if it has standbys, or goes back and has a checkpoint. One with standbys alone ends with the first worker
that it loses, so no worker is lost then. The next hub is struck when all chunks have standbys again, or there is a checkpoint.

Cuts, partitions of workers and hubs, and disks need root and are left out without it. Cuts and partitions also need workers and
hubs on hosts of their own, which are network namespaces. The seed puts a third of the runs on one host, where workers and hubs
share memory.

Each worker contributes a value of its own. So the change of a chunk tells who is in the mean: the worker itself, once. In jobs
that need all workers, each kill, stop and partition may cost a part of one step, and all other steps have every worker; in those
that go back every step has every worker, and the parameters at the end are known. A run is right if

- no worker sees anything else, and all end with equal parameters;
- the launcher ends well within a bound;
- a worker whose connections were cut goes on in the same process;
- a job that is launched again goes on from the newest checkpoint that was whole, or a later one;
- a line of hub, manager, launcher or worker names each fault within five seconds of when it can be noticed: at once, when
  the silent worker or hub counts as lost, or when the hub that was killed runs again. A stop, a freeze, a partition
  or an absence of the manager that was over before may go without. So may a full disk on which nothing was to be written, and a
  worker's second cut within ten seconds. The program counts the runs in which the manager could not write.

Each run prints its seed; one with the same seed draws the same faults. The exit code is 1 if any run was wrong. The program
ends all processes that it starts, and removes their namespaces and disks.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from faults_log import NAMED_WITHIN_S
from faults_network import Network, cannot
from faults_plan import HUBS, KINDS, LOSING, OF_NETWORK, OF_ROOT, WORKERS, Fault, draw
from faults_programs import Programs
from faults_run import Run

BOUND_S = 120.0
"""Seconds within which the job must end after its last fault. The next fault must also find something to befall so soon."""


@dataclass
class Totals:
    """What all runs together have had."""

    done: Counter[str] = field(default_factory=Counter)
    longest_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of each kind, the longest time until a line named a fault."""
    named: Counter[str] = field(default_factory=Counter)
    unnamed: int = 0
    full_states: int = 0


def disturbed(arguments: argparse.Namespace, seed: int, is_root: bool, totals: Totals) -> str | None:
    """Runs a job with faults. Returns what was wrong with it, or None."""
    chooser = random.Random(f"faults of {seed}")
    has_hosts = chooser.random() < 2 / 3 and is_root
    left_out = () if has_hosts else OF_NETWORK if is_root else OF_ROOT
    done: Counter[str] = Counter()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paramhub-faults-")))
        network = stack.enter_context(contextlib.closing(Network(WORKERS, HUBS + 1))) if has_hosts else None
        programs = Programs(arguments.paramhub, seed, folder, network)
        stack.enter_context(contextlib.closing(programs))
        kinds = [kind for kind in KINDS[programs.policy] if kind not in left_out]
        plan = draw(chooser, arguments.faults, kinds)
        if is_root:
            programs.make_disks()
        run = stack.enter_context(contextlib.closing(Run(programs)))
        run.start()
        problem = play(run, plan, arguments.steps, done)
        if problem is not None and arguments.logs is not None:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            (arguments.logs / f"{seed}.log").write_text("\n".join(run.log.lines))
        elif problem is not None:
            print("\n".join(run.log.lines[-100:]), file=sys.stderr)
    count(run, done, totals)
    faults = ", ".join(f"{count} x {fault}" for fault, count in sorted(done.items()))
    seconds = time.monotonic() - began
    where = "hosts of their own" if has_hosts else "one host"
    print(
        f"seed {seed}, {programs.policy} with {programs.least} or more workers on {where}: {faults}; {seconds:.0f} s: "
        f"{problem or 'right'}",
        flush=True,
    )
    return problem


def count(run: Run, done: Counter[str], totals: Totals) -> None:
    totals.done += done
    for kind, seconds in run.log.named_after_s.items():
        totals.longest_s[kind] = max(totals.longest_s[kind], *seconds)
        totals.named[kind] += len(seconds)
    totals.unnamed += len(run.log.unnamed)
    totals.full_states += run.full_states > 0


def play(run: Run, plan: list[Fault], steps: int, done: Counter[str]) -> str | None:
    """Lets the faults happen one after the other, and the job end. Returns what was wrong."""
    for fault in plan:
        until = time.monotonic() + fault.pause_s
        while time.monotonic() < until:
            run.keep_up()
            time.sleep(0.02)
        until = time.monotonic() + BOUND_S
        while not run.has_ended() and not (run.has_begun() and run.strike(fault)):
            if time.monotonic() > until:
                return f"for {BOUND_S:.0f} s there was nothing for the next fault to befall: {fault}"
            run.keep_up()
            time.sleep(0.02)
        if run.has_ended():
            break
        done[fault.kind] += 1
    run.end_after(steps)
    until = time.monotonic() + BOUND_S
    while not run.has_ended():
        if time.monotonic() > until:
            return f"the job has not ended {BOUND_S:.0f} s after the last fault"
        run.keep_up()
        time.sleep(0.02)
    run.await_names()
    return verdict(run, plan, done)


def verdict(run: Run, plan: list[Fault], done: Counter[str]) -> str | None:
    text = "\n".join(run.log.lines)
    if wrong := re.findall(r"WRONG.*", text):
        return str(wrong[0])
    lacking = set(re.findall(r"step (\d+) lacks a rank", text))
    if run.programs.least == WORKERS and len(lacking) > sum(done[kind] for kind in LOSING):
        return f"{len(lacking)} steps lack a rank, of a job that needs all"
    if run.programs.launcher is None or run.programs.launcher.returncode != 0:
        return f"the launcher has ended with {run.programs.launcher and run.programs.launcher.returncode}"
    if run.problems:
        return run.problems[0]
    ends = set(re.findall(r"rank \d ends with (\w+)", text))
    if len(ends) != 1:
        return f"the ranks end with {len(ends)} different parameters"
    if run.log.unnamed:
        return f"not named within {NAMED_WITHIN_S:.0f} s: {'; '.join(run.log.unnamed)}"
    if done.total() < len(plan):
        return f"it has ended after {done.total()} faults"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--paramhub", default="paramhub", help="the program")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=10, help="of each run")
    parser.add_argument("--steps", type=int, default=500, help="that the job makes after the last fault")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first run; each further one has the next"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="the folder for the whole logs of wrong runs, of which otherwise the end is printed",
    )
    arguments = parser.parse_args()
    # What has been made is removed also if this program is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    why = cannot()
    if why is not None:
        print(f"left out: {', '.join(OF_ROOT)}; {why}", flush=True)
    first = arguments.seed if arguments.seed is not None else random.randrange(1 << 32)
    totals = Totals()
    seeds = range(first, first + arguments.runs)
    wrong = [seed for seed in seeds if disturbed(arguments, seed, why is None, totals)]
    kinds = ", ".join(f"{count} x {fault}" for fault, count in sorted(totals.done.items()))
    print(f"{totals.done.total()} faults: {kinds}")
    longest = ", ".join(
        f"{kind} {seconds:.2f} s ({totals.named[kind]})" for kind, seconds in sorted(totals.longest_s.items())
    )
    print(f"named at the latest after, by kind and number: {longest}; {totals.unnamed} not named in time")
    print(f"the manager could not write its state in {totals.full_states} runs")
    print(f"{arguments.runs} runs: {len(wrong)} wrong{f', seeds {wrong}' if wrong else ''}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
