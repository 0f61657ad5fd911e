"""Horovod's process sets: some of the ranks, which run operations among themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from paramhub.errors import MisuseError
from paramhub.torch import _initialization
from paramhub.torch._collectives import Group
from paramhub.torch._join import JoinableGroup

if TYPE_CHECKING:
    from paramhub.torch._world import World


class ProcessSet:
    """Some of the ranks, in ascending order. `init` or `add_process_set` makes it usable, until `remove_process_set` or
    `shutdown`; before and after that its id, size and rank are None. As with Horovod, ``root_rank`` of an operation is a rank
    among all, not among the set's."""

    mpi_comm = None
    """None, because paramhub.torch has no MPI communicators. It is here for scripts that read it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        """Raises MisuseError if ``ranks`` are no numbers, or one comes twice."""
        given = list(ranks) if isinstance(ranks, Iterable) else [None]
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in given):
            raise MisuseError(
                f"a ProcessSet is made of a list of ranks, not of {ranks!r}: paramhub.torch has no MPI communicators"
            )
        if len(set(given)) < len(given):
            raise MisuseError(f"a ProcessSet has each rank once, but was given {given}")
        self._ranks: list[int] = sorted(given)
        self._world: World | None = None
        self._id: int | None = None
        self._group: Group | None = None

    @property
    def ranks(self) -> list[int]:
        """The ranks in the set, ascending."""
        return self._ranks

    @property
    def process_set_id(self) -> int | None:
        """The number of the set, the same on all ranks; None if the set cannot be used. All ranks together are number 0."""
        is_usable = self._world is not None and self._world is _initialization.current()
        return self._id if is_usable else None

    def size(self) -> int | None:
        """The number of ranks in the set; None if the set cannot be used."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's rank within the set; None if the set cannot be used. Raises MisuseError if this process is not in it."""
        if self.process_set_id is None:
            return None
        self._check_included()
        return self.ranks.index(_initialization.rank())

    def included(self) -> bool:
        """Returns whether this process is in the set."""
        return _initialization.rank() in self.ranks

    def group(self) -> Group | JoinableGroup:
        """What runs the set's operations. Raises MisuseError if the set cannot be used, or this process is not in it."""
        if self.process_set_id is None:
            raise MisuseError(
                f"{self} is not in use: give it to paramhub.torch.init(process_sets=[...]) or add_process_set() on every rank"
            )
        self._check_included()
        assert self._group is not None and self._world is not None
        self._world.check_process_group()
        return self._group

    def _check_included(self) -> None:
        if not self.included():
            raise MisuseError(
                f"rank {_initialization.rank()} is not in {self}: only the set's ranks call its operations"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        # A model that is copied goes on using the same set, whose connections have no copy.
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        # Another process adds the set to its own ranks before it uses it.
        return ProcessSet, (self.ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the present world."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def ranks(self) -> list[int]:
        world = _initialization.current()
        return [] if world is None else list(range(world.size))

    @property
    def process_set_id(self) -> int:
        return 0

    def size(self) -> int:
        return _initialization.size()

    def __reduce__(self) -> str:
        return "global_process_set"

    def group(self) -> JoinableGroup:
        return _initialization.world().joins.group()


global_process_set = _GlobalProcessSet()
"""All ranks: the set of every operation that names no other."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Makes a set of some ranks usable, and returns it. All ranks call it together with the same ranks, also those that are
    not in the set. Unlike Horovod's it needs no ``init(process_sets="dynamic")``.

    Raises MisuseError for ranks that do not exist or are a set already, and if ranks disagree.
    """
    process_set = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    world, ranks = _initialization.world(), process_set.ranks
    # Ranks compare first, so that all refuse what one of them must refuse.
    proposals = world.allgather_text(world.label("process-set"), json.dumps(ranks))
    others = [rank for rank, proposal in enumerate(proposals) if json.loads(proposal) != ranks]
    if others:
        raise MisuseError(
            f"add_process_set: rank {world.rank} adds a set of ranks {ranks}, and rank {others[0]} one of "
            f"{proposals[others[0]]}: all ranks add the same sets in the same order"
        )
    check_new(world.size, [process_set], [*world.process_sets.values()])
    number = world.next_process_set()
    if world.rank in ranks:
        name = f"process-set-{number}"
        process_set._group = Group(
            name, world, world.store(name), members=ranks, timeout=world.options.timeout
        )
    process_set._world, process_set._id = world, number
    world.process_sets[number] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Ends a set; its operations under way end first. All ranks call it together. Returns whether there was such a set. The
    set of all ranks stays."""
    number = process_set.process_set_id
    if not number:
        return False
    world, group = process_set._world, process_set._group
    process_set._world = process_set._id = process_set._group = None
    assert world is not None
    del world.process_sets[number]
    if group is not None:
        group.leave()
    return True


def check_new(size: int, process_sets: Sequence[ProcessSet], present: Sequence[ProcessSet] = ()) -> None:
    """Checks sets before they are added. Raises MisuseError for ranks that do not exist, or are a set already."""
    for process_set in process_sets:
        if not isinstance(process_set, ProcessSet):
            raise MisuseError(
                f'process_sets is to be a list of ProcessSet objects, or "dynamic", not to have {process_set!r}'
            )
    known = [list(range(size)), *(each.ranks for each in present)]
    for process_set in process_sets:
        ranks = process_set.ranks
        absent = [rank for rank in ranks if not 0 <= rank < size]
        if absent:
            raise MisuseError(f"a process set has rank {absent[0]}, which is none of {size} ranks")
        if process_set is global_process_set or ranks in known:
            raise MisuseError(f"the process set of ranks {ranks} exists already: each is added once")
        if not ranks:
            raise MisuseError("a process set needs a rank")
        known.append(ranks)
