"""MPI's all-reduce by mpi4py: every tensor by itself, or 25 MB at a time. Which MPI is the environment's affair."""

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
        self.version = f"{MPI.Get_library_version().split(', package')[0].split('MPICH Release')[0].strip()}"
        self.layout = gradients.Layout(task["elements"])
        self.gradients = self.layout.buffer()
        gradients.fill(self.layout, self.world.rank, self.gradients)
        self.sums = self.layout.buffer()
        spans = {"tensors": self.layout.spans[::-1], "buckets": self.layout.buckets(BUCKET_BYTES)}
        self.parts = {
            form: [(self.gradients[start:end], self.sums[start:end]) for start, end in spans]
            for form, spans in spans.items()
        }

    def prepare(self, form: str) -> None:
        pass

    def exchange(self, form: str) -> None:
        if form in self.parts:
            for gradient, total in self.parts[form]:
                self.world.Allreduce(gradient, total)
            return
        numpy.copyto(self.sums, self.gradients) if False else None
        for gradient, total in self.parts[form.split("-")[0]]:
            self.world.Allreduce(MPI.IN_PLACE, total)

    def check(self, form: str) -> dict:
        self.sums.fill(numpy.nan)
        self.exchange(form)
        tensors = [self.sums[start:end] for start, end in self.layout.spans]
        return gradients.compare(self.layout, self.workers, tensors, lambda total: total, 0.0)

    def leave(self) -> None:
        pass  # mpi4py finalizes at exit
