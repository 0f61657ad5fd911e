"""Checks of the model and the arguments of a HubOptimizer, and the broadcast of the model's other tensors."""

from __future__ import annotations

import inspect

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from paramhub.errors import MisuseError
from paramhub.optimizers import BY_NAME, Optimizer
from paramhub.torch import _memory
from paramhub.torch._parameter_hooks import is_exchanged
from paramhub.torch._world import World


def check_arguments(model: object, optimizer: object) -> None:
    """Raises TypeError for arguments that other optimizers take: parameters, or an optimizer of torch."""
    mine = optimizer if isinstance(optimizer, Optimizer) else None
    call = "HubOptimizer(model, optimizer)" if mine is not None else None
    for given in (optimizer, model):
        if call is None and isinstance(given, torch.optim.Optimizer):
            call = f"HubOptimizer(model, {_at_the_hub(given)})"
    call = call or "HubOptimizer(model, paramhub.SGD(lr=0.1))"
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"HubOptimizer takes the model itself, not {_kind(model)}: {call}. Which of the model's parameters it trains, and in "
            "which groups, is said with params="
            + (KEEP_TORCHS if isinstance(model, torch.optim.Optimizer) else "")
        )
    if mine is None:
        keep = KEEP_TORCHS if isinstance(optimizer, torch.optim.Optimizer) else ""
        raise TypeError(
            f"HubOptimizer takes an optimizer that the hub runs, not {_kind(optimizer)}: {call}{keep}"
        )


KEEP_TORCHS = (
    ". To have torch's optimizer on each rank, with gradients averaged by the hub: "
    "paramhub.torch.DistributedOptimizer(optimizer, model.named_parameters())"
)


def _kind(given: object) -> str:
    if given is None:
        return "nothing"
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return f"a {type(given).__name__}"


def _at_the_hub(optimizer: torch.optim.Optimizer) -> str:
    """The Python expression for paramhub's counterpart of an optimizer of torch, or for SGD if there is none."""
    name = type(optimizer).__name__
    built_in = BY_NAME.get(name.lower())
    if built_in is None:
        return "paramhub.SGD(lr=0.1)"
    numbers = []
    for argument, parameter in inspect.signature(built_in).parameters.items():
        value = optimizer.defaults.get(argument, parameter.default)
        if argument == "lr" or value != parameter.default:
            numbers.append(f"{argument}={value!r}")
    return f"paramhub.{name}({', '.join(numbers)})"


def names(model: torch.nn.Module) -> dict[int, str]:
    """The names of all parameters by their id, in the order of the model's definition. A tied parameter has its first name."""
    if isinstance(model, DistributedDataParallel):
        raise MisuseError(
            "HubOptimizer exchanges gradients itself: give it the model inside DistributedDataParallel"
        )
    return {id(parameter): name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}


def check(name: str, parameter: torch.nn.Parameter) -> None:
    """Raises MisuseError for a parameter that cannot be exchanged."""
    if isinstance(parameter, UninitializedParameter):
        raise MisuseError(f"{name!r} has no shape yet: run the lazy modules once before HubOptimizer is made")
    if parameter.is_meta:
        raise MisuseError(
            f"{name!r} has no values yet: bring the model from the meta device to another one first"
        )
    if type(parameter.data) is not torch.Tensor:
        raise MisuseError(f"{name!r} is a {type(parameter.data).__name__}: HubOptimizer takes plain tensors")


def broadcast_rest(world: World, model: torch.nn.Module, exchanged: set[int]) -> None:
    """Sends rank 0's buffers to every rank, and its parameters that neither this optimizer (``exchanged``, by id) nor another
    one exchanges."""
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
    # The key's type is f32 whatever the bytes are, because between initialise and pull the hub does not compute with them.
    key = {"name": "buffers", "shape": [count // 4], "dtype": "f32"}
    job = world.jobs.open(world.label("buffers"), {"keys": [key], "optimizer": {"name": "sgd"}})
    if world.rank == 0:
        flat = _memory.flatten(tensors)
        job.initialise([0], [(flat.data_ptr(), count)], flat, 0).wait()
    else:
        flat = torch.empty(count, dtype=torch.uint8)
        job.pull([0], [(flat.data_ptr(), count)], flat).wait()
        _memory.unflatten(flat, tensors)
    world.jobs.close(job)
