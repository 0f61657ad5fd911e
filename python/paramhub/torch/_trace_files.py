"""Trace files: one for each rank, and a merged one for all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paramhub import _native
from paramhub.errors import MisuseError

if TYPE_CHECKING:
    from paramhub.torch._staged_handle import StagedHandle

COMPUTATION, WAITS, EXCHANGE = "computation", "waits", "exchange"
"""Tracks. Two spans of one of the first two tracks must not overlap partly. Exchanges may overlap, and have a row
for each tensor."""


class Event(NamedTuple):
    """A span or an exchange. Times are nanoseconds of this host's monotonic clock."""

    name: str
    track: str
    begin_ns: int
    end_ns: int
    handle: _native.Handle | StagedHandle | None = None
    """The handle of an exchange, which has the time of its end."""


@dataclass(frozen=True)
class Origin:
    """The rank whose events a file has, and the conversion of their times to those of the timeline."""

    run: str
    """The same for all ranks of a run, and no other."""
    rank: int
    size: int
    host: str
    start_ns: int
    """The time at which the timeline begins, on rank 0's clock."""
    offset_ns: int
    """Nanoseconds to add to this host's clock to get rank 0's."""


def write(directory: str, origin: Origin, events: Iterable[Event], dropped: int, now_ns: int) -> None:
    """Writes a rank's file, and the merged one if this is the last rank, or rank 0.

    A lock lets in one rank at a time, so that of two ranks that end together one finds the other's file.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    about = {**origin.__dict__, "dropped_events": dropped}
    with _alone(folder):
        _replace(folder / f"rank-{origin.rank}.json", about, _lines(origin, events, now_ns))
        others = _of_run(folder, origin.run)
        if origin.rank == 0 or len(others) == origin.size:
            _merge(folder, origin.run, others)


def merge(directory: str) -> str:
    """Merges the rank files in ``directory`` into its ``trace.json``, and returns the path of that. If the directory
    has files of several runs, those of the run that wrote last are merged."""
    folder = Path(directory)
    files = sorted(folder.glob("rank-*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise MisuseError(f"{directory} has no rank-N.json: run with PARAMHUB_TRACE={directory} first")
    with _alone(folder):
        run = _about(files[-1])["run"]
        return str(_merge(folder, run, _of_run(folder, run)))


def _merge(folder: Path, run: str, files: list[Path]) -> Path:
    about = {path.stem: _about(path) for path in files}
    return _replace(
        folder / "trace.json", {"run": run, **about}, (line for path in files for line in _events(path))
    )


def _lines(origin: Origin, events: Iterable[Event], now_ns: int) -> Iterator[str]:
    """Chrome's trace events, one on each line, because files are merged by line."""
    shift = origin.offset_ns - origin.start_ns
    tracks = {COMPUTATION: 1, WAITS: 2, EXCHANGE: 3}
    common: dict[str, Any] = {"pid": origin.rank}
    yield _metadata(origin.rank, 0, "process_name", name=f"rank {origin.rank} ({origin.host})")
    yield _metadata(origin.rank, 0, "process_sort_index", sort_index=origin.rank)
    for event in events:
        track = tracks.setdefault(event.track, len(tracks) + 1)
        begin_ns, end_ns = event.begin_ns + shift, (event.end_ns or now_ns) + shift
        common = {"name": event.name, "cat": event.track, "pid": origin.rank, "tid": track}
        if event.track != EXCHANGE:
            yield json.dumps({**common, "ph": "X", "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3})
            continue
        finished_ns = event.handle.finished_ns if event.handle is not None else 0
        end_ns = finished_ns + shift if finished_ns else end_ns
        # One identity for all exchanges of a tensor keeps them in one row.
        common["id"] = f"{origin.rank}/{event.name}"
        ended = {} if finished_ns else {"args": {"unfinished": True}}
        yield json.dumps({**common, "ph": "b", "ts": begin_ns / 1e3, **ended})
        yield json.dumps({**common, "ph": "e", "ts": end_ns / 1e3})
    for track, number in tracks.items():
        yield _metadata(origin.rank, number, "thread_name", name=track)


def _metadata(rank: int, track: int, kind: str, **arguments: object) -> str:
    return json.dumps({"ph": "M", "pid": rank, "tid": track, "name": kind, "args": arguments})


def _replace(path: Path, about: dict[str, Any], lines: Iterable[str]) -> Path:
    """Replaces a trace file at once: a reader sees the old one or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}", delete=False) as file:
        try:
            file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(about) + ', "traceEvents": [\n')
            between = ""
            for line in lines:
                file.write(between + line)
                between = ",\n"
            file.write("\n]}\n")
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
    return path


def _about(path: Path) -> dict[str, Any]:
    with path.open() as file:
        try:
            about = json.loads(file.readline().rstrip() + "]}")["otherData"]
            about["run"]
        except (ValueError, KeyError, TypeError):
            raise MisuseError(f"{path} is no trace file of ours: take it away") from None
        return about


def _events(path: Path) -> Iterator[str]:
    with path.open() as file:
        file.readline()
        for line in file:
            line = line.rstrip().rstrip(",")
            if line != "]}":
                yield line


def _of_run(folder: Path, run: str) -> list[Path]:
    """The rank files of one run, by rank. Files of other runs are left out."""
    files: list[tuple[int, Path]] = []
    for path in folder.glob("rank-*.json"):
        with contextlib.suppress(MisuseError):
            about = _about(path)
            if about["run"] == run:
                files.append((about["rank"], path))
    return [path for _, path in sorted(files)]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".paramhub.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
