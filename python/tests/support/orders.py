"""What the tests' process and the zygote tell one another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Order:
    """What one rank is to do. What it returns or raises goes into ``outcome``, what it prints into ``output``."""

    team: int
    rank: int
    environment: dict[str, str]
    path: list[str]
    module: str
    file: str
    function: str
    arguments: bytes
    folder: str
    outcome: str
    output: str


@dataclass
class Signal:
    """Sends a signal to the ranks of a team that still run, or with ``whole_group`` to what they have started too."""

    team: int
    number: int
    ranks: tuple[int, ...] | None = None
    whole_group: bool = False


@dataclass
class Ended:
    """A rank has gone: its exit code, or the negative number of the signal that ended it."""

    team: int
    rank: int
    code: int
