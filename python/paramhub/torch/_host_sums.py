"""Has the ranks of one host sum a bucket among themselves before one of them, the leader, exchanges it.

On a host with several GPUs they sum on the GPUs, so the bucket crosses to the host's memory and to the network once, and not once
for each GPU. The leader's results are broadcast to the others when all buckets of the pass were summed: libraries for devices
need one order of operations on all ranks, and results come from the hub in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paramhub.errors import MisuseError
from paramhub.torch._buckets import Buckets


class HostSums:
    """Averages the buckets of one DDP instance over all ranks of its group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        host_group: dist.ProcessGroup,
        open_buckets: Callable[[Sequence[int]], Buckets],
    ) -> None:
        """``group`` is that of the DDP instance. ``host_group`` has those of its ranks that are on this host.
        ``open_buckets(leaders)`` is called on the first rank of each host group, with all of these ranks. All ranks of ``group``
        make this together."""
        self._host_group = host_group
        self._size = group.size()
        leaders = _leaders(group, host_group)
        self._buckets = open_buckets(leaders) if dist.get_rank() in leaders else None
        self._pending: list[_Pending] = []

    def average(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begins the sum of a bucket. The future has its mean."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise MisuseError(
                "HubState(host_group=...): a bucket has the sparse gradient of an embedding, which ranks of one host do not sum "
                "among themselves: use sparse=False in its module, or leave out host_group"
            )
        if bucket.index() == 0:
            # An exception may have ended the pass before.
            self._pending.clear()
        # DDP without a hook divides first, too.
        buffer.div_(self._size)
        on_host = dist.reduce(buffer, group=self._host_group, group_dst=0, async_op=True)
        exchanged = None
        if self._buckets is not None:
            # On a GPU this orders streams, and the host goes on.
            on_host.wait()
            exchanged, _, _ = self._buckets.exchange(bucket)
        pending = _Pending(buffer, on_host, exchanged)
        self._pending.append(pending)
        if bucket.is_last():
            self._distribute()
        return pending.future

    def _distribute(self) -> None:
        """Gives the results to the ranks of the host, in the order of the buckets, which all ranks have."""
        pending, self._pending = self._pending, []
        for each in pending:
            each.on_host.wait()
            if each.exchanged is not None:
                each.exchanged.wait()
            dist.broadcast(each.buffer, group=self._host_group, group_src=0)
            each.future.set_result(each.buffer)


class _Pending:
    """A bucket under way."""

    def __init__(self, buffer: torch.Tensor, on_host: dist.Work, exchanged: Any) -> None:
        self.buffer = buffer
        self.on_host = on_host
        """The sum of the host's ranks."""
        self.exchanged = exchanged
        """The handle of the leader's exchange; None on other ranks."""
        devices = [] if buffer.device.type == "cpu" else [buffer.device]
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)


def _leaders(group: dist.ProcessGroup, host_group: dist.ProcessGroup) -> list[int]:
    """The first rank of each host group. Raises MisuseError, on every rank, if the host groups are not parts of the group."""
    own = dist.get_process_group_ranks(host_group)
    described: list[list[int]] = [[] for _ in range(group.size())]
    dist.all_gather_object(described, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    for rank, its in zip(ranks, described, strict=True):
        strangers = [each for each in its if each not in ranks or described[ranks.index(each)] != its]
        if rank not in its or strangers:
            raise MisuseError(
                f"HubState: the host_group of rank {rank} has ranks {its}: each of the model's ranks, {ranks}, is to be in one "
                "host group, which all of its ranks give. dist.new_subgroups() makes one for each host"
            )
    return sorted({its[0] for its in described})
