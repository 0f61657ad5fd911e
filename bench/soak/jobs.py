"""Runs many short jobs at running hubs, several at once, and counts the wrong records of jobs that have ended well.

    python bench/soak/jobs.py --paramhub target/release/paramhub --jobs 5000 --python python

One half of the jobs runs at a manager with one hub, the other half at a manager with two, all with checkpoints. They are started
in turn by ``paramhub train``, by ``paramhub run`` and, if ``--python`` names an interpreter with the package and NumPy, by
``python -m paramhub run`` with a worker in Python. As soon as a job's launcher has ended with 0, the manager must record the job
as finished, and in the end the checkpoint of its last step must be complete. The program prints every job for which this is not
so; its exit code is 1 if there is any. It ends all processes that it starts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

from processes import end_all

WORKER = Path(__file__).with_name("worker.py")
STEPS = 22
"""The steps of each job: for `train` two epochs of the 1,437 digits in batches of 2 x 64."""
TRAIN = ["--epochs", "2", "--batch", "64", "--net", "mlp"]
EVERY = ["--checkpoint-every", "5"]
WAIT_TIMEOUT_S = 120


class ManagerAndHubs:
    """A manager and hubs that share a folder of checkpoints."""

    def __init__(self, paramhub: str, hubs: int, folder: Path) -> None:
        self.hubs, self.checkpoints = hubs, folder / "checkpoints"
        self.log = (folder / "log").open("w")
        self.processes: list[subprocess.Popen[str]] = []
        ready = self._start([paramhub, "manager", "--listen", "127.0.0.1:0"])
        self.url = next(word for word in ready.split() if word.startswith("http://"))
        for _ in range(hubs):
            kept = ["--checkpoints", str(self.checkpoints), "--checkpoint-keep", "1"]
            self._start([paramhub, "hub", "--listen", "127.0.0.1:0", "--join", self.url, *kept])

    def _start(self, command: list[str]) -> str:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        ready = process.stdout.readline()
        if " ready: " not in ready:
            raise RuntimeError(f"{' '.join(command)} is not ready: {ready or 'see ' + self.log.name}")
        return ready

    def job(self, name: str) -> dict[str, object]:
        with urllib.request.urlopen(f"{self.url}/v1/jobs/{name}", timeout=20) as answer:
            return json.load(answer)

    def close(self) -> None:
        end_all(reversed(self.processes))
        self.log.close()


def command(arguments: argparse.Namespace, way: str, cluster: ManagerAndHubs, name: str) -> list[str]:
    """The command that starts one job of two workers."""
    job = ["--hub", cluster.url, "--hubs", str(cluster.hubs), "--name", name, *EVERY]
    if way == "train":
        return [arguments.paramhub, "train", "--workers", "2", *job, *TRAIN]
    if way == "run":
        return [arguments.paramhub, "run", "-n", "2", *job, "--", arguments.paramhub, "train", *TRAIN]
    work = [arguments.python, str(WORKER), str(STEPS)]
    return [arguments.python, "-m", "paramhub", "run", "-n", "2", *job, "--", *work]


def play(arguments: argparse.Namespace, cluster: ManagerAndHubs, jobs: list[tuple[str, str]]) -> list[str]:
    """Runs these jobs, several at once. Returns a line for each job with a problem."""
    waiting, wrong, lock = iter(jobs), [], threading.Lock()

    def work() -> None:
        while True:
            with lock:
                way, name = next(waiting, (None, None))
            if way is None or name is None:
                return
            problem = one(arguments, cluster, way, name)
            if problem is not None:
                with lock:
                    wrong.append(f"{name}: {problem}")
                    print(wrong[-1], flush=True)

    threads = [threading.Thread(target=work) for _ in range(arguments.parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def one(arguments: argparse.Namespace, cluster: ManagerAndHubs, way: str, name: str) -> str | None:
    try:
        ended = subprocess.run(
            command(arguments, way, cluster, name),
            capture_output=True,
            text=True,
            timeout=WAIT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"has not ended within {WAIT_TIMEOUT_S} s"
    if ended.returncode != 0:
        return f"the launcher ended with {ended.returncode}: {ended.stderr.strip().splitlines()[-3:]}"
    job = cluster.job(name)
    if job["state"] != "finished":
        return f"is recorded as {job['state']}: {job['message']}"
    return None


def without_last_checkpoint(cluster: ManagerAndHubs, names: list[str]) -> list[str]:
    """Jobs without a complete checkpoint of their last step. Every hub writes its part."""

    def is_there(name: str) -> bool:
        folders = (cluster.checkpoints / name).glob(f"step-{STEPS:010}.*")
        parts = [f"hub-{hub}.json" for hub in range(cluster.hubs)]
        return any(all((folder / part).exists() for part in parts) for folder in folders)

    deadline = time.monotonic() + WAIT_TIMEOUT_S
    missing = list(names)
    while missing and time.monotonic() < deadline:
        missing = [name for name in missing if not is_there(name)]
        time.sleep(0.1)
    return missing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--paramhub", default="paramhub", help="the program")
    parser.add_argument(
        "--python", help="an interpreter with the package and NumPy; without one no job comes from Python"
    )
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--parallel", type=int, default=3, help="jobs at once")
    arguments = parser.parse_args()
    ways = ["train", "run"] + (["python"] if arguments.python else [])
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    began = time.monotonic()
    for hubs in (1, 2):
        with tempfile.TemporaryDirectory(prefix="paramhub-soak-") as folder:
            cluster = ManagerAndHubs(arguments.paramhub, hubs, Path(folder))
            try:
                share = arguments.jobs // 2 if hubs == 1 else arguments.jobs - arguments.jobs // 2
                jobs = [(ways[index % len(ways)], f"{hubs}-hubs-{index}") for index in range(share)]
                counts.update(f"{way}, {hubs} hubs" for way, _ in jobs)
                failed = play(arguments, cluster, jobs)
                wrong += failed
                spoken_for = {problem.split(":")[0] for problem in failed}
                missing = without_last_checkpoint(
                    cluster, [name for _, name in jobs if name not in spoken_for]
                )
                wrong += [f"{name}: the checkpoint of its last step is missing" for name in missing]
                for problem in wrong[len(wrong) - len(missing) :] if missing else []:
                    print(problem, flush=True)
            finally:
                cluster.close()
    of_each = ", ".join(f"{count} from {way}" for way, count in sorted(counts.items()))
    print(
        f"{arguments.jobs} jobs in {time.monotonic() - began:.0f} s ({of_each}): {len(wrong)} recorded wrongly"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
