"""Keys, types and memory ranges of torch's tensors, for the hub."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paramhub.errors import MisuseError

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
"""The types of elements that hubs sum, by torch's types."""


def key(name: str, tensor: torch.Tensor, *, group: int = 0) -> dict[str, Any]:
    """A tensor's entry in a job's key table."""
    try:
        dtype = DTYPES[tensor.dtype]
    except KeyError:
        raise MisuseError(
            f"{name!r} has elements of {tensor.dtype}, which hubs do not sum: use float32, float16 or bfloat16"
        ) from None
    entry: dict[str, Any] = {"name": name, "shape": list(tensor.shape), "dtype": dtype, "priority": 0}
    return {**entry, "group": group} if group else entry


def memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of a dense host tensor. A request with this range must have the tensor as its owner, to keep it alive."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's elements fill its memory without gaps or overlap, in any order of dimensions. Sums and
    updates are elementwise, so any order will do as long as all ranks have the same."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last) or _fills(tensor)


def _fills(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def needs_stage(device: torch.device) -> bool:
    """Returns whether the device's tensors are exchanged through a stage's host memory."""
    return device.type != "cpu"


def check_same_device(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """The device of all tensors. Raises MisuseError if there are several."""
    found: torch.device | None = None
    for name, tensor in tensors:
        if found is None:
            found = tensor.device
        elif tensor.device != found:
            raise MisuseError(
                f"{name!r} is on {tensor.device}, others are on {found}: give each device an optimizer of its own"
            )
    if found is None:
        raise MisuseError("there is no tensor to exchange")
    return found
