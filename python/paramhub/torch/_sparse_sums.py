"""Sums of sparse tensors: ranks exchange indices and values, and none sends a zero that its tensor does not have.

First all ranks learn how many elements each has. Then each sends its own to every other, as messages: these need no order
among the group's collectives, so the caller goes on before the ranks know the sizes. Every rank adds the same values in the
order of the ranks, so all get the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch._descriptions import DESCRIPTION_LENGTH, describe, text_of
from paramhub.torch._followed_work import FollowedWork
from paramhub.torch._tensors import memory_range
from paramhub.torch._work import Work

FIRST_TAG = 1 << 62
"""The tag of a group's first sum. torch's tags for messages are smaller."""

SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int32}
"""The types in which values of these types are added up."""


def begin(
    mesh: _native.Mesh,
    members: Sequence[int],
    own: torch.Tensor,
    write: Callable[[torch.Tensor], None],
    number: int,
) -> Work:
    """Sums the ranks' sparse COO tensors, of which this rank's is ``own``, on the host and coalesced. ``write(sum)`` gets the
    sum, which is coalesced. ``members`` are the ranks' names in errors, and ``number`` counts the group's sums. Halves are added
    up in f32.

    The work raises MisuseError, on every rank, if ranks' tensors differ in type, shape or number of sparse dimensions.
    """
    description = torch.tensor([*describe(own), own.sparse_dim(), own._nnz()])
    described = description.new_empty(mesh.size, len(description))
    receives = [memory_range(line) for line in described]
    first = mesh.allgather(memory_range(description), receives, (description, described))
    exchange = functools.partial(_exchange, mesh, members, own, write, described, FIRST_TAG + number)
    return FollowedWork(Work((first,)), exchange)


def _exchange(
    mesh: _native.Mesh,
    members: Sequence[int],
    own: torch.Tensor,
    write: Callable[[torch.Tensor], None],
    described: torch.Tensor,
    tag: int,
) -> Work:
    """Sends this rank's indices and values, and receives those of the others, which ``described`` counts."""
    lines = described.tolist()
    _check_same(lines, members)
    indices, values = own.indices().contiguous(), own.values().contiguous()
    parts, handles = [], []
    for rank, line in enumerate(lines):
        count = line[-1]
        if rank == mesh.rank:
            parts.append((indices, values))
            continue
        theirs = indices.new_empty(len(indices), count), values.new_empty(count, *values.shape[1:])
        parts.append(theirs)
        # Messages of one tag arrive in the order in which they are sent.
        handles += [mesh.receive(rank, tag, memory_range(part), part) for part in theirs if part.numel()]
        handles += [
            mesh.send(rank, tag, memory_range(part), part) for part in (indices, values) if part.numel()
        ]
    return Work(tuple(handles), lambda: write(_sum_of(own, parts)))


def _check_same(lines: Sequence[Sequence[int]], members: Sequence[int]) -> None:
    """Raises MisuseError if ranks' tensors cannot be added."""
    first = lines[0]
    for rank, line in zip(members, lines, strict=True):
        if line[:-1] != first[:-1]:
            texts = [
                f"{text_of(each)} with {each[DESCRIPTION_LENGTH]} sparse dimensions" for each in (first, line)
            ]
            raise MisuseError(
                f"the sum of sparse tensors: rank {members[0]} has {texts[0]}, and rank {rank} {texts[1]}: all ranks give "
                "sparse tensors of one type and shape"
            )


def _sum_of(own: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of the ranks' indices and values, as a coalesced tensor like ``own``."""
    extents = own.shape[: own.sparse_dim()]
    places = torch.cat([_places(indices, extents) for indices, _ in parts])
    summed, positions = torch.unique(places, return_inverse=True)
    values = torch.zeros(
        len(summed), *own.shape[own.sparse_dim() :], dtype=SUMMED_IN.get(own.dtype, own.dtype)
    )
    for (_, addends), its in zip(parts, positions.split([len(each) for _, each in parts]), strict=True):
        # No rank has an index twice.
        values.index_add_(0, its, addends.to(values.dtype))
    return torch.sparse_coo_tensor(
        _indices(summed, extents), values.to(own.dtype), own.shape, is_coalesced=True, check_invariants=False
    )


def _places(indices: torch.Tensor, extents: Sequence[int]) -> torch.Tensor:
    """The number of each element among all that the sparse dimensions have, in row-major order."""
    place = indices.new_zeros(indices.shape[1])
    for index, extent in zip(indices, extents, strict=True):
        place = place * extent + index
    return place


def _indices(places: torch.Tensor, extents: Sequence[int]) -> torch.Tensor:
    """The indices of the elements with these numbers."""
    indices = places.new_empty(len(extents), len(places))
    for dimension in reversed(range(len(extents))):
        indices[dimension] = places % max(1, extents[dimension])
        places = places // max(1, extents[dimension])
    return indices
