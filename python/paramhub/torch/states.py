"""Horovod's broadcasts: one rank sends its parameters, optimizer state or objects to every rank."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch import functions
from paramhub.torch._initialization import world
from paramhub.torch._operations import root_in
from paramhub.torch._process_sets import ProcessSet, global_process_set

UNPICKLABLE = -1
"""What a rank sends as the length of an object that cannot be pickled."""


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies rank ``root_rank``'s tensors into those of every other rank of ``process_set``. ``params`` is
    ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.

    Raises MisuseError, on every rank, if ranks do not have tensors of the same names, shapes and types.
    """
    root_in(process_set, root_rank)
    pairs = _pairs(params)
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise MisuseError(
                f"{name!r} is no tensor but {type(tensor).__name__}: use broadcast_object for it"
            )
    _agree([f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in pairs], root_rank, process_set)
    handles = [
        functions.broadcast_async_(tensor.detach(), root_rank, process_set=process_set) for _, tensor in pairs
    ]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copies rank ``root_rank``'s optimizer state and hyperparameters into the optimizer of every other rank of ``process_set``,
    which may have no state yet.

    Parameter groups stay the same objects, so that schedulers can go on using them. ``load_state_dict`` chooses the device
    and type of the state's tensors. ``model`` is accepted for compatibility with Horovod.
    """
    root_in(process_set, root_rank)
    is_root = world().rank == root_rank
    tensors: list[torch.Tensor] = []
    skeleton = _without_tensors(optimizer.state_dict(), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank, process_set=process_set)
    if not is_root:
        # Each placeholder has the shape and type of the tensor to receive.
        state = _with_tensors(skeleton, tensors)
    for handle in [
        functions.broadcast_async_(tensor, root_rank, process_set=process_set) for tensor in tensors
    ]:
        handle.wait()
    if not is_root:
        _load(optimizer, state)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank ``root_rank``'s object, pickled there and unpickled at every other rank of ``process_set``. Raises MisuseError, on
    every rank, if it cannot be pickled."""
    root_in(process_set, root_rank)
    is_root = world().rank == root_rank
    content, problem = _pickled(obj if is_root else None)
    length = functions.broadcast_(
        torch.tensor([UNPICKLABLE if problem else content.numel()]), root_rank, process_set=process_set
    )
    if length.item() == UNPICKLABLE:
        raise _not_pickled("broadcast_object", root_rank, problem) from problem
    received = functions.broadcast_(
        content if is_root else torch.empty(int(length.item()), dtype=torch.uint8),
        root_rank,
        process_set=process_set,
    )
    return obj if is_root else pickle.loads(received.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of ``process_set``, by rank. Raises MisuseError, on every rank, if one cannot be pickled."""
    content, problem = _pickled(obj)
    own = torch.tensor([UNPICKLABLE if problem else content.numel()])
    lengths = functions.allgather(own, process_set=process_set).tolist()
    if UNPICKLABLE in lengths:
        rank = process_set.ranks[lengths.index(UNPICKLABLE)]
        raise _not_pickled("allgather_object", rank, problem) from problem
    everything = functions.allgather(content, process_set=process_set)
    return [pickle.loads(part.numpy().tobytes()) for part in everything.split(lengths)]


def _pickled(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    """The bytes of an object, or none and why it cannot be pickled. The other ranks are to know: they would wait for them."""
    try:
        return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8), None
    except Exception as error:
        return torch.empty(0, dtype=torch.uint8), error


def _not_pickled(name: str, rank: int, problem: Exception | None) -> MisuseError:
    reason = "" if problem is None else f": {problem}"
    return MisuseError(f"{name}: the object of rank {rank} cannot be pickled{reason}")


def _pairs(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        # This goes in the order of names, because the mapping's own order may differ between ranks.
        present = [(str(name), tensor) for name, tensor in params.items() if tensor is not None]
        return sorted(present, key=lambda pair: pair[0])
    if isinstance(params, torch.Tensor):
        raise MisuseError(
            "broadcast_parameters takes a state_dict or named parameters; use broadcast_ for a tensor"
        )
    pairs = [
        item if isinstance(item, tuple) else (str(position), item) for position, item in enumerate(params)
    ]
    return [(name, tensor) for name, tensor in pairs if tensor is not None]


def _agree(described: list[str], root_rank: int, process_set: ProcessSet) -> None:
    """Raises MisuseError if a rank's tensors do not match the root's. They would receive the wrong values, or fail to receive."""
    digest = hashlib.blake2b("\n".join(described).encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "little", signed=True)])
    ranks = process_set.ranks
    digests = dict(zip(ranks, functions.allgather(own, process_set=process_set).tolist(), strict=True))
    others = [rank for rank, digest in digests.items() if digest != digests[root_rank]]
    if not others:
        return
    all_described = allgather_object(described, process_set=process_set)
    expected, found = all_described[ranks.index(root_rank)], all_described[ranks.index(others[0])]
    for position in range(max(len(expected), len(found))):
        here = expected[position] if position < len(expected) else "nothing more"
        there = found[position] if position < len(found) else "nothing more"
        if here != there:
            raise MisuseError(
                f"broadcast_parameters: rank {root_rank} and rank {others[0]} differ at position {position}: rank "
                f"{root_rank} has {here}, rank {others[0]} has {there}"
            )


class _Place:
    """The placeholder of a tensor in a pickled state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype


def _without_tensors(state: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        tensors.append(state.detach().cpu())
        return _Place(state)
    return _mapped(state, lambda value: _without_tensors(value, tensors))


def _with_tensors(state: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(state, _Place):
        tensors.append(torch.empty(state.shape, dtype=state.dtype))
        return tensors[-1]
    return _mapped(state, lambda value: _with_tensors(value, tensors))


def _mapped(state: Any, change: Any) -> Any:
    """The same containers with other leaves, in a fixed order, because both ends number the tensors by it."""
    if isinstance(state, dict):
        return {key: change(value) for key, value in state.items()}
    if isinstance(state, list):
        return [change(value) for value in state]
    if isinstance(state, tuple):
        changed = [change(value) for value in state]
        return type(state)(*changed) if hasattr(state, "_fields") else tuple(changed)
    return state


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a state into the present groups and mapping, to which other objects may have references."""
    groups, held = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    held.clear()
    held.update(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, held
