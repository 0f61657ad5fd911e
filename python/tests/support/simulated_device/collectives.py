"""Collectives of gloo for tensors of the simulated devices, which it exchanges in copies on the host. Those of other backends are
torch's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work, _create_work_from_future

OPERATORS = ("allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_", "reduce_")

_library: Any = None
"""The kernels are those of torch again when nothing refers to this."""


def register(device_type: str) -> None:
    """Has ``init_process_group("gloo")`` serve these devices too."""
    global _library
    dist.Backend.backend_capability[dist.Backend.GLOO].append(device_type)
    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        # torch has kernels of its own for devices of others. They pass the devices' tensors to gloo.
        warnings.simplefilter("ignore")
        for name in OPERATORS:
            of_torch = torch.library.get_kernel(f"c10d::{name}", "PrivateUse1")
            _library.impl(name, _on_host(name, of_torch, device_type), "PrivateUse1", with_keyset=True)


def _on_host(name: str, of_torch: Any, device_type: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.c10d, name).default

    def run(keys: Any, *arguments: Any) -> Any:
        group = dist.ProcessGroup.unbox(
            next(each for each in arguments if isinstance(each, torch.ScriptObject))
        )
        if not isinstance(group._get_backend(torch.device(device_type)), dist.ProcessGroupGloo):
            return of_torch.call_boxed(keys, *arguments)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copied(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [copied(each) for each in value]
            if not isinstance(value, torch.Tensor) or value.device.type != device_type:
                return value
            copies.append((value, value.cpu()))
            return copies[-1][1]

        result = operator(*map(copied, arguments))
        # Some operators return their tensors, too.
        returns_tensors = isinstance(result, tuple)
        Work.unbox(result[-1] if returns_tensors else result).wait()
        for tensor, host in copies:
            tensor.copy_(host)
        # The future has the results on the device, ordered after these copies.
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[copies[0][0].device])
        future.set_result(arguments[0])
        work = _create_work_from_future(future).boxed()
        return (arguments[0], work) if returns_tensors else work

    return run
