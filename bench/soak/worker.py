"""A rank of a short job, which ``paramhub run`` starts: it makes some steps with one tensor and leaves."""

from __future__ import annotations

import sys

import numpy

import paramhub

weight, gradient = numpy.zeros((512, 64), "f4"), numpy.full((512, 64), 1e-3, "f4")
with paramhub.connect() as job:
    job.init({"weight": weight}, optimizer=paramhub.SGD(lr=0.1))
    for _ in range(int(sys.argv[1])):
        job.push_pull("weight", gradient, out=weight).wait()
