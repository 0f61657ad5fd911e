"""Horovod's operations on several tensors at once. Each is exchanged for itself, but their gradients come back together, and one
handle is for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramhub.torch import _autograd, _operations
from paramhub.torch._operations import Pending, check_reduction, copy_of
from paramhub.torch._process_sets import ProcessSet, global_process_set
from paramhub.torch._reductions import Average, Compression, Compressor, Reduction


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of each tensor."""
    options = _autograd.Scaled(check_reduction(average, op), prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = tuple(tensor for tensor, _ in pairs)
    is_recorded = _autograd.needs_gradient(*compressed)
    reduced = (
        _autograd.Allreduce.apply(options, *compressed) if is_recorded else options.allreduce(compressed)
    )
    return [compression.decompress(each, dtype) for each, (_, dtype) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """`grouped_allreduce` without waiting; `synchronize` returns the list of results."""
    copies = [copy_of(tensor) for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`grouped_allreduce` in place."""
    pending = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    )
    return pending.wait()


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """`grouped_allreduce` in place, without waiting."""
    op = check_reduction(average, op)
    return _operations.together(
        [
            _operations.reduce_in_place(tensor, op, prescale_factor, postscale_factor, process_set)
            for tensor in tensors
        ]
    )


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of each tensor."""
    if _autograd.needs_gradient(*tensors):
        return list(_autograd.Allgather.apply(process_set, *tensors))
    return grouped_allgather_async(tensors, name, process_set).wait()


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """`grouped_allgather` without waiting for the tensors. It does wait until all ranks have sent their sizes."""
    pending, _ = _operations.gather_all(tensors, process_set)
    return _operations.together(pending)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of each tensor."""
    options = _autograd.Scaled(check_reduction(None, op), prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    compressed = tuple(tensor for tensor, _ in pairs)
    is_recorded = _autograd.needs_gradient(*compressed)
    reduced = (
        _autograd.Reducescatter.apply(options, *compressed)
        if is_recorded
        else options.reducescatter(compressed)
    )
    return [compression.decompress(each, dtype) for each, (_, dtype) in zip(reduced, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """`grouped_reducescatter` without waiting; `synchronize` returns the list of results."""
    op = check_reduction(None, op)
    return _operations.together(
        [
            _operations.reduce_parts(tensor, op, prescale_factor, postscale_factor, process_set)
            for tensor in tensors
        ]
    )
