"""The keys of a key-value store, and the tensors that a caller passes with them."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paramhub import _native
from paramhub.errors import MisuseError

if TYPE_CHECKING:
    from paramhub._native import Handle

Key = str | int
Keys = Key | Sequence[Key]


class Value:
    """The shape and type of a key's tensors, and the handles of its requests under way."""

    def __init__(self, name: Key, memory: _native.Memory) -> None:
        self.name = name
        self.shape = memory.shape
        self.dtype = memory.dtype
        self._handles: list[Handle] = []

    def note(self, handle: Handle) -> None:
        """Adds a handle. Drops handles that have ended without an error, and all failed ones but the first."""
        kept: list[Handle] = []
        for one in self._handles:
            if not one.done() or (
                one.exception() is not None and not any(earlier.done() for earlier in kept)
            ):
                kept.append(one)
        self._handles = [*kept, handle]

    def wait(self, deadline: float | None) -> None:
        while self._handles:
            handle = self._handles[0]
            try:
                handle.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            finally:
                if handle.done():
                    del self._handles[0]


def names(key: Keys) -> list[Key]:
    return [_name(one) for one in key] if isinstance(key, (list, tuple)) else [_name(key)]


def _name(key: Any) -> Key:
    if isinstance(key, str) and key:
        return key
    try:
        number = operator.index(key)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise MisuseError(f"a key is a name or a number from 0, not {key!r}")
    return number


def grouped(key: Keys, tensors: Any) -> list[tuple[Key, list[Any]]]:
    """Each key with its tensors. A key that is named several times gets the tensors of all its occurrences."""
    if not isinstance(key, (list, tuple)):
        return [(_name(key), _listed(tensors))]
    count = len(tensors) if isinstance(tensors, (list, tuple)) else 1
    if count != len(key):
        raise MisuseError(
            f"{len(key)} keys came with {count} tensors: pass as many, or a list of them for each key"
        )
    found: dict[Key, list[Any]] = {}
    for name, its in zip(names(key), _listed(tensors), strict=True):
        found.setdefault(name, []).extend(_listed(its))
    return list(found.items())


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
