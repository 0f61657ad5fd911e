"""The recipe of docs/pytorch.md for Hugging Face's Trainer, and the error of HubOptimizer in a Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import recipes
import torch
import torch.distributed as dist
from team import Rank, Team
from torch import nn

import paramhub.torch
from paramhub.torch import HubOptimizer

pytestmark = recipes.needs("transformers")

QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "WANDB_MODE": "disabled"}


class Points(recipes.Points):
    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        return {"inputs": self.inputs[index], "labels": self.labels[index], "index": index}


class Model(nn.Module):
    """A model in the form that the Trainer requires."""

    def __init__(self) -> None:
        super().__init__()
        self.network = recipes.network()
        self.seen: list[torch.Tensor] = []

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor, index: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        self.seen.append(index.clone())
        outputs = self.network(inputs)
        return {"loss": recipes.loss_of(outputs, labels), "logits": outputs}


def train(rank: Rank) -> None:
    from transformers import Trainer, TrainingArguments

    def arguments(folder: str, **given: Any) -> TrainingArguments:
        # The hyperparameters of the reference.
        return TrainingArguments(
            folder, **given, learning_rate=recipes.LR, optim="sgd", optim_args="momentum=0.9", max_grad_norm=0.0,
            lr_scheduler_type="constant", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip

    with pytest.raises(ValueError, match="backend paramhub is not available"):
        arguments("out", use_cpu=True, ddp_backend="paramhub")
    model = Model()
    recipes.run(
        recipes.recipe("Hugging Face's Trainer"),
        torch=torch,
        TrainingArguments=arguments,
        Trainer=Trainer,
        model=model,
        dataset=Points(),
    )
    assert dist.get_backend() == "paramhub"
    recipes.check_trained(model.network, model.seen, rank.rank, rank.folder)

    # With HubOptimizer in a Trainer the error names the conflict, before any gradient is sent.
    model = Model()
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1))
    trainer = Trainer(
        model,
        arguments("out", use_cpu=True, max_steps=1),
        train_dataset=Points(),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
    )
    with pytest.raises(
        paramhub.MisuseError, match=r"within DistributedDataParallel.*Trainer.*docs/pytorch\.md"
    ):
        trainer.train()
    optimizer.close()
    dist.destroy_process_group()


def test_trainer(team: Team) -> None:
    team(train, ranks=2, env=QUIET)
