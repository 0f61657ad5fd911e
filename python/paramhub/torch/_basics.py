"""Horovod's questions about hosts and about what it was built with, and its timeline."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from pathlib import Path

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._clocks import offset_to_rank_0
from paramhub.torch._initialization import current, local_rank
from paramhub.torch._rendezvous import explained_store_errors
from paramhub.torch._trace_files import Origin
from paramhub.torch._world import World


def cross_rank() -> int:
    """The position of this process's host among the hosts that have a rank with this process's local rank."""
    return _peers_across_hosts().index(_world().first_ranks[_world().rank])


def cross_size() -> int:
    """The number of hosts that have a rank with this process's local rank."""
    return len(_peers_across_hosts())


def is_homogeneous() -> bool:
    """Returns whether all hosts have the same number of ranks."""
    return len(set(_ranks_by_host(_world()).values())) == 1


def mpi_threads_supported() -> bool:
    """False, because paramhub.torch does not use MPI."""
    return False


def mpi_built() -> bool:
    """False, because paramhub.torch does not use MPI."""
    return False


def mpi_enabled() -> bool:
    """False, because paramhub.torch does not use MPI."""
    return False


def gloo_built() -> bool:
    """False, because paramhub has its own connections between ranks."""
    return False


def gloo_enabled() -> bool:
    """False, because paramhub has its own connections between ranks."""
    return False


def nccl_built() -> bool:
    """False, because paramhub does not use NCCL."""
    return False


def ddl_built() -> bool:
    """False, because paramhub does not use IBM's DDL."""
    return False


def ccl_built() -> bool:
    """False, because paramhub does not use oneCCL."""
    return False


def cuda_built() -> bool:
    """False, because paramhub sums on processors: gradients on a GPU are copied by torch."""
    return False


def rocm_built() -> bool:
    """False, because paramhub sums on processors: gradients on a GPU are copied by torch."""
    return False


_timeline: Path | None = None


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Records a timeline of all ranks (`paramhub.torch.trace`), until `stop_timeline` writes it to ``file_path``. All ranks
    call it together. ``mark_cycles`` has no effect: there are no cycles.

    Raises MisuseError if a timeline is recorded already.
    """
    global _timeline
    world = _world()
    if trace.active:
        to = os.environ.get("PARAMHUB_TRACE", "").strip()
        raise MisuseError(
            "start_timeline: a timeline is recorded already, "
            + (f"for PARAMHUB_TRACE={to}" if _timeline is None and to else "call stop_timeline() first")
        )
    label = world.label("timeline")
    run = world.allgather_text(label, secrets.token_hex(8))[0]
    store = world.store(label)
    with explained_store_errors(store, world.rank):
        offset = offset_to_rank_0(store, world.rank, world.size, _native.now_ns, world.options.timeout)
    start_ns = int(world.allgather_text(f"{label}/start", str(_native.now_ns()))[0])
    _timeline = Path(file_path)
    folder = _folder(_timeline)
    trace._start(str(folder), Origin(run, world.rank, world.size, socket.gethostname(), start_ns, offset))


def stop_timeline() -> None:
    """Writes the timeline of all ranks to the file that `start_timeline` named, as Chrome's trace events, for Perfetto. All ranks
    call it together; rank 0 writes the file, with the ranks whose hosts share its folder."""
    global _timeline
    world = _world()
    if _timeline is None:
        raise MisuseError("stop_timeline: start_timeline() was not called")
    path, _timeline = _timeline, None
    trace._finish()
    # Rank 0 needs the files of all others.
    world.allgather_text(world.label("timeline-end"), "")
    if world.rank == 0:
        folder = _folder(path)
        os.replace(trace.merge(str(folder)), path)
        shutil.rmtree(folder, ignore_errors=True)


def _folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.ranks")


def _world() -> World:
    world = current()
    if world is None:
        raise MisuseError("call paramhub.torch.init() first")
    return world


def _ranks_by_host(world: World) -> dict[int, int]:
    """The number of ranks on each host. A host's key is its first rank."""
    return {first: world.first_ranks.count(first) for first in sorted(set(world.first_ranks))}


def _peers_across_hosts() -> list[int]:
    return [first for first, ranks in _ranks_by_host(_world()).items() if ranks > local_rank()]
