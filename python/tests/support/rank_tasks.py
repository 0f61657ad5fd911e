"""The messages between the tests' process and the fork server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RankTask:
    """The task of one rank. It writes its result or exception into the file ``outcome``, and its output into ``output``."""

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
    """A request to send a signal to the running ranks of a team, with ``whole_group`` also to processes that they started."""

    team: int
    number: int
    ranks: tuple[int, ...] | None = None
    whole_group: bool = False


@dataclass
class Ended:
    """A rank has ended: its exit code, or the negative number of the signal that ended it."""

    team: int
    rank: int
    code: int
