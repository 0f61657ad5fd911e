"""Replaces all hubs and the manager under running jobs by those of another version, and checks that no job loses a step.

    python bench/soak/upgrade.py --before OLD/paramhub --after NEW/paramhub --workers OLD-ENVIRONMENT/bin/python
    python bench/soak/upgrade.py --before OLD/paramhub --after NEW/paramhub --manager first --rounds 5 --json

A manager with a state on disk has three hubs and two reproducible jobs with standbys (``--replicas 1``), of two workers each. All
are of the version ``--before``, the workers by ``--workers``: a Python that has the package of that version, and numpy. Then this
program does for each hub what docs/recovery.md says: it drains the hub, ends it with SIGTERM, starts one of the version
``--after`` at its address, and waits until all jobs have all their standbys again. Before or after the hubs the manager is ended,
too, and one of the version ``--after`` goes on with its state. ``--manager never`` leaves the old one.

The jobs then make some more steps. Each is made once more with as many steps, by the version ``--before`` and without an upgrade.
Printed are for each job of each round

- the steps lost: step numbers that a worker has not made exactly once;
- the longest time from the end of a step of a worker to the end of its next one since the upgrade began, and what happened then;
  and the longest one of the undisturbed run, since other programs take time as well;
- whether all workers end with the parameters of the undisturbed run, to the bit.

The exit code is 1 if a job has lost a step, has stood for longer than 2 s, or ends with other bits. This program ends all
processes that it starts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from upgrade_cluster import Cluster, JobResult, Stuck

BAR_S = 2.0
"""The longest time that a step may take."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="the program of the older version")
    parser.add_argument("--after", required=True, help="the program of the newer version")
    parser.add_argument(
        "--workers", default=sys.executable, help="a Python with numpy and the package of the older version"
    )
    parser.add_argument(
        "--manager", choices=("first", "last", "never"), default="last", help="when to replace it"
    )
    parser.add_argument("--rounds", type=int, default=1, help="upgrades")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="pretended computation of a step")
    parser.add_argument(
        "--idle",
        type=float,
        default=1.0,
        help="seconds from the drain of a hub to its end, as of an operator",
    )
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of training after each replacement")
    parser.add_argument("--logs", type=Path, help="a folder to which the logs of all rounds are copied")
    parser.add_argument("--json", action="store_true", help="print the results of jobs as JSON, too")
    arguments = parser.parse_args()
    wrong = 0
    longest: list[float] = []
    for number in range(1, arguments.rounds + 1):
        try:
            upgraded = run(arguments, f"{number}-upgraded", None)
            steps = {result.job: result.steps for result in upgraded}
            undisturbed = run(arguments, f"{number}-undisturbed", steps)
        except (Stuck, OSError) as problem:
            print(f"round {number}: {problem}", flush=True)
            wrong += 1
            continue
        for result, expected in zip(upgraded, undisturbed, strict=True):
            has_bits = len(result.bits) == 1 and result.bits == expected.bits
            wrong += not has_bits or result.lost > 0 or result.longest_s > BAR_S
            longest.append(result.longest_s)
            print(
                f"round {number}, job {result.job}: {result.lost} of {result.steps} steps lost; a step takes "
                f"{result.median_s * 1000:.0f} ms, at most {result.longest_s:.3f} s ({result.longest_in}), undisturbed "
                f"{expected.longest_s:.3f} s; {'equal' if has_bits else 'OTHER'} bits",
                flush=True,
            )
            if arguments.json:
                print(json.dumps({**asdict(result), "undisturbed_longest_s": expected.longest_s}), flush=True)
    if longest:
        print(
            f"longest step: median {statistics.median(longest):.3f} s, worst {max(longest):.3f} s; {wrong} wrong"
        )
    return 1 if wrong else 0


def run(arguments: argparse.Namespace, name: str, steps: dict[str, int] | None) -> list[JobResult]:
    """Runs the jobs, with an upgrade unless the number of their steps is given."""
    with tempfile.TemporaryDirectory(prefix="paramhub-upgrade-") as folder:
        cluster = Cluster(arguments, Path(folder))
        try:
            cluster.start()
            if steps is None:
                cluster.upgrade()
            return cluster.finish(steps)
        except Stuck as stuck:
            raise Stuck(f"{stuck}\n{cluster.logs()}") from None
        finally:
            cluster.close()
            if arguments.logs is not None:
                shutil.copytree(folder, arguments.logs / name, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
