"""A rank of a job whose hubs are upgraded, which ``paramhub run`` starts: it writes down when each of its steps ended.

It makes steps until the file JOB.end in the folder says how many there are. Its gradients follow from rank and step alone. So
two runs with equally many steps end with the same bits.
"""

from __future__ import annotations

import math
import os
import sys
import time
import zlib
from pathlib import Path

import numpy

import paramhub

SHAPES = {"first": 40_000, "second": 25_000, "third": 100}
"""The elements of each tensor. All hubs have several chunks."""


def last_step(end: Path) -> float:
    """The number of steps that the job is to make. It is unknown until the file is there, far ahead of the step under way."""
    try:
        return int(end.read_text())
    except FileNotFoundError:
        return math.inf


def main() -> None:
    folder, name, compute_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]) / 1000
    values = {name: numpy.zeros(elements, "f4") for name, elements in SHAPES.items()}
    own = f"{name}-{os.environ['RANK']}"
    with paramhub.connect() as job, (folder / f"{own}.steps").open("wb", buffering=0) as steps:
        job.init(values, optimizer=paramhub.AdamW(lr=0.01), reproducible=True)
        while (step := job.next_step("first")) < last_step(folder / f"{name}.end"):
            chance = numpy.random.default_rng((job.rank, step))
            gradients = {name: chance.standard_normal(value.size, "f4") for name, value in values.items()}
            time.sleep(compute_s)
            waiting = [job.push_pull(name, gradients[name], out=value) for name, value in values.items()]
            for handle in waiting:
                handle.wait()
            steps.write(f"{step} {time.monotonic()}\n".encode())
        text = b"".join(value.tobytes() for value in values.values())
        (folder / f"{own}.bits").write_text(f"{zlib.crc32(text):08x}")


if __name__ == "__main__":
    main()
