"""Rank 0's buffers at every rank before each forward pass, as with DistributedDataParallel's ``broadcast_buffers``."""

from __future__ import annotations

from typing import Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch import _memory
from paramhub.torch._exchange import StepState
from paramhub.torch._world import World


class BufferSync:
    """The hook of a model. It has no reference to the optimizer, so that the optimizer can be freed."""

    def __init__(self, world: World, model: torch.nn.Module, step: StepState) -> None:
        consistency, job = world.hubs.access.job.consistency, step.job
        goes_on = job.loses_workers or job.rewind_every is not None
        if goes_on or consistency not in (None, "sync"):
            what = "a job that outlives its ranks" if goes_on else f"consistency={consistency!r}"
            raise MisuseError(
                f"sync_buffers waits in each step for every rank, and with {what} some may not come: leave it out"
            )
        self._group = world.group()
        self._step = step
        self._hook = model.register_forward_pre_hook(self._before_forward, prepend=True)

    def _before_forward(self, model: torch.nn.Module, _inputs: Any) -> None:
        # Evaluation may be one rank's alone, and passes that add up gradients are those of one step.
        if not (model.training and torch.is_grad_enabled()) or self._step.is_paused:
            return
        buffers = [buffer for buffer in model.buffers() if buffer.numel() > 0]
        if not buffers or self._group.size == 1:
            return
        flat = _memory.flatten(buffers)
        self._group.broadcast(flat, 0).wait()
        if self._group.rank != 0:
            _memory.unflatten(flat, buffers)

    def remove(self) -> None:
        """Removes the hook. A second call does nothing."""
        self._hook.remove()
