"""Horovod's join: a rank that has run out of data serves the operations of the ranks that go on, until all have joined.

A joined rank does not know which operations the others call, and they do not ask: as long as nobody has joined, a rank only
notes what it calls. A rank that has waited for `FIRST_LOOK` seconds looks into the run's store whether another one has joined.
From then on it writes there what it calls, and joined ranks call the same with tensors that change no result: zeros, for a sum
or a mean.
"""

from __future__ import annotations

import concurrent.futures
import json
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from paramhub.errors import JobFailedError, MisuseError
from paramhub.torch._collectives import Group
from paramhub.torch._rendezvous import LostStoreError, explained_store_errors
from paramhub.torch._work import Work

if TYPE_CHECKING:
    from paramhub.torch._gradients import GradientExchange
    from paramhub.torch._world import World

FIRST_LOOK = 0.05
"""Seconds for which a rank waits for an operation before it looks whether another rank has joined."""
LOOK_INTERVAL_MAX = 0.5
"""The most seconds between two such looks of one wait."""
LOOK_PATIENCE = 0.02
"""Seconds for which a rank awaits what such a look finds, before it waits for the operation again."""
POLL_INTERVAL_MAX = 0.004
"""The most seconds between two looks of a joined rank for operations to serve."""
FAILURE_INTERVAL = 0.05
"""Seconds between two looks for failures of a joined rank that awaits an answer of the store."""
LEFT_INTERVAL = 0.5
"""Seconds between two looks of a joined rank for ranks that have left."""
LOST_STORE_PATIENCE = 2.0
"""Seconds for which a joined rank without a store waits for the failure that explains it: the process that has ended was
that of a rank."""
CALLS_MAX = 1 << 14
"""The number of newest calls that a rank can describe. Only calls that do not need every rank, such as a root's broadcasts,
can run so far ahead of a rank that does not come."""
KEYS = "join"
"""What the keys of joins in the run's store begin with."""


class Awaited(Protocol):
    """What `Joins.wait` waits for."""

    def wait(self, timeout: float | None = None) -> None: ...


class _Call(NamedTuple):
    number: int
    """Its position among the group's collectives, from 1."""
    description: tuple[Any, ...]


class _StoreThread:
    """Calls functions with a connection of its own to the run's store, one after the other. It does so on a daemon thread,
    because a call into the store has no end if the store's process has stopped, and Ctrl-C does not interrupt it."""

    def __init__(self, store: dist.Store) -> None:
        calls: queue.SimpleQueue[_StoreCall | None] = queue.SimpleQueue()
        self._calls = calls
        threading.Thread(target=_answer, args=(calls, store), name="paramhub-join", daemon=True).start()
        weakref.finalize(self, calls.put, None)

    def submit(self, call: Callable[[dist.Store], Any]) -> concurrent.futures.Future[Any]:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put(_StoreCall(call, answer))
        return answer


class _StoreCall(NamedTuple):
    call: Callable[[dist.Store], Any]
    answer: concurrent.futures.Future[Any]


def _answer(calls: queue.SimpleQueue[_StoreCall | None], origin: dist.Store) -> None:
    store: dist.Store | None = None
    while (each := calls.get()) is not None:
        try:
            if store is None:
                # Other threads use the connection that is there.
                store = origin.clone() if hasattr(origin, "clone") else origin
            each.answer.set_result(each.call(store))
        except Exception as error:
            each.answer.set_exception(error)
        # A call has references to the joins, which end this thread when they are gone.
        del each


class Joins:
    """One rank's part in the joins of its world: what it tells joined ranks, and what it serves when it has joined."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store: _StoreThread | None = None
        self._looking: concurrent.futures.Future[Any] | None = None
        """The look for joined ranks that is under way."""
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
            store = self._world.store(KEYS)
            with explained_store_errors(store, self._world.rank):
                store.set("group", "")
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
        try:
            return self._join(f"{KEYS}/{self._number}/")
        except LostStoreError as lost:
            raise self._reason(lost) from None

    def _join(self, prefix: str) -> int:
        world = self._world
        # Ranks that have joined before may not have made these calls.
        self._announce_all()
        steps = {label: exchange.steps for label, exchange in self._optimizers.items()}
        own = json.dumps([self._number_of_calls(), steps])
        last_key = f"{prefix}last"

        def announce(store: dist.Store) -> None:
            store.set(f"{prefix}rank/{world.rank}", own)
            store.set(f"{prefix}joined", "")
            if store.add(f"{prefix}count", 1) == world.size:
                store.set(last_key, str(world.rank))

        self._ask(announce)
        served: list[Work] = []
        goal: tuple[int, dict[str, int]] | None = None
        pause = 0.0
        looked = time.monotonic()
        while goal is None or not self._has_reached(*goal):
            if goal is None and self._check(last_key):
                goal = self._goal(prefix)
                continue
            if self._serve(prefix, served):
                pause = 0.0
                continue
            served = self._without_ended(served)
            if goal is None and time.monotonic() - looked > LEFT_INTERVAL:
                self._ask(lambda store: _check_left(store, prefix, world.rank, world.size))
                looked = time.monotonic()
            time.sleep(pause)
            pause = min(pause + 0.0005, POLL_INTERVAL_MAX)
        for work in served:
            work.wait()
        last = int(self._get(last_key))
        self._number += 1
        self._is_known = False
        self._looking = None
        self._calls.clear()
        self._meetings.clear()
        return last

    def _goal(self, prefix: str) -> tuple[int, dict[str, int]]:
        """The number of calls, and of each optimizer's steps, that every rank is to have made at the end."""
        calls, steps = 0, dict.fromkeys(self._optimizers, 0)
        for rank in range(self._world.size):
            its_calls, its_steps = json.loads(self._get(f"{prefix}rank/{rank}"))
            calls = max(calls, its_calls)
            for label in steps:
                steps[label] = max(steps[label], its_steps.get(label, 0))
        return calls, steps

    def _has_reached(self, calls: int, steps: dict[str, int]) -> bool:
        return self._number_of_calls() >= calls and all(
            exchange.steps >= steps.get(label, 0) and exchange.has_served()
            for label, exchange in self._optimizers.items()
        )

    def _serve(self, prefix: str, served: list[Work]) -> bool:
        """Makes one call of the others', if there is one that this rank has not made. Returns whether there was."""
        if self._group is None and self._check(f"{KEYS}/group"):
            self.group()
        if self._group is not None:
            key = f"{prefix}call/{self._number_of_calls() + 1}"
            if self._check(key):
                rank, description = json.loads(self._get(key))
                served.append(self._group.serve(rank, description))
                return True
        for label, exchange in list(self._optimizers.items()):
            if exchange.has_served() and self._check(f"{prefix}step/{label}/{exchange.steps + 1}"):
                exchange.serve()
                return True
        return False

    def _without_ended(self, served: list[Work]) -> list[Work]:
        """Those that have not ended. Raises the error of one that failed, or of the group or an optimizer that did."""
        if (failure := self._failure()) is not None:
            raise failure
        left = []
        for work in served:
            if work.done():
                work.wait()
            else:
                left.append(work)
        return left

    def _failure(self) -> BaseException | None:
        """Why the group or an optimizer can exchange nothing any more, or None."""
        if self._group is not None and (failure := self._group.failure()) is not None:
            return failure
        failures = (exchange.failure() for exchange in self._optimizers.values())
        return next((failure for failure in failures if failure is not None), None)

    def _reason(self, lost: LostStoreError) -> BaseException:
        """The failure by which the store was lost, as far as this rank learns it."""
        deadline = time.monotonic() + LOST_STORE_PATIENCE
        while (failure := self._failure()) is None:
            if time.monotonic() >= deadline:
                return JobFailedError(str(lost))
            time.sleep(0.01)
        return failure

    def _look(self) -> None:
        """Looks whether another rank has joined, and if so describes what it has to serve."""
        key = f"{KEYS}/{self._number}/joined"
        try:
            looking = self._looking = self._looking or self._thread().submit(lambda store: store.check([key]))
            concurrent.futures.wait([looking], LOOK_PATIENCE)
            if not looking.done():
                return
            self._looking = None
            self._is_known = looking.result()
        except RuntimeError:
            # The store may have ended with rank 0, and the operations say so themselves. Or the interpreter ends, and starts
            # no thread any more.
            self._looking = None
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
        self._tell(f"call/{call.number}", text)

    def _announce_step(self, label: str, exchange: GradientExchange) -> None:
        self._tell(f"step/{label}/{exchange.steps + 1}", "")

    def _tell(self, key: str, text: str) -> None:
        """Writes for joined ranks. If the store is lost, the ranks that wait in it say so."""
        whole = f"{KEYS}/{self._number}/{key}"
        self._thread().submit(lambda store: store.set(whole, text))

    def _check(self, key: str) -> bool:
        return self._ask(lambda store: store.check([key]))

    def _get(self, key: str) -> bytes:
        return self._ask(lambda store: store.get(key))

    def _ask(self, call: Callable[[dist.Store], Any]) -> Any:
        """Returns what ``call`` returns. Raises the failure of the group or an optimizer if one comes first."""
        answer = self._thread().submit(call)
        while not answer.done():
            concurrent.futures.wait([answer], FAILURE_INTERVAL)
            if not answer.done() and (failure := self._failure()) is not None:
                raise failure
        with explained_store_errors(self._world.watch_store, self._world.rank):
            return answer.result()

    def _number_of_calls(self) -> int:
        return 0 if self._group is None else self._group.calls()

    def _thread(self) -> _StoreThread:
        if self._store is None:
            self._store = _StoreThread(self._world.watch_store)
        return self._store


def _check_left(store: dist.Store, prefix: str, own: int, size: int) -> None:
    """Raises JobFailedError if another rank has left the run, which it announces in its `RunStore`, and has not joined."""
    for rank in range(size):
        # In this order, because a rank that has joined may leave between the two.
        if rank != own and store.check([f"left/{rank}"]) and not store.check([f"{prefix}rank/{rank}"]):
            raise JobFailedError(
                f"rank {rank} has left without join(), and rank {own} waits for it there: every rank calls join() before it "
                "ends"
            )


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
        description = ("allreduce", tensor.numel(), tensor.dtype, op, tensor.device.type)
        return self._joins.note(work, description, is_meeting=tensor.numel() > 0)

    def sum_sparse(self, tensor: torch.Tensor, *, timeout: float | None = None) -> JoinableWork:
        work = self._group.sum_sparse(tensor, timeout=timeout)
        return self._joins.note(work, ("sum_sparse", list(tensor.shape), tensor.sparse_dim(), tensor.dtype))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> JoinableWork:
        work = self._group.reduce_scatter(output, inputs, op)
        lengths = [each.numel() for each in inputs]
        description = ("reduce_scatter", lengths, output.dtype, op, output.device.type)
        return self._joins.note(work, description, is_meeting=False)

    def broadcast(self, tensor: torch.Tensor, root: int, *, compares_types: bool = False) -> JoinableWork:
        work = self._group.broadcast(tensor, root, compares_types=compares_types)
        description = ("broadcast", tensor.numel(), tensor.dtype, root, compares_types, tensor.device.type)
        return self._joins.note(work, description, is_meeting=False)

    def allgather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> JoinableWork:
        work = self._group.allgather_single(output, tensor)
        return self._joins.note(work, ("allgather_single", tensor.numel(), tensor.dtype, tensor.device.type))

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

    def _serve_allreduce(self, _: int, length: int, dtype: str, op: str, device: str) -> Work:
        return self._group.allreduce(_neutral(length, dtype, op, device), op)

    def _serve_sum_sparse(self, _: int, shape: list[int], sparse_dimensions: int, dtype: str) -> Work:
        indices = torch.empty(sparse_dimensions, 0, dtype=torch.int64)
        values = torch.empty(0, *shape[sparse_dimensions:], dtype=_dtype(dtype))
        return self._group.sum_sparse(torch.sparse_coo_tensor(indices, values, shape, check_invariants=False))

    def _serve_reduce_scatter(self, _: int, lengths: list[int], dtype: str, op: str, device: str) -> Work:
        output = _neutral(lengths[self.rank], dtype, op, device)
        inputs = [_neutral(length, dtype, op, device) for length in lengths]
        return self._group.reduce_scatter(output, inputs, op)

    def _serve_broadcast(
        self, rank: int, length: int, dtype: str, root: int, compares_types: bool, device: str
    ) -> Work:
        if root == self.rank:
            return self._cannot_serve(f"rank {rank} called broadcast with rank {root} as root")
        own = _neutral(length, dtype, "sum", device)
        return self._group.broadcast(own, root, compares_types=compares_types)

    def _serve_allgather_single(self, _: int, length: int, dtype: str, device: str) -> Work:
        own = _neutral(length, dtype, "sum", device)
        return self._group.allgather_single(own.new_empty(length * self.size), own)

    def _serve_barrier(self, _: int) -> Work:
        return self._group.barrier()

    def _cannot_serve(self, reason: str) -> Work:
        """Fails the group, on every rank: the call waits for this rank, which has nothing to give."""
        message = f"rank {self.rank} has called join(), and {reason}: it has no data any more"
        self._group.give_up(message)
        raise MisuseError(message)


def _neutral(length: int, dtype_name: str, op: str, device: str) -> torch.Tensor:
    """A tensor that changes no result of the reduction. ``dtype_name`` is ``torch.float32`` or another type's. ``device`` is the
    type of the others' device, because tensors of a device are exchanged in pieces."""
    dtype = _dtype(dtype_name)
    return torch.full((length,), _neutral_element(dtype, op), dtype=dtype, device=device)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


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
