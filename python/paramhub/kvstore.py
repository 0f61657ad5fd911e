"""Key-value stores with MXNet's API: values that all ranks push to and pull from.

A training program, started with ``paramhub run -n 4 -- python train.py``::

    import paramhub, paramhub.kvstore as kvs

    with kvs.create("depcha") as kv:
        for key, parameter in parameters.items():
            kv.init(key, parameter)
        kv.set_optimizer(paramhub.SGD(lr=0.1, momentum=0.9))
        for inputs, targets in batches:
            gradients = ...
            for key in parameters:
                kv.push(key, gradients[key])
            for key in parameters:
                kv.pull(key, out=parameters[key])
            kv.wait()

A ``local`` store belongs to one process. ``funnel``, ``concom`` and ``depcha`` exchange by collectives among the ranks, ``hub``
through a hub. All ranks make the same calls in the same order, from one thread.

Calls return at once where MXNet's do. A read of an MXNet array waits for its value. Tensors of other libraries cannot wait, so
push, pull and pushpull return a handle. Wait for the handle, or for all handles of a key with `KVStore.wait`. Until then do not
write to a pushed tensor, and do not read ``out``. Further calls of the store may take the same tensors at once, because the
store runs its calls in order.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paramhub import _native
from paramhub._job import worker_identity
from paramhub._keys import Key, Keys, Value, grouped, names
from paramhub.errors import MisuseError, ParamhubError
from paramhub.optimizers import Optimizer, named, settings_of

if TYPE_CHECKING:
    from paramhub._native import Handle

__all__ = ["KVStore", "create"]

EXIT_TIMEOUT = 10.0
"""Seconds that leaving an open store may take at the end of the program."""


def create(
    kind: str = "local",
    *,
    url: str | None = None,
    job: str | None = None,
    secret: str | None = None,
    rank: int | None = None,
    transport: str | None = None,
    interfaces: str | None = None,
    timeout: float | None = None,
    rack: str | None = None,
    host: str | None = None,
    compute_threads: int | None = None,
    outstanding: int | None = None,
    check: bool = False,
    codec: str | None = None,
    reproducible: bool = False,
    consistency: str | None = None,
) -> KVStore:
    """Makes a store of a kind. Returns when every rank has called it.

    ``hub``, ``funnel``, ``concom`` and ``depcha`` are for the ranks of a job. ``url`` to ``rank``, and ``transport`` to ``host``,
    are the same as in `paramhub.connect`. A job has one store, and no other use.

    ``compute_threads`` is the number of threads that run optimizers, by default one for each processor. ``outstanding`` is for
    ``concom``: the number of keys that are exchanged at a time, over as many communicators, 2 by default. With ``check`` ranks
    compare every collective before they call it, and an error names the first one in which they differ. The comparison is
    slow: use it to find a fault. ``codec``, ``reproducible`` and ``consistency`` are for ``hub``: the encoding of gradients in
    frames (``f16``, ``bf16``), whether sums are bit-equal from run to run, and how far ranks may be apart: ``sync``, ``async`` or
    ``staleness:STEPS``. In an ``async`` store the optimizer updates parameters by each push alone, and a pull gets the parameters
    that the hub had after this rank's last push.

    Raises MisuseError if an argument is missing or unreadable, ConnectError if the manager cannot be reached or ranks are
    missing.
    """
    native = _native.open_store(
        kind,
        worker_identity(url, job, secret, rank, "create()") if kind in _OF_RANKS else None,
        transport=transport,
        interfaces=interfaces,
        rendezvous_timeout=timeout,
        rack=rack,
        host=host,
        compute_threads=compute_threads,
        outstanding=outstanding,
        check=check,
        codec=codec,
        reproducible=reproducible,
        consistency=consistency,
    )
    return KVStore(native)


_OF_RANKS = ("hub", "funnel", "concom", "depcha")
_REASON_MAX = 1000
"""The most characters of an error message that this rank sends to the others."""


class KVStore:
    """This rank's end of a store, which `create` makes.

    A key is a name or a number from 0. A method that takes a key also takes a list of keys, with a list of as many values. A
    method that takes a value of a key also takes a list of values, for instance one for each device. Tensors are contiguous
    host tensors in f32, f16 or bf16, with the shape and type that `init` gave the key.

    As a context manager it leaves the store at the end of the block. If the block raises, it abandons the store: the other
    ranks' calls raise, too, and name this rank. At the end of the program an open store is left, or abandoned if an exception
    ends the program.
    """

    def __init__(self, native: _native.Store) -> None:
        self._native = native
        self._values: dict[str, Value] = {}
        self._optimizer: Optimizer | None = None
        self._groups: list[dict[str, float | bool]] = []
        """The hyperparameters of the groups of keys, from group 1."""
        self._leave_handle: Handle | None = None
        _open.add(self)

    @property
    def type(self) -> str:
        """The kind that was passed to `create`."""
        return self._native.kind

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._native.rank

    @property
    def num_workers(self) -> int:
        """The number of ranks that share the store."""
        return self._native.size

    @property
    def size(self) -> int:
        """The same as `num_workers`."""
        return self._native.size

    def init(self, key: Keys, value: Any) -> None:
        """Gives keys their initial values, once: at every rank those of rank 0. It does not change ``value`` itself; for that
        see `broadcast`.

        Every rank calls it, with tensors of the same shapes. In a ``hub`` store all keys need it before the first push.
        """
        given = []
        for name, tensors in grouped(key, value):
            if str(name) in self._values:
                raise self._wrong(name, "it has its value already")
            if len(tensors) != 1:
                raise self._wrong(name, f"it begins with one value, and {len(tensors)} were passed")
            given.append((name, _native.Memory(tensors[0])))
        handle = self._native.init(given)
        self._values |= {str(name): Value(name, memory) for name, memory in given}
        handle.wait()

    def push(self, key: Keys, value: Any, priority: int = 0) -> Handle:
        """Adds this rank's value to the key's new sum, or with an optimizer to the mean that updates the key's parameters.

        Every rank pushes the key equally often. Several values for one key are added up. The handle ends when the values have
        been read; until then do not write to them. If several keys are ready, the one with the highest ``priority`` is copied
        first.
        """
        return self._exchange(grouped(key, value), [], priority)

    def pull(self, key: Keys, out: Any, priority: int = 0) -> Handle:
        """Receives the key's value into ``out``, or into each tensor of ``out``. The value is the sum of the ranks' last pushes,
        with an optimizer the parameters, and before the first push the initial value. The handle ends when the value has
        arrived; until then do not use ``out``."""
        return self._exchange([], grouped(key, out), priority)

    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0) -> Handle:
        """`push`, then `pull`, into ``value`` itself if there is no ``out``. All keys of a list are pushed before the first is
        pulled."""
        return self._exchange(grouped(key, value), grouped(key, value if out is None else out), priority)

    def broadcast(self, key: Keys, value: Any, out: Any, priority: int = 0) -> Handle:
        """`init`, then `pull`: ``out`` receives rank 0's value. ``out`` may be ``value`` itself."""
        self.init(key, value)
        return self.pull(key, out, priority)

    def wait(self, key: Keys | None = None, timeout: float | None = None) -> None:
        """Waits for all pushes and pulls of these keys, or of all keys, and raises the first failure. Raises TimeoutError after
        ``timeout`` seconds; the exchanges go on."""
        if timeout is not None and not timeout >= 0:
            raise MisuseError(f"a timeout is 0 or more seconds, not {timeout}")
        deadline = None if timeout is None else time.monotonic() + timeout
        values = list(self._values.values()) if key is None else [self._value(name) for name in names(key)]
        for value in values:
            value.wait(deadline)

    def barrier(self, timeout: float | None = None) -> None:
        """Waits until every rank has called it, and until all earlier pushes and pulls of this rank have ended."""
        self._native.barrier().wait(timeout)

    def set_optimizer(self, optimizer: Optimizer | str, **arguments: Any) -> None:
        """Makes the values of all keys parameters, which the optimizer updates by the mean of the ranks' pushes. Every rank
        calls it before the first push, with equal arguments.

        ``optimizer`` is an optimizer of `paramhub`, or a name with arguments: ``paramhub.Adam(lr=0.01)`` or
        ``"adam", lr=0.01``. Its numbers are those of all keys, which are group 0, but for those of a group of `add_group`.
        """
        if isinstance(optimizer, str):
            optimizer = named(optimizer, **arguments)
        elif arguments:
            raise MisuseError(f"{optimizer!r} has its numbers: change them there, or pass its name")
        numbers = dict(optimizer.hyperparameters)
        self._native.set_optimizer(
            optimizer.name, json.dumps(settings_of(numbers)) if numbers else None
        ).wait()
        self._optimizer = Optimizer(optimizer.name, **numbers)
        self._groups = []

    def add_group(self, key: Keys, **own: float | bool) -> int:
        """Makes keys that have their values a group with hyperparameters of its own, by the hub's names (``weight_decay=0.0``);
        the others are those of the optimizer. Every rank calls it, with equal arguments, after `set_optimizer` and before the
        first push. Returns the number of the group, from 1, for `set_hyperparameters`."""
        numbers = {**self._chosen().hyperparameters, **own}
        keys = names(key)
        for name in keys:
            self._value(name)
        self._native.add_group(keys, json.dumps(settings_of(numbers))).wait()
        self._groups.append(numbers)
        return len(self._groups)

    def set_hyperparameters(self, *, group: int = 0, **changed: float | bool) -> None:
        """Changes hyperparameters of a group of keys from the next push on, by the hub's names (``learning_rate=0.01``). Every
        rank calls it, with equal arguments."""
        optimizer = self._chosen()
        if not 0 <= group <= len(self._groups):
            raise MisuseError(
                f"{self._name()}: there is no group {group} of keys: there are {1 + len(self._groups)}, counted from 0"
            )
        numbers = {**(self._groups[group - 1] if group else optimizer.hyperparameters), **changed}
        self._native.set_hyperparameters(json.dumps(settings_of(numbers)), group).wait()
        if group:
            self._groups[group - 1] = numbers
        else:
            optimizer.hyperparameters = numbers

    def _chosen(self) -> Optimizer:
        if self._optimizer is None:
            raise MisuseError(f"{self._name()}: there is no optimizer, choose one with set_optimizer")
        return self._optimizer

    def optimizer_state(self, key: Key) -> tuple[list[bytes], int]:
        """Waits for this rank's pushes. Returns the optimizer's state of a key: for each of the optimizer's slots the f32 values
        of the key's elements in C order, and the number of updates that the state has had.

        The slots are those of the hub: for SGD the momentum, for Adam the first and the second moment. Where nothing was pushed
        before, every rank calls it.
        """
        self._value(key)
        return self._native.optimizer_state(key)

    def set_optimizer_state(self, key: Key, slots: list[bytes], updates: int) -> None:
        """Gives a key the state that `optimizer_state` has returned. Every rank calls it, with equal arguments, after
        `set_optimizer` and before the first push."""
        self._value(key)
        self._native.set_optimizer_state(key, [bytes(slot) for slot in slots], updates).wait()

    def leave(self, timeout: float | None = None) -> None:
        """Waits for all pushes and pulls and leaves the store. Every rank calls it. Raises TimeoutError after ``timeout``
        seconds; leaving goes on. After the store has been left, it does nothing."""
        if self not in _open:
            return
        if self._leave_handle is None:
            self._leave_handle = self._native.leave()
        try:
            self._leave_handle.wait(timeout)
        finally:
            if self._leave_handle.done():
                _open.discard(self)

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self,
        kind: builtins.type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # sys.exit() without a code, or with 0, is no failure.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.leave()
        else:
            self._give_up(error)

    def __repr__(self) -> str:
        return f"<paramhub.kvstore.KVStore {self.type!r} rank {self.rank} of {self.num_workers}>"

    def _exchange(
        self, values: list[tuple[Key, list[Any]]], outs: list[tuple[Key, list[Any]]], priority: int
    ) -> Handle:
        requests: dict[Key, tuple[list[_native.Memory], list[_native.Memory]]] = {}
        for name, tensors in values:
            requests.setdefault(name, ([], []))[0].extend(self._look(name, tensors, writable=False))
        for name, tensors in outs:
            requests.setdefault(name, ([], []))[1].extend(self._look(name, tensors, writable=True))
        handle = self._native.exchange([(name, *memories) for name, memories in requests.items()], priority)
        for name in requests:
            self._value(name).note(handle)
        return handle

    def _look(self, name: Key, tensors: list[Any], *, writable: bool) -> list[_native.Memory]:
        value = self._value(name)
        if not tensors:
            raise self._wrong(name, "no tensor was passed")
        memories = [_native.Memory(tensor, writable) for tensor in tensors]
        for memory in memories:
            if (memory.dtype, memory.shape) != (value.dtype, value.shape):
                known = f"its value has the shape {value.shape} in {value.dtype}"
                raise self._wrong(name, f"{known}, but one of {memory.shape} in {memory.dtype} was passed")
        return memories

    def _value(self, name: Key) -> Value:
        value = self._values.get(str(name))
        if value is None or value.name != name:
            raise self._wrong(name, "it has no value yet: give it one with init")
        return value

    def _wrong(self, name: Key, reason: str) -> MisuseError:
        return MisuseError(f"{self._name()}: key {name!r}: {reason}")

    def _name(self) -> str:
        return f"key-value store `{self.type}`, rank {self.rank}"

    def _give_up(self, error: BaseException) -> None:
        _open.discard(self)
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._native.abandon(f"rank {self.rank} has failed: {reason}"[:_REASON_MAX])


_open: set[KVStore] = set()
"""Stores that this process has neither left nor abandoned."""


def _at_exit() -> None:
    # The interpreter stores the exception that ends it. A failed rank must not wait for ranks that wait for it.
    error: BaseException | None = getattr(sys, "last_value", None)
    for store in list(_open):
        if error is not None:
            store._give_up(error)
            continue
        try:
            store.leave(EXIT_TIMEOUT)
        except (ParamhubError, TimeoutError) as failure:
            print(f"{store!r} could not be left: {failure}", file=sys.stderr)
            store._give_up(failure)


atexit.register(_at_exit)
# A forked child has copies of its parent's stores, which only the parent may leave.
os.register_at_fork(after_in_child=_open.clear)
