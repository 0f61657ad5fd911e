"""A rank of a job that outlives its workers, which ``paramhub run`` starts: it checks the change that each step makes.

Rank r contributes 4^r, with the sign of the step. With SGD at a rate of 1 each element then falls by the mean of those who
contributed. All elements of a chunk fall by the same, and the change tells who they were.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
import zlib
from pathlib import Path

import numpy

import paramhub

CHUNK = 8192
"""Elements of a chunk."""
SHAPES = {"first": 5 * CHUNK, "second": 3 * CHUNK + 1000, "third": 100}


def changes(rank: int, ranks: int) -> numpy.ndarray:
    """The changes that a step may make in which this rank takes part, ascending."""
    others = [other for other in range(ranks) if other != rank]
    groups = [(rank, *group) for count in range(ranks) for group in itertools.combinations(others, count)]
    return numpy.array(sorted(sum(4.0**each for each in group) / len(group) for group in groups))


def say(text: str) -> None:
    """Writes a line at once, so that the lines of several processes do not mix."""
    os.write(1, f"{text}\n".encode())


def main() -> None:
    end, is_exact, every = Path(sys.argv[1]), sys.argv[2] != "continue", int(sys.argv[3])
    while True:
        try:
            return train(end, is_exact, every)
        except paramhub.Rewound as rewound:
            say(f"rank {os.environ['RANK']} goes back: {rewound}")


def last_step(end: Path) -> float:
    """The number of steps that the job is to make. It is unknown until the file is there, far ahead of the step under way."""
    try:
        return int(end.read_text())
    except FileNotFoundError:
        return math.inf


def train(end: Path, is_exact: bool, every: int) -> None:
    """Makes all steps from the one at which this rank joins the job. It says when it has made the first one, and each one after
    which a checkpoint is due. ``is_exact`` says that each step has every worker, whatever is lost. Raises Rewound when another
    rank is lost, or a hub without a standby."""
    values = {name: numpy.zeros(elements, "f4") for name, elements in SHAPES.items()}
    with paramhub.connect() as job:
        job.init(values, optimizer=paramhub.SGD(lr=1.0))
        # A step that some ranks have made and that was lost at some chunks is behind the step at which this one begins.
        ranks = int(os.environ["WORLD_SIZE"])
        allowed, own = changes(job.rank, ranks), 4.0**job.rank
        complete = sum(4.0**rank for rank in range(ranks)) / ranks
        if is_exact:
            allowed = numpy.array([complete])
        has_begun = False
        while (step := job.next_step("first")) < last_step(end):
            sign = 1.0 if step % 2 == 0 else -1.0
            before = {name: value.copy() for name, value in values.items()}
            waiting = [
                job.push_pull(name, numpy.full_like(value, sign * own), out=value)
                for name, value in values.items()
            ]
            for handle in waiting:
                handle.wait()
            is_complete = True
            for name, value in values.items():
                change = sign * (before[name] - value)
                for chunk in range(0, len(change), CHUNK):
                    part = change[chunk : chunk + CHUNK]
                    off = numpy.abs(allowed - part[0]).min()
                    if part.min() != part.max() or off > 0.01:
                        say(
                            f"WRONG: step {step} changes chunk {chunk // CHUNK} of {name} by {part.min()} to {part.max()} "
                            f"at rank {job.rank}"
                        )
                    is_complete &= abs(part[0] - complete) <= 0.01
            if not is_complete:
                say(f"rank {job.rank}: step {step} lacks a rank")
            if not has_begun:
                say(f"rank {job.rank} has begun at step {step}, process {os.getpid()}")
                has_begun = True
            if (step + 1) % every == 0:
                say(f"rank {job.rank} has made step {step + 1}")
            time.sleep(0.002)
        if is_exact:
            # Steps of both signs cancel each other, whatever has been made twice.
            for name, value in values.items():
                if (value != -complete * (step % 2)).any():
                    say(f"WRONG: {name} ends with {value.min()} to {value.max()} at rank {job.rank}")
        text = b"".join(value.tobytes() for value in values.values())
        say(f"rank {job.rank} ends with {zlib.crc32(text):08x}")


if __name__ == "__main__":
    main()
