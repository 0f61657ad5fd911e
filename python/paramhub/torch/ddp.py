"""Averages DistributedDataParallel's gradients through a hub, in its communication hook."""

# DDP compares the hook's annotations with its own types: they must not be strings here.

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._buckets import Buckets, UnknownParameter
from paramhub.torch._ddp_instances import ddp_instances
from paramhub.torch._host_sums import HostSums
from paramhub.torch._initialization import world
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._work import Work
from paramhub.torch._world import World


class HubState:
    """The state of `hub_hook`. Make one for each DistributedDataParallel::

        ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)

    On the first backward pass it opens a job of all ranks of ``process_group`` (by default DDP's own) with every parameter that
    requires a gradient, by name. Gradients become their mean, as with DDP itself. ``codec`` is the encoding of f32 gradients in
    frames: ``f16``, ``bf16``, ``int8``, or for matrices ``one-bit`` or ``two-bit``; the last three also encode the results.
    Sums are made in f32 in any case. ``ddp`` is the model of this state; without it the model's first forward pass sets it.

    Of the gradients of ``Embedding(sparse=True)`` and ``EmbeddingBag(sparse=True)`` the ranks exchange the rows, without a hub
    and without a codec.

    ``host_group`` has the ranks of this host, which each rank gives, for example from ``dist.new_subgroups()``. They sum their
    gradients among themselves, over NCCL on GPUs, and the first of them exchanges the sums. It refuses sparse gradients.

    On the hub's host all ranks read one copy of the mean, which is read-only. The mean is written into the bucket instead if
    ``in_place=True``, or if another hook is registered that calls `hub_hook` and may change the result of its future.

    The first pass calls `paramhub.torch.init` if it was not called before. If a model has several DDP instances, all ranks must
    run their first backward passes in the same order, as DDP itself requires.

    It can be pickled. The unpickled state has its options without the process groups, and opens a job of its own.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        ddp: DistributedDataParallel | None = None,
        codec: str | None = None,
        in_place: bool = False,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.codec = codec
        self.in_place = in_place
        self._group = process_group
        self._ddp = weakref.ref(ddp) if ddp is not None else None
        self._host_group = host_group
        self._buckets: Buckets | None = None
        self._host_sums: HostSums | None = None
        if ddp is None:
            _learn_in_forward(self)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: the options. ``parameters`` is for the error feedback of codecs, which is not saved yet:
        training from this state does not make up for what such a codec has lost so far."""
        return {"codec": self.codec, "in_place": self.in_place, "parameters": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a result of `state_dict`. Call it before the first backward pass, unless it changes nothing."""
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
        ddp, group = self._model()
        here = world()
        ranks = _ranks(here, group)
        # A hook around this one may change its result in place; DDP itself only reads it.
        is_wrapped = not any(
            held is self and hook is hub_hook for hook, held in getattr(ddp, "_comm_hooks", ())
        )
        self._buckets = Buckets(here, ddp, ranks, here.codec(self.codec), self.in_place or is_wrapped)
        return self._buckets

    def _open_on_host(self, host_group: dist.ProcessGroup) -> HostSums:
        ddp, group = self._model()
        here = world()
        # Raises if torch.distributed has other ranks.
        _ranks(here, group)

        def open_buckets(leaders: Sequence[int]) -> Buckets:
            return Buckets(here, ddp, list(leaders), here.codec(self.codec), in_place=True, sums=True)

        self._host_sums = HostSums(group, host_group, open_buckets)
        return self._host_sums

    def _model(self) -> tuple[DistributedDataParallel, dist.ProcessGroup]:
        """The model of this state, and the group whose ranks exchange its gradients."""
        ddp = self._ddp() if self._ddp is not None else _holder(self)
        if ddp is None:
            raise MisuseError("HubState: the DistributedDataParallel it was made for is gone")
        self._ddp = weakref.ref(ddp)
        return ddp, self._group if self._group is not None else ddp.process_group


def hub_hook(state: HubState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients through a hub, in place. Pass it to
    ``DistributedDataParallel.register_comm_hook``.

    If the exchange fails, for instance because a rank died, the backward pass raises JobFailedError with the
    hub's message within seconds. The first pass of a static graph raises RuntimeError with that message.
    """
    if state._host_group is not None:
        return (state._host_sums or state._open_on_host(state._host_group)).average(bucket)
    buckets = state._buckets or state._open()
    try:
        handle, result, name = buckets.exchange(bucket)
    except UnknownParameter:
        # If a second instance has the same state, this raises a better explanation.
        _holder(state)
        raise
    return _Exchange(handle, result, name, buckets).future


class _Exchange:
    """One bucket under way, and the future that DDP waits for.

    Ctrl-C does not interrupt DDP's own wait in C++, and an exception loses its type there. So a callback at the
    end of the backward pass, which runs before DDP's, waits first. If DDP waits before that (in a static
    graph's first pass) or outside of a backward pass (in its `join`), a thread of this package completes the
    future.
    """

    def __init__(
        self, handle: _native.Handle | StagedHandle | Work, result: torch.Tensor, name: str, buckets: Buckets
    ) -> None:
        self._handle = handle
        self._name = name
        self._watch = buckets.watch
        # With a device the future must know the device stream on which the result arrives.
        devices = [] if buckets.device.type == "cpu" else [buckets.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._uncompleted = [future]
        # This does not use set_exception: it sets the exception as the result, and DDP would report that the result is no
        # tensor.
        self.future = future.then(self._outcome)
        self._result = result
        with contextlib.suppress(RuntimeError):  # Outside of a backward pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        handle.add_done_callback(self._complete)

    def _wait(self) -> None:
        if self._watch is not None:
            self._watch.backward_ended()
        with trace.wait(self._name):
            self._handle.wait()
        self._complete(self._handle)

    def _complete(self, handle: _native.Handle | StagedHandle | Work) -> None:
        try:
            future = self._uncompleted.pop()
        except IndexError:
            return  # The other thread has completed it.
        future.set_result(self._result)

    def _outcome(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        error = self._handle.exception()
        if error is not None:
            raise error
        return future.value()


def _learn_in_forward(state: HubState) -> None:
    """Registers a hook that finds the DDP instance of ``state`` in the instance's first forward pass. DDP passes its hook
    neither itself nor its parameters' names, and a search among all objects takes up to seconds."""
    waiting = weakref.ref(state)

    def look(module: torch.nn.Module, _inputs: Any) -> None:
        state = waiting()
        if state is None or state._ddp is not None:
            hook.remove()
            return
        # A compiled model contains the DDP instance.
        module = module._modules.get("_orig_mod") or module
        if isinstance(module, DistributedDataParallel) and _has(module, state):
            state._ddp = weakref.ref(module)
            hook.remove()

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)


def _holder(state: HubState) -> DistributedDataParallel:
    """The DDP instance with which ``state`` was registered, found among all objects. For a state that no forward pass has set."""
    holders = [ddp for ddp in ddp_instances() if _has(ddp, state)]
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
    """A process group's ranks as ranks of the world; None for all of them."""
    if (dist.get_rank(), dist.get_world_size()) != (here.rank, here.size):
        raise MisuseError(
            f"hub_hook: this is rank {dist.get_rank()} of {dist.get_world_size()} for torch.distributed, but rank "
            f"{here.rank} of {here.size} for paramhub: pass the same to both"
        )
    ranks = dist.get_process_group_ranks(group)
    return None if len(ranks) == here.size else ranks
