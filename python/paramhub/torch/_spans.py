"""What a process group's operations are in a timeline: each an exchange, the waits for them, and DDP's passes around them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch.distributed as dist

from paramhub.torch import trace
from paramhub.torch._instances import instances
from paramhub.torch._work import Work

LOOKS_MAX = 4
"""How often a group looks for the models that use it: each time takes a fraction of a second."""


class Spans:
    """A group's, while a trace is made; else each call does nothing."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members = list(members)
        self._rows: dict[str, list[Work]] = {}
        self._watches: list[trace.Watch] = []
        self._looks = 0

    def issued(self, name: str, work: Work) -> None:
        """An operation has begun. Operations of one name that are under way together get rows of their own."""
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
        """DDP has handed in a bucket: from its next forward pass on, its passes are recorded."""
        if trace.active and not self._watches and self._looks < LOOKS_MAX:
            self._looks += 1
            found = [trace.watch(ddp) for ddp in instances() if self._serves(ddp.process_group)]
            self._watches = [watch for watch in found if watch is not None]

    def backward_ended(self) -> None:
        """The pass has no more to compute."""
        for watch in self._watches:
            watch.backward_ended()

    def _serves(self, group: dist.ProcessGroup) -> bool:
        with contextlib.suppress(Exception):  # Of a group that torch.distributed does not know.
            is_ours = "paramhub" in dist.get_backend_config(group)
            return is_ours and dist.get_process_group_ranks(group) == self._members
        return False
