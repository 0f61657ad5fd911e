"""DistributedDataParallel over gloo with the model's parameters and a backward pass that computes nothing."""

import os

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradients

# The mean is exact if the number of workers is a power of two, else it is rounded in the last place.
TOLERANCE = 1e-6


class HandOut(torch.autograd.Function):
    """An operation whose backward returns gradients that exist already, all at once."""

    @staticmethod
    def forward(ctx, ready, *parameters):
        ctx.ready = ready
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        # No other reference may exist, or autograd would copy the gradients instead of taking them as `parameter.grad`.
        handed_out = (None, *ctx.ready)
        ctx.ready.clear()
        return handed_out


class Model(torch.nn.Module):
    def __init__(self, shapes: list):
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, ready: list) -> torch.Tensor:
        return HandOut.apply(ready, *self.tensors)


class Peer:
    def __init__(self, task: dict):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.workers = task["workers"]
        dist.init_process_group(
            "gloo", init_method=f"file://{task['scratch']}/ddp", rank=task["rank"], world_size=self.workers
        )
        self.version = f"torch {torch.__version__}"
        self.layout = gradients.Layout(task["elements"])
        self.pristine = self.layout.buffer()
        gradients.fill(self.layout, task["rank"], self.pristine)
        self.working = self.layout.buffer()
        self.shapes = task["shapes"]
        self.parts = [
            torch.from_numpy(self.working[start:end]).view(shape)
            for (start, end), shape in zip(self.layout.spans, self.shapes)
        ]
        model = Model(self.shapes)
        wrapped = {
            "bare": lambda: model,
            "copies": lambda: DistributedDataParallel(Model(self.shapes)),
            "views": lambda: DistributedDataParallel(Model(self.shapes), gradient_as_bucket_view=True),
        }
        self.models = {form: wrap() for form, wrap in wrapped.items() if form in task["forms"]}

    def prepare(self, form: str) -> None:
        model = self.models[form]
        model.zero_grad(set_to_none=True)
        # DDP writes the means into the gradients' memory.
        numpy.copyto(self.working, self.pristine)
        self.loss = model([part.detach() for part in self.parts])

    def exchange(self, form: str) -> None:
        self.loss.backward()

    def check(self, form: str) -> dict:
        self.prepare(form)
        self.exchange(form)
        tensors = [parameter.grad.flatten().numpy() for parameter in self.models[form].parameters()]
        mean = 1.0 / self.workers
        return gradients.compare(self.layout, self.workers, tensors, lambda total: total * mean, TOLERANCE)

    def leave(self) -> None:
        dist.destroy_process_group()
