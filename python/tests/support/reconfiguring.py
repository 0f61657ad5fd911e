"""Ranks of `init_process_group("paramhub", enable_reconfigure=True)` that are connected anew, and what they train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from team import Rank, await_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramhub.torch

CAN_RECONFIGURE = hasattr(dist, "_reconfigure") and paramhub.torch.backend.HAS_BACKENDS
SMALL, LARGE = 10, 100_000
"""Numbers of elements that go over the mesh, and through the hub."""
TIMEOUT = timedelta(seconds=60)


def begin(rank: Rank, size: int, timeout: timedelta = TIMEOUT) -> None:
    """Initialises torch.distributed as one of ``size`` processes that are started together."""
    dist.init_process_group(
        "paramhub",
        init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
        rank=rank.rank,
        world_size=size,
        timeout=timeout,
        enable_reconfigure=True,
    )


def begin_alone() -> None:
    """Initialises torch.distributed as a process that comes later, when the store of the first ones may be gone."""
    dist.init_process_group(
        "paramhub", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT, enable_reconfigure=True
    )


def exchange(rank: Rank, uuid: int, members: Sequence[int]) -> list[str]:
    """The handles of the members, through files."""
    own = rank.folder / f"handle-{uuid}-{rank.rank}"
    own.with_suffix(".part").write_text(dist._get_reconfigure_handle())
    own.with_suffix(".part").rename(own)
    handles = []
    for member in members:
        path = rank.folder / f"handle-{uuid}-{member}"
        await_file(path, 60)
        handles.append(path.read_text())
    return handles


def connect(rank: Rank, uuid: int, members: Sequence[int]) -> None:
    """Connects the members, whose new ranks are their places among these."""
    dist._reconfigure(uuid, exchange(rank, uuid, members)).wait()
    check(list(members).index(rank.rank), len(members))


def check(rank: int, size: int) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert dist.get_process_group_ranks(None) == list(range(size))
    for elements in (SMALL, LARGE):
        tensor = torch.full((elements,), float(rank + 1))
        dist.all_reduce(tensor)
        assert bool((tensor == size * (size + 1) / 2).all())
    ranks: list = [None] * size
    dist.all_gather_object(ranks, rank)
    assert ranks == list(range(size))


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(40, 512), nn.ReLU(), nn.Linear(512, 300), nn.Tanh(), nn.Linear(300, 7))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 40, generator=generator), torch.randint(0, 7, (8,), generator=generator)


def train(model: nn.Module, steps: int = 5) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, labels = batch(step, dist.get_rank())
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_training() -> None:
    gloo = dist.new_group(backend="gloo")
    ours = train(DistributedDataParallel(network(), bucket_cap_mb=1))
    theirs = train(DistributedDataParallel(network(), bucket_cap_mb=1, process_group=gloo))
    check_same(ours, theirs)


def check_same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert torch.linalg.vector_norm(own - other) <= 1e-6 * torch.linalg.vector_norm(other)
