"""Lightning's recipes of docs/pytorch.md."""

from __future__ import annotations

import os
from typing import Any

import pytest
import recipes
import torch
import torch.distributed as dist
from team import Rank, Team
from torch.utils.data import DataLoader

import paramhub.torch

pytestmark = recipes.needs("lightning")


class Indices(recipes.Points):
    """Points with their indices, so that the test knows which rank has used them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.labels[index], index


def train(rank: Rank, way: str) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = recipes.network()
            self.seen: list[torch.Tensor] = []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            inputs, labels, indices = batch
            self.seen.append(indices)
            return recipes.loss_of(self.network(inputs), labels)

        def on_train_end(self) -> None:
            # The Trainer removes DDP after this and keeps the process group.
            self.backend = dist.get_backend()
            self.hooks = getattr(self.trainer.strategy.model, "_comm_hooks", [])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return recipes.sgd(self.network)

    os.chdir(rank.folder)
    module = Module()
    recipes.run(
        recipes.recipe("Lightning", {"backend": 0, "hook": 1}[way]),
        torch=torch,
        lightning=lightning,
        paramhub=paramhub,
        DDPStrategy=DDPStrategy,
        module=module,
        batches=DataLoader(Indices(), batch_size=recipes.BATCH),
    )
    assert module.backend == {"backend": "paramhub", "hook": "gloo"}[way]
    assert [type(state).__name__ for _, state in module.hooks] == {"backend": [], "hook": ["HubState"]}[way]
    assert all(state._buckets is not None for _, state in module.hooks)
    recipes.check_trained(module.network, module.seen, rank.rank, rank.folder)


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_lightning(team: Team, way: str) -> None:
    team(train, way, ranks=2)
