"""``torch.distributed.init_process_group("paramhub")``.

torch 2.14 and later find the backend through the package's entry point. For earlier versions ``import paramhub.torch``
registers it. If `paramhub.torch.init` was not called before, the ranks of the default process group become its ranks.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paramhub.errors import MisuseError
from paramhub.torch import _initialization
from paramhub.torch._c10d import C10dWork, Collectives, last_result
from paramhub.torch._collectives import Group
from paramhub.torch._options import Options
from paramhub.torch._rank_assignment import group_member_assignment
from paramhub.torch._reconfigure import Connection, Unconnected
from paramhub.torch._work import Work
from paramhub.torch._world import World

NAME = "paramhub"
DEVICES = ["cpu", "cuda"]
FIRST_WITH_BACKENDS = (2, 14)
"""The first version of torch in which a Python class can be a `Backend`, and not only a process group."""

HAS_BACKENDS = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= FIRST_WITH_BACKENDS

_lock = threading.Lock()
_made: dict[str, int] = {}
"""The number of groups of each name that this process has made. Names repeat when torch.distributed is initialised again."""


def register() -> None:
    """Registers the backend with torch.distributed. A second call does nothing."""
    with _lock:
        if NAME.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, _backend_options: object) -> Any:
    """Called by torch on every member of a new group, with ``torch.distributed``'s options."""
    is_default = not options.global_ranks_in_group
    if getattr(options, "enable_reconfigure", False):
        return _create_unconnected(options, is_alone=_serves_all_devices(inspect.currentframe()))
    rank, size = options.group_rank, options.group_size
    timeout = options.timeout.total_seconds()
    name = f"{_made_so_far(str(options.group_id))}"
    store: dist.Store = dist.PrefixStore(f"paramhub/{name}", options.store)
    members = None if is_default else list(options.global_ranks_in_group)
    if members is not None and isinstance(dist.group.WORLD, _Reconfigurable):
        name, store = dist.group.WORLD.connection.subgroup(members)
    world = _initialization.current()
    owns_world = world is None and (is_default or not _default_is_ours())
    if owns_world:
        assignment = group_member_assignment(rank, size)
        opts = Options(timeout=timeout)
        if is_default:
            world = _initialization.establish(assignment, store, None, opts)
        else:
            # The default group is another backend's, and not all of its ranks are here.
            world, members = World(assignment, dist.PrefixStore("world", store), None, None, opts), None
    assert world is not None
    if is_default and (world.rank, world.size) != (rank, size):
        raise MisuseError(
            f"paramhub.torch.init() made this rank {world.rank} of {world.size}, but init_process_group makes it rank {rank} of "
            f"{size}: they must be the same"
        )
    try:
        group = Group(f"group-{name}", world, store, members=members, timeout=timeout)
    except BaseException:
        if owns_world:
            _end_world(world, abandon=True)
        raise
    leave = _GroupShutdown(group, world if owns_world else None)
    if not HAS_BACKENDS:
        return ProcessGroup(rank, size, group, store, leave)
    backend = Backend(rank, size, group, store, leave)
    if _serves_all_devices(inspect.currentframe()):
        return UnwrappedWorkProcessGroup(options, backend)
    return backend


def _create_unconnected(options: Any, *, is_alone: bool) -> Any:
    """The default group of a program that calls ``init_process_group(enable_reconfigure=True)``, and later connects it."""
    if not is_alone:
        raise MisuseError(
            'a process group with enable_reconfigure has one backend: call init_process_group("paramhub", '
            "enable_reconfigure=True), without devices and other backends"
        )
    return ReconfigurableProcessGroup(options)


class _GroupShutdown:
    """Leaves a process group's `Group`, and its world if the process group owns it."""

    def __init__(self, group: Group, world: World | None) -> None:
        self._group = group
        self._world = world

    def __call__(self, *, abandon: bool = False) -> None:
        self._group.leave(abandon=abandon)
        world, self._world = self._world, None
        if world is not None:
            _end_world(world, abandon=abandon)


def _end_world(world: World, *, abandon: bool) -> None:
    if world is _initialization.current():
        _initialization.shutdown(abandon=abandon)
    else:
        world.leave(abandon=abandon)


class _Reconfigurable:
    """A process group that a reconfigure connects."""

    connection: Connection


class _ShutdownMethods:
    """The methods with which torch ends a process group."""

    _leave: Callable[..., None]

    def shutdown(self) -> None:
        _alive.discard(self)
        self._leave()

    def abort(self) -> None:
        _alive.discard(self)
        self._leave(abandon=True)


_alive: set[_ShutdownMethods] = set()


if HAS_BACKENDS:
    _Base = torch._C._distributed_c10d.Backend

    class Backend(_ShutdownMethods, Collectives, _Base):
        """The backend of one device or of all devices."""

        def __init__(
            self,
            rank: int,
            size: int,
            group: Group | Unconnected,
            store: dist.Store,
            leave: Callable[..., None],
        ) -> None:
            _Base.__init__(self, rank, size)
            self._init_collectives(group, store)
            self._leave = leave
            self._options = _Base.Options(NAME, timedelta(seconds=group.timeout))
            # torch's wrapper for detailed debugging keeps only the C++ half of this object alive.
            _alive.add(self)

        @property
        def options(self) -> Any:
            return self._options

        # In torch 2.15 the base class's properties of a Python backend call themselves without end.

        @property
        def supports_reconfigure(self) -> bool:
            return False

        @property
        def supports_window(self) -> bool:
            return False

        @property
        def supports_coalescing(self) -> bool:
            # Operations are issued one by one anyway, and without coalescing each has a result of its own.
            return False

    class UnwrappedWorkProcessGroup(dist.ProcessGroup):
        """torch's process group with this backend for all devices.

        torch wraps a Python backend's works. The wrapper reports neither whether a work is complete nor the rank from which a
        receive got its tensor. This class returns the works themselves; everything else is torch's own.
        """

        def __init__(self, options: Any, backend: Backend) -> None:
            given = options.process_group
            super().__init__(given.get_group_store(), options.group_rank, options.group_size)
            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._set_default_backend(kind)
            for device in DEVICES:
                self._register_backend(torch.device(device), kind, backend)
            if given.bound_device_id is not None:
                self.bound_device_id = given.bound_device_id

    def _returning_unwrapped_work(name: str) -> Callable[..., Any]:
        of_torch = getattr(dist.ProcessGroup, name)

        def method(self: Any, *arguments: Any, **named: Any) -> Any:
            last_result.work = None
            wrapped = of_torch(self, *arguments, **named)
            work, last_result.work = last_result.work, None
            return wrapped if work is None else work

        # pybind11 recognises a call of the overridden method by the caller's name.
        method.__code__ = method.__code__.replace(co_name=name)
        method.__name__ = name
        return method

    # torch's old names call these methods.
    for _name in (
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
        "broadcast",
        "allgather",
        "allgather_coalesced",
        "all_gather_single",
        "all_gather_single_coalesced",
        "gather",
        "scatter",
        "alltoall",
        "all_to_all_single",
        "send",
        "recv",
        "recv_anysource",
        "barrier",
        "_end_coalescing",
    ):
        setattr(UnwrappedWorkProcessGroup, _name, _returning_unwrapped_work(_name))

    class ReconfigurableProcessGroup(UnwrappedWorkProcessGroup, _Reconfigurable):
        """The process group that `Connection` connects, and connects anew to other processes. torch keeps the rank and the size
        of a backend from its start, and asks the process group for them, which has the present ones."""

        def __init__(self, options: Any) -> None:
            self.connection = connection = Connection(options, self._connection_changed)
            self._backend = Backend(
                connection.rank, connection.size, connection.group, connection.store, connection.leave
            )
            super().__init__(options, self._backend)

        def getRank(self) -> int:
            return self.connection.rank

        def getSize(self) -> int:
            return self.connection.size

        @property
        def supports_reconfigure(self) -> bool:
            return True

        def get_reconfigure_handle(self) -> str:
            return self.connection.handle()

        def reconfigure(self, opts: Any) -> C10dWork:
            """Returns when the processes are connected; the result has ended."""
            limit = None if opts.timeout is None else opts.timeout.total_seconds()
            self.connection.reconfigure(opts.uuid, opts.handles, limit)
            return C10dWork(self.connection.group, Work(()), [])

        def _connection_changed(self, connection: Connection) -> None:
            self._backend._init_collectives(connection.group, connection.store)
            # torch reads the default group's ranks and its store from here, for device meshes and for other groups.
            groups = dist.distributed_c10d._world
            groups.pg_group_ranks[self] = {rank: rank for rank in range(connection.size)}
            if connection.torch_store is not None:
                groups.pg_map[self] = (groups.pg_map[self][0], connection.torch_store)

else:

    class ProcessGroup(_ShutdownMethods, Collectives, dist.ProcessGroup):
        """The process group, for all devices."""

        def __init__(
            self, rank: int, size: int, group: Group, store: dist.Store, leave: _GroupShutdown
        ) -> None:
            dist.ProcessGroup.__init__(self, rank, size)
            self._init_collectives(group, store)
            self._leave = leave
            self._name = self._description = ""

        # torch keeps name and description in its own backends, and here there is none.

        def setGroupName(self, name: str) -> None:
            self._name = name

        def getGroupName(self) -> str:
            return self._name

        def setGroupDesc(self, description: str) -> None:
            self._description = description

        def getGroupDesc(self) -> str:
            return self._description


def _serves_all_devices(frame: Any) -> bool:
    """Returns whether torch makes a group of this backend alone, and not one of ``"cpu:gloo,cuda:paramhub"``. torch does not
    pass this, so it is read from the caller's local variables. If a later torch has others, works come in torch's wrapper, and
    nothing else is lost."""
    caller = frame.f_back.f_locals if frame is not None and frame.f_back is not None else {}
    config = caller.get("backend_config")
    if not isinstance(config, dist.distributed_c10d.BackendConfig):
        return False
    devices = config.get_device_backend_map()
    return set(devices.values()) == {NAME} and set(devices) == set(DEVICES)


def _made_so_far(group_id: str) -> str:
    """A name that no other group has, the same on all members."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", group_id)[:48] or "unnamed"
    _made[name] = number = _made.get(name, -1) + 1
    return f"{name}.{number}" if number else name


def _default_is_ours() -> bool:
    return dist.is_initialized() and dist.get_backend() == NAME
