"""The memory of parameters, and the order of dimensions in which they are exchanged."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import _tensors

ALIGNMENT = 16
"""Tensors are padded to a multiple of so many bytes in a flat copy, so that it can be viewed as any type there."""


def make_dense(parameter: torch.nn.Parameter) -> None:
    """Moves a parameter with gaps or overlaps in its memory to new, contiguous memory."""
    if not _tensors.is_dense(parameter):
        parameter.data = parameter.data.contiguous()


def memory_shape(tensor: torch.Tensor) -> list[int]:
    """The extents of a dense tensor's dimensions in memory order, outermost first. Exchanges are elementwise, so any order
    will do, but all ranks need the same."""
    stride, extents = tensor.stride(), tensor.shape
    return [extents[dimension] for dimension in sorted(range(tensor.dim()), key=lambda at: -stride[at])]


def move_into(parameter: torch.nn.Parameter, memory: _native.Tensor) -> torch.Tensor:
    """Moves a dense parameter into ``memory``, with its values and strides. Returns the tensor that keeps the memory alive."""
    flat = torch.from_dlpack(memory).reshape(-1)
    moved = flat.as_strided(parameter.size(), parameter.stride())
    moved.copy_(parameter.data)
    parameter.data = moved
    return moved


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order, in one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def in_memory_order_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with the parameter's strides: itself, or else a copy."""
    pairs = zip(parameter.stride(), gradient.stride(), parameter.shape, strict=True)
    if all(mine == theirs or extent == 1 for mine, theirs, extent in pairs):
        return gradient
    copy = torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
    )
    return copy.copy_(gradient)


def check_apart(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuses dense tensors that overlap: the hub would update the same memory twice."""
    ranges = sorted((*_tensors.memory_range(tensor), name) for name, tensor in tensors)
    for (start, length, name), (other_start, _, other) in itertools.pairwise(ranges):
        if other_start < start + length:
            raise MisuseError(
                f"parameters {name!r} and {other!r} share memory but are different Parameter objects: tie them by "
                "assigning one and the same Parameter to both places"
            )


def flat_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of `flatten`'s result for these tensors."""
    return sum(_padded(tensor) for tensor in tensors)


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the bytes of host tensors of any types, one after the other. Each begins at a multiple of `ALIGNMENT`."""
    flat = torch.zeros(flat_bytes(tensors), dtype=torch.uint8)
    for piece, tensor in zip(_pieces(flat, tensors), tensors, strict=True):
        piece.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies the result of `flatten` of tensors of the same shapes and types back into these."""
    for piece, tensor in zip(_pieces(flat, tensors), tensors, strict=True):
        tensor.detach().copy_(piece.view(tensor.dtype).view(tensor.shape))


def _pieces(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    start = 0
    for tensor in tensors:
        yield flat[start : start + tensor.numel() * tensor.element_size()]
        start += _padded(tensor)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
