"""Who this process is among those a launcher has started: torchrun, Slurm, or ``paramhub run``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from paramhub.errors import MisuseError


@dataclass(frozen=True)
class Launched:
    """This process's place among all (``rank`` of ``size``) and among those of its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str
    """What told: ``arguments``, ``torchrun``, ``slurm``, ``environment``, or ``nobody`` for a process of its own."""
    master: tuple[str, int] | None = None
    """Where rank 0 can be met, as far as the launcher tells."""

    @property
    def is_on_one_host(self) -> bool:
        return self.local_size == self.size


def launched(
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Launched:
    """Reads the launcher's variables; arguments overrule them."""
    if rank is not None or size is not None:
        if rank is None or size is None:
            raise MisuseError("give both rank and size, or neither")
        found = Launched(
            rank,
            size,
            local_rank if local_rank is not None else _read(environment, "LOCAL_RANK", rank),
            local_size if local_size is not None else _read(environment, "LOCAL_WORLD_SIZE", size),
            "arguments",
            _master(environment),
        )
    elif "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = _read(environment, "RANK"), _read(environment, "WORLD_SIZE")
        found = Launched(
            rank,
            size,
            _read(environment, "LOCAL_RANK", rank),
            _read(environment, "LOCAL_WORLD_SIZE", size),
            "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment",
            _master(environment),
        )
    elif "SLURM_PROCID" in environment and _read(environment, "SLURM_NTASKS", 1) > 1:
        found = _slurm(environment)
    else:
        found = Launched(0, 1, 0, 1, "nobody")
    if not 0 <= found.rank < found.size:
        raise MisuseError(f"rank {found.rank} is none of {found.size} ranks: ranks count from 0")
    if not 0 <= found.local_rank < found.local_size <= found.size:
        raise MisuseError(
            f"rank {found.rank}: local rank {found.local_rank} of {found.local_size} does not fit {found.size} ranks"
        )
    return found


def _slurm(environment: Mapping[str, str]) -> Launched:
    rank, size = _read(environment, "SLURM_PROCID"), _read(environment, "SLURM_NTASKS")
    local_rank = _read(environment, "SLURM_LOCALID", 0)
    node = _read(environment, "SLURM_NODEID", 0)
    tasks = (
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(size)
    )
    counts = tasks_per_node(tasks)
    local_size = counts[node] if node < len(counts) else size
    master = _master(environment)
    if master is None:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "localhost"
        # Any port would do; this one is the same on every rank and seldom another job's.
        master = (first_node(nodes), 29400 + _read(environment, "SLURM_JOB_ID", 0) % 20000)
    return Launched(rank, size, local_rank, local_size, "slurm", master)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's short form ``2(x3),1``: 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if matched is None:
            raise MisuseError(f"SLURM_TASKS_PER_NODE cannot be read: {text!r}")
        counts += [int(matched[1])] * int(matched[2] or 1)
    return counts


def first_node(nodes: str) -> str:
    """The first host of Slurm's list ``rack[3-5,9],other``: rack3."""
    matched = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", nodes)
    if matched is None:
        raise MisuseError(f"SLURM_STEP_NODELIST cannot be read: {nodes!r}")
    if matched[2] is None:
        return matched[1]
    return matched[1] + re.split("[,-]", matched[2])[0] + matched[3]


def _master(environment: Mapping[str, str]) -> tuple[str, int] | None:
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        return None
    return environment["MASTER_ADDR"], _read(environment, "MASTER_PORT")


def _read(environment: Mapping[str, str], variable: str, default: int | None = None) -> int:
    text = environment.get(variable)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise MisuseError(f"{variable} is to be a number, not {text!r}") from None
