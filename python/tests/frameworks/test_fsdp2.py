"""FSDP2's recipes of docs/pytorch.md, which need only torch."""

from __future__ import annotations

import pytest
import recipes
import torch
import torch.distributed as dist
from team import Rank, Team
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import paramhub.torch  # noqa: F401 - before torch 2.14 this registers the backend

WAYS = ["fsdp2", "hsdp"]
"""The recipes, in their order."""


def train(rank: Rank, way: str) -> None:
    model, reference, points = recipes.network(), recipes.network(), recipes.Points()
    made = recipes.run(
        recipes.recipe("FSDP2", WAYS.index(way)),
        torch=torch,
        fully_shard=fully_shard,
        init_device_mesh=init_device_mesh,
        model=model,
    )
    assert dist.get_backend(made["mesh"].get_group("replicate") if way == "hsdp" else None) == "paramhub"
    single = torch.optim.AdamW(reference.parameters())
    whole = recipes.BATCH * rank.size
    for step in range(len(points) // whole):
        everything = slice(step * whole, (step + 1) * whole)
        own = slice(step * whole + rank.rank * recipes.BATCH, step * whole + (rank.rank + 1) * recipes.BATCH)
        for each, optimizer, at in ((model, made["optimizer"], own), (reference, single, everything)):
            optimizer.zero_grad()
            recipes.loss_of(each(points.inputs[at]), points.labels[at]).backward()
            optimizer.step()
    for sharded, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(sharded.full_tensor(), expected.detach(), rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.parametrize(("way", "ranks"), [("fsdp2", 2), ("hsdp", 4)])
def test_fsdp2(team: Team, way: str, ranks: int) -> None:
    team(train, way, ranks=ranks)
