"""`paramhub.torch.init` and `shutdown`, and the world of this process between them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from paramhub.errors import MisuseError
from paramhub.torch._options import TIMEOUT_DEFAULT, Options
from paramhub.torch._rank_assignment import RankAssignment, find_rank_assignment
from paramhub.torch._rendezvous import rendezvous_store
from paramhub.torch._run_record import RunRecord
from paramhub.torch._world import World

if TYPE_CHECKING:
    from paramhub.torch._process_sets import ProcessSet

_world: World | None = None
_awaited_reconfigure: str | None = None
"""What connects the process group of this process, if it is to be connected by a reconfigure."""


def init(
    url: str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    store: dist.Store | None = None,
    transport: str | None = None,
    interfaces: str | None = None,
    reproducible: bool = False,
    hub_cores: int | None = None,
    timeout: float = TIMEOUT_DEFAULT,
    dead_after: float = 30.0,
    host_hub: bool | None = None,
    deployment: str | None = None,
    on_worker_loss: str | None = None,
    linger: float | None = None,
    rewind_every: int | None = None,
    max_workers: int | None = None,
    program_state_bytes: int | None = None,
    checkpoints: str | None = None,
    checkpoint_every: str | None = None,
    replicas: int | None = None,
    max_hubs: int | None = None,
    hub_label: str | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Joins the other ranks of this run. A second call does nothing, except that it adds ``process_sets``.

    Rank and size come from the arguments, or from the variables of torchrun, Slurm, MPI's launchers or ``paramhub run``, or
    from torch.distributed's process group if it was initialised before. Without any of these this process is the only rank. If
    two of these sources disagree, `init` raises MisuseError; with ``store``, however, the arguments need not agree with the
    process group.

    The hub is the one at ``url`` (a connection manager's URL) or at ``PARAMHUB_URL``. If neither is given, rank 0 runs a hub on
    threads of its own process, and prints its addresses. Ranks meet through ``store``, by default torch.distributed's own if it
    was initialised, else a TCPStore at ``MASTER_ADDR:MASTER_PORT``.

    ``transport`` is ``auto`` (shared memory to a hub on this host, TCP to others), ``tcp`` or ``shm``, by default the value of
    ``PARAMHUB_TRANSPORT``. ``interfaces`` lists the network interfaces of this host that streams to a hub on another host use
    (``"eth0,eth1"``, ``"10.0.0.0/24"``, ``"^docker"``), by default the value of ``PARAMHUB_INTERFACES``, else all interfaces that
    lead to the hub; ranks may differ. With ``reproducible`` sums are made in rank order and are bit-equal from run to run.

    ``hub_cores`` is the number of threads on which a hub in rank 0 sums, by default one for each processor and at most 4. They
    sleep while no frames arrive. ``timeout`` in seconds is how long ranks wait for one another, and for the hubs at that URL,
    whose number is rank 0's ``PARAMHUB_HUBS``. ``dead_after`` is how many seconds a rank may be silent before the hub takes it
    for dead; the hub notices the end of a rank's process at once.

    If several ranks share a host that has no hub, the first of them runs another hub for this host. It sums the host's
    gradients first, in shared memory, so that each byte leaves the host once. ``host_hub`` says whether it does. If the
    connection manager requires an admin token, set ``PARAMHUB_ADMIN_TOKEN_FILE`` or ``PARAMHUB_ADMIN_TOKEN``.

    ``deployment`` says which hosts have hubs if no hub is named. The default is rank 0's ``PARAMHUB_DEPLOYMENT``, else ``cs`` for
    several hosts. With ``cs`` every host has a hub, and the hosts' sums go round a ring, so all links carry the same load. With
    ``cc`` only rank 0's host has one, whose link then carries all hosts' gradients.

    ``on_worker_loss`` is what becomes of a `HubOptimizer` when a rank is lost: ``fail``, ``rewind`` or ``continue``. With
    ``rewind`` its parameters and state stay at the hub until each rank has a process again, at most ``linger`` seconds (300).
    All ranks then go back to the newest step that all of them had made, and training goes on at ``optimizer.resumed_step``, as if
    no rank had been lost. With ``rewind_every=N`` they go back to every Nth step only, and the hub copies the model less often.
    With ``continue`` the ranks that are left make steps without the lost one until its place is taken. If torchrun has started
    the ranks and no hub is named, the hub runs in a process of its own, which ends with torchrun. Elsewhere name a hub by its
    URL; outside of Slurm ``PARAMHUB_RUN_ID`` says which run the ranks belong to. The defaults are ``PARAMHUB_ON_WORKER_LOSS``,
    else ``fail``, ``PARAMHUB_LINGER`` and ``PARAMHUB_REWIND_EVERY``. Rank 0's count. `paramhub.torch.State` carries the rest of a
    program's state, of at most ``program_state_bytes`` a rank (4 MiB; the hub counts four times as many).

    With ``rewind`` and ``max_workers`` a launcher may start more or fewer ranks than before when it starts all of them again,
    as torchrun does with ``--nnodes MIN:MAX``: up to so many. The hub counts memory for all of them. The default is
    ``PARAMHUB_MAX_WORKERS``, else the number of ranks stays.

    With ``checkpoint_every`` (``"1000"`` steps or ``"30s"``) the hub of such a run also writes checkpoints, with what a `State`
    has saved. If all has ended at once, the hub too, the same command goes on from the newest one: the run is known again by
    ``PARAMHUB_RUN_ID`` or its Slurm job. A run that finished begins anew. The hub at that URL is to have a folder for
    checkpoints; the one that torchrun's ranks leave has ``checkpoints``, and then writes one every 30 seconds if nothing else
    is said. The defaults are ``PARAMHUB_CHECKPOINT_EVERY`` and ``PARAMHUB_CHECKPOINTS``.

    With ``replicas=1``, by default rank 0's ``PARAMHUB_REPLICAS``, the jobs of this run go on when a hub is lost: another hub
    has all that ranks were answered, and takes over. Two hubs or more must have joined the connection manager at that URL.
    docs/recovery.md says what such a job cannot have.

    ``max_hubs`` is the most hubs that serve a job of this run when it begins, those with the fewest jobs; the loss of another one
    does not concern it. ``hub_label`` is the label that they must have (``paramhub hub --label``). The defaults are rank 0's
    ``PARAMHUB_JOB_MAX_HUBS`` and ``PARAMHUB_JOB_HUB_LABEL``, else all hubs at that URL.

    ``process_sets`` is a list of `paramhub.torch.ProcessSet` objects, the same on all ranks, that are added at once. Horovod's
    ``"dynamic"``, which permits `paramhub.torch.add_process_set` there, changes nothing here.
    """
    if _world is not None:
        _add_process_sets(process_sets, _world.size)
        return
    if _awaited_reconfigure is not None:
        raise MisuseError(
            f"torch.distributed was initialised with enable_reconfigure and is not connected: {_awaited_reconfigure}"
        )
    # With a store of their own these ranks may differ from torch.distributed's. They may be one dimension of a device mesh.
    is_separate = rank is not None and store is not None
    group = None
    if dist.is_initialized() and not is_separate:
        group = (dist.get_rank(), dist.get_world_size())
    assignment = find_rank_assignment(rank, size, local_rank, local_size, group=group)
    options = Options(
        transport,
        reproducible,
        hub_cores,
        timeout,
        dead_after,
        host_hub,
        deployment,
        interfaces,
        on_worker_loss,
        linger,
        rewind_every,
        max_workers,
        program_state_bytes,
        checkpoints,
        checkpoint_every,
        replicas,
        max_hubs,
        hub_label,
    )
    _add_process_sets(process_sets, assignment.size, only_check=True)
    if store is None:
        store = rendezvous_store(assignment, timeout)
    establish(assignment, store, url, options, is_separate=is_separate)
    _add_process_sets(process_sets, assignment.size)


def _add_process_sets(
    process_sets: Sequence[ProcessSet] | str | None, size: int, *, only_check: bool = False
) -> None:
    # Process sets need this module.
    from paramhub.torch._process_sets import add_process_set, check_new

    if process_sets is None or process_sets == "dynamic":
        return
    if isinstance(process_sets, str) or not isinstance(process_sets, Sequence):
        raise MisuseError(
            f'process_sets is to be a list of ProcessSet objects, or "dynamic", not {process_sets!r}'
        )
    added = list(process_sets)
    check_new(size, added, [] if _world is None else list(_world.process_sets.values()))
    for process_set in () if only_check else added:
        add_process_set(process_set)


def establish(
    assignment: RankAssignment,
    store: dist.Store,
    url: str | None,
    options: Options,
    *,
    is_separate: bool = False,
) -> World:
    """The second half of `init`: joins the other ranks through ``store``, and makes the result this process's world."""
    global _world
    prefix = _next_store_prefix()
    record = RunRecord(store, _worlds_made)
    _world = World(assignment, dist.PrefixStore(prefix, store), record, url, options, is_separate=is_separate)
    atexit.register(_at_exit)
    return _world


def establish_anew(assignment: RankAssignment, store: dist.Store, options: Options) -> World:
    """Joins the ranks of a reconfigured process group, and makes the result this process's world. They have been started at
    different times, perhaps by different launchers, so the keys of ``store`` belong to this world alone."""
    global _world
    world_store = dist.PrefixStore("world", store)
    _world = World(assignment, world_store, None, None, options, takes_launcher_job=False)
    atexit.register(_at_exit)
    return _world


def await_reconfigure(how: str | None) -> None:
    """Says that a reconfigure connects the process group, and how the program makes one; with None that none is awaited."""
    global _awaited_reconfigure
    _awaited_reconfigure = how


def current() -> World | None:
    """This process's world, or None if `init` was not called."""
    return _world


def is_initialized() -> bool:
    """Returns whether `init` was called, and `shutdown` not since."""
    return _world is not None


def shutdown(*, abandon: bool = False) -> None:
    """Leaves all jobs. At the end of the process it happens by itself.

    With ``abandon`` it waits for nothing: this rank has failed, and the other ranks must fail at once, too.
    """
    global _world
    world, _world = _world, None
    if world is not None:
        atexit.unregister(_at_exit)
        world.leave(abandon=abandon)


def world() -> World:
    """This process's world. Calls `init` if nothing has called it before."""
    if _world is None:
        init()
    assert _world is not None
    _world.check_process_group()
    return _world


def rank() -> int:
    """This process's rank, from 0."""
    return _initialized_world().rank


def size() -> int:
    """The number of ranks."""
    return _initialized_world().size


def local_rank() -> int:
    """This process's rank among those of its host."""
    return _initialized_world().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return _initialized_world().local_size


def _initialized_world() -> World:
    if _world is None:
        raise MisuseError("call paramhub.torch.init() first")
    return _world


def _at_exit() -> None:
    global _world
    world, _world = _world, None
    # A forked child must not leave its parent's jobs, nor announce its parent's exit in the store.
    if world is not None and world.process == os.getpid():
        # The interpreter stores the exception that ends it. A rank that failed must not wait for ranks that wait for it.
        world.leave(abandon=getattr(sys, "last_value", None) is not None)


_worlds_made = 0


def _next_store_prefix() -> str:
    """The prefix of all keys of the next world. Restarts of the run, and earlier worlds of this process, have other prefixes."""
    global _worlds_made
    _worlds_made += 1
    return f"paramhub/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_worlds_made}"
