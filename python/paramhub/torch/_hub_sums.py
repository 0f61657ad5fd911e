"""A group's way through the hub: sums and means of tensors of any size."""

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
"""Tensors of fewer bytes go over the mesh: there a round trip costs less, and the hub's throughput does not matter yet."""
LARGE_SLOTS = 16
SLOT_BYTES_MAX = 1 << 20
SLOT_BYTES_MIN = 16 << 10
SMALL_SLOTS = 2
"""A job's slots: so many of the largest, and of every smaller power of two. Together they bound what the hub keeps for it."""

_OPTIMIZERS = {"sum": Sum, "average": Mean}


class HubSums:
    """A hub job for each type and operation, made when it is first used, on a thread of its own: a rank that comes first
    goes on, and its tensors wait."""

    def __init__(self, name: str, world: World, members: Sequence[int]) -> None:
        self._name = name
        self._world = world
        self._members = members
        self._slots: dict[tuple[torch.dtype, str], _native.Slots] = {}
        self._jobs: list[_native.Job] = []
        self._lock = threading.Lock()
        self._is_closed = False
        # A hub in rank 0's process has that host's network interface alone: across hosts a ring moves fewer bytes through it.
        self._is_near = world.is_on_one_host or not world.hub.is_embedded

    def takes(self, tensor: torch.Tensor, op: str) -> bool:
        """Whether this way is the better one: the same answer on all ranks."""
        return (
            tensor.nbytes >= HUB_BYTES_MIN
            and tensor.dtype in DTYPES
            and op in _OPTIMIZERS
            and self._is_near
            and len(self._members) > 1
        )

    def exchange(self, tensor: torch.Tensor, op: str) -> _native.Handle:
        """Reduces a contiguous tensor in place."""
        slots = self._slots.get((tensor.dtype, op)) or self._begin(tensor.dtype, op)
        return slots.exchange(memory_range(tensor), tensor)

    def fail(self, message: str, culprit: int | None) -> None:
        """Nothing is exchanged any more."""
        for slots in self._slots.values():
            slots.fail(message, culprit)

    def close(self, *, abandon: bool) -> None:
        """Leaves the jobs. With ``abandon`` requests under way are not waited for."""
        with self._lock:
            self._is_closed = True
            jobs, self._jobs = self._jobs, []
        self.fail(f"group `{self._name}` was left", None)
        for job in jobs:
            try:
                self._world.close_job(job, abandon=abandon)
            except JobFailedError:
                # Whoever used it was told when it happened.
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
            job = self._world.open_job(label, settings, self._members)
        except Exception as error:
            slots.fail(str(error), getattr(error, "culprit", None))
            return
        with self._lock:
            is_late = self._is_closed
            if not is_late:
                self._jobs.append(job)
        if is_late:
            self._world.close_job(job, abandon=True)
        else:
            slots.open(job)


def _slot_sizes() -> list[int]:
    sizes = [SLOT_BYTES_MAX] * LARGE_SLOTS
    nbytes = SLOT_BYTES_MAX // 2
    while nbytes >= SLOT_BYTES_MIN:
        sizes += [nbytes] * SMALL_SLOTS
        nbytes //= 2
    return sizes
