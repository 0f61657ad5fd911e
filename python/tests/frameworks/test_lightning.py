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


WAYS = ["backend", "hook", "optimizer"]
"""The recipes, in their order."""


def module_class() -> type:
    import lightning.pytorch as lightning

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

    return Module


def train(rank: Rank, way: str) -> None:
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import DDPStrategy

    os.chdir(rank.folder)
    made = recipes.run(
        recipes.recipe("Lightning", WAYS.index(way)),
        torch=torch,
        lightning=lightning,
        paramhub=paramhub,
        DDPStrategy=DDPStrategy,
        Module=module_class(),
        module=module_class()(),
        batches=DataLoader(Indices(), batch_size=recipes.BATCH),
    )
    module = made["module"]
    assert module.backend == ("paramhub" if way == "backend" else "gloo")
    assert [type(state).__name__ for _, state in module.hooks] == (["HubState"] if way == "hook" else [])
    assert all(state._buckets is not None for _, state in module.hooks)
    recipes.check_trained(module.network, module.seen, rank.rank, rank.folder)


@pytest.mark.parametrize("way", WAYS)
def test_lightning(team: Team, way: str) -> None:
    team(train, way, ranks=2)


def compare(rank: Rank) -> None:
    """Two passes a step, a schedule, and a second fit from a checkpoint: as with DDP and torch's optimizer."""
    import lightning.pytorch as lightning

    from paramhub.lightning import HubStrategy

    def trained(strategy: Any, make: Any, optimizer: Any) -> torch.nn.Module:
        class OfMake(make):  # type: ignore[misc]
            def configure_optimizers(self) -> Any:
                made = optimizer(self)
                return [made], [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)]

            def on_train_epoch_start(self) -> None:
                # Lightning runs this on an object of its own that has the optimizer's attributes.
                if strategy is HubStrategy:
                    self.optimizers().broadcast_parameters()

        module, saved = OfMake(), None
        for epochs in [2, 4]:
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy=strategy(), max_epochs=epochs, accumulate_grad_batches=2,
                logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            )  # fmt: skip
            trainer.fit(module, DataLoader(Indices(), batch_size=4), ckpt_path=saved)
            saved = str(rank.folder / f"{strategy.__name__}.ckpt")
            trainer.save_checkpoint(saved)
        return module

    os.chdir(rank.folder)
    ours = trained(
        HubStrategy,
        module_class(),
        lambda module: paramhub.torch.HubOptimizer(module, paramhub.SGD(lr=0.1, momentum=0.9)),
    )
    torchs = trained(lightning.strategies.DDPStrategy, module_class(), recipes.sgd)
    for (name, own), expected in zip(ours.named_parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(
            own, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    for options, error in [
        ({}, r"averages no gradients.*SGD"),
        ({"gradient_clip_val": 0.5}, r"max_grad_norm=0\.5"),
    ]:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=HubStrategy(), max_steps=1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False, **options,
        )  # fmt: skip
        with pytest.raises(paramhub.MisuseError, match=error):
            trainer.fit(module_class()(), DataLoader(Indices(), batch_size=4))


def test_lightning_with_hub_optimizer_equals_that_with_torchs(team: Team) -> None:
    team(compare, ranks=2)
