"""The gradients of Horovod's operations. Each function takes several tensors, which it exchanges together, and whose
gradients come back together; a single one is a group of one. Gradients are those of Horovod 0.28, with its factors. They have no
gradients themselves, because a backward pass does not record what it exchanges."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from paramhub.errors import MisuseError
from paramhub.torch import _operations
from paramhub.torch._operations import copy_of
from paramhub.torch._process_sets import ProcessSet
from paramhub.torch._reductions import Average, Reduction, Sum


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Returns whether autograd is to know of an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Scaled, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.options = options
        return options.allreduce(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        op = ctx.options.op
        if op is not Average and op is not Sum:
            raise MisuseError(f"allreduce with {op!r} has no gradient: detach the tensor")
        return None, *ctx.options.allreduce(gradients)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, root_rank: int, process_set: ProcessSet, tensor: torch.Tensor) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return _operations.broadcast_in_place(copy_of(tensor), root_rank, process_set).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        process_set = ctx.process_set
        mean = _operations.reduce_in_place(copy_of(gradient), Average, 1.0, 1.0, process_set).wait()
        group = process_set.group()
        is_root = group.members[group.rank] == ctx.root_rank
        return None, None, mean if is_root else torch.zeros_like(mean)


class Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, process_set: ProcessSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.are_scalars = [tensor.dim() == 0 for tensor in tensors]
        pending, ctx.counts = _operations.gather_all(tensors, process_set)
        return tuple(each.wait() for each in pending)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        pending = [
            _operations.reduce_split(gradient.contiguous(), counts, Average, 1.0, ctx.process_set)
            for gradient, counts in zip(gradients, ctx.counts, strict=True)
        ]
        own = [each.wait() for each in pending]
        return None, *(
            each.squeeze(0) if is_scalar else each
            for each, is_scalar in zip(own, ctx.are_scalars, strict=True)
        )


class Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, splits: Any, process_set: ProcessSet, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received, received_splits = _operations.redistribute(tensor, splits, process_set).wait()
        ctx.process_set, ctx.received_splits = process_set, received_splits
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[None, None, torch.Tensor]:
        back, _ = _operations.redistribute(gradient, ctx.received_splits, ctx.process_set).wait()
        return None, None, back


class Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: Scaled, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.options = options
        return options.reducescatter(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        options = ctx.options
        if options.op is not Average and options.op is not Sum:
            raise MisuseError(f"reducescatter with {options.op!r} has no gradient: detach the tensor")
        size = options.process_set.group().size if options.op is Sum else 1
        factor = size * options.prescale * options.postscale
        pending, _ = _operations.gather_all([each * factor for each in gradients], options.process_set)
        return None, *(each.wait() for each in pending)


class Scaled:
    """A reduction with its factors and its ranks."""

    def __init__(self, op: Reduction, prescale: float, postscale: float, process_set: ProcessSet) -> None:
        self.op = op
        self.prescale = prescale
        self.postscale = postscale
        self.process_set = process_set

    def allreduce(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        pending = [
            _operations.reduce_in_place(
                copy_of(tensor), self.op, self.prescale, self.postscale, self.process_set
            )
            for tensor in tensors
        ]
        return tuple(each.wait() for each in pending)

    def reducescatter(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        pending = [
            _operations.reduce_parts(tensor, self.op, self.prescale, self.postscale, self.process_set)
            for tensor in tensors
        ]
        return tuple(each.wait() for each in pending)
