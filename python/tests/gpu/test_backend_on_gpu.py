"""The backend of torch.distributed beside those of torch, on a host with a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from team import Rank, Team

import paramhub.torch.backend

ON_CUDA = pytest.mark.skipif(DEVICE.type != "cuda", reason="the backend is registered for tensors of CUDA")
SMALL, LARGE = 100, 100_000
"""Elements: a sum of SMALL goes over the mesh, one of LARGE through the hub."""


def sums_on_the_host() -> None:
    for elements in (SMALL, LARGE):
        tensor = torch.ones(elements)
        dist.all_reduce(tensor)
        assert bool((tensor == 2.0).all())


def is_beside_nccl(rank: Rank) -> None:
    dist.init_process_group("cpu:paramhub,cuda:nccl")
    sums_on_the_host()
    # With one rank for each GPU this is NCCL's. Two ranks on one GPU it refuses, so only one rank asks it here.
    alone = dist.new_group([rank.rank], backend="nccl", use_local_synchronization=True)
    tensor = torch.ones(LARGE, device=DEVICE)
    dist.all_reduce(tensor, group=alone)
    assert float(tensor.sum()) == LARGE
    sums_on_the_host()
    dist.destroy_process_group()


@ON_CUDA
@pytest.mark.skipif(
    not paramhub.torch.backend.HAS_BACKENDS,
    reason="before torch 2.14 a Python class cannot be one of two backends",
)
def test_nccl_can_be_beside_paramhub(team: Team) -> None:
    team(is_beside_nccl, ranks=2)


def is_beside_gloo(rank: Rank) -> None:
    """DDP's model is on the GPU and its group is gloo's, and a second group of paramhub sums tensors of the host."""
    dist.init_process_group("gloo")
    group = dist.new_group(backend="paramhub")
    on_device = torch.ones(LARGE, device=DEVICE)
    dist.all_reduce(on_device)
    assert float(on_device.sum()) == 2 * LARGE
    on_host = torch.ones(LARGE)
    dist.all_reduce(on_host, group=group)
    assert float(on_host.sum()) == 2 * LARGE
    dist.destroy_process_group()


def test_groups_of_gloo_and_of_paramhub_in_one_process(team: Team) -> None:
    team(is_beside_gloo, ranks=2)
