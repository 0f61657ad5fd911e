"""Registers host memory of a job with a CUDA device, so that the device copies from it and to it without the host's help."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from paramhub.torch._log import log
from paramhub.torch._tensors import memory_range

Range = tuple[int, int]
"""Address and bytes."""


def pages_of(ranges: Iterable[Range], page: int = mmap.PAGESIZE) -> list[Range]:
    """The pages on which these ranges lie, with neighbouring ones as one range. The device locks whole pages and refuses a page
    that is locked already, so that two ranges on one page must be registered together."""
    runs: list[Range] = []
    for address, size in sorted(ranges):
        if size == 0:
            continue
        start, end = address // page * page, -(-(address + size) // page) * page
        if runs and start <= sum(runs[-1]):
            start, length = runs.pop()
            end = max(end, start + length)
        runs.append((start, end - start))
    return runs


def register(tensors: Sequence[torch.Tensor], device: torch.device) -> list[Range]:
    """Registers the pages of host tensors with the current device, and returns those that it has taken. It may refuse some:
    copies of these go by way of the driver's own memory, which takes longer."""
    taken: list[Range] = []
    refused: dict[str, int] = {}
    runtime = torch.cuda.cudart()
    for address, size in pages_of(map(memory_range, tensors)):
        code = runtime.cudaHostRegister(address, size, 0)
        if int(code) == 0:
            taken.append((address, size))
        else:
            reason = f"CUDA error {int(code)}, {runtime.cudaGetErrorString(code)}"
            refused[reason] = refused.get(reason, 0) + size
            _clear_error(device)
    for reason, size in refused.items():
        log(f"{device} refuses to register {size} bytes of host memory ({reason}): their copies take longer")
    return taken


def release(
    pages: Sequence[Range], tensors: Sequence[torch.Tensor], device: torch.device, streams: Iterable[Any]
) -> None:
    """Undoes `register` when the copies on ``streams`` have ended. ``tensors`` are those that were registered: they are mapped
    until this returns. An address that stayed registered would stand for the old memory although other memory is mapped there
    later, and the device would copy to and from the old one."""
    # After an error of the device each call raises. Then it makes no more copies.
    with contextlib.suppress(RuntimeError):
        for stream in streams:
            stream.synchronize()
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        for address, _ in pages:
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                _clear_error(device)


def _clear_error(device: torch.device) -> None:
    """A call that was refused leaves its error behind, and torch raises it at the next start of a kernel, as if the kernel had
    failed. This starts one."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
