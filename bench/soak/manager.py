"""Kills the connection manager of a training again and again and checks that the training does not notice.

    python bench/soak/manager.py --paramhub target/release/paramhub --kills 5 --away 60

The training is that of ``kills.py``: two hubs, three workers, reproducible. The manager keeps its state. It is killed with
SIGKILL while the training runs, is away for some time, and starts again. The hubs' checkpoints tell which steps the training has
made while the manager was away and after it was back. It is right if it makes steps all the time, is launched once, and ends with
parameters that are bit-equal to those of an undisturbed training. The exit code is 1 if it was wrong.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from kills import Run, await_end, undisturbed

BOUND_S = 1200.0
"""Seconds within which the training must end."""
BETWEEN_S = 5.0
"""Seconds that the manager is there between two kills."""


def steps_written(run: Run) -> int:
    """The newest step of which both hubs have written a checkpoint."""
    steps = (run.folder / "checkpoints" / "killed").glob("step-*")
    whole = [step for step in steps if all((step / f"hub-{hub}.json").exists() for hub in range(2))]
    return max((int(step.name.partition("-")[2].partition(".")[0]) for step in whole), default=0)


def disturbed(arguments: argparse.Namespace, expected: bytes) -> list[str]:
    """Runs the training. Returns what was wrong with it."""
    problems = []
    with tempfile.TemporaryDirectory(prefix="paramhub-manager-") as folder:
        run = Run(arguments.paramhub, arguments.epochs, Path(folder))
        try:
            while not steps_written(run):
                run.keep_up()
                time.sleep(0.05)
            for kill in range(1, arguments.kills + 1):
                if run.has_ended():
                    problems.append("it ended before the last kill: give --epochs more")
                    break
                before = steps_written(run)
                run.servers[0].send_signal(signal.SIGKILL)
                run.servers[0].wait()
                time.sleep(arguments.away)
                away = steps_written(run)
                run.keep_up()
                time.sleep(BETWEEN_S)
                back = steps_written(run)
                print(f"kill {kill}: step {before}, {away} while it was away, {back} after", flush=True)
                if not before < away < back and not run.has_ended():
                    problems.append(f"no steps around kill {kill}")
            await_end(run, BOUND_S)
            if run.saved.read_bytes() != expected:
                problems.append("other parameters than undisturbed")
            if run.launches != 1:
                problems.append(f"{run.launches} launches")
        finally:
            run.close()
        log = (run.folder / "log").read_text()
        if "has forgotten this hub" in log:
            problems.append("the manager has forgotten a hub")
        if problems:
            print(log[-8000:], file=sys.stderr)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--paramhub", default="paramhub", help="the program")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--away", type=float, default=60.0, help="seconds that the manager is away")
    parser.add_argument("--epochs", type=int, default=14_000, help="of the training")
    arguments = parser.parse_args()
    problems = disturbed(arguments, undisturbed(arguments, BOUND_S))
    print(f"{arguments.kills} kills of the manager: {'; '.join(problems) or 'right'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
