"""What the programs of a run have written, and whether it names each fault soon enough."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NAMED_WITHIN_S = 5.0
"""Seconds from the time at which a fault can be noticed within which a line must name it."""
NO_MANAGER = "this hub asks again until it is answered"
MANAGER_IS_BACK = "answers again, after"


@dataclass
class Expected:
    """A fault of which a line must say something."""

    kind: str
    rank: int | None
    """The worker that it has befallen, if any."""
    noticeable_at: float
    pattern: re.Pattern[str]


class Log:
    """The lines of all programs of a run, with the time at which each was there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        self.expected: list[Expected] = []
        self.named_after_s: defaultdict[str, list[float]] = defaultdict(list)
        """Of each kind of fault, the seconds after which each fault was named."""
        self.unnamed: list[str] = []
        self.outages = 0
        """The hubs that have said that they hear no manager, and not that it is back."""
        self._file = path.open("rb")
        self._rest = b""

    def poll(self, on_line: Callable[[str], None]) -> None:
        """Reads what is new."""
        now = time.monotonic()
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in (each.decode(errors="replace") for each in whole):
            self.lines.append(line)
            # A worker's output repeats what the hubs tell it.
            if not line.startswith("["):
                self.outages += (NO_MANAGER in line) - (MANAGER_IS_BACK in line)
            for each in [each for each in self.expected if each.pattern.search(line)]:
                self._named(each, now)
            on_line(line)
        for each in [each for each in self.expected if now > each.noticeable_at + NAMED_WITHIN_S]:
            self.expected.remove(each)
            befallen = "" if each.rank is None else f" of rank {each.rank}"
            self.unnamed.append(
                f"{each.kind}{befallen} at line {len(self.lines)} (no line has {each.pattern.pattern})"
            )

    def expect(
        self, kind: str, rank: int | None, pattern: str, after_s: float = 0.0, is_named: bool = False
    ) -> None:
        """Begins to wait for a line that names a fault, which can be noticed after some time. ``is_named`` says that such a
        line was there before, and that no program repeats it."""
        now = time.monotonic()
        self.expected.append(Expected(kind, rank, now + after_s, re.compile(pattern)))
        if is_named:
            self._named(self.expected[-1], now)

    def excuse(self, kinds: tuple[str, ...]) -> None:
        """Waits no longer for the names of these faults: what has happened since has made them unimportant."""
        self.expected = [each for each in self.expected if each.kind not in kinds]

    def _named(self, expected: Expected, now: float) -> None:
        self.expected.remove(expected)
        self.named_after_s[expected.kind].append(max(0.0, now - expected.noticeable_at))

    def close(self) -> None:
        self._file.close()
