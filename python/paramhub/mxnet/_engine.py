"""Memory of MXNet's arrays for exchanges, and operations of MXNet's engine that end with an exchange.

MXNet's calls return before their arrays have values: its engine orders what reads and writes an array. An exchange reads and
writes memory without the engine, so this module does two things: it waits until the engine has finished with the memory, and
then it gives the engine an operation on each array that lasts as long as the exchange. What the program does with the
arrays meanwhile waits for that operation.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray
from mxnet.ndarray.ndarray import to_dlpack_for_read, to_dlpack_for_write

from paramhub.errors import MisuseError

_ON_HOST = ("cpu", "cpu_pinned", "cpu_shared")
_DTYPES = (numpy.float32, numpy.float16)
_CPU_PRIORITIZED = ctypes.c_int(3)
"""mxnet::FnProperty::kCPUPrioritized. Threads of their own run these operations, so that computation does not wait for them."""


class Lent:
    """Memory of an array, for `paramhub._native.Memory`. The array's values are there when it has been made."""

    def __init__(self, array: NDArray, *, writable: bool) -> None:
        self._capsule = (to_dlpack_for_write if writable else to_dlpack_for_read)(array)

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def is_on_host(array: NDArray) -> bool:
    return array.context.device_type in _ON_HOST


def check(array: Any, place: str) -> None:
    """Raises MisuseError, which begins with ``place``, if the array cannot be exchanged."""
    if not isinstance(array, NDArray):
        raise MisuseError(f"{place}: an NDArray is exchanged, not a {type(array).__name__}")
    if array.stype != "default":
        raise MisuseError(
            f"{place}: arrays of storage type `{array.stype}` are not exchanged: pass array.tostype('default')"
        )
    if array.dtype not in _DTYPES:
        raise MisuseError(
            f"{place}: arrays of float32 and float16 are exchanged, not of {numpy.dtype(array.dtype).name}"
        )


def follow(wait: Callable[[], None], array: NDArray, *, writes: bool) -> None:
    """Gives the engine an operation that reads the array, or with ``writes`` writes it, and that ends when ``wait`` returns.
    ``wait`` runs on a thread of the engine and must not raise.

    An operation has one array: arrays can be views of the same memory, and the engine would never begin an operation that has
    the same memory twice.
    """
    number = next(_numbers)
    _waits[number] = wait
    handle = (ctypes.c_void_p * 1)(array.handle.value)
    read, written = (0, 1) if writes else (1, 0)
    check_call(
        _LIB.MXEnginePushSyncND(
            _run,
            ctypes.c_void_p(number),
            None,
            ctypes.byref(_HOST),
            handle,
            read,
            handle,
            written,
            ctypes.byref(_CPU_PRIORITIZED),
            0,
            b"paramhub exchange",
        )
    )


class _Context(ctypes.Structure):
    """mxnet::Context: type and number of a device."""

    _fields_ = (("dev_type", ctypes.c_int), ("dev_id", ctypes.c_int32))


_HOST = _Context(mx.Context.devstr2type["cpu"], 0)
_numbers = itertools.count(1)
_waits: dict[int, Callable[[], None]] = {}
"""The operations that the engine has not run yet, by the number that it passes back."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
def _run(_: int, number: int) -> None:
    _waits.pop(number)()
