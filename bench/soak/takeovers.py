"""Kills or freezes one of three hubs under running jobs with standbys, and measures how long the jobs stand.

    python bench/soak/takeovers.py --paramhub target/release/paramhub --rounds 20
    python bench/soak/takeovers.py --paramhub target/release/paramhub --rounds 10 --freeze

A manager has three hubs and two reproducible jobs (``--replicas 1``) of two workers each. In each round one of the hubs is killed
at a random moment, or frozen until its standbys have taken over. The jobs then make some more steps. Each is made once more
with as many steps and undisturbed. Printed are for each job of each round the steps lost, the longest time from the end of a
step of a worker to the end of its next one, and whether all workers end with the parameters of the undisturbed run, to the bit.
From the time under ``--freeze`` two seconds are taken, after which a silent hub counts as lost (``--dead-after 2``).

The exit code is 1 if a job has lost a step, has stood for longer than 2 s, or ends with other bits. This program ends all
processes that it starts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from upgrade_cluster import HUBS, Cluster, JobResult, Stuck

BAR_S = 2.0
"""The longest time that a job may stand."""
DEAD_AFTER_S = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paramhub", default="paramhub", help="the program")
    parser.add_argument(
        "--workers", default=sys.executable, help="a Python with numpy and the package, for the workers"
    )
    parser.add_argument("--freeze", action="store_true", help="freeze the hub instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=None, help="of the hubs and moments")
    parser.add_argument("--compute-ms", type=float, default=5.0, help="pretended computation of a step")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds of training after the loss")
    arguments = parser.parse_args()
    arguments.before = arguments.paramhub
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    chance = random.Random(seed)
    wrong = 0
    stood: list[float] = []
    for number in range(1, arguments.rounds + 1):
        # All calls of hubs come within a second.
        loss = (chance.randrange(1, 1 + HUBS), chance.uniform(0.0, 1.0), arguments.freeze)
        try:
            lost = run(arguments, loss, None)
            undisturbed = run(arguments, loss, {result.job: result.steps for result in lost})
        except (Stuck, OSError) as problem:
            print(f"round {number}: {problem}", flush=True)
            wrong += 1
            continue
        for result, expected in zip(lost, undisturbed, strict=True):
            has_bits = len(result.bits) == 1 and result.bits == expected.bits
            gap_s = result.longest_s - (DEAD_AFTER_S if arguments.freeze else 0)
            wrong += not has_bits or result.lost > 0 or gap_s > BAR_S
            stood.append(gap_s)
            print(
                f"round {number}, hub {loss[0]}, job {result.job}: {result.lost} of {result.steps} steps lost; a step takes "
                f"{result.median_s * 1000:.0f} ms, the longest {gap_s:.3f} s ({result.longest_in}); "
                f"{'equal' if has_bits else 'OTHER'} bits",
                flush=True,
            )
    if stood:
        print(
            f"longest step: median {statistics.median(stood):.3f} s, worst {max(stood):.3f} s; {wrong} wrong"
        )
    return 1 if wrong else 0


def run(
    arguments: argparse.Namespace, loss: tuple[int, float, bool], steps: dict[str, int] | None
) -> list[JobResult]:
    """Runs the jobs, with a loss unless the number of their steps is given."""
    with tempfile.TemporaryDirectory(prefix="paramhub-takeover-") as folder:
        cluster = Cluster(arguments, Path(folder), ("--dead-after", str(DEAD_AFTER_S)))
        try:
            cluster.start()
            if steps is None:
                cluster.lose_hub(*loss)
            return cluster.finish(steps)
        except Stuck as stuck:
            raise Stuck(f"{stuck}\n{cluster.logs()}") from None
        finally:
            cluster.close()


if __name__ == "__main__":
    sys.exit(main())
