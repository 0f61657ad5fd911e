"""What an optimizer's start asks of a model."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from paramhub.errors import MisuseError
from paramhub.torch import _memory
from paramhub.torch._attachment import is_exchanged
from paramhub.torch._world import World


def names(model: torch.nn.Module) -> dict[int, str]:
    """The names of all parameters by their id, in the order of the model's definition. Tied ones have their first."""
    if isinstance(model, DistributedDataParallel):
        raise MisuseError(
            "HubOptimizer exchanges gradients itself: give it the model inside DistributedDataParallel"
        )
    return {id(parameter): name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}


def check(name: str, parameter: torch.nn.Parameter) -> None:
    """Refuses what cannot be exchanged."""
    if isinstance(parameter, UninitializedParameter):
        raise MisuseError(f"{name!r} has no shape yet: run the lazy modules once before HubOptimizer is made")
    if parameter.is_meta:
        raise MisuseError(
            f"{name!r} has no values yet: bring the model from the meta device to another one first"
        )
    if type(parameter.data) is not torch.Tensor:
        raise MisuseError(f"{name!r} is a {type(parameter.data).__name__}: HubOptimizer takes plain tensors")


def broadcast_rest(world: World, model: torch.nn.Module, exchanged: set[int]) -> None:
    """Rank 0's buffers, and parameters that are not ``exchanged`` (by id) by this or another optimizer, become everybody's."""
    tensors = [
        tensor
        for tensor in (*model.parameters(), *model.buffers())
        if id(tensor) not in exchanged
        and not is_exchanged(tensor)
        and tensor.numel() > 0
        and type(tensor.data) is torch.Tensor
    ]
    count = _memory.flat_bytes(tensors)
    if count == 0 or world.size == 1:
        return
    # Bytes of any type travel as if they were f32: between initialise and pull nobody computes with them.
    key = {"name": "buffers", "shape": [count // 4], "dtype": "f32"}
    job = world.open_job(world.label("buffers"), {"keys": [key], "optimizer": {"name": "sgd"}})
    if world.rank == 0:
        flat = _memory.flatten(tensors)
        job.initialise([0], [(flat.data_ptr(), count)], flat, 0).wait()
    else:
        flat = torch.empty(count, dtype=torch.uint8)
        job.pull([0], [(flat.data_ptr(), count)], flat).wait()
        _memory.unflatten(flat, tensors)
    world.close_job(job)
