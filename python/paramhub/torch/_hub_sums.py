"""Sums and means of a group's tensors of any size, through the hub."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paramhub import _native
from paramhub.errors import JobFailedError
from paramhub.optimizers import Mean, Sum
from paramhub.torch._tensors import DTYPES, memory_range

if TYPE_CHECKING:
    from paramhub.torch._world import World

HUB_BYTES_MIN = 64 << 10
"""Tensors of fewer bytes go over the mesh, whose round trips cost less. For these the hub's higher throughput does not matter."""
SHARED_MEMORY_FIRST = True
"""Ranks that share memory reduce there themselves: that needs fewer copies than a hub that all of them share memory with."""
LARGE_SLOTS = 16
SLOT_BYTES_MAX = 1 << 20
SLOT_BYTES_MIN = 16 << 10
SMALL_SLOTS = 2
"""The number of slots of a job of the largest size is `LARGE_SLOTS`, of every smaller power of two `SMALL_SLOTS`. Together they
bound the hub's memory for the job."""

_OPTIMIZERS = {"sum": Sum, "average": Mean}


class HubSums:
    """One hub job for each type and operation. A separate thread opens a job at its first use, so the first rank to call does
    not wait for the others; only its tensors do."""

    def __init__(self, name: str, world: World, members: Sequence[int], *, shares_memory: bool) -> None:
        """``shares_memory`` says whether the group's mesh reduces in memory that the ranks share."""
        self._name = name
        self._world = world
        self._members = members
        self._slots: dict[tuple[torch.dtype, str], _native.Slots] = {}
        self._jobs: list[_native.Job] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._shares_memory = shares_memory
        # A hub in rank 0's process uses only that host's network interface. Across hosts a ring moves fewer bytes through it.
        self._is_near = world.hubs.is_on_one_host or not world.hubs.access.is_embedded

    def takes(self, tensor: torch.Tensor, op: str) -> bool:
        """Returns whether the hub, and not the mesh, sums this tensor. The result is the same on all ranks."""
        return (
            tensor.nbytes >= HUB_BYTES_MIN
            and tensor.dtype in DTYPES
            and op in _OPTIMIZERS
            and self._is_near
            and not (self._shares_memory and SHARED_MEMORY_FIRST)
            and len(self._members) > 1
        )

    def exchange(self, tensor: torch.Tensor, op: str) -> _native.Handle:
        """Reduces a contiguous tensor in place."""
        slots = self._slots.get((tensor.dtype, op)) or self._begin(tensor.dtype, op)
        return slots.exchange(memory_range(tensor), tensor)

    def fail(self, message: str, culprit: int | None) -> None:
        """Fails every exchange, and all later ones."""
        for slots in self._slots.values():
            slots.fail(message, culprit)

    def close(self, *, abandon: bool) -> None:
        """Leaves the jobs. With ``abandon`` it does not wait for requests under way."""
        with self._lock:
            self._is_closed = True
            jobs, self._jobs = self._jobs, []
        self.fail(f"group `{self._name}` was left", None)
        for job in jobs:
            try:
                self._world.jobs.close(job, abandon=abandon)
            except JobFailedError:
                # The operations of this job have raised the error already.
                continue

    def _begin(self, dtype: torch.dtype, op: str) -> _native.Slots:
        sizes = _slot_sizes()
        slots = _native.Slots(list(enumerate(sizes)))
        self._slots[dtype, op] = slots
        settings = {
            "keys": [
                {
                    "name": f"slot-{number}",
                    "shape": [nbytes // dtype.itemsize],
                    "dtype": DTYPES[dtype],
                    "priority": 0,
                }
                for number, nbytes in enumerate(sizes)
            ],
            "optimizer": _OPTIMIZERS[op]().settings(),
        }
        label = f"{self._name}/{op}-{DTYPES[dtype]}"
        opener = threading.Thread(
            target=self._open, args=(slots, label, settings), name="paramhub-open", daemon=True
        )
        opener.start()
        return slots

    def _open(self, slots: _native.Slots, label: str, settings: dict) -> None:
        try:
            job = self._world.jobs.open(label, settings, self._members)
        except Exception as error:
            slots.fail(str(error), getattr(error, "culprit", None))
            return
        with self._lock:
            is_late = self._is_closed
            if not is_late:
                self._jobs.append(job)
        if is_late:
            self._world.jobs.close(job, abandon=True)
        else:
            slots.open(job)


def _slot_sizes() -> list[int]:
    sizes = [SLOT_BYTES_MAX] * LARGE_SLOTS
    nbytes = SLOT_BYTES_MAX // 2
    while nbytes >= SLOT_BYTES_MIN:
        sizes += [nbytes] * SMALL_SLOTS
        nbytes //= 2
    return sizes
