"""torch's ``reconfigure``: processes that have initialised torch.distributed choose anew which of them are the ranks.

Each process listens with a store of its own, whose address is in its handle. The ranks meet in the store of the one that
becomes rank 0: that of `init_process_group` may have ended with the process that ran it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from paramhub.errors import ConnectError, MisuseError
from paramhub.torch import _initialization, _watchdog
from paramhub.torch._collectives import Group
from paramhub.torch._hosts import own_address_toward
from paramhub.torch._log import log
from paramhub.torch._options import Options
from paramhub.torch._rank_assignment import RankAssignment, group_member_assignment
from paramhub.torch._rendezvous import (
    LostStoreError,
    allgather_json,
    format_ranks,
    store_address,
    wait_for_keys,
)
from paramhub.torch._shutdown import run_with_timeout

HOW = (
    "collect torch.distributed._get_reconfigure_handle() of every process that is to take part, and call "
    "torch.distributed._reconfigure(uuid, handles).wait() with the same arguments in all of them"
)
QUIET_GRACE = 1.0
"""Seconds that the others have to come before connections end over which nothing is under way here: they may still be about to
get the result of a collective that has ended here."""
OLD_WORLD_TIMEOUT = 10.0
"""Seconds that the old connections may take to end. Their store may be on a host that has no power."""
DIAL_TIMEOUT = 10.0
"""Seconds in which the process that becomes rank 0 must take a connection. It listens since before it gave its handle."""
_LATEST = 10**9 - 1
_IDENTITY = "process"
"""Under this key a process's store has the token of its handle."""


@dataclass(frozen=True)
class Handle:
    """What the other processes must know of one to meet it."""

    connected: int
    """How often it has been connected. Handles sort by it, so that a set of them gives the first ranks to the processes that
    have been there the longest, whose parameters are to be broadcast, and not to newcomers."""
    rank: int
    token: str
    """Tells the process from a later one at the same port."""
    address: str
    port: int

    def __str__(self) -> str:
        return f"paramhub-1:{_LATEST - self.connected:09d}:{self.rank:09d}:{self.token}:{self.port}:{self.address}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        found = re.fullmatch(r"paramhub-1:(\d{9}):(\d{9}):([0-9a-f]{32}):(\d{1,5}):([0-9A-Za-z.:%_-]+)", text)
        if found is None:
            raise MisuseError(
                f"{text[:80]!r} is no handle of this backend and version: {HOW}. All processes need the same version of paramhub"
            )
        return cls(_LATEST - int(found[1]), int(found[2]), found[3], found[5], int(found[4]))


class Unconnected:
    """Stands for the group of processes that are not connected: it refuses every operation."""

    def __init__(self, timeout: float, why: str) -> None:
        self.timeout = timeout
        self._why = why

    def collectives(self) -> int:
        return 0

    def failure(self) -> None:
        return None

    def refuse(self) -> NoReturn:
        raise MisuseError(f"the default process group is not connected{self._why}: {HOW}")

    def __getattr__(self, name: str) -> Any:
        self.refuse()


class Listener:
    """This process's own store, in which the others meet it if it becomes rank 0."""

    def __init__(self, address: str, timeout: float) -> None:
        # torch's own listener would be open on all interfaces.
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
            listener.bind((address, 0))
            listener.listen(512)
            self.address, self.port = address, int(listener.getsockname()[1])
            self.token = secrets.token_hex(16)
            self.store = dist.TCPStore(
                address,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
                master_listen_fd=listener.detach(),
            )
        self.store.set(_IDENTITY, self.token)


class Connection:
    """The default group of this process, which can be connected anew, and the world in which it is."""

    def __init__(self, options: Any, changed: Callable[[Connection], None]) -> None:
        """``options`` are torch's for a new group. ``changed(connection)`` is called whenever `group` has changed."""
        if _initialization.current() is not None:
            raise MisuseError(
                "paramhub.torch.init() has connected these ranks, which cannot be reconfigured then: leave it out, or call "
                "init_process_group without enable_reconfigure"
            )
        self.rank, self.size = options.group_rank, options.group_size
        self.store: dist.Store = options.store
        self.torch_store: dist.Store | None = None
        """The store for whatever else of torch.distributed meets in one, once the processes have been connected."""
        self.group: Group | Unconnected = Unconnected(options.timeout.total_seconds(), " yet")
        self._changed = changed
        self._master = _master(options)
        self._listener: Listener | None = None
        self._connected = 0
        self._uuids: set[int] = set()
        self._subgroups: dict[str, int] = {}
        self._lock = threading.Lock()
        _initialization.await_reconfigure(HOW)

    def handle(self) -> str:
        """This process's handle. It differs from one connection to the next, and stands for the process all the same."""
        if self._listener is None:
            own = None if self._master is None else own_address_toward(*self._master)
            self._listener = Listener(own or "127.0.0.1", self.group.timeout)
        listener = self._listener
        return str(Handle(self._connected, self.rank, listener.token, listener.address, listener.port))

    def reconfigure(self, uuid: int, given: Collection[str], timeout: float | None) -> None:
        """Ends the present connections at once, and connects the processes of these handles. A list gives the ranks by its
        order; a set is sorted. Raises ConnectError if not all of them have come after ``timeout`` seconds."""
        if not self._lock.acquire(blocking=False):
            raise MisuseError("another thread of this process reconfigures the group")
        try:
            texts = list(given) if isinstance(given, Sequence) else sorted(given)
            handles = [Handle.parse(text) for text in texts]
            rank = self._rank_among(handles)
            if uuid in self._uuids:
                raise MisuseError(
                    f"uuid {uuid} was used before: give each reconfigure another one, the same in all processes"
                )
            self._uuids.add(uuid)
            seconds = self.group.timeout
            self._disconnect(seconds, f": it is being reconfigured with uuid {uuid}")
            world = _initialization.current()
            if world is not None and not world.is_quiet():
                self._end_world()
            try:
                group = self._connect(uuid, handles, rank, seconds if timeout is None else timeout)
            except BaseException as error:
                self._end_world()
                problem = " ".join(str(error).split())
                self._disconnect(
                    seconds, f", because the reconfigure with uuid {uuid} has failed ({problem})"
                )
                raise
            assert self.torch_store is not None
            self.torch_store.set_timeout(timedelta(seconds=seconds))
            group.timeout = seconds
            group.world.set_timeout(seconds)
            self._connected += 1
        finally:
            self._lock.release()

    def _rank_among(self, handles: list[Handle]) -> int:
        tokens = [handle.token for handle in handles]
        own = None if self._listener is None else self._listener.token
        if own not in tokens:
            raise MisuseError(
                "the handle of this process is not among those with which it reconfigures: give its "
                "torch.distributed._get_reconfigure_handle() to all, itself included. A process that is to leave calls "
                "destroy_process_group instead"
            )
        if len(set(tokens)) < len(tokens):
            twice = next(at for at, token in enumerate(tokens) if token in tokens[:at])
            raise MisuseError(
                f"the handle at position {twice} stands there twice: give each process's handle once"
            )
        return tokens.index(own)

    def _connect(self, uuid: int, handles: list[Handle], rank: int, timeout: float) -> Group:
        deadline = time.monotonic() + timeout
        first = handles[0]
        try:
            assert self._listener is not None
            of_rank_0 = self._listener.store if rank == 0 else _dial(first, rank, timeout)
            return self._meet(uuid, handles, rank, of_rank_0, deadline)
        except LostStoreError as error:
            raise _no_answer(first, rank, error.reason) from None
        except dist.DistError as error:
            raise _no_answer(first, rank, error) from None

    def _meet(
        self, uuid: int, handles: list[Handle], rank: int, of_rank_0: dist.Store, deadline: float
    ) -> Group:
        def left() -> float:
            return max(0.1, round(deadline - time.monotonic(), 1))

        first, size = handles[0], len(handles)
        store = dist.PrefixStore(f"paramhub/{uuid}", of_rank_0)
        ranks = hashlib.sha256("\n".join(handle.token for handle in handles).encode()).hexdigest()
        torch_groups = dist.distributed_c10d._world
        came = {"ranks": ranks, "groups": torch_groups.group_count}
        if _initialization.current() is not None:
            store.set(f"came/{rank}", json.dumps(came))
            wait_for_keys(store, [f"came/{other}" for other in range(size)], min(QUIET_GRACE, left()))
        self._end_world()
        all_came = allgather_json(
            store,
            "came",
            came,
            rank,
            size,
            left(),
            f"do they reconfigure with uuid {uuid} and these handles?",
        )
        if different := [other for other, its in enumerate(all_came) if its["ranks"] != ranks]:
            raise MisuseError(
                f"rank {rank}: {format_ranks(different)} of {size} reconfigured with other handles: give the same ones, in the "
                "same order, to all processes"
            )
        master = (first.address, first.port)
        assignment = RankAssignment(rank, size, None, None, "torch.distributed", master)
        world = _initialization.establish_anew(assignment, store, Options(timeout=left()))
        self.store = dist.PrefixStore("group", store)
        group = Group(f"default-{uuid}", world, self.store, timeout=left())
        self.rank, self.size, self.group = rank, size, group
        self._subgroups = {}
        # torch names other groups by this number, and the members of groups of other backends meet under their names.
        torch_groups.group_count = max(its["groups"] for its in all_came)
        self.torch_store = dist.PrefixStore(f"torch/{uuid}", of_rank_0.clone())
        self._changed(self)
        return group

    def subgroup(self, members: Sequence[int]) -> tuple[str, dist.Store]:
        """A name for another group among the ranks, the same in all of its members, and where these meet. torch's own names
        count what each process has made since its start, and newcomers have made less than others."""
        if isinstance(self.group, Unconnected):
            self.group.refuse()
        ranks = hashlib.sha256(",".join(map(str, members)).encode()).hexdigest()[:16]
        self._subgroups[ranks] = number = self._subgroups.get(ranks, -1) + 1
        name = f"{ranks}.{number}"
        return name, dist.PrefixStore(f"subgroup/{name}", self.store)

    def leave(self, *, abandon: bool = False) -> None:
        """Leaves for good."""
        if isinstance(self.group, Group):
            if not abandon:
                self.group.leave()
            _initialization.shutdown(abandon=abandon)
        _initialization.await_reconfigure(None)
        self._listener = None

    def _disconnect(self, timeout: float, why: str) -> None:
        """Refuses operations from now on."""
        self.group = Unconnected(timeout, why)
        self._changed(self)

    def _end_world(self) -> None:
        """Ends the present connections. Operations under way fail at once, in all processes."""
        world = _initialization.current()
        if world is None:
            return
        world.give_up_groups(
            f"rank {world.rank} has ended these connections, to reconfigure the process group"
        )
        _watchdog.replace_thread()
        if not run_with_timeout(OLD_WORLD_TIMEOUT, lambda: _initialization.shutdown(abandon=True)):
            log(
                f"rank {world.rank}: the old connections have not ended within {OLD_WORLD_TIMEOUT:g} s, and are left alone"
            )


def _dial(first: Handle, rank: int, timeout: float) -> dist.Store:
    """The store of the process that becomes rank 0."""
    deadline = time.monotonic() + timeout
    stores: list[dist.Store] = []

    def connect() -> None:
        store = dist.TCPStore(
            first.address,
            first.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )
        if store.check([_IDENTITY]) and store.get(_IDENTITY).decode() == first.token:
            stores.append(store)

    try:
        # Unlike torch's own attempt, this one ends at once if nobody listens.
        socket.create_connection((first.address, first.port), min(timeout, DIAL_TIMEOUT)).close()
        # torch waits without end for a process that has stopped.
        has_ended = run_with_timeout(max(0.0, deadline - time.monotonic()), connect)
    except OSError as error:
        raise _no_answer(first, rank, error) from None
    if not has_ended:
        raise _no_answer(first, rank, f"it has said nothing for {timeout:g} s")
    if not stores:
        raise _no_answer(first, rank, "another process listens there")
    return stores[0]


def _no_answer(first: Handle, rank: int, problem: object) -> ConnectError:
    is_loopback = first.address in ("127.0.0.1", "::1")
    advice = (
        "; for processes on several hosts call init_process_group with a store or a MASTER_ADDR that leads to the network"
        if is_loopback
        else ""
    )
    return ConnectError(
        f"rank {rank}: the process that is to be rank 0 does not answer at {first.address}:{first.port} "
        f"({str(problem).splitlines()[0]}): if it has ended, reconfigure without its handle{advice}"
    )


def _master(options: Any) -> tuple[str, int] | None:
    """Where the processes meet at first: this host's address towards it is one that the others reach."""
    assignment = group_member_assignment(options.group_rank, options.group_size)
    return store_address(options.store) or assignment.master
