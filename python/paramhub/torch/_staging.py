"""Exchanges a job's tensors that are on a device, through the host memory that the job has for them.

A gradient is copied into the host memory from which it is exchanged: the arena that a hub on this host shares, or pinned
memory that the network sends from. `StagedExchanges` submits the request, and copies the result back.

Each exchange costs the host a fraction of a millisecond, however small its tensors are. So gradients that become ready one after
the other are collected into groups, and each group is one exchange. Ranks may group differently, because hubs count the
gradients of each key.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch import _pinning
from paramhub.torch._device_streams import Copies, DeviceStreams
from paramhub.torch._staged_exchanges import CLOSED, Piece, StagedExchanges
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._tensors import memory_range

if TYPE_CHECKING:
    from paramhub._native import Handle, Job

GROUP_BYTES = 1 << 20
"""The bytes from which on a group of gradients is exchanged. On an H200 groups of 1, 4 and 8 MiB take equally long; with smaller
ones the exchange of a small model begins earlier."""
NO_BACKWARD = -1
"""Autograd's number of the current backward pass where there is none."""


class _Group:
    """Gradients that became ready one after the other on one device stream, to be exchanged in one request."""

    def __init__(self, stage: Stage, stream: Any) -> None:
        self.handle = StagedHandle(stage.streams, stage.hand_over)
        self.stream = stream
        self.keys: list[int] = []
        self.gradients: list[torch.Tensor] = []
        self.outs: list[torch.Tensor] = []
        self.nbytes = 0

    def add(self, key: int, gradient: torch.Tensor, out: torch.Tensor) -> None:
        self.keys.append(key)
        self.gradients.append(gradient)
        self.outs.append(out)
        self.nbytes += gradient.numel() * gradient.element_size()


class Stage:
    """Exchanges one job's tensors on one device through host memory. Keys are given by their positions in the job's key table.

    ``is_encoded`` says that gradients travel in another encoding than their own: the arena then has no place for them."""

    def __init__(
        self,
        job: Job,
        device: torch.device,
        shapes: Sequence[torch.Size],
        dtypes: Sequence[torch.dtype],
        *,
        is_encoded: bool = False,
    ) -> None:
        self._job = job
        self._device = device
        self.streams = DeviceStreams(device)
        self._exchanges = StagedExchanges()
        shared = job.shares_memory
        self._gradients = [
            self._host_tensor(job.gradient_tensor, shared and not is_encoded, key, shape, dtype)
            for key, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._parameters = [
            self._host_tensor(job.parameter_tensor, shared, key, shape, dtype)
            for key, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        self._pin()
        self._lock = threading.RLock()
        self._group: _Group | None = None
        """The gradients that were collected and not handed over yet."""
        self._backward = NO_BACKWARD
        """Autograd's number of the newest backward pass at whose end a group is handed over."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The host memory into which parameters are received, by key."""
        return self._parameters

    def push_pull(
        self, keys: list[int], gradients: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> StagedHandle:
        """Exchanges ``gradients`` with their values at this point of the current device stream, and receives into ``outs``."""
        handle = StagedHandle(self.streams)
        self._push_pull(handle, self.streams.current_stream(), keys, gradients, outs)
        return handle

    def collect(self, key: int, gradient: torch.Tensor, out: torch.Tensor) -> StagedHandle:
        """Exchanges a gradient as `push_pull` does, together with others that come before or after it. Its values are those at
        this point of the current device stream, or at a later one: the caller does not write to it until the end.

        It is handed over with its group when the group is large enough, when a caller asks for the end, and at the end of a
        backward pass. Outside of one the caller calls `hand_over` after the last gradient."""
        stream = self.streams.current_stream()
        with self._lock:
            self._hand_over_after_backward()
            if self._group is not None and self._group.stream != stream:
                # The copies of a group wait for the work on one device stream.
                self.hand_over()
            if self._group is None:
                self._group = _Group(self, stream)
            group = self._group
            group.add(key, gradient, out)
            if group.nbytes >= GROUP_BYTES:
                self.hand_over()
        return group.handle

    def hand_over(self) -> None:
        """Begins the exchange of the gradients that were collected so far."""
        with self._lock:
            group, self._group = self._group, None
            if group is None:
                return
            group.handle.is_collecting = False
            self._push_pull(group.handle, group.stream, group.keys, group.gradients, group.outs)

    def exchange(
        self,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        request: Callable[[], Handle],
        copies_back: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> StagedHandle:
        """Copies the device's tensors with their values at this point of the current device stream. Submits the request when
        they are on the host, and copies its results back. ``copies`` and ``copies_back`` are pairs of tensors: copy to, from."""
        handle = StagedHandle(self.streams)
        piece = Piece(_columns(copies), request, _columns(copies_back))
        self._exchanges.begin(handle, self.streams.current_stream(), [piece])
        return handle

    def _push_pull(
        self,
        handle: StagedHandle,
        stream: Any,
        keys: list[int],
        gradients: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> None:
        sends, receives = [self._gradients[key] for key in keys], [self._parameters[key] for key in keys]
        ranges = [memory_range(tensor) for tensor in sends], [memory_range(tensor) for tensor in receives]
        piece = Piece((sends, gradients), lambda: self._job.push_pull(keys, *ranges, self), (outs, receives))
        self._exchanges.begin(handle, stream, [piece])

    def _hand_over_after_backward(self) -> None:
        """Has the group handed over at the end of the backward pass under way. If an exception ends a pass, autograd does not
        call this: then the next caller does that asks for an end or ends the step."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            if backward != NO_BACKWARD:
                torch.autograd.Variable._execution_engine.queue_callback(self.hand_over)
            self._backward = backward

    def close(self) -> None:
        """Ends the stage's thread. Requests that were submitted before still end. Gradients that were collected and not handed
        over are not exchanged."""
        with self._lock:
            self._exchanges.close()
            group, self._group = self._group, None
        if group is not None:
            group.handle.is_collecting = False
            group.handle.end(MisuseError(CLOSED), None)
            group.handle.submitted()

    def _host_tensor(
        self,
        job_memory: Callable[[int], Any],
        is_in_arena: bool,
        key: int,
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        if is_in_arena or self._device.type != "cuda":
            return torch.from_dlpack(job_memory(key)).view(shape)
        return self.streams.empty(shape, dtype)

    def _pin(self) -> None:
        """Registers the arena with the device. If the device refuses, copies are slower but correct."""
        if self._device.type != "cuda" or not self._job.shares_memory:
            return
        with self.streams.on_device():
            tensors = [tensor for tensor in (*self._gradients, *self._parameters) if not tensor.is_pinned()]
            pages = _pinning.register(tensors, self._device)
        # It must be undone while the memory is still mapped, so the finalizer keeps the tensors. No copy is submitted any more
        # when it runs, because everything that submits one refers to the stage. At the end of the process the driver does it.
        release = weakref.finalize(
            self, _pinning.release, pages, tensors, self._device, (self.streams.out, self.streams.back)
        )
        release.atexit = False


def _columns(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copies:
    return [to for to, _ in pairs], [source for _, source in pairs]
