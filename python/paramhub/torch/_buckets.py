"""This module exchanges DDP's buckets of gradients, parameter by parameter.

A sparse gradient has a bucket of its own, which is no part of the job: the ranks exchange its rows themselves.

Each parameter is one key, so DDP may regroup buckets, as it does after the first pass. If a bucket's keys are consecutive in the
key table and the hub is on this host, all ranks of the host read the mean from one shared copy. So when DDP has regrouped, the
job is opened again with its key table in the order of the buckets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._collectives import Group
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._staging import Stage
from paramhub.torch._tensors import check_same_device, is_dense, key, needs_stage
from paramhub.torch._work import Work
from paramhub.torch._world import World

LAYOUTS_MAX = 4096
"""The most layouts of buckets that are kept. No model has nearly as many buckets."""
REORDERINGS_MAX = 2
"""The number of times that the job is opened again for a new order of the buckets. DDP changes them once."""


class UnknownParameter(MisuseError):
    """A bucket has the gradient of a parameter that the job does not have."""


class _Layout(NamedTuple):
    """The memory of a bucket's gradients, and of their means if that is separate."""

    address: int
    """The address of the bucket's buffer."""
    keys: list[int]
    """The positions of the bucket's parameters in the job's key table."""
    ranges: list[tuple[int, int]]
    """The address of each gradient, and its length in bytes."""
    parts: list[torch.Tensor]
    """A view of each gradient in the buffer, with one dimension."""
    shared: torch.Tensor | None
    """The means in the memory that the host's ranks share, with one dimension; None if they replace the gradients."""
    name: str
    """The name of the bucket in traces."""


class Buckets:
    """Exchanges the buckets of one DDP instance through a job of its own. All its ranks must construct it together."""

    def __init__(
        self,
        world: World,
        ddp: DistributedDataParallel,
        ranks: list[int] | None,
        codec: str | None,
        in_place: bool,
        sums: bool = False,
    ) -> None:
        """``sums`` says that gradients become their sum, and not their mean."""
        self._world = world
        self._ranks = ranks
        self._codec = codec
        self._optimizer = "sum" if sums else "mean"
        exchanged = {id(parameter) for parameter in ddp._module_parameters if parameter.requires_grad}
        trained = {
            name: parameter
            for name, parameter in ddp.module.named_parameters()
            if id(parameter) in exchanged and parameter.numel() > 0
        }
        self.device = check_same_device(trained.items())
        # DDP goes by the modules, too.
        sparse = {
            id(module.weight)
            for module in ddp.module.modules()
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        }
        self._sparse_names = {id(each): name for name, each in trained.items() if id(each) in sparse}
        self._parameters = {name: each for name, each in trained.items() if id(each) not in sparse}
        self._group = self._make_group() if self._sparse_names else None
        # The stage of an accelerator always writes the means over the gradients in the bucket.
        self._in_place = in_place or needs_stage(self.device)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._names_in_pass: list[str] = []
        self._has_scattered_keys = False
        self._next_order: list[str] | None = None
        self._reorderings = 0
        self._stage: Stage | None = None
        self._job = self._open(list(self._parameters)) if self._parameters else None
        # Traces the passes of this module.
        self.watch = trace.watch(ddp)

    def exchange(
        self, bucket: dist.GradBucket
    ) -> tuple[_native.Handle | StagedHandle | Work, torch.Tensor, str]:
        """Submits a bucket's gradients. Returns the handle, the tensor that has their mean when the handle has ended, and the
        bucket's name. The tensor has the bucket's shape."""
        if self._next_order is not None:
            self._reopen()
        buffer = bucket.buffer()
        if buffer.is_sparse:
            work, rows, name = self._sum_rows(bucket, buffer)
            self._collect_order(bucket, [])
            return work, rows, name
        assert self._job is not None
        layout = self._layout(bucket, buffer)
        handle: _native.Handle | StagedHandle
        if self._stage is not None:
            handle = self._stage.push_pull(layout.keys, layout.parts, layout.parts)
        elif layout.shared is None:
            handle = self._job.push_pull_in_place(layout.keys, layout.ranges, buffer)
        else:
            handle = self._job.push_pull_shared(layout.keys, layout.ranges, buffer)
        if trace.active:
            trace.request(layout.name, handle)
        self._collect_order(bucket, layout.keys)
        return handle, buffer if layout.shared is None else layout.shared, layout.name

    def _make_group(self) -> Group:
        """The ranks of the DDP instance, for sums of sparse gradients."""
        world = self._world
        if self._ranks is None:
            return world.group()
        name = world.label(f"ddp-rows-{_digest(self._ranks)}")
        return Group(name, world, world.store(name), members=self._ranks, timeout=world.options.timeout)

    def _sum_rows(self, bucket: dist.GradBucket, gradient: torch.Tensor) -> tuple[Work, torch.Tensor, str]:
        """Submits a sparse gradient, as `exchange` does."""
        name = self._sparse_names.get(id(bucket.parameters()[0]))
        if self._group is None or name is None:
            raise UnknownParameter(
                f"hub_hook: DDP hands over a sparse gradient of shape {list(gradient.shape)} that is of no Embedding or "
                "EmbeddingBag with sparse=True, or whose module was changed after DDP was constructed: make it dense"
            )
        # DDP without a hook divides first, too.
        rows = gradient / self._group.size
        return self._group.sum_sparse(rows, timeout=math.inf), rows, name

    def _open(self, order: list[str]) -> _native.Job:
        world = self._world
        kind = "ddp" if self._ranks is None else f"ddp-{_digest(self._ranks)}"
        job = world.jobs.open(
            world.label(kind),
            {
                "keys": [key(name, self._parameters[name]) for name in order],
                "optimizer": {"name": self._optimizer},
                "codec": self._codec,
                "packed": True,
            },
            self._ranks,
            shared_parameters="never" if self._in_place else "where possible",
            inherits=True,
        )
        self._stage = None
        if needs_stage(self.device):
            members = [self._parameters[name] for name in order]
            sizes = [torch.Size([parameter.numel()]) for parameter in members]
            dtypes = [parameter.dtype for parameter in members]
            self._stage = Stage(job, self.device, sizes, dtypes, is_encoded=self._codec is not None)
        self._key_numbers = {name: number for number, name in enumerate(order)}
        self._layouts.clear()
        return job

    def _collect_order(self, bucket: dist.GradBucket, keys: list[int]) -> None:
        """Stores the order in which buckets arrive. After the last bucket of a pass, it requests a key table in this order if the
        keys of some bucket are not consecutive.

        It uses nothing that differs between ranks, so either all ranks open the job again, or none.
        """
        if self._reorderings >= REORDERINGS_MAX or self._in_place:
            return
        for parameter in bucket.parameters():
            name = self._names.get(id(parameter))
            if name is not None:
                self._names_in_pass.append(name)
        self._has_scattered_keys = self._has_scattered_keys or not _are_consecutive(keys)
        if bucket.is_last():
            if self._has_scattered_keys:
                left_out = self._parameters.keys() - set(self._names_in_pass)
                self._next_order = self._names_in_pass + [
                    name for name in self._parameters if name in left_out
                ]
            self._names_in_pass, self._has_scattered_keys = [], False

    def _reopen(self) -> None:
        """Opens the job again, with its key table in the buckets' order. No request is under way between two passes."""
        order, self._next_order = self._next_order, None
        assert order is not None and self._job is not None
        self._reorderings += 1
        # The old job is closed first, because the hub may not have the memory for both.
        self._world.jobs.close(self._job)
        self._job = self._open(order)

    def _layout(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> _Layout:
        """Returns the layout of a bucket. A bucket is identified by its parameters, because DDP renumbers buckets when it
        regroups."""
        parameters = bucket.parameters()
        identity = tuple(map(id, parameters))
        layout = self._layouts.get(identity)
        if layout is None or layout.address != buffer.data_ptr():
            if len(self._layouts) >= LAYOUTS_MAX:
                self._layouts.clear()
            layout = self._layouts[identity] = self._find_layout(parameters, bucket.gradients(), buffer)
        return layout

    def _find_layout(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> _Layout:
        """Finds where each gradient of a bucket lies, and checks that they fill the buffer in order, without gaps."""
        keys: list[int] = []
        ranges: list[tuple[int, int]] = []
        names: list[str] = []
        parts: list[torch.Tensor] = []
        begin = buffer.data_ptr()
        filled_bytes = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.numel() == 0:
                continue
            name = self._names.get(id(parameter))
            if name is None:
                raise UnknownParameter(
                    f"hub_hook: DDP hands over the gradient of a parameter of shape {list(parameter.shape)} that did "
                    "not require one at the first backward pass: freeze and unfreeze before DDP is constructed"
                )
            if gradient.dtype != parameter.dtype:
                raise MisuseError(
                    f"hub_hook: DDP reduces {name!r}, which is {parameter.dtype}, as {gradient.dtype}: leave "
                    "mixed_precision out and use HubState(codec=...)"
                )
            nbytes = gradient.numel() * gradient.element_size()
            if gradient.data_ptr() != begin + filled_bytes or not is_dense(gradient):
                raise MisuseError(
                    f"hub_hook: the gradient of {name!r} does not lie in its bucket behind the one before it. Please "
                    "report this"
                )
            first_element = filled_bytes // gradient.element_size()
            parts.append(buffer[first_element : first_element + gradient.numel()])
            filled_bytes += nbytes
            names.append(name)
            keys.append(self._key_numbers[name])
            ranges.append((gradient.data_ptr(), nbytes))
        if filled_bytes != buffer.numel() * buffer.element_size():
            raise MisuseError("hub_hook: a bucket has more than its gradients. Please report this")
        shared = None
        assert self._job is not None
        if self._job.shares_parameters and keys and _are_consecutive(keys):
            shared = torch.from_dlpack(self._job.shared_parameters(keys[0], keys[-1] + 1))
        name = (
            names[0]
            if len(names) == 1
            else f"{names[0]} … {names[-1]} ({len(names)})"
            if names
            else "nothing"
        )
        return _Layout(begin, keys, ranges, parts, shared, name)


def _are_consecutive(keys: list[int]) -> bool:
    """Returns whether the keys follow one another in the job's key table."""
    return all(key == keys[0] + position for position, key in enumerate(keys))


def _digest(ranks: list[int]) -> str:
    """Returns 12 hexadecimal digits that distinguish groups of ranks in the labels of their jobs."""
    return hashlib.blake2s(",".join(map(str, ranks)).encode(), digest_size=6).hexdigest()
