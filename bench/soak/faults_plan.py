"""The faults of a run, as its seed chooses them before the run begins."""

from __future__ import annotations

import random
from dataclasses import dataclass

WORKERS = 4
PAUSES_S = (0.05, 1.0)
"""Seconds between two faults, at least and at most."""
HUBS = 3
LONGEST_S = {
    "stop": 4.0,
    "partition": 4.0,
    "manager": 3.0,
    "launcher": 3.0,
    "disk": 3.0,
    "hub": 3.0,
    "freeze": 4.0,
    "isolate": 4.0,
    "separate": 4.0,
}
"""Seconds that a fault lasts at most. The others are over at once."""
WEIGHTS = {
    "kill": 3,
    "stop": 2,
    "manager": 2,
    "launcher": 1,
    "cut": 3,
    "partition": 2,
    "disk": 2,
    "hub": 3,
    "freeze": 2,
    "isolate": 2,
    "separate": 2,
}
OF_HUBS = ("hub", "freeze", "isolate", "separate")
"""Kinds that befall a hub."""
OF_ROOT = ("cut", "partition", "disk", "isolate", "separate")
"""Kinds that need what only root may do: mounts, namespaces and the end of other processes' connections."""
OF_NETWORK = ("cut", "partition", "isolate", "separate")
"""Kinds that need the workers and hubs to be on hosts of their own."""
OF_WORKERS = ("kill", "stop", "cut", "partition")
LOSING = ("kill", "stop", "partition")
"""Kinds that may cost a worker's part of one step, and end a job that fails with a worker."""
KINDS = {
    "continue": tuple(kind for kind in WEIGHTS if kind not in OF_HUBS),
    "rewind": tuple(kind for kind in WEIGHTS if kind != "separate"),
    "replicas": tuple(kind for kind in WEIGHTS if kind not in LOSING),
    "replicas and rewind": tuple(WEIGHTS),
}
"""What a job outlives, by what becomes of it."""
WAYS = ("both", "to", "from")
DISKS = ("state", "checkpoints")


@dataclass(frozen=True)
class Fault:
    kind: str
    rank: int
    """The worker that it befalls, if its kind is one of workers."""
    pause_s: float
    """Seconds from the fault before."""
    seconds: float
    """How long it lasts."""
    way: str
    """Which packets a partition drops: those to the host that it befalls, those from it, or both."""
    disk: str
    """What the full disk holds: the manager's state or the hubs' checkpoints."""
    at_hub: bool
    """Whether a connection is cut at the hub's end."""
    hubs: int
    """How many hubs lose their connections by a cut, counted from the first."""
    hub: int
    """The hub that it befalls, if its kind is one of hubs."""
    other: int
    """How far behind it is the hub from which it is separated, if its kind is that."""

    @property
    def befalls_worker(self) -> bool:
        return self.kind in OF_WORKERS


def draw(chooser: random.Random, count: int, kinds: list[str]) -> list[Fault]:
    """Draws the faults of a run. All values of a fault are drawn whatever its kind is, so that each choice depends only on
    the seed and the kinds."""
    return [draw_one(chooser, kinds) for _ in range(count)]


def draw_one(chooser: random.Random, kinds: list[str]) -> Fault:
    kind = chooser.choices(kinds, [WEIGHTS[each] for each in kinds])[0]
    return Fault(
        kind=kind,
        rank=chooser.randrange(WORKERS),
        pause_s=chooser.uniform(*PAUSES_S),
        seconds=LONGEST_S.get(kind, 0.0) * chooser.random(),
        way=chooser.choice(WAYS),
        disk=chooser.choice(DISKS),
        at_hub=chooser.random() < 0.5,
        hubs=chooser.choice((1, 2)),
        hub=chooser.randrange(HUBS),
        other=chooser.choice((1, 2)),
    )
