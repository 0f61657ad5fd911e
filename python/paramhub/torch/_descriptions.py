"""Types and shapes of tensors as numbers, by which ranks compare their tensors."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

DIMENSIONS_MAX = 8
"""The number of dimensions by which ranks compare shapes. All that follow count as one."""
DESCRIPTION_LENGTH = 3 + DIMENSIONS_MAX


def describe(tensor: torch.Tensor) -> list[int]:
    """A 1, for a tensor that is there; its type; the number of its dimensions; and its dimensions."""
    shape = list(tensor.shape[: DIMENSIONS_MAX - 1])
    rest = tensor.shape[DIMENSIONS_MAX - 1 :]
    shape += [rest.numel()] if rest else []
    return [1, _type_number(tensor.dtype), len(shape), *shape, *[0] * (DIMENSIONS_MAX - len(shape))]


def text_of(description: Sequence[int]) -> str:
    """A description for people."""
    known = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    names = {_type_number(each): str(each) for each in known}
    kind, count = description[1:3]
    return f"{names.get(kind, 'another type')} of shape {list(description[3 : 3 + count])}"


def _type_number(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())
