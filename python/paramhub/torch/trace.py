"""What every rank did when, as a timeline for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

With ``PARAMHUB_TRACE=dir`` in rank 0's environment every rank writes ``dir/rank-N.json`` when it leaves, and
the rank that finds all of them there (or rank 0, when it leaves) merges them into ``dir/trace.json``, on rank
0's clock. Hosts that share no directory leave their files to be copied together and merged by
``python -m paramhub.torch.merge_traces dir``.

A process of the timeline is a rank. Its tracks are ``computation`` (forward, backward, step), ``waits`` (for
which tensor it waits), and a row for each tensor's exchanges, from the request to its end. A rank keeps the
newest ``EVENTS_MAX`` events; how many older ones were dropped stands in its file.

`span` is for the user's own code too::

    with paramhub.torch.trace.span("load data"):
        ...
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from paramhub import _native
from paramhub.torch._trace_files import COMPUTATION, EXCHANGE, WAITS, Event, Origin, merge, write

if TYPE_CHECKING:
    from paramhub.torch._staging import StagedHandle

__all__ = ["COMPUTATION", "EVENTS_MAX", "WAITS", "merge", "record", "request", "span", "wait", "watch"]

EVENTS_MAX = 1 << 17
"""Events a rank keeps: about 30 MB of memory, and as much in its file."""

active = False
"""Whether anything is recorded: what costs more than a call to `span` looks here first."""

_recorder: _Recorder | None = None
_nothing = contextlib.nullcontext()


def span(name: str, track: str = COMPUTATION) -> contextlib.AbstractContextManager[Any]:
    """A context whose duration is recorded under ``name``. Spans of one track follow or enclose one
    another."""
    return _Span(_recorder, name, track) if _recorder is not None else _nothing


def wait(name: str) -> contextlib.AbstractContextManager[Any]:
    """A `span` in which this rank waits for ``name``."""
    return span(name, WAITS)


def record(name: str, track: str, begin_ns: int, end_ns: int) -> None:
    """A span that is over, between two times of `paramhub._native.now_ns`."""
    if _recorder is not None:
        _recorder.add(Event(name, track, begin_ns, end_ns))


def request(name: str, handle: _native.Handle | StagedHandle) -> None:
    """An exchange of tensor ``name``, which lasts as long as ``handle`` is under way."""
    if _recorder is not None:
        # What is staged is submitted later, when it has come from its device.
        _recorder.add(Event(name, EXCHANGE, handle.submitted_ns or _native.now_ns(), 0, handle))


class Watch:
    """Records a module's forward passes, and its backward passes from the first gradient to
    `backward_ended`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._forward_ns = 0
        self._backward_ns = 0
        self._hooks = [
            module.register_forward_pre_hook(self._forward_begins, prepend=True),
            module.register_forward_hook(self._forward_ended),
        ]

    def _forward_begins(self, module: torch.nn.Module, inputs: Any) -> None:
        self._forward_ns = _native.now_ns()

    def _forward_ended(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        record("forward", COMPUTATION, self._forward_ns, _native.now_ns())
        for output in _tensors(outputs):
            if output.requires_grad:
                output.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        self._backward_ns = self._backward_ns or _native.now_ns()

    def backward_began(self) -> None:
        """A gradient is there, if none was before."""
        self._backward_ns = self._backward_ns or _native.now_ns()

    def backward_ended(self) -> None:
        """The pass that began last has no more to compute."""
        begun, self._backward_ns = self._backward_ns, 0
        if begun:
            record("backward", COMPUTATION, begun, _native.now_ns())

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def watch(module: torch.nn.Module) -> Watch | None:
    """A `Watch` over a module if anything is recorded. Whoever knows when backward has ended tells it."""
    return Watch(module) if active else None


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """What a module has returned, as far as it lies in tuples, lists and dicts."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if isinstance(outputs, list | tuple):
        return [tensor for output in outputs for tensor in _tensors(output)]
    return []


class _Recorder:
    def __init__(self, origin: Origin, directory: str) -> None:
        self.origin = origin
        self.directory = directory
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.count = 0

    def add(self, event: Event) -> None:
        self.events.append(event)
        self.count += 1


class _Span:
    __slots__ = ("_begin_ns", "_name", "_recorder", "_track")

    def __init__(self, recorder: _Recorder, name: str, track: str) -> None:
        self._recorder = recorder
        self._name = name
        self._track = track
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = _native.now_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.add(Event(self._name, self._track, self._begin_ns, _native.now_ns()))


def _start(directory: str, origin: Origin) -> None:
    """Records from now on, until `_finish`."""
    global active, _recorder
    _recorder = _Recorder(origin, directory)
    active = True


def _finish() -> None:
    """Writes what was recorded. A directory that cannot be written costs the trace, not the training."""
    global active, _recorder
    recorder, _recorder, active = _recorder, None, False
    if recorder is None:
        return
    dropped = recorder.count - len(recorder.events)
    try:
        write(recorder.directory, recorder.origin, recorder.events, dropped, _native.now_ns())
    except OSError as error:
        print(f"paramhub: rank {recorder.origin.rank}: no trace was written: {error}", file=sys.stderr)
