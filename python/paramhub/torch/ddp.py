"""Gradients of DistributedDataParallel through a hub, by its communication hook."""

# DDP compares the hook's annotations with its own types: they must not be strings here.

import contextlib
import gc
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._tensors import check_same_device, is_dense, key
from paramhub.torch._world import World, world

LAYOUTS_MAX = 4096
"""Buckets whose layout is remembered. DDP has them rebuilt once; more than these come from tensors of one
use."""


class HubState:
    """What `hub_hook` needs to know. One for each DistributedDataParallel::

        ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)

    On the first backward pass it opens a job of all ranks of ``process_group`` (by default DDP's own) with
    every parameter that requires a gradient, by name, in the model's order. Gradients come back as their
    mean, as from DDP itself. ``codec`` (``f16``, ``bf16``) is how f32 gradients travel; they are summed in
    f32 all the same. ``ddp`` tells the model this state is for, which it finds by itself otherwise.

    `paramhub.torch.init` is called by the first pass if it was not before. Where a model has several DDP
    instances, all ranks must run their first backward passes in the same order, as DDP asks for anyway.

    It can be pickled; what comes back has its options, save the process group, and opens a job of its own.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        ddp: DistributedDataParallel | None = None,
        codec: str | None = None,
    ) -> None:
        self.codec = codec
        self._group = process_group
        self._ddp = weakref.ref(ddp) if ddp is not None else None
        self._job: _native.Job | None = None
        self._names: dict[int, str] = {}
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._watch: trace.Watch | None = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the options, and by parameter name what a codec remembers, which none does
        yet."""
        return {"codec": self.codec, "parameters": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Before the first backward pass, unless it changes nothing."""
        codec = state["codec"]
        if self._job is not None and codec != self.codec:
            raise MisuseError(
                f"HubState: its job is open with codec {self.codec}, and cannot change to {codec}: load the state "
                "before the first backward pass"
            )
        self.codec = codec

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(codec=state["codec"])  # type: ignore[misc]

    def _exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._job is None:
            self._job = self._open()
        buffer = bucket.buffer()
        layout = self._layout(bucket, buffer)
        handle = self._job.push_pull_in_place(layout.keys, layout.ranges, buffer)
        if trace.active:
            trace.request(layout.name, handle)
        return _Exchange(handle, buffer, layout.name, self._watch).future

    def _open(self) -> _native.Job:
        ddp = self._ddp() if self._ddp is not None else _holder(self)
        if ddp is None:
            raise MisuseError("HubState: the DistributedDataParallel it was made for is gone")
        here = world()
        ranks = _ranks(here, self._group if self._group is not None else ddp.process_group)
        exchanged = {id(parameter) for parameter in ddp._module_parameters if parameter.requires_grad}
        parameters = [
            (name, parameter)
            for name, parameter in ddp.module.named_parameters()
            if id(parameter) in exchanged and parameter.numel() > 0
        ]
        device = check_same_device(parameters)
        if device.type != "cpu":
            raise MisuseError(
                f"hub_hook: the model is on {device}, and only gradients in host memory are exchanged as yet"
            )
        kind = "ddp" if ranks is None else f"ddp-{_digest(ranks)}"
        job = here.open_job(
            here.label(kind),
            {
                "keys": [key(name, parameter) for name, parameter in parameters],
                "optimizer": {"name": "mean"},
                "codec": self.codec,
            },
            ranks,
        )
        self._names = {id(parameter): name for name, parameter in parameters}
        self._watch = trace.watch(ddp)
        return job

    def _layout(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> "_Layout":
        """Where each parameter's gradient lies in the bucket. Buckets are known by their parameters: DDP
        numbers them anew when it rebuilds them."""
        parameters = bucket.parameters()
        identity = tuple(map(id, parameters))
        address = buffer.data_ptr()
        layout = self._layouts.get(identity)
        if layout is None or layout.address != address:
            if len(self._layouts) >= LAYOUTS_MAX:
                self._layouts.clear()
            layout = self._layouts[identity] = self._look(parameters, bucket.gradients(), buffer)
        return layout

    def _look(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> "_Layout":
        assert self._job is not None
        names: list[str] = []
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None and parameter.numel() > 0:
                raise MisuseError(
                    f"hub_hook: DDP hands over the gradient of a parameter of shape {list(parameter.shape)} that did "
                    "not require one at the first backward pass: freeze and unfreeze before DDP is constructed"
                )
            names.append(name or "")
        if buffer.is_sparse:
            raise MisuseError(
                f"hub_hook: the gradient of {names[0]!r} is sparse: use sparse=False in the module"
            )
        keys, ranges = [], []
        begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()
        for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
            address, nbytes = gradient.data_ptr(), gradient.numel() * gradient.element_size()
            if nbytes == 0:
                continue
            if gradient.dtype != parameter.dtype:
                raise MisuseError(
                    f"hub_hook: DDP reduces {name!r}, which is {parameter.dtype}, as {gradient.dtype}: leave "
                    "mixed_precision out and use HubState(codec=...)"
                )
            if not (begin <= address and address + nbytes <= end and is_dense(gradient)):
                raise MisuseError(
                    f"hub_hook: the gradient of {name!r} does not lie in its bucket in one piece. Please report this"
                )
            number = self._job.key(name)
            assert number is not None
            keys.append(number)
            ranges.append((address, nbytes))
        present = [name for name in names if name]
        name = present[0] if len(present) == 1 else f"{present[0]} … {present[-1]} ({len(present)})"
        return _Layout(keys, ranges, begin, name)


def hub_hook(state: HubState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients through a hub, in place. For
    ``DistributedDataParallel.register_comm_hook``.

    If the exchange fails, because a rank died for example, the backward pass raises JobFailedError with the
    hub's message within seconds (RuntimeError with it in the first pass of a static graph).
    """
    return state._exchange(bucket)


class _Layout:
    __slots__ = ("address", "keys", "name", "ranges")

    def __init__(self, keys: list[int], ranges: list[tuple[int, int]], address: int, name: str) -> None:
        self.keys = keys
        self.ranges = ranges
        self.address = address
        self.name = name


class _Exchange:
    """One bucket under way, and the future that DDP waits for.

    DDP's own wait, in C++, would neither answer Ctrl-C nor keep an exception's type. A callback at the end of
    the backward pass, before DDP's, waits in its stead. Where DDP waits before that (a static graph's first
    pass) or outside of a backward pass (its `join`), the future is completed from the library's thread.
    """

    def __init__(
        self, handle: _native.Handle, buffer: torch.Tensor, name: str, watch: trace.Watch | None
    ) -> None:
        self._handle = handle
        self._name = name
        self._watch = watch
        self._uncompleted: list[torch.futures.Future[torch.Tensor]] = [torch.futures.Future()]
        # Not set_exception: the object it sets in the result's place is no tensor, and DDP would complain of
        # that.
        self.future = self._uncompleted[0].then(self._outcome)
        self._buffer = buffer
        with contextlib.suppress(RuntimeError):  # Where this is no backward pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        handle.add_done_callback(self._complete)

    def _wait(self) -> None:
        if self._watch is not None:
            self._watch.backward_ended()
        with trace.wait(self._name):
            self._handle.wait()
        self._complete(self._handle)

    def _complete(self, handle: _native.Handle) -> None:
        try:
            future = self._uncompleted.pop()
        except IndexError:
            return  # The other thread was first.
        future.set_result(self._buffer)

    def _outcome(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        error = self._handle.exception()
        if error is not None:
            raise error
        return future.value()


def _holder(state: HubState) -> DistributedDataParallel:
    """The DDP instance that ``state`` was registered with. It is looked for once: DDP tells its hook neither
    itself nor its parameters' names."""
    holders = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), DistributedDataParallel)
        and any(held is state for _, held in thing.__dict__.get("_comm_hooks", ()))
    ]
    if len(holders) == 1:
        return holders[0]
    if holders:
        raise MisuseError(
            "HubState: it is registered with several DistributedDataParallel instances: give each its own"
        )
    raise MisuseError(
        "HubState: no DistributedDataParallel has it as the state of its hook: pass HubState(ddp=...)"
    )


def _ranks(here: World, group: dist.ProcessGroup) -> list[int] | None:
    """A process group's ranks in the world's; None for all of them."""
    if (dist.get_rank(), dist.get_world_size()) != (here.rank, here.size):
        raise MisuseError(
            f"hub_hook: this is rank {dist.get_rank()} of {dist.get_world_size()} for torch.distributed, but rank "
            f"{here.rank} of {here.size} for paramhub: pass the same to both"
        )
    ranks = dist.get_process_group_ranks(group)
    return None if len(ranks) == here.size else ranks


def _digest(ranks: list[int]) -> str:
    return hashlib.blake2s(",".join(map(str, ranks)).encode(), digest_size=6).hexdigest()
