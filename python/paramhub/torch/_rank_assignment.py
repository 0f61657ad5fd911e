"""Finds this process's rank and size: in arguments, a launcher's variables, or torch.distributed's process group."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paramhub.errors import MisuseError

_MPI = (
    # Open MPI, MVAPICH, and the MPIs that Hydra starts: MPICH and Intel MPI.
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""The variables in which MPI's launchers pass rank, size, local rank and local size."""
_BY_TORCH = "torch.distributed"
_AGREEMENT = (
    "If torch.distributed is right, call paramhub.torch.init(rank=torch.distributed.get_rank(), "
    "size=torch.distributed.get_world_size()) first, or unset the variables; if they are right, give init_process_group the "
    "same rank and world_size"
)


@dataclass(frozen=True)
class RankAssignment:
    """This process's rank among all ranks (``rank`` of ``size``) and among those of its host."""

    rank: int
    size: int
    local_rank: int | None
    """None, like ``local_size``, if no source has it. Then the ranks exchange the names of their hosts."""
    local_size: int | None
    launcher: str
    """The source: ``arguments``, ``torchrun``, ``slurm``, ``mpi``, ``environment``, ``torch.distributed``, or ``none`` for a
    process that no launcher has started."""
    master: tuple[str, int] | None = None
    """Host and port at which rank 0 listens for the others, if the launcher passes them."""

    @property
    def is_on_one_host(self) -> bool:
        return self.local_size == self.size

    def among(self, hosts: Sequence[str]) -> RankAssignment:
        """This assignment with its local rank and size, where ``hosts`` has the hosts of all ranks. The launcher's local rank
        stays if the launcher counts as many ranks on the host. Else local ranks are in the order of ranks."""
        local = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        if self.local_size == len(local):
            return self
        return replace(self, local_rank=local.index(self.rank), local_size=len(local))


def find_rank_assignment(
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    environment: Mapping[str, str] = os.environ,
    group: tuple[int, int] | None = None,
) -> RankAssignment:
    """Reads the launcher's variables; arguments overrule them. ``group`` is rank and size of torch.distributed's process group,
    if there is one. It is used if no other source has rank and size; if another source disagrees, MisuseError is raised."""
    if rank is not None or size is not None:
        if rank is None or size is None:
            raise MisuseError("give both rank and size, or neither")
        found = _by_arguments(rank, size, local_rank, local_size, environment)
    else:
        found = _by_variables(environment, has_group=group is not None)
    if group is not None and group != (found.rank, found.size):
        if found.launcher != "none":
            raise MisuseError(_disagreement(group, found))
        found = RankAssignment(*group, None, None, _BY_TORCH, _master(environment))
    if not 0 <= found.rank < found.size:
        raise MisuseError(f"rank {found.rank} is none of {found.size} ranks: ranks count from 0")
    if (
        found.local_rank is not None
        and found.local_size is not None
        and not 0 <= found.local_rank < found.local_size <= found.size
    ):
        raise MisuseError(
            f"rank {found.rank}: local rank {found.local_rank} of {found.local_size} does not fit {found.size} ranks"
        )
    return found


def group_member_assignment(
    rank: int, size: int, environment: Mapping[str, str] = os.environ
) -> RankAssignment:
    """The assignment of a member of a process group that torch.distributed is making. It is the launcher's if the launcher has
    started these ranks. Else the user has made the group, and the group's rank and size are used."""
    with contextlib.suppress(MisuseError):
        return find_rank_assignment(environment=environment, group=(rank, size))
    return RankAssignment(rank, size, None, None, _BY_TORCH, _master(environment))


def _by_arguments(
    rank: int, size: int, local_rank: int | None, local_size: int | None, environment: Mapping[str, str]
) -> RankAssignment:
    # A launcher's local ranks count the ranks that it has started, which may be others than these.
    if (environment.get("RANK"), environment.get("WORLD_SIZE")) == (str(rank), str(size)):
        local_rank = local_rank if local_rank is not None else _read_if_set(environment, "LOCAL_RANK")
        local_size = local_size if local_size is not None else _read_if_set(environment, "LOCAL_WORLD_SIZE")
    if local_rank is None or local_size is None:
        local_rank = local_size = None
    return RankAssignment(rank, size, local_rank, local_size, "arguments", _master(environment))


def _by_variables(environment: Mapping[str, str], *, has_group: bool) -> RankAssignment:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "environment"
        return _of(environment, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), launcher)
    if not has_group and "RANK" not in environment and _read(environment, "WORLD_SIZE", 1) > 1:
        raise MisuseError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but nothing says which rank this process is: set RANK, or call "
            "init_process_group(rank=..., world_size=...) or paramhub.torch.init(rank=..., size=...) first"
        )
    # These come before Slurm's variables: in an allocation mpirun's daemons pass their own Slurm variables on to the ranks.
    for names in _MPI:
        if names[0] in environment and names[1] in environment:
            found = _of(environment, names, "mpi")
            return replace(found, master=found.master or _slurm_master(environment))
    if "SLURM_PROCID" in environment and _read(environment, "SLURM_NTASKS", 1) > 1:
        return _slurm(environment)
    return RankAssignment(0, 1, 0, 1, "none")


def _of(environment: Mapping[str, str], names: tuple[str, str, str, str], launcher: str) -> RankAssignment:
    rank, size = _read(environment, names[0]), _read(environment, names[1])
    local_rank, local_size = _read_if_set(environment, names[2]), _read_if_set(environment, names[3])
    if local_rank is None or local_size is None:
        local_rank = local_size = None
    return RankAssignment(rank, size, local_rank, local_size, launcher, _master(environment))


def _disagreement(group: tuple[int, int], found: RankAssignment) -> str:
    source = {
        "arguments": "its arguments",
        "slurm": "Slurm's variables (SLURM_PROCID, SLURM_NTASKS)",
        "mpi": "MPI's variables",
    }.get(found.launcher, "RANK and WORLD_SIZE")
    mended = (
        "Give both the same; or, for ranks of its own beside the process group, a store of their own, too (store=...)"
        if found.launcher == "arguments"
        else _AGREEMENT
    )
    return (
        f"this process is rank {group[0]} of {group[1]} for torch.distributed, but rank {found.rank} of {found.size} for "
        f"paramhub, by {source}. {mended}"
    )


def _slurm(environment: Mapping[str, str]) -> RankAssignment:
    rank, size = _read(environment, "SLURM_PROCID"), _read(environment, "SLURM_NTASKS")
    local_rank = _read(environment, "SLURM_LOCALID", 0)
    node = _read(environment, "SLURM_NODEID", 0)
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    counts = tasks_per_node(tasks) if tasks else []
    local_size = counts[node] if node < len(counts) else None
    master = _master(environment) or _slurm_master(environment) or _slurm_rendezvous("localhost", environment)
    return RankAssignment(rank, size, local_rank, local_size, "slurm", master)


def _slurm_master(environment: Mapping[str, str]) -> tuple[str, int] | None:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    return _slurm_rendezvous(first_node(nodes), environment) if nodes else None


def _slurm_rendezvous(host: str, environment: Mapping[str, str]) -> tuple[str, int]:
    # Any port would do. This one is the same on every rank, and another job seldom uses it.
    return host, 29400 + _read(environment, "SLURM_JOB_ID", 0) % 20000


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


def _read_if_set(environment: Mapping[str, str], variable: str) -> int | None:
    return _read(environment, variable) if variable in environment else None


def _read(environment: Mapping[str, str], variable: str, default: int | None = None) -> int:
    text = environment.get(variable)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise MisuseError(f"{variable} is to be a number, not {text!r}") from None
