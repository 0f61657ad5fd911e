"""Horovod's join: a rank that has run out of data serves the operations of the ranks that go on, until all have joined.

A joined rank does not know which operations the others call, and they do not ask: as long as nobody has joined, a rank only
notes what it calls. A rank that has waited for `FIRST_LOOK` seconds looks into the run's store whether another one has joined.
From then on it writes there what it calls, and joined ranks call the same with tensors that change no result: zeros, for a sum
or a mean.
"""

from __future__ import annotations

import json
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from paramhub.errors import MisuseError
from paramhub.torch._collectives import Group
from paramhub.torch._rendezvous import explained_store_errors
from paramhub.torch._work import Work

if TYPE_CHECKING:
    from paramhub.torch._gradients import GradientExchange
    from paramhub.torch._world import World

FIRST_LOOK = 0.05
"""Seconds for which a rank waits for an operation before it looks whether another rank has joined."""
LOOK_INTERVAL_MAX = 0.5
"""The most seconds between two such looks of one wait."""
POLL_INTERVAL_MAX = 0.004
"""The most seconds between two looks of a joined rank for operations to serve."""
CALLS_MAX = 1 << 14
"""The number of newest calls that a rank can describe. Only calls that do not need every rank, such as a root's broadcasts,
can run so far ahead of a rank that does not come."""


class Awaited(Protocol):
    """What `Joins.wait` waits for."""

    def wait(self, timeout: float | None = None) -> None: ...


class _Call(NamedTuple):
    number: int
    """Its position among the group's collectives, from 1."""
    description: tuple[Any, ...]


class Joins:
    """One rank's part in the joins of its world: what it tells joined ranks, and what it serves when it has joined."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store: dist.Store | None = None
        self._group: JoinableGroup | None = None
        self._optimizers: weakref.WeakValueDictionary[str, GradientExchange] = weakref.WeakValueDictionary()
        self._calls: deque[_Call] = deque(maxlen=CALLS_MAX)
        """The calls that some rank may not have made."""
        self._meetings: deque[tuple[int, Work]] = deque()
        """Number and work of those of them that end at this rank only if every rank has called them."""
        self._number = 0
        self._is_known = False
        self._looked = 0.0

    def group(self) -> JoinableGroup:
        """The group of all ranks. The first call makes it; every rank makes that call."""
        if self._group is None:
            # A rank that has joined is to make it, too.
            self._write("group", "")
            self._group = JoinableGroup(self._world.group(), self)
        return self._group

    def add_optimizer(self, label: str, exchange: GradientExchange) -> None:
        """Registers the exchange of an optimizer of all ranks, whose steps a joined rank is to serve."""
        self._optimizers[label] = exchange

    def note(self, work: Work, description: tuple[Any, ...], *, is_meeting: bool = True) -> JoinableWork:
        """Notes a call of the group's that has just been made."""
        while self._meetings and self._meetings[0][1].done():
            number, _ = self._meetings.popleft()
            while self._calls and self._calls[0].number <= number:
                self._calls.popleft()
        assert self._group is not None
        call = _Call(self._group.calls(), description)
        self._calls.append(call)
        if is_meeting:
            self._meetings.append((call.number, work))
        if self._is_known:
            self._announce(call)
        return JoinableWork(work, self)

    def wait(self, work: Awaited, timeout: float | None = None) -> None:
        """Waits for the end of ``work``, and meanwhile looks whether a rank has joined that has to serve it. Raises what
        ``work.wait`` raises, and TimeoutError after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_LOOK
        while not self._is_known:
            left = pause if deadline is None else min(pause, max(0.0, deadline - time.monotonic()))
            try:
                return work.wait(left)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            self._look()
            pause = min(2 * pause, LOOK_INTERVAL_MAX)
        return work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def look_now_and_then(self) -> None:
        """For a rank that polls an operation instead of waiting for it."""
        now = time.monotonic()
        if not self._is_known and now - self._looked > FIRST_LOOK:
            self._looked = now
            self._look()

    def step_begins(self, label: str, exchange: GradientExchange) -> None:
        """Called when an optimizer is about to wait for its gradients."""
        if self._is_known:
            self._announce_step(label, exchange)

    def join(self) -> int:
        """Serves the other ranks' operations until every rank has joined. Returns the rank that joined last."""
        world = self._world
        if world.size == 1:
            return 0
        for label, exchange in self._optimizers.items():
            if exchange.is_under_way:
                raise MisuseError(
                    f"join() between backward and step(): {label}'s gradients are being exchanged: call step() first"
                )
        with explained_store_errors(self._shared(), world.rank):
            return self._join(self._shared(), f"{self._number}/")

    def _join(self, store: dist.Store, prefix: str) -> int:
        world = self._world
        # Ranks that have joined before may not have made these calls.
        self._announce_all()
        steps = {label: exchange.steps for label, exchange in self._optimizers.items()}
        store.set(f"{prefix}rank/{world.rank}", json.dumps([self._number_of_calls(), steps]))
        store.set(f"{prefix}joined", "")
        last_key = f"{prefix}last"
        if store.add(f"{prefix}count", 1) == world.size:
            store.set(last_key, str(world.rank))
        served: list[Work] = []
        goal: tuple[int, dict[str, int]] | None = None
        pause = 0.0
        while goal is None or not self._has_reached(*goal):
            if goal is None and store.check([last_key]):
                goal = self._goal(store, prefix)
                continue
            if self._serve(store, prefix, served):
                pause = 0.0
                continue
            served = self._without_ended(served)
            time.sleep(pause)
            pause = min(pause + 0.0005, POLL_INTERVAL_MAX)
        for work in served:
            work.wait()
        last = int(store.get(last_key))
        self._number += 1
        self._is_known = False
        self._calls.clear()
        self._meetings.clear()
        return last

    def _goal(self, store: dist.Store, prefix: str) -> tuple[int, dict[str, int]]:
        """The number of calls, and of each optimizer's steps, that every rank is to have made at the end."""
        calls, steps = 0, dict.fromkeys(self._optimizers, 0)
        for rank in range(self._world.size):
            its_calls, its_steps = json.loads(store.get(f"{prefix}rank/{rank}"))
            calls = max(calls, its_calls)
            for label in steps:
                steps[label] = max(steps[label], its_steps.get(label, 0))
        return calls, steps

    def _has_reached(self, calls: int, steps: dict[str, int]) -> bool:
        return self._number_of_calls() >= calls and all(
            exchange.steps >= steps.get(label, 0) and exchange.has_served()
            for label, exchange in self._optimizers.items()
        )

    def _serve(self, store: dist.Store, prefix: str, served: list[Work]) -> bool:
        """Makes one call of the others', if there is one that this rank has not made. Returns whether there was."""
        if self._group is None and store.check(["group"]):
            self.group()
        if self._group is not None:
            key = f"{prefix}call/{self._number_of_calls() + 1}"
            if store.check([key]):
                rank, description = json.loads(store.get(key))
                served.append(self._group.serve(rank, description))
                return True
        for label, exchange in list(self._optimizers.items()):
            if exchange.has_served() and store.check([f"{prefix}step/{label}/{exchange.steps + 1}"]):
                exchange.serve()
                return True
        return False

    def _without_ended(self, served: list[Work]) -> list[Work]:
        """Those that have not ended. Raises the error of one that failed, or of the group or an optimizer that did."""
        if self._group is not None and (failure := self._group.failure()) is not None:
            raise failure
        for exchange in self._optimizers.values():
            if (failure := exchange.failure()) is not None:
                raise failure
        left = []
        for work in served:
            if work.done():
                work.wait()
            else:
                left.append(work)
        return left

    def _look(self) -> None:
        """Looks whether another rank has joined, and if so describes what it has to serve."""
        try:
            self._is_known = self._shared().check([f"{self._number}/joined"])
        except dist.DistError:
            # The store may have ended with rank 0. The operations say so themselves.
            return
        if self._is_known:
            self._announce_all()

    def _announce_all(self) -> None:
        for call in self._calls:
            self._announce(call)
        for label, exchange in self._optimizers.items():
            if exchange.is_under_way:
                self._announce_step(label, exchange)

    def _announce(self, call: _Call) -> None:
        text = json.dumps([self._world.rank, call.description], default=str)
        self._write(f"{self._number}/call/{call.number}", text)

    def _announce_step(self, label: str, exchange: GradientExchange) -> None:
        self._write(f"{self._number}/step/{label}/{exchange.steps + 1}", "")

    def _write(self, key: str, text: str) -> None:
        store = self._shared()
        with explained_store_errors(store, self._world.rank):
            store.set(key, text)

    def _number_of_calls(self) -> int:
        return 0 if self._group is None else self._group.calls()

    def _shared(self) -> dist.Store:
        if self._store is None:
            self._store = self._world.store("join")
        return self._store


class JoinableWork:
    """A `Work` of the group of all ranks."""

    __slots__ = ("_joins", "_work")

    def __init__(self, work: Work, joins: Joins) -> None:
        self._work = work
        self._joins = joins

    def wait(self, timeout: float | None = None) -> None:
        self._joins.wait(self._work, timeout)

    def done(self) -> bool:
        if self._work.done():
            return True
        self._joins.look_now_and_then()
        return False


class JoinableGroup:
    """The group of all ranks, with those of `Group`'s collectives that Horovod's operations are made of. Joined ranks take
    part in them as follows: they add nothing to a reduction, receive what is broadcast, and give zeros to `allgather_single`.
    The other moves cannot be served; so before one of these, operations exchange descriptions by `allgather_single`, where
    zeros are none."""

    def __init__(self, group: Group, joins: Joins) -> None:
        self._group = group
        self._joins = joins
        self.rank = group.rank
        self.size = group.size
        self.members = group.members

    def allreduce(self, tensor: torch.Tensor, op: Any) -> JoinableWork:
        work = self._group.allreduce(tensor, op)
        description = ("allreduce", tensor.numel(), tensor.dtype, op)
        return self._joins.note(work, description, is_meeting=tensor.numel() > 0)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> JoinableWork:
        work = self._group.reduce_scatter(output, inputs, op)
        lengths = [each.numel() for each in inputs]
        return self._joins.note(work, ("reduce_scatter", lengths, output.dtype, op), is_meeting=False)

    def broadcast(self, tensor: torch.Tensor, root: int) -> JoinableWork:
        work = self._group.broadcast(tensor, root)
        return self._joins.note(work, ("broadcast", tensor.numel(), tensor.dtype, root), is_meeting=False)

    def allgather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> JoinableWork:
        work = self._group.allgather_single(output, tensor)
        return self._joins.note(work, ("allgather_single", tensor.numel(), tensor.dtype))

    def allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> JoinableWork:
        return self._joins.note(self._group.allgather(outputs, tensor), ("allgather",), is_meeting=False)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> JoinableWork:
        work = self._group.all_to_all(outputs, inputs)
        return self._joins.note(work, ("all_to_all",), is_meeting=False)

    def barrier(self) -> JoinableWork:
        return self._joins.note(self._group.barrier(), ("barrier",))

    def calls(self) -> int:
        """The number of collectives that this rank has called."""
        return self._group.collectives()

    def failure(self) -> BaseException | None:
        return self._group.failure()

    def serve(self, rank: int, description: list[Any]) -> Work:
        """Takes part in a call of ``rank``'s without adding to its result."""
        name, *arguments = description
        serve = getattr(self, f"_serve_{name}", None)
        if serve is None:
            return self._cannot_serve(
                f"rank {rank} called {name}, which only ranks that go on have called in part"
            )
        return serve(rank, *arguments)

    def _serve_allreduce(self, _: int, length: int, dtype: str, op: str) -> Work:
        return self._group.allreduce(_neutral(length, dtype, op), op)

    def _serve_reduce_scatter(self, _: int, lengths: list[int], dtype: str, op: str) -> Work:
        output = _neutral(lengths[self.rank], dtype, op)
        return self._group.reduce_scatter(output, [_neutral(length, dtype, op) for length in lengths], op)

    def _serve_broadcast(self, rank: int, length: int, dtype: str, root: int) -> Work:
        if root == self.rank:
            return self._cannot_serve(f"rank {rank} called broadcast with rank {root} as root")
        return self._group.broadcast(_neutral(length, dtype, "sum"), root)

    def _serve_allgather_single(self, _: int, length: int, dtype: str) -> Work:
        own = _neutral(length, dtype, "sum")
        return self._group.allgather_single(own.new_empty(length * self.size), own)

    def _serve_barrier(self, _: int) -> Work:
        return self._group.barrier()

    def _cannot_serve(self, reason: str) -> Work:
        """Fails the group, on every rank: the call waits for this rank, which has nothing to give."""
        message = f"rank {self.rank} has called join(), and {reason}: it has no data any more"
        self._group.give_up(message)
        raise MisuseError(message)


def _neutral(length: int, dtype_name: str, op: str) -> torch.Tensor:
    """A tensor that changes no result of the reduction. ``dtype_name`` is ``torch.float32`` or another type's."""
    dtype: torch.dtype = getattr(torch, dtype_name.removeprefix("torch."))
    return torch.full((length,), _neutral_element(dtype, op), dtype=dtype)


def _neutral_element(dtype: torch.dtype, op: str) -> Any:
    if op == "product":
        return 1
    if op not in ("min", "max"):
        return 0
    if dtype is torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if op == "min" else limits.min
