"""The device of the tests in ``gpu/``: the first GPU, or the one that the variable TESTED_DEVICE names. All ranks share it. With
``simulated:0`` it is one that `simulated_device` has on any machine. With ``cpu`` the tests check themselves: tensors are staged
as those of a device are."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import training
from torch import nn

import paramhub.torch

NAME = os.environ.get("TESTED_DEVICE", "cuda:0")
if NAME.startswith("simulated"):
    # Ranks import this after they were forked, from a process that does not know the device.
    import simulated_device

    simulated_device.load()
DEVICE = torch.device(NAME)
STREAMS = torch.get_device_module(DEVICE)
"""Streams, events and random numbers of the device, such as ``torch.cuda``."""
BUSY_CYCLES = 200_000_000
"""A tenth of a second at 2 GHz."""
BUSY_SECONDS = 0.1


def is_there() -> bool:
    return bool(STREAMS.is_available())


def begin() -> None:
    """Prepares a process: the device computes the same in each run, and without the short formats of its matrix units."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    if DEVICE.type == "cpu":
        from paramhub.torch import HubOptimizer, _buckets, _gradients

        _buckets.needs_stage = _gradients.needs_stage = lambda device: True
        HubOptimizer._stages_all = True


def begin_collectives() -> None:
    """Prepares a process, and makes the default group with paramhub's backend."""
    _stage_collectives()
    dist.init_process_group("paramhub")


def begin_horovod() -> None:
    """Prepares a process, and has it join its run."""
    _stage_collectives()
    paramhub.torch.init()


def _stage_collectives() -> None:
    from paramhub.torch import _c10d, _collectives, backend

    begin()
    if DEVICE.type == "cpu":
        _c10d.needs_stage = _collectives.needs_stage = lambda device: True
    elif DEVICE.type not in backend.DEVICES:
        backend.DEVICES.append(DEVICE.type)
        dist.Backend.backend_capability[backend.NAME] = backend.DEVICES


def group_differently(rank: int) -> None:
    """Has rank 0 exchange the gradients of a small model in one group, and the others in several."""
    from paramhub.torch import _staging

    if rank > 0:
        _staging.GROUP_BYTES = 1000 * rank


def keep_busy() -> None:
    """Puts work on the current stream, so that what follows there begins much later than the host has submitted it."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)
    elif DEVICE.type == "simulated":
        STREAMS._sleep(BUSY_SECONDS)


def make(kind: type[training.Net] = training.OneHead) -> nn.Module:
    """The same parameters on every rank and in every call."""
    return training.make(kind).to(DEVICE)


def loss_of(model: nn.Module, step: int, rank: int, *arguments: int) -> torch.Tensor:
    images, labels = training.batch(step, rank)
    return nn.functional.cross_entropy(model(images.to(DEVICE), *arguments).float(), labels.to(DEVICE))
