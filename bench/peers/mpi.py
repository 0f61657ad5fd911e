"""MPI's all-reduce by mpi4py: every tensor by itself, or 25 MB at a time, in place or into a second buffer.

The launcher determines the MPI library and its transport.
"""

import numpy
from mpi4py import MPI

import gradients

BUCKET_BYTES = 25 << 20


class Peer:
    def __init__(self, task: dict):
        self.workers = task["workers"]
        self.world = MPI.COMM_WORLD
        if self.world.size != self.workers:
            raise RuntimeError(f"MPI sees {self.world.size} ranks instead of {self.workers}: another MPI's launcher?")
        self.version = version()
        self.layout = gradients.Layout(task["elements"])
        self.gradients = self.layout.buffer()
        gradients.fill(self.layout, self.world.rank, self.gradients)
        self.sums = self.layout.buffer()
        spans = {"tensors": self.layout.spans[::-1], "buckets": self.layout.buckets(BUCKET_BYTES)}
        self.parts = {}
        for form, spans in spans.items():
            sums = [self.sums[start:end] for start, end in spans]
            self.parts[f"{form}-in-place"] = [(MPI.IN_PLACE, part) for part in sums]
            self.parts[form] = [(self.gradients[start:end], part) for (start, end), part in zip(spans, sums)]

    def prepare(self, form: str) -> None:
        if form.endswith("in-place"):
            numpy.copyto(self.sums, self.gradients)

    def exchange(self, form: str) -> None:
        for gradient, total in self.parts[form]:
            self.world.Allreduce(gradient, total)

    def check(self, form: str) -> dict:
        self.sums.fill(numpy.nan)
        self.prepare(form)
        self.exchange(form)
        tensors = [self.sums[start:end] for start, end in self.layout.spans]
        return gradients.compare(self.layout, self.workers, tensors, lambda total: total, 0.0)

    def leave(self) -> None:
        pass  # mpi4py finalizes at exit


def version() -> str:
    """The library's name and version. The library's own text is long; its first words are enough."""
    first_line = MPI.Get_library_version().partition("\n")[0].partition(",")[0]
    return " ".join(first_line.replace("Version:", "").split())
