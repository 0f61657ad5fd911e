"""Gradients of DistributedDataParallel through a hub, by its communication hook."""

# DDP compares the hook's annotations with its own types: they must not be strings here.

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._buckets import Buckets, UnknownParameter
from paramhub.torch._instances import instances
from paramhub.torch._staging import StagedHandle
from paramhub.torch._world import World, world


class HubState:
    """What `hub_hook` needs to know. One for each DistributedDataParallel::

        ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)

    On the first backward pass it opens a job of all ranks of ``process_group`` (by default DDP's own) with every parameter
    that requires a gradient, by name. Gradients come back as their mean, as from DDP itself. ``codec`` (``f16``, ``bf16``, or
    ``one-bit`` and ``two-bit`` for matrices, which come back so, too) is how f32 gradients travel; they are summed in f32 all the
    same. ``ddp`` tells the model this state is for; otherwise its first forward pass tells.

    Beside the hub the ranks of a host read one copy of the mean, which nobody can write. Where `hub_hook` is not registered
    itself but called by a hook around it, which may change the result of its future, and with ``in_place=True``, the mean is
    written into the bucket instead.

    `paramhub.torch.init` is called by the first pass if it was not before. Where a model has several DDP instances,
    all ranks must run their first backward passes in the same order, as DDP asks for anyway.

    It can be pickled; what comes back has its options, save the process group, and opens a job of its own.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        ddp: DistributedDataParallel | None = None,
        codec: str | None = None,
        in_place: bool = False,
    ) -> None:
        self.codec = codec
        self.in_place = in_place
        self._group = process_group
        self._ddp = weakref.ref(ddp) if ddp is not None else None
        self._buckets: Buckets | None = None
        if ddp is None:
            _learn_in_forward(self)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the options, and by parameter name what a codec remembers, of which nothing is kept yet: what
        ``one-bit`` has lost so far is not made up for by whoever goes on from here."""
        return {"codec": self.codec, "in_place": self.in_place, "parameters": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Before the first backward pass, unless it changes nothing."""
        if self._buckets is not None and (state["codec"], state["in_place"]) != (self.codec, self.in_place):
            raise MisuseError(
                f"HubState: its job is open with codec {self.codec}, and cannot change to {state['codec']}: load the "
                "state before the first backward pass"
            )
        self.codec, self.in_place = state["codec"], state["in_place"]

    def __getstate__(self) -> dict[str, Any]:
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(codec=state["codec"], in_place=state["in_place"])  # type: ignore[misc]

    def _open(self) -> Buckets:
        ddp = self._ddp() if self._ddp is not None else _holder(self)
        if ddp is None:
            raise MisuseError("HubState: the DistributedDataParallel it was made for is gone")
        self._ddp = weakref.ref(ddp)
        here = world()
        ranks = _ranks(here, self._group if self._group is not None else ddp.process_group)
        # Whoever wraps the hook may change its result in place; DDP itself only reads it.
        is_wrapped = not any(
            held is self and hook is hub_hook for hook, held in getattr(ddp, "_comm_hooks", ())
        )
        self._buckets = Buckets(here, ddp, ranks, self.codec, self.in_place or is_wrapped)
        return self._buckets


def hub_hook(state: HubState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients through a hub, in place. For
    ``DistributedDataParallel.register_comm_hook``.

    If the exchange fails, because a rank died for example, the backward pass raises JobFailedError with the
    hub's message within seconds (RuntimeError with it where the first pass of a static graph exchanges).
    """
    buckets = state._buckets or state._open()
    try:
        handle, result, name = buckets.exchange(bucket)
    except UnknownParameter:
        # A second instance with the same state explains it better.
        _holder(state)
        raise
    return _Exchange(handle, result, name, buckets).future


class _Exchange:
    """One bucket under way, and the future that DDP waits for.

    DDP's own wait, in C++, would neither answer Ctrl-C nor keep an exception's type. A callback at the end of
    the backward pass, before DDP's, waits in its stead. Where DDP waits before that (a static graph's first
    pass) or outside of a backward pass (its `join`), the future is completed from the library's thread.
    """

    def __init__(
        self, handle: _native.Handle | StagedHandle, result: torch.Tensor, name: str, buckets: Buckets
    ) -> None:
        self._handle = handle
        self._name = name
        self._watch = buckets.watch
        # On a device it has to know the stream on which the result becomes right.
        devices = [] if buckets.device.type == "cpu" else [buckets.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._uncompleted = [future]
        # Not set_exception: the object it sets in the result's place is no tensor, and DDP would complain of
        # that.
        self.future = future.then(self._outcome)
        self._result = result
        with contextlib.suppress(RuntimeError):  # Where this is no backward pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        handle.add_done_callback(self._complete)

    def _wait(self) -> None:
        if self._watch is not None:
            self._watch.backward_ended()
        with trace.wait(self._name):
            self._handle.wait()
        self._complete(self._handle)

    def _complete(self, handle: _native.Handle | StagedHandle) -> None:
        try:
            future = self._uncompleted.pop()
        except IndexError:
            return  # The other thread was first.
        future.set_result(self._result)

    def _outcome(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        error = self._handle.exception()
        if error is not None:
            raise error
        return future.value()


def _learn_in_forward(state: HubState) -> None:
    """Lets the DDP instance that ``state`` is going to be registered with tell it by its first forward pass. DDP tells its hook
    neither itself nor its parameters' names, and looking for it among all objects takes up to seconds."""
    waiting = weakref.ref(state)

    def look(module: torch.nn.Module, _inputs: Any) -> None:
        state = waiting()
        if state is None or state._ddp is not None:
            hook.remove()
            return
        # A compiled model has it inside.
        module = module._modules.get("_orig_mod") or module
        if isinstance(module, DistributedDataParallel) and _has(module, state):
            state._ddp = weakref.ref(module)
            hook.remove()

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)


def _holder(state: HubState) -> DistributedDataParallel:
    """The DDP instance that ``state`` was registered with, where no forward pass has told."""
    holders = [ddp for ddp in instances() if _has(ddp, state)]
    if len(holders) == 1:
        return holders[0]
    if holders:
        raise MisuseError(
            "HubState: it is registered with several DistributedDataParallel instances: give each its own"
        )
    raise MisuseError(
        "HubState: no DistributedDataParallel has it as the state of its hook: pass HubState(ddp=...)"
    )


def _has(ddp: DistributedDataParallel, state: HubState) -> bool:
    return any(held is state for _, held in ddp.__dict__.get("_comm_hooks", ()))


def _ranks(here: World, group: dist.ProcessGroup) -> list[int] | None:
    """A process group's ranks in the world's; None for all of them."""
    if (dist.get_rank(), dist.get_world_size()) != (here.rank, here.size):
        raise MisuseError(
            f"hub_hook: this is rank {dist.get_rank()} of {dist.get_world_size()} for torch.distributed, but rank "
            f"{here.rank} of {here.size} for paramhub: pass the same to both"
        )
    ranks = dist.get_process_group_ranks(group)
    return None if len(ranks) == here.size else ranks
