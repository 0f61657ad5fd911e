"""Records a process group's operations in the trace: each exchange, the waits for it, and the passes of DDP models."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch.distributed as dist

from paramhub.torch import trace
from paramhub.torch._ddp_instances import ddp_instances
from paramhub.torch._work import Work

LOOKS_MAX = 4
"""The interval at which a group searches for the models that use it. Each search takes a fraction of a second."""


class Spans:
    """The recorder of one group's operations. Without a trace each call does nothing."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members = list(members)
        self._rows: dict[str, list[Work]] = {}
        self._watches: list[trace.Watch] = []
        self._looks = 0

    def issued(self, name: str, work: Work) -> None:
        """Records an operation that has begun. Operations of one name that run at the same time get rows of their own."""
        work.name = name
        if not trace.active:
            return
        row = self._rows.setdefault(name, [])
        place = next((at for at, earlier in enumerate(row) if earlier.done()), len(row))
        row[place : place + 1] = [work]
        if place > 0:
            work.name = f"{name} ({place + 1})"
        for handle in work.handles:
            trace.request(work.name, handle)

    def is_in_backward(self) -> None:
        """Called when DDP has submitted a bucket. Records DDP's passes from its next forward pass on."""
        if trace.active and not self._watches and self._looks < LOOKS_MAX:
            self._looks += 1
            found = [trace.watch(ddp) for ddp in ddp_instances() if self._serves(ddp.process_group)]
            self._watches = [watch for watch in found if watch is not None]

    def backward_ended(self) -> None:
        """Called when the backward pass has computed all gradients."""
        for watch in self._watches:
            watch.backward_ended()

    def _serves(self, group: dist.ProcessGroup) -> bool:
        with contextlib.suppress(Exception):  # torch.distributed may not know the group.
            is_ours = "paramhub" in dist.get_backend_config(group)
            return is_ours and dist.get_process_group_ranks(group) == self._members
        return False
