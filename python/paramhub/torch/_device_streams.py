"""The streams on which a device's tensors are copied to host memory and back.

Except for pinned memory, which only CUDA has, the code is the same for every accelerator: it gets the streams and events of a
device from torch by the device's name. The CPU is such a device too; its streams do nothing, and most tests run this code on it.
Those in python/tests/gpu run it on a GPU, or on a simulated device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from paramhub.errors import MisuseError

Copies = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Tensors to copy to, and those to copy from."""


class DeviceStreams:
    """Two streams of one device: one for copies to the host, and one for results that come back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            self._module: Any = torch.get_device_module(device)
            with self.on_device():
                self.out, self.back = self._module.Stream(), self._module.Stream()
        except (AttributeError, RuntimeError) as error:
            raise MisuseError(
                f"a tensor on {device} cannot be exchanged ({error}): move it to the host, for example by tensor.cpu()"
            ) from error

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can access."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def current_stream(self) -> Any:
        """The device stream on which the caller computes."""
        if self.device.type == "cpu":
            return self._module.current_stream()
        return self._module.current_stream(self.device)

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the device is the current one."""
        return contextlib.nullcontext() if self.device.type == "cpu" else self._module.device(self.device)

    def on_results_stream(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which the results' device stream is the current one."""
        return self._module.stream(self.back)

    def copy_to_host(self, stream: Any, copies: Sequence[Copies]) -> list[Any]:
        """Begins copies of tensors with their values at this point of ``stream``. The events that it returns follow each of
        ``copies``."""
        ready = self._module.Event()
        ready.record(stream)
        ready.wait(self.out)
        copied = []
        with self._module.stream(self.out):
            for each in copies:
                _copy(each)
                copied.append(self._module.Event())
                copied[-1].record(self.out)
        return copied

    def copy_back(self, copies: Copies) -> None:
        """Begins copies of results, on their stream."""
        # Before the copies: if one cannot begin, those before it still write.
        self.keep(copies[0])
        # In this mode tensors that were made in it can be written, too.
        with torch.inference_mode(), self.on_results_stream():
            _copy(copies)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the allocator from reusing the tensors' memory before the results' stream has come to this point. It matters
        if nothing waits for a result and its tensor is dropped."""
        if self.device.type != "cpu":
            for tensor in tensors:
                tensor.record_stream(self.back)

    def results_event(self) -> Any:
        """An event that follows all copies of results so far."""
        event = self._module.Event()
        event.record(self.back)
        return event

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Copies a sparse value of the host into a tensor of the device, and waits for the copy."""
        with torch.no_grad(), self.on_results_stream():
            tensor.copy_(value.to(self.device))
        if self.device.type != "cpu":
            self.back.synchronize()


def _copy(copies: Copies) -> None:
    """Copies on the current device stream. One call for all of them keeps the interpreter's lock free for other threads."""
    to, sources = copies
    if to:
        torch._foreach_copy_(to, sources, non_blocking=True)
