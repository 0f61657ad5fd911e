"""Opens the job of a HubOptimizer: its settings, the memory of its parameters, and their initial values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paramhub import _native
from paramhub.torch import _memory, _optimizer_state, _tensors
from paramhub.torch._exchange import Exchange, StepState
from paramhub.torch._log import log
from paramhub.torch._staging import Stage
from paramhub.torch._world import World


def open_job(
    world: World,
    exchanges: Sequence[Exchange],
    groups: Sequence[int],
    settings: dict[str, Any],
    states: Sequence[_optimizer_state.State] | None,
    codecs: Mapping[str, str],
    former: _native.Job | None = None,
    *,
    replaces: bool = False,
) -> None:
    """Opens the job of these parameters, whose groups are ``groups``. They start from rank 0's values, with the optimizer
    state in ``states``; or from the values and state at the hubs, if the job resumes from a checkpoint or an earlier start of
    the ranks has left it. Collective. ``former`` is this rank's part in a job whose ranks go back to an earlier step, which this
    rank then joins again. ``replaces`` says that the job takes the place of one that this rank has left. If the job shares
    memory with the hub, this moves the parameters there."""
    step = exchanges[0].step
    keys = []
    for exchange, group in zip(exchanges, groups, strict=True):
        key = _tensors.key(exchange.name, exchange.parameter, group=group)
        keys.append(
            {**key, "shape": _memory.memory_shape(exchange.parameter), "codec": codecs.get(exchange.name)}
        )
    if former is not None:
        job = world.jobs.rejoin(former)
    else:
        job = world.jobs.open(
            world.label("hub-optimizer"),
            {**settings, "keys": keys},
            peers="layers" in settings,
            inherits=True,
            is_of_optimizer=True,
            replaces=replaces,
        )
    resumes = job.resumed_step is not None
    if resumes and world.rank == 0:
        log(f"parameters and optimizer state are those at the hubs, of step {job.resumed_step}")
    held = _place(job, step, exchanges, is_encoded=settings["codec"] is not None or bool(codecs))
    numbers = [exchange.number for exchange in exchanges]
    ranges = [_tensors.memory_range(tensor) for tensor in held]
    if world.rank == 0 and not resumes:
        if states is not None:
            _optimizer_state.restore(job, exchanges, states)
        job.initialise(numbers, ranges, held, 0).wait()
    else:
        job.pull(numbers, ranges, held).wait()
    job.begin_factors(numbers, ranges, held)
    if step.stage is not None:
        for exchange, tensor in zip(exchanges, held, strict=True):
            exchange.flat.copy_(tensor)


def _place(
    job: _native.Job, step: StepState, exchanges: Sequence[Exchange], is_encoded: bool
) -> list[torch.Tensor]:
    """Sets the memory from which parameters are initialised and into which they are received, and returns it: their own, or a
    stage's host memory if they are staged."""
    step.job = job
    device = exchanges[0].parameter.device
    if step.is_staged:
        shapes = [torch.Size([exchange.parameter.numel()]) for exchange in exchanges]
        dtypes = [exchange.parameter.dtype for exchange in exchanges]
        step.stage = Stage(job, device, shapes, dtypes, is_encoded=is_encoded)
        for exchange in exchanges:
            exchange.settle(exchange.parameter.data)
        held = step.stage.parameters
        for exchange, tensor in zip(exchanges, held, strict=True):
            tensor.copy_(exchange.flat)
        return held
    step.stage = None
    for exchange in exchanges:
        parameter = exchange.parameter
        if job.shares_memory:
            exchange.settle(_memory.move_into(parameter, job.parameter_tensor(exchange.number)))
        else:
            exchange.settle(parameter.data)
    return [exchange.memory for exchange in exchanges]
