"""PyTorch's all-reduce over gloo: every tensor by itself, or 25 MB at a time."""

import os

import numpy
import torch
import torch.distributed as dist

import gradients

# DDP's own size of a bucket.
BUCKET_BYTES = 25 << 20


class Peer:
    def __init__(self, task: dict):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.workers = task["workers"]
        dist.init_process_group(
            "gloo", init_method=f"file://{task['scratch']}/gloo", rank=task["rank"], world_size=self.workers
        )
        self.version = f"torch {torch.__version__}"
        self.layout = gradients.Layout(task["elements"])
        self.pristine = self.layout.buffer()
        gradients.fill(self.layout, task["rank"], self.pristine)
        self.working = self.layout.buffer()
        whole = torch.from_numpy(self.working)
        spans = {"tensors": self.layout.spans[::-1], "buckets": self.layout.buckets(BUCKET_BYTES)}
        self.parts = {form: [whole[start:end] for start, end in spans] for form, spans in spans.items()}

    def prepare(self, form: str) -> None:
        # The last exchange has written its sums into the gradients' memory.
        numpy.copyto(self.working, self.pristine)

    def exchange(self, form: str) -> None:
        works = [dist.all_reduce(part, async_op=True) for part in self.parts[form]]
        for work in works:
            work.wait()

    def check(self, form: str) -> dict:
        self.prepare(form)
        self.exchange(form)
        tensors = [self.working[start:end] for start, end in self.layout.spans]
        return gradients.compare(self.layout, self.workers, tensors, lambda total: total, 0.0)

    def leave(self) -> None:
        dist.destroy_process_group()
