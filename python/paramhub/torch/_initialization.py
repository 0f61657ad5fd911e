"""`paramhub.torch.init` and `shutdown`, and the world of this process between them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from paramhub.errors import MisuseError
from paramhub.torch._job_options import DEAD_AFTER_DEFAULT, JobOptions, number
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
    dead_after: float | None = None,
    host_hub: bool | None = None,
    deployment: str | None = None,
    run_id: str | None = None,
    hubs: int | None = None,
    max_hubs: int | None = None,
    hub_label: str | None = None,
    weight: int | None = None,
    replicas: int | None = None,
    reduction: str | None = None,
    encrypt: bool | None = None,
    on_interface_down: str | None = None,
    redial_grace: float | None = None,
    progress_timeout: float | None = None,
    codec: str | None = None,
    consistency: str | None = None,
    optimize_at: str | None = None,
    between_sites: str | None = None,
    stragglers: str | None = None,
    checkpoints: str | None = None,
    checkpoint_every: str | int | None = None,
    resume: str | int | None = None,
    on_worker_loss: str | None = None,
    linger: float | None = None,
    rewind_every: int | None = None,
    max_workers: int | None = None,
    program_state_bytes: int | None = None,
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
    sleep while no frames arrive. ``timeout`` in seconds is how long ranks wait for one another and for hubs, 300 by default.
    ``dead_after`` is how many seconds a rank may be silent before the hub takes it for dead, 30 by default; the hub notices the
    end of a rank's process at once.

    If several ranks share a host that has no hub, the first of them runs another hub for this host. It sums the host's
    gradients first, in shared memory, so that each byte leaves the host once. ``host_hub`` says whether it does. If the
    connection manager requires an admin token, set ``PARAMHUB_ADMIN_TOKEN_FILE`` or ``PARAMHUB_ADMIN_TOKEN``.

    ``deployment`` says which hosts have hubs if no hub is named. The default is rank 0's ``PARAMHUB_DEPLOYMENT``, else ``cs`` for
    several hosts. With ``cs`` every host has a hub, and the hosts' sums go round a ring, so all links carry the same load. With
    ``cc`` only rank 0's host has one, whose link then carries all hosts' gradients.

    The remaining arguments are what the run asks of its jobs at the hubs. Rank 0's count. The default of each is rank 0's
    variable ``PARAMHUB_JOB_`` and the argument's name in capitals, such as ``PARAMHUB_JOB_MAX_HUBS`` (for ``run_id``
    ``PARAMHUB_RUN_ID``). docs/combinations.md says what does not combine.

    Jobs of all kinds have these:

    - ``hubs`` is the number of hubs at that URL for which they wait, ``max_hubs`` the most that serve a job when it begins, those
      with the fewest jobs; the loss of another one does not concern it. ``hub_label`` is the label that they must have
      (``paramhub hub --label``).
    - ``weight``, 1 to 100, is their share of a hub core's time against that of other runs.
    - ``replicas=1``: they go on when a hub is lost: another hub has all that ranks were answered, and takes over. Two hubs or
      more must have joined the connection manager. docs/recovery.md says what such a job cannot have.
    - ``reduction`` is how hosts and racks combine their sums: ``auto``, ``flat``, ``tree``, ``ring``, ``sharded`` or ``line``.
    - ``encrypt``: streams between hosts are encrypted, those between ranks, too.
    - ``on_interface_down``, ``redial_grace`` and ``progress_timeout`` are as for `paramhub.create_job`.
    - ``codec`` is the encoding of gradients, where the optimizer or the hook is given none.

    - ``between_sites`` is the encoding in which sums of gradients cross between hosts and racks whose hubs sum first: ``f32``;
      ``bf16``, in half the bytes; or with error feedback, which needs finite gradients, ``int8`` or, for matrices, ``one-bit``
      or ``two-bit``.

    Only a `HubOptimizer` has these, since its parameters are at the hub:

    - ``consistency`` is ``sync``, ``async`` (each rank's gradient is an update of its own, and no rank waits for another), or
      ``staleness:STEPS`` (the same, and no rank is more than so many steps ahead of the slowest). With ``reduction`` ``tree``
      or ``sharded`` the ranks of a host or rack whose hub sums first step together, and hosts or racks stand for ranks.
    - ``optimize_at`` (``every-site`` or ``owner``) is where the optimizer runs if hubs serve racks or hosts.
    - ``stragglers`` (``wait``, ``drop:FRACTION``, ``backup:N``) is what becomes of gradients that come late, those of ranks or,
      with ``reduction`` ``tree`` or ``sharded``, those of hosts and racks whose hub sums first; see
      `paramhub.create_job`.
    - ``checkpoint_every`` (``"1000"`` steps or ``"30s"``): the hubs write checkpoints. A hub that this run starts writes them
      into the folder ``checkpoints``, by default every 30 seconds, and with several hubs only every so many steps; the hub at
      that URL has its own folder. If all has ended, the hub too, the same command goes on from the newest checkpoint, if a name
      tells that it is the same run: ``run_id``, the Slurm job, or torchrun's ``--rdzv-id``. ``optimizer.resumed_step`` is its
      step. A run that finished begins anew. ``resume`` chooses otherwise: ``latest``, a number of steps, or ``never``.
    - ``on_worker_loss`` is what becomes of it when a rank is lost: ``fail``, ``rewind`` or ``continue``. With
      ``rewind`` its parameters and state stay at the hub until each rank has a process again, at most ``linger`` seconds (300).
      All ranks then go back to the newest step that all of them had made, and training goes on at ``optimizer.resumed_step``, as
      if no rank had been lost. With ``rewind_every=N`` they go back to every Nth step only, and the hub copies the model less
      often. With ``continue`` the ranks that are left make steps without the lost one until its place is taken. If torchrun has
      started the ranks and no hub is named, the hub runs in a process of its own, which ends with torchrun. Elsewhere name a hub
      by its URL, and outside of Slurm the run by ``run_id``. `paramhub.torch.State` carries the rest of a program's state, of at
      most ``program_state_bytes`` a rank (4 MiB; the hub counts four times as many).
    - With ``rewind`` and ``max_workers`` a launcher may start more or fewer ranks than before when it starts all of them again,
      as torchrun does with ``--nnodes MIN:MAX``: up to so many. The hub counts memory for all of them. By default the number of
      ranks stays.

    `paramhub run` has a flag for each of them, and creates the run's first job itself, with its flags. What its workers give to
    `init` holds for further jobs, but for ``codec`` and ``consistency``. They cannot ask for checkpoints or ``on_worker_loss``.

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
    job = JobOptions(
        hubs=hubs,
        max_hubs=max_hubs,
        hub_label=hub_label,
        weight=weight,
        replicas=replicas,
        reduction=reduction,
        encrypt=encrypt,
        on_interface_down=on_interface_down,
        redial_grace=redial_grace,
        progress_timeout=progress_timeout,
        codec=codec,
        consistency=consistency,
        optimize_at=optimize_at,
        between_sites=between_sites,
        stragglers=stragglers,
        checkpoint_every=None if checkpoint_every is None else str(checkpoint_every),
        resume=None if resume is None else str(resume),
        on_worker_loss=on_worker_loss,
        linger=linger,
        rewind_every=rewind_every,
        max_workers=max_workers,
        program_state_bytes=program_state_bytes,
    )
    options = Options(
        transport=transport,
        reproducible=reproducible,
        hub_cores=hub_cores,
        timeout=timeout,
        dead_after=number(dead_after, "dead_after", DEAD_AFTER_DEFAULT),
        host_hub=host_hub,
        deployment=deployment,
        interfaces=interfaces,
        checkpoints=checkpoints,
        run_id=run_id,
        job=job,
    )
    _add_process_sets(process_sets, assignment.size, only_check=True)
    if store is None:
        store = rendezvous_store(assignment, options.timeout)
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
    _world = World(
        assignment,
        dist.PrefixStore(prefix, store),
        record,
        url,
        options,
        is_separate=is_separate,
    )
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
