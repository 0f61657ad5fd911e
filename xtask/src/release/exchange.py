"""A worker for ``paramhub run``. Its tensors are the standard library's, so that it runs where nothing is installed."""

import array
import os

import paramhub

ELEMENTS, STEPS, LEARNING_RATE = 100_000, 3, 0.5

with paramhub.connect() as job:
    ranks = int(os.environ["WORLD_SIZE"])
    weight = array.array("f", [1.0]) * ELEMENTS
    gradient = array.array("f", [job.rank + 1.0]) * ELEMENTS
    job.init({"weight": weight}, paramhub.SGD(lr=LEARNING_RATE))
    for _ in range(STEPS):
        job.push_pull("weight", gradient, out=weight).wait()
    mean = sum(range(1, ranks + 1)) / ranks
    expected = 1.0 - STEPS * LEARNING_RATE * mean
    # All of these numbers are exact in binary.
    assert set(weight) == {expected}, (set(weight), expected)
    print(f"rank {job.rank} of {ranks}: {STEPS} steps gave {expected}", flush=True)
