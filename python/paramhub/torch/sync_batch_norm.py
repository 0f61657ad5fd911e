"""Horovod's SyncBatchNorm: batch normalisation with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from paramhub.errors import MisuseError
from paramhub.torch._operations import reduce_in_place
from paramhub.torch._process_sets import ProcessSet, global_process_set
from paramhub.torch._reductions import Sum


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch.nn.BatchNorm for inputs of shape ``(N, C, ...)`` of any device, with mean and variance over the batches of all
    ranks, which may differ in size. Its output, gradients and running statistics are those of one process with the whole
    batch.

    In training each forward and each backward pass is an operation that all ranks of ``process_set`` call in the same order. The
    gradients of weight and bias are those of this rank's batch, which a `DistributedOptimizer` averages as all others. There are
    no second derivatives.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise MisuseError(
                f"SyncBatchNorm takes inputs of shape (N, C, ...), not of shape {list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        is_training = self.training or not self.track_running_stats
        if not is_training or self.process_set.size() == 1:
            # It keeps the running statistics, too.
            return self._forward_alone(input)
        factor = self._count_batch()
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                unbiased = variance * (count / max(count - 1, 1))
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return output

    def _forward_alone(self, input: torch.Tensor) -> torch.Tensor:
        factor = self._count_batch() if self.training else 0.0
        return functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            factor,
            self.eps,
        )

    def _count_batch(self) -> float:
        """Counts a batch of training, and returns the share that its statistics have in the running ones."""
        if not self.training or self.num_batches_tracked is None:
            return 0.0 if self.momentum is None else self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        exact = torch.float64 if input.dtype is torch.float64 else torch.float32
        values = input.to(exact)
        over = [0, *range(2, input.dim())]
        count, mean, variance = _whole_statistics(values, over, process_set)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + eps)
        centred = values - mean.view(shape)
        output = centred * scale.view(shape)
        if weight is not None:
            output = output * weight.to(exact).view(shape)
        if bias is not None:
            output = output + bias.to(exact).view(shape)
        ctx.save_for_backward(centred, scale, weight)
        ctx.over, ctx.shape, ctx.count, ctx.process_set = over, shape, count, process_set
        ctx.mark_non_differentiable(mean, variance)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        centred, scale, weight = ctx.saved_tensors
        dtype = gradient.dtype
        gradient = gradient.to(centred.dtype)
        sums = gradient.sum(ctx.over)
        products = (gradient * centred).sum(ctx.over)
        of_weight = (products * scale).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = sums.to(weight.dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None, None
        whole = _summed(torch.cat([sums, products]), ctx.process_set) / max(ctx.count, 1.0)
        mean, slope = whole.chunk(2)
        of_input = gradient - mean.view(ctx.shape) - centred * (slope * scale**2).view(ctx.shape)
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        return (of_input * factor.view(ctx.shape)).to(dtype), of_weight, of_bias, None, None


def _whole_statistics(
    values: torch.Tensor, over: list[int], process_set: ProcessSet
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The number of values of each channel over all ranks, their mean, and their biased variance."""
    channels = values.shape[1]
    count = values.numel() // channels if channels else 0
    own = values.new_zeros(channels) if count == 0 else values.mean(over)
    shape = [1, -1] + [1] * (values.dim() - 2)
    squares = (values - own.view(shape)).square().sum(over)
    # Sums of squares about each rank's own mean keep their precision where the mean is large.
    line = torch.cat([values.new_tensor([float(count)]), own, squares]).cpu()
    group = process_set.group()
    gathered = line.new_empty(group.size * len(line))
    group.allgather_single(gathered, line).wait()
    lines = gathered.view(group.size, -1).double()
    counts, means, squares = lines[:, :1], lines[:, 1 : 1 + channels], lines[:, 1 + channels :]
    total = float(counts.sum())
    mean = (counts * means).sum(0) / max(total, 1.0)
    variance = (squares + counts * (means - mean).square()).sum(0) / max(total, 1.0)
    return total, mean.to(values), variance.to(values)


def _summed(tensor: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
    host = reduce_in_place(tensor.cpu(), Sum, 1.0, 1.0, process_set).wait()
    return host.to(tensor.device)
