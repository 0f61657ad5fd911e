"""Means over the ranks of a job, for JAX.

A training program, started with ``paramhub run -n 4 -- python train.py``, in which each rank takes its part of each batch::

    import paramhub.jax

    paramhub.jax.init()
    parameters = paramhub.jax.broadcast(parameters)        # rank 0's
    optimizer = optax.chain(paramhub.jax.average_gradients(), optax.adam(1e-3))
    ...
    gradients = gradients_of(parameters, batch)            # compiled by jax.jit
    updates, state = optimizer.update(gradients, state, parameters)

The exchange is a call of Python and not a part of a compiled function: call `mean` and the optimizer's ``update`` outside of
``jax.jit``, or compile what comes after `mean` by itself. All ranks make the same calls in the same order, from one thread.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import sys
from typing import Any

import jax
import ml_dtypes
import numpy

import paramhub
from paramhub import _native
from paramhub.errors import MisuseError

__all__ = ["average_gradients", "broadcast", "init", "mean", "rank", "shutdown", "size"]

_DTYPES = {
    numpy.dtype(numpy.float32): "f32",
    numpy.dtype(numpy.float16): "f16",
    numpy.dtype(ml_dtypes.bfloat16): "bf16",
}
_LARGE_SLOTS = 16
_SLOT_BYTES_MAX = 1 << 20
_SLOT_BYTES_MIN = 16 << 10


def init(
    url: str | None = None,
    job: str | None = None,
    secret: str | None = None,
    rank: int | None = None,
    **options: Any,
) -> None:
    """Joins the run's job. Returns when every rank has called it. The arguments are those of `paramhub.connect`; under
    ``paramhub run`` none is needed. A second call does nothing.

    Raises MisuseError if an argument is missing, ConnectError if ranks are missing or the manager cannot be reached.
    """
    global _ranks
    if _ranks is None:
        _ranks = _Ranks(paramhub.connect(url, job, secret, rank, **options))


def rank() -> int:
    """This process's number, from 0."""
    return _joined().job.rank


def size() -> int:
    """The number of ranks."""
    return _joined().job.workers


def mean(tree: Any) -> Any:
    """Returns the tree with the means over all ranks of its arrays. Each keeps its type, and its devices if it is not of NumPy.
    Arrays are of float32, float16 or bfloat16, which are summed in float32.

    Raises MisuseError in a function that JAX traces, for arrays of other types, and if ranks pass different trees.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        _check(path, leaf, "mean")
        if leaf.dtype not in _DTYPES:
            raise MisuseError(
                f"paramhub.jax.mean: the leaf {_name(path)} is of {leaf.dtype}, but means are of float32, float16 and bfloat16"
            )
    ranks = _joined()
    check = ranks.compare("mean", leaves)
    parts: dict[int, numpy.ndarray] = {}
    under_way = []
    for dtype in _DTYPES:
        # The leaves of a type travel together, in memory of their own: those of JAX must not change.
        own = [
            (number, numpy.asarray(leaf)) for number, (_, leaf) in enumerate(leaves) if leaf.dtype == dtype
        ]
        together = numpy.empty(sum(array.size for _, array in own), dtype)
        begin = 0
        for number, array in own:
            parts[number] = together[begin : begin + array.size].reshape(array.shape)
            parts[number][...] = array
            begin += array.size
        if together.size:
            under_way.append(ranks.exchange(together))
    check()
    for handle in under_way:
        handle.wait()
    return structure.unflatten(_placed(parts[number], leaf) for number, (_, leaf) in enumerate(leaves))


def broadcast(tree: Any) -> Any:
    """Returns the tree with rank 0's arrays, of any type, at every rank. It moves twice the bytes of the arrays through the hub:
    call it once, for initial values.

    Raises MisuseError in a function that JAX traces, and if ranks pass different trees.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        _check(path, leaf, "broadcast")
    ranks = _joined()
    ranks.compare("broadcast", leaves)()
    received = []
    for _, leaf in leaves:
        # A number below 65536 can be told from its mean with zeros, whatever its bits mean to the array.
        array = _raw(leaf)
        bits = numpy.zeros(array.nbytes + array.nbytes % 2, numpy.uint8)
        if ranks.job.rank == 0:
            bits[: array.nbytes] = numpy.frombuffer(array.tobytes(), numpy.uint8)
        numbers = bits.view(numpy.uint16).astype(numpy.float32)
        if numbers.size:
            ranks.exchange(numbers).wait()
        whole = numpy.rint(numbers * numpy.float32(ranks.job.workers)).astype(numpy.uint16)
        values = whole.view(numpy.uint8)[: array.nbytes].view(array.dtype).reshape(array.shape)
        received.append(_placed(values, leaf))
    return structure.unflatten(received)


def average_gradients() -> Any:
    """An optax transformation that replaces gradients by their means over all ranks, for ``optax.chain``. Call its ``update``
    outside of ``jax.jit``, and raises as `mean` does."""
    import optax

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return mean(updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def shutdown() -> None:
    """Leaves the job. Every rank calls it, or ends its program, which does the same. Later, `init` cannot join the job again."""
    global _ranks
    ranks, _ranks = _ranks, None
    if ranks is not None:
        ranks.job.leave()


class _Ranks:
    """The job of this process, whose keys are slots for arrays of any size."""

    def __init__(self, job: paramhub.Job) -> None:
        self.job = job
        sizes = _slot_sizes()
        keys: list[dict[str, Any]] = []
        self._slots = {}
        for dtype, name in _DTYPES.items():
            self._slots[dtype] = _native.Slots(list(enumerate(sizes, len(keys))))
            for nbytes in sizes:
                shape = [nbytes // dtype.itemsize]
                keys.append({"name": f"{name}-{len(keys)}", "shape": shape, "dtype": name, "priority": 0})
        assert job._member is not None
        settings = {"keys": keys, "optimizer": paramhub.Mean().settings()}
        job._native, job._member = job._member.init(json.dumps(settings)), None
        for slots in self._slots.values():
            slots.open(job._native)

    def exchange(self, array: numpy.ndarray) -> _native.Handle:
        """Begins to replace a contiguous array's values by their means over all ranks. Its memory is kept alive."""
        return self._slots[array.dtype].exchange((array.ctypes.data, array.nbytes), array)

    def compare(self, operation: str, leaves: list[tuple[Any, Any]]) -> Any:
        """Begins to compare what the ranks exchange. Returns a function that raises MisuseError if they differ: the exchange of
        arrays that do not fit each other would give wrong numbers."""
        forms = [(_name(path), leaf.shape, str(leaf.dtype)) for path, leaf in leaves]
        digest = hashlib.sha256(repr((operation, forms)).encode()).digest()
        own = numpy.frombuffer(digest, numpy.uint8).astype(numpy.float32)
        means = own.copy()
        handle = self.exchange(means)

        def check() -> None:
            handle.wait()
            if not numpy.allclose(means, own, rtol=0, atol=0.1):
                reason = (
                    f"job `{self.job.name}`, rank {self.job.rank}: the ranks differ in what they exchange. This rank calls "
                    f"{operation} with {len(forms)} leaves, {forms[:3]}{' and so on' if len(forms) > 3 else ''}: all ranks make "
                    "the same calls, with trees of the same names, shapes and types"
                )
                # The ranks have filled different slots, so that later means would be of values that do not belong together.
                for slots in self._slots.values():
                    slots.fail(reason)
                raise MisuseError(reason)

        return check


_ranks: _Ranks | None = None


def _joined() -> _Ranks:
    if _ranks is None:
        raise MisuseError("paramhub.jax has not joined a job: call paramhub.jax.init() first")
    return _ranks


def _check(path: Any, leaf: Any, call: str) -> None:
    """Raises MisuseError if a leaf has no values that this process can exchange."""
    if isinstance(leaf, jax.core.Tracer):
        raise MisuseError(
            f"paramhub.jax.{call}: the leaf {_name(path)} is traced by a transformation of JAX, such as jax.jit, and has no "
            f"values to exchange. Call paramhub.jax.{call}, or the optimizer's update with average_gradients, outside of it"
        )
    if not isinstance(leaf, (jax.Array, numpy.ndarray, numpy.generic)):
        raise MisuseError(
            f"paramhub.jax.{call}: the leaf {_name(path)} is a {type(leaf).__name__} and no array: pass jax.numpy.asarray of it"
        )
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise MisuseError(
            f"paramhub.jax.{call}: parts of the leaf {_name(path)} are in other processes of jax.distributed. Ranks of paramhub "
            "exchange arrays that each of them has whole"
        )


def _raw(leaf: Any) -> numpy.ndarray:
    is_key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return numpy.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _placed(values: numpy.ndarray, leaf: Any) -> Any:
    """Values as an array like the leaf."""
    if not isinstance(leaf, jax.Array):
        return values if isinstance(leaf, numpy.ndarray) else values[()]
    placed: Any = values
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        placed = jax.random.wrap_key_data(values, impl=jax.random.key_impl(leaf))
    if leaf.committed:
        return jax.device_put(placed, leaf.sharding)
    # A sharding would commit the array, and JAX refuses to compute with arrays that are committed to different devices.
    with jax.default_device(next(iter(leaf.devices()))):
        return jax.device_put(placed)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "itself"


def _slot_sizes() -> list[int]:
    """Bytes of the slots of one type: many of the largest size, for throughput, and two of each smaller power of two."""
    sizes = [_SLOT_BYTES_MAX] * _LARGE_SLOTS
    nbytes = _SLOT_BYTES_MAX // 2
    while nbytes >= _SLOT_BYTES_MIN:
        sizes += [nbytes] * 2
        nbytes //= 2
    return sizes


def _at_exit() -> None:
    # If an exception ends the program, the job gives up instead, and the other ranks hear the reason.
    if getattr(sys, "last_value", None) is None:
        shutdown()


atexit.register(_at_exit)
