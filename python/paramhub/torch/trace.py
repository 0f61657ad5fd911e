"""A timeline of the events on every rank, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

With ``PARAMHUB_TRACE=dir`` in rank 0's environment every rank writes ``dir/rank-N.json`` when it leaves. The
rank that finds all files there (or rank 0, when it leaves) merges them into ``dir/trace.json``, on rank 0's
clock. If hosts share no directory, copy their files into one and merge them with
``python -m paramhub.torch.merge_traces dir``.

A process of the timeline is a rank. Its tracks are ``computation`` (forward, backward, step), ``waits`` (one
span for each tensor that the rank waits for), and a row for each tensor's exchanges, from the request to its
end. A rank keeps the newest ``EVENTS_MAX`` events; its file has the number of older events that were dropped.

User code may call `span`, too::

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
    from paramhub.torch._staged_handle import StagedHandle

__all__ = ["COMPUTATION", "EVENTS_MAX", "WAITS", "merge", "record", "request", "span", "wait", "watch"]

EVENTS_MAX = 1 << 17
"""The most events that a rank keeps: about 30 MB of memory, and as much in its file."""

active = False
"""True if events are recorded. Code whose recording costs more than a call to `span` tests this first."""

_recorder: _Recorder | None = None
_nothing = contextlib.nullcontext()


def span(name: str, track: str = COMPUTATION) -> contextlib.AbstractContextManager[Any]:
    """A context whose duration is recorded under ``name``. Two spans of one track must not overlap partly."""
    return _Span(_recorder, name, track) if _recorder is not None else _nothing


def wait(name: str) -> contextlib.AbstractContextManager[Any]:
    """A `span` in which this rank waits for ``name``."""
    return span(name, WAITS)


def record(name: str, track: str, begin_ns: int, end_ns: int) -> None:
    """Records a span that has ended. Its times are those of `paramhub._native.now_ns`."""
    if _recorder is not None:
        _recorder.add(Event(name, track, begin_ns, end_ns))


def request(name: str, handle: _native.Handle | StagedHandle) -> None:
    """Records an exchange of tensor ``name``, which lasts until ``handle`` has ended."""
    if _recorder is not None:
        # A staged tensor is submitted later, after the copy from its device.
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
        """Called at a gradient of a backward pass; the first one begins the pass's span."""
        self._backward_ns = self._backward_ns or _native.now_ns()

    def backward_ended(self) -> None:
        """Called when the backward pass has computed all gradients; records its span."""
        begun, self._backward_ns = self._backward_ns, 0
        if begun:
            record("backward", COMPUTATION, begun, _native.now_ns())

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def watch(module: torch.nn.Module) -> Watch | None:
    """A `Watch` over a module if events are recorded. The caller must call its `backward_ended`."""
    return Watch(module) if active else None


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """The tensors in a module's result, which may be nested in tuples, lists and dicts."""
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
    """Records events until `_finish`."""
    global active, _recorder
    _recorder = _Recorder(origin, directory)
    active = True


def _finish() -> None:
    """Writes the recorded events. If the directory cannot be written, the trace is lost and training goes on."""
    global active, _recorder
    recorder, _recorder, active = _recorder, None, False
    if recorder is None:
        return
    dropped = recorder.count - len(recorder.events)
    try:
        write(recorder.directory, recorder.origin, recorder.events, dropped, _native.now_ns())
    except OSError as error:
        print(f"paramhub: rank {recorder.origin.rank}: no trace was written: {error}", file=sys.stderr)
