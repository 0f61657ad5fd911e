"""DDP's instances, which know neither their hooks' state nor their process group's backend of their own accord."""

from __future__ import annotations

import gc

from torch.nn.parallel import DistributedDataParallel


def instances() -> list[DistributedDataParallel]:
    """All of this process. It looks through everything that the garbage collector knows, once: some hundredths of a second for a
    million objects. An `isinstance` of each would take seconds: the class of DDP has a metaclass that is asked each time."""
    kinds = {id(kind) for kind in _with_subclasses(DistributedDataParallel)}
    return [thing for thing in gc.get_objects() if id(type(thing)) in kinds]


def _with_subclasses(kind: type) -> list[type]:
    found = [kind]
    for each in found:
        found += [below for below in type.__subclasses__(each) if below not in found]
    return found
