"""MXNet's key-value store over `paramhub.kvstore`."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy
from mxnet.kvstore import KVStoreBase
from mxnet.ndarray import NDArray

import paramhub.kvstore
from paramhub._keys import Key, Keys, grouped
from paramhub.errors import MisuseError
from paramhub.mxnet import _engine
from paramhub.mxnet._optimizers import HubOptimizer
from paramhub.optimizers import Optimizer

GIVEN_UP_INTERVAL = 1.0
"""Seconds between two looks whether the store of an exchange was given up."""


class Store(KVStoreBase):
    """A store of MXNet for the ranks of a job, which `mx.kv.create` makes by its name. It returns when every rank has made it.

    All ranks make the same calls in the same order, from one thread. Keys are names or numbers from 0, values dense arrays in
    float32 or float16. Lists of keys and of values, and several values for a key, are as in MXNet's stores. Calls return at
    once where MXNet's do; what reads an array afterwards waits for its value.

    If an exchange fails, for instance because a rank is lost, the next call of the store raises the reason (JobFailedError). An
    array into which the failed exchange should have written keeps what it had: before you save parameters, call `_barrier`.
    """

    kind = "hub"
    consistency: str | None = None
    """The arguments of `paramhub.kvstore.create`."""
    type = "dist_sync_paramhub"
    """The store's name. MXNet reads from it that the store spans processes, and whether ranks wait for one another."""

    def __init__(self) -> None:
        self._kv = paramhub.kvstore.create(self.kind, consistency=self.consistency)
        self._optimizer: HubOptimizer | None = None
        self._restored: dict[Key, Any] = {}
        self._forms: dict[Key, tuple[tuple[int, ...], Any]] = {}
        self._has_pushed = False
        self._failure: BaseException | None = None

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._kv.rank

    @property
    def num_workers(self) -> int:
        """The number of ranks that share the store."""
        return self._kv.num_workers

    def is_capable(self, capability: str) -> bool:
        """Returns whether the store has a capability. There is one, ``"optimizer"``, and it has it."""
        if capability.lower() != KVStoreBase.OPTIMIZER:
            raise ValueError(f"unknown capability: {capability}")
        return True

    def init(self, key: Keys, value: Any) -> None:
        """Gives keys their initial values: at every rank those of rank 0. All keys need it before the first push."""
        self._raise_failure()
        pairs = self._grouped(key, value)
        lent = [
            [_engine.Lent(self._on_host(array), writable=False) for array in arrays] for _, arrays in pairs
        ]
        self._kv.init([name for name, _ in pairs], lent)
        self._forms |= {name: (arrays[0].shape, arrays[0].dtype) for name, arrays in pairs}

    def push(self, key: Keys, value: Any, priority: int = 0) -> None:
        """Adds the sum of this rank's values to the key's new sum, or has the optimizer update the key's parameters by it."""
        self._exchange(self._fitting(key, value), [], priority)

    def pull(self, key: Keys, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Receives the key's value into ``out``, or into each array of ``out``: with an optimizer the parameters, else the
        sum of the last pushes, and before the first push the initial value."""
        self._exchange([], self._fitting(key, out), priority)

    def pushpull(self, key: Keys, value: Any, out: Any = None, priority: int = 0) -> None:
        """`push`, then `pull`, into ``value`` itself if there is no ``out``."""
        outs = self._fitting(key, value if out is None else out)
        self._exchange(self._fitting(key, value), outs, priority)

    def broadcast(self, key: Keys, value: Any, out: Any, priority: int = 0) -> None:
        """`init`, then `pull`."""
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Raises MisuseError: values are dense."""
        raise self._wrong(f"key {key!r}: rows alone are not exchanged, so pull the whole value with `pull`")

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Makes the values of all keys parameters, which the optimizer updates at the hub, as MXNet defines it: by
        ``rescale_grad`` times the sum of the ranks' pushes. Every rank calls it before the first push.

        Raises MisuseError if the hub cannot make the same updates.
        """
        self._raise_failure()
        if self._has_begun:
            raise self._wrong(
                "the optimizer is chosen before the first push, and before save_optimizer_states, which has it begin"
            )
        self._optimizer = self._at_hub(optimizer)
        self._restored = {}

    def set_gradient_compression(self, compression_params: dict[str, Any]) -> None:
        """Raises MisuseError: the hub's codecs are not MXNet's compression."""
        raise self._wrong(
            f"gradients are not compressed as {compression_params!r} says: a hub's codecs round otherwise than MXNet's, "
            "so leave compression_params out"
        )

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Writes the optimizer's states to a file of MXNet's format, which a program without paramhub can load, too. Any rank
        may call it after it has waited for its pulls; before the first push every rank does.

        Raises MisuseError for states of float16 parameters, which MXNet keeps in another form.
        """
        self._raise_failure()
        optimizer = self._chosen()
        self._begin()
        states = {}
        for name, (shape, dtype) in self._forms.items():
            if dtype != numpy.float32:
                raise self._wrong(f"key {name!r}: the states of float16 parameters are not saved")
            slots, updates = self._kv.optimizer_state(name)
            # MXNet's updater has no state of a parameter that was never updated. None is that of an optimizer without state.
            if updates or not slots:
                states[name] = optimizer.to_mxnet(slots, shape)
        with open(fname, "wb") as file:
            file.write(pickle.dumps((states, optimizer.optimizer) if dump_optimizer else states))

    def load_optimizer_states(self, fname: str) -> None:
        """Reads the optimizer's states from a file of MXNet's format. Every rank calls it before the first push. The format is
        Python's pickle: load only files that you trust."""
        self._raise_failure()
        self._chosen()
        if self._has_begun:
            raise self._wrong(
                "the optimizer's states are loaded before the first push, and before save_optimizer_states, which has the "
                "optimizer begin"
            )
        with open(fname, "rb") as file:
            loaded = pickle.loads(file.read())
        states, optimizer = loaded if isinstance(loaded, tuple) else (loaded, None)
        if optimizer is not None:
            self._optimizer = self._at_hub(optimizer)
        if unknown := states.keys() - self._forms.keys():
            raise self._wrong(
                f"{fname} has states of keys that have no value here: {sorted(map(str, unknown))}"
            )
        self._restored = states

    @property
    def _updater(self) -> Any:
        """gluon.Trainer takes the loaded optimizer from here."""
        return self._chosen()

    def _set_updater(self, updater: Callable[..., object]) -> None:
        raise self._wrong("a hub runs no Python updater: call set_optimizer with an optimizer of MXNet")

    def _barrier(self) -> None:
        """Waits until every rank has called it, and until all exchanges of this rank have ended."""
        self._raise_failure()
        self._kv.wait()
        self._kv.barrier()

    def leave(self) -> None:
        """Waits for all exchanges and leaves the store. Every rank calls it, or ends its program, which does the same."""
        self._raise_failure()
        self._kv.leave()

    def __repr__(self) -> str:
        return f"<{self.type} rank {self.rank} of {self.num_workers}>"

    def _exchange(
        self, values: list[tuple[Key, list[NDArray]]], outs: list[tuple[Key, list[NDArray]]], priority: int
    ) -> None:
        self._raise_failure()
        lent, reads, results = [], [], []
        for name, arrays in values:
            scale = self._prepare_push(name)
            own = [self._on_host(array) if scale == 1.0 else self._on_host(array) * scale for array in arrays]
            reads += own
            lent.append((name, [_engine.Lent(array, writable=False) for array in own]))
        own_outs, copies = [], []
        for name, arrays in outs:
            own = [
                array if _engine.is_on_host(array) else mx.nd.empty(array.shape, dtype=array.dtype)
                for array in arrays
            ]
            copies += [(host, array) for host, array in zip(own, arrays, strict=True) if host is not array]
            own_outs += own
            results.append((name, [_engine.Lent(array, writable=True) for array in own]))
        handle = self._kv._exchange(lent, results, priority)

        def wait() -> None:
            try:
                # A store that is given up at the program's end may leave exchanges that never end.
                while not handle.done() and self._kv in paramhub.kvstore._open:
                    with contextlib.suppress(TimeoutError):
                        handle.wait(GIVEN_UP_INTERVAL)
                if handle.done():
                    handle.wait()
            except BaseException as failure:
                self._failure = self._failure or failure

        for array in reads:
            _engine.follow(wait, array, writes=False)
        for array in own_outs:
            _engine.follow(wait, array, writes=True)
        for host, array in copies:
            host.copyto(array)

    def _prepare_push(self, name: Key) -> float:
        """Counts a push of a key, and brings the hub's hyperparameters up to date. Returns the scale of the value."""
        if self._optimizer is None:
            self._has_pushed = True
            return 1.0
        self._begin()
        self._has_pushed = True
        scale, changes = self._optimizer.next(name)
        if scale != 1.0 and self._forms[name][1] == numpy.float16:
            raise self._wrong(
                f"key {name!r}: its gradients are of float16 and would be multiplied by {scale:g} before the push, where they "
                "can overflow or become zero. Use float32 parameters, or `update_on_kvstore=False`"
            )
        for group, changed in changes:
            self._kv.set_hyperparameters(group=group, **changed)
        return scale

    def _begin(self) -> None:
        """Gives the store the optimizer and its states, once. Their numbers are known only now: gluon.Trainer sets
        ``rescale_grad`` with the first step."""
        optimizer = self._chosen()
        if optimizer.has_begun:
            return
        first, *further = optimizer.begin(list(self._forms))
        self._kv.set_optimizer(Optimizer(optimizer.name, **first.numbers))
        for group in further:
            self._kv.add_group(group.keys, **group.numbers)
        for name, state in self._restored.items():
            self._kv.set_optimizer_state(name, *optimizer.from_mxnet(name, state))
        self._restored = {}

    @property
    def _has_begun(self) -> bool:
        """Whether the store has taken its optimizer and the states, or goes without one."""
        return self._has_pushed or (self._optimizer is not None and self._optimizer.has_begun)

    def _chosen(self) -> HubOptimizer:
        if self._optimizer is None:
            raise self._wrong("there is no optimizer: choose one with set_optimizer")
        return self._optimizer

    def _at_hub(self, optimizer: mx.optimizer.Optimizer) -> HubOptimizer:
        return HubOptimizer(optimizer, None if self.consistency else self.num_workers)

    def _on_host(self, array: NDArray) -> NDArray:
        return array if _engine.is_on_host(array) else array.as_in_context(mx.cpu())

    def _grouped(self, key: Keys, arrays: Any) -> list[tuple[Key, list[NDArray]]]:
        pairs = grouped(key, arrays)
        for name, its in pairs:
            for array in its:
                _engine.check(array, f"{self.type}, rank {self.rank}: key {name!r}")
        return pairs

    def _fitting(self, key: Keys, arrays: Any) -> list[tuple[Key, list[NDArray]]]:
        """`_grouped`, where each key has a value, and arrays have its form. It is checked before a push counts."""
        pairs = self._grouped(key, arrays)
        for name, its in pairs:
            if name not in self._forms:
                raise self._wrong(f"key {name!r}: it has no value yet: give it one with init")
            shape, dtype = self._forms[name]
            for array in its:
                if (array.shape, array.dtype) != (shape, dtype):
                    raise self._wrong(
                        f"key {name!r}: its value has the shape {shape} in {dtype.__name__}, but one of {array.shape} in "
                        f"{array.dtype.__name__} was passed"
                    )
        return pairs

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wrong(self, reason: str) -> MisuseError:
        return MisuseError(f"{self.type}, rank {self.rank}: {reason}")
