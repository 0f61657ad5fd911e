"""Finds this process's DistributedDataParallel instances: neither hooks nor process groups can ask torch for them."""

from __future__ import annotations

import gc

from torch.nn.parallel import DistributedDataParallel


def ddp_instances() -> list[DistributedDataParallel]:
    """All instances of this process. It looks through all objects of the garbage collector, which takes some hundredths of a
    second for a million objects. With `isinstance` it would take seconds, because DDP's metaclass is called for each object."""
    kinds = {id(kind) for kind in _with_subclasses(DistributedDataParallel)}
    return [thing for thing in gc.get_objects() if id(type(thing)) in kinds]


def _with_subclasses(kind: type) -> list[type]:
    found = [kind]
    for each in found:
        found += [below for below in type.__subclasses__(each) if below not in found]
    return found
