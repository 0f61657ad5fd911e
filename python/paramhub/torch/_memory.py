"""Where parameters lie, and in what order of dimensions they are exchanged."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import _tensors

ALIGNMENT = 16
"""Bytes to a multiple of which tensors are padded in a flat copy: every type can be viewed there."""


def make_dense(parameter: torch.nn.Parameter) -> None:
    """Gives a parameter with gaps or overlaps in its memory a memory of its own."""
    if not _tensors.is_dense(parameter):
        parameter.data = parameter.data.contiguous()


def memory_shape(tensor: torch.Tensor) -> list[int]:
    """The extents of a dense tensor in the order its elements lie in memory, outermost first. Exchanges are elementwise, so
    any order will do, but all ranks need the same."""
    stride, extents = tensor.stride(), tensor.shape
    return [extents[dimension] for dimension in sorted(range(tensor.dim()), key=lambda at: -stride[at])]


def move_into(parameter: torch.nn.Parameter, memory: _native.Tensor) -> torch.Tensor:
    """Lets a dense parameter lie in ``memory``, with the values and strides it has. Returns the tensor that keeps it."""
    flat = torch.from_dlpack(memory).reshape(-1)
    moved = flat.as_strided(parameter.size(), parameter.stride())
    moved.copy_(parameter.data)
    parameter.data = moved
    return moved


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def in_memory_order_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with its elements in memory as the parameter's are: itself, or else a copy."""
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
    """A copy of the bytes of host tensors of any types, one after the other, each from a multiple of `ALIGNMENT` on."""
    flat = torch.zeros(flat_bytes(tensors), dtype=torch.uint8)
    for piece, tensor in zip(_pieces(flat, tensors), tensors, strict=True):
        piece.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return flat


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies what `flatten` has made of tensors of the same shapes and types back into these."""
    for piece, tensor in zip(_pieces(flat, tensors), tensors, strict=True):
        tensor.detach().copy_(piece.view(tensor.dtype).view(tensor.shape))


def _pieces(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    start = 0
    for tensor in tensors:
        yield flat[start : start + tensor.numel() * tensor.element_size()]
        start += _padded(tensor)


def _padded(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
