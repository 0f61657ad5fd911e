"""Key-value stores under MXNet's names: values that all ranks push to and pull from.

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

The kinds are ``local``, of one process; ``funnel``, ``concom`` and ``depcha``, by collectives among the ranks; and ``hub``,
through a hub. All ranks make the same calls in the same order, from one thread.

Calls return at once, where MXNet's do. MXNet's arrays wait when they are read; tensors of other libraries cannot, so that push,
pull and pushpull return a handle: wait for it, or for all of a key's with `KVStore.wait`. Until then what was pushed must not be
written, and ``out`` not be looked at. The store itself may be given both again at once: it keeps the order of its calls.
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
from paramhub._job import seat_of
from paramhub._keys import Key, Keys, Value, grouped, names
from paramhub.errors import MisuseError, ParamhubError
from paramhub.optimizers import Optimizer, named, settings_of

if TYPE_CHECKING:
    from paramhub._native import Handle

__all__ = ["KVStore", "create"]

FAREWELL_TIMEOUT = 10.0
"""Seconds that leaving a store may take at the end of a program that has not left it."""


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
) -> KVStore:
    """Makes a store of a kind, and returns when every rank has.

    ``hub``, ``funnel``, ``concom`` and ``depcha`` are for the ranks of a job; who this one is, and ``transport`` to ``host``, are
    as in `paramhub.connect`. A job has one store, and no other use.

    ``compute_threads`` is how many threads run optimizers, by default one for each processor. Of ``concom`` ``outstanding`` is
    how many keys are exchanged at a time, over as many communicators, 2 by default. With ``check`` ranks compare every collective
    before they call it, and the first one in which they differ is named: for finding out, since it takes its time. Of ``hub``
    ``codec`` is how gradients travel (``f16``, ``bf16``), and with ``reproducible`` sums are bit-equal from run to run.

    Raises MisuseError if something is missing or unreadable, ConnectError if the manager cannot be reached or ranks are missing.
    """
    native = _native.open_store(
        kind,
        seat_of(url, job, secret, rank, "create()") if kind in _OF_RANKS else None,
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
    )
    return KVStore(native)


_OF_RANKS = ("hub", "funnel", "concom", "depcha")
_REASON_MAX = 1000
"""Characters of an error that the other ranks are told."""


class KVStore:
    """This rank's end of a store; made by `create`.

    A key is a name or a number from 0. Where a method takes a key it takes a list of keys as well, and with it a list of as many
    values; where it takes a value it takes a list of them, as of several devices. Tensors are contiguous ones of the host, in
    f32, f16 or bf16, with the shape and type that the key was given at first.

    As a context manager it leaves the store at the end. If the block raises it gives it up: the other ranks' calls raise, too,
    and name this rank. A store that is still open when the program ends is left then, or given up if an exception ends it.
    """

    def __init__(self, native: _native.Store) -> None:
        self._native = native
        self._values: dict[str, Value] = {}
        self._optimizer: Optimizer | None = None
        self._farewell: Handle | None = None
        _open.add(self)

    @property
    def type(self) -> str:
        """The kind it was made as."""
        return self._native.kind

    @property
    def rank(self) -> int:
        """This process, counted from 0."""
        return self._native.rank

    @property
    def num_workers(self) -> int:
        """How many ranks share the store."""
        return self._native.size

    @property
    def size(self) -> int:
        """As `num_workers`."""
        return self._native.size

    def init(self, key: Keys, value: Any) -> None:
        """Gives keys their values, once: rank 0's, at every rank. ``value`` itself stays as it is; see `broadcast`.

        Every rank calls it, with tensors of the same shapes. Of a ``hub`` store all keys have theirs before the first push.
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
        """Adds this rank's value to the key's new sum, or with an optimizer to the mean that makes its new parameters.

        Every rank pushes the key as often. Several values are added up. The handle ends when they have been read; until then they
        must not be written. Of keys that are ready together those of higher ``priority`` are copied first.
        """
        return self._exchange(grouped(key, value), [], priority)

    def pull(self, key: Keys, out: Any, priority: int = 0) -> Handle:
        """Receives the key's value into ``out``, or into each of several: the sum of what all ranks have pushed last, with an
        optimizer its parameters, and before the first push what `init` was given. The handle ends when it is there; until then
        ``out`` must be left alone."""
        return self._exchange([], grouped(key, out), priority)

    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0) -> Handle:
        """`push`, then `pull`; into ``value`` itself if there is no ``out``. Of a list of keys all are pushed before the first is
        pulled."""
        return self._exchange(grouped(key, value), grouped(key, value if out is None else out), priority)

    def broadcast(self, key: Keys, value: Any, out: Any, priority: int = 0) -> Handle:
        """`init`, then `pull`: ``out`` becomes rank 0's value. It may be ``value``."""
        self.init(key, value)
        return self.pull(key, out, priority)

    def wait(self, key: Keys | None = None, timeout: float | None = None) -> None:
        """Waits for what was pushed and pulled of these keys, or of all, and raises the first failure. Raises TimeoutError after
        ``timeout`` seconds, and goes on."""
        if timeout is not None and not timeout >= 0:
            raise MisuseError(f"a timeout is 0 or more seconds, not {timeout}")
        deadline = None if timeout is None else time.monotonic() + timeout
        values = list(self._values.values()) if key is None else [self._value(name) for name in names(key)]
        for value in values:
            value.wait(deadline)

    def barrier(self, timeout: float | None = None) -> None:
        """Waits until every rank has called it and all that this one has pushed and pulled before has been exchanged."""
        self._native.barrier().wait(timeout)

    def set_optimizer(self, optimizer: Optimizer | str, **arguments: Any) -> None:
        """From now on keys' values are parameters, which the optimizer changes by the mean of what all ranks push. Before the
        first push, and alike at every rank.

        ``optimizer`` is one of `paramhub`'s, or its name and arguments: ``paramhub.Adam(lr=0.01)`` or ``"adam", lr=0.01``.
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

    def set_hyperparameters(self, **changed: float | bool) -> None:
        """Changes some of the optimizer's numbers from the next push on, by the hub's names (``learning_rate=0.01``), alike at
        every rank."""
        if self._optimizer is None:
            raise MisuseError(f"{self._who()}: there is no optimizer, choose one with set_optimizer")
        numbers = {**self._optimizer.hyperparameters, **changed}
        self._native.set_hyperparameters(json.dumps(settings_of(numbers))).wait()
        self._optimizer.hyperparameters = numbers

    def leave(self, timeout: float | None = None) -> None:
        """Waits for all that was asked for and leaves the other ranks in order; every rank does. Raises TimeoutError after
        ``timeout`` seconds, and goes on. Left before, it does nothing."""
        if self not in _open:
            return
        if self._farewell is None:
            self._farewell = self._native.leave()
        try:
            self._farewell.wait(timeout)
        finally:
            if self._farewell.done():
                _open.discard(self)

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self,
        kind: builtins.type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A program may end well from within.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.leave()
        else:
            self._give_up(error)

    def __repr__(self) -> str:
        return f"<paramhub.kvstore.KVStore {self.type!r} rank {self.rank} of {self.num_workers}>"

    def _exchange(
        self, values: list[tuple[Key, list[Any]]], outs: list[tuple[Key, list[Any]]], priority: int
    ) -> Handle:
        errands: dict[Key, tuple[list[_native.Memory], list[_native.Memory]]] = {}
        for name, tensors in values:
            errands.setdefault(name, ([], []))[0].extend(self._look(name, tensors, writable=False))
        for name, tensors in outs:
            errands.setdefault(name, ([], []))[1].extend(self._look(name, tensors, writable=True))
        handle = self._native.exchange([(name, *memories) for name, memories in errands.items()], priority)
        for name in errands:
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
        return MisuseError(f"{self._who()}: key {name!r}: {reason}")

    def _who(self) -> str:
        return f"key-value store `{self.type}`, rank {self.rank}"

    def _give_up(self, error: BaseException) -> None:
        _open.discard(self)
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        self._native.abandon(f"rank {self.rank} has failed: {said}"[:_REASON_MAX])


_open: set[KVStore] = set()
"""Stores that have not been left."""


def _at_exit() -> None:
    # The interpreter notes an exception that ends it. A rank that failed must not wait for ranks that wait for it.
    error: BaseException | None = getattr(sys, "last_value", None)
    for store in list(_open):
        if error is not None:
            store._give_up(error)
            continue
        try:
            store.leave(FAREWELL_TIMEOUT)
        except (ParamhubError, TimeoutError) as failure:
            print(f"{store!r} could not be left: {failure}", file=sys.stderr)
            store._give_up(failure)


atexit.register(_at_exit)
# A child's copy is not its own to leave.
os.register_at_fork(after_in_child=_open.clear)
