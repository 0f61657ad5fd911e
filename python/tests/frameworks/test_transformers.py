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

WAYS = ["optimizer", "backend"]
"""The recipes, in their order."""
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


def train(rank: Rank, way: str) -> None:
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
        recipes.recipe("Hugging Face's Trainer", WAYS.index(way)),
        torch=torch,
        TrainingArguments=arguments,
        Trainer=Trainer,
        model=model,
        dataset=Points(),
    )
    assert dist.get_backend() == ("paramhub" if way == "backend" else "gloo")
    recipes.check_trained(model.network, model.seen, rank.rank, rank.folder)
    if way == "optimizer":
        return dist.destroy_process_group()

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


@pytest.mark.parametrize("way", WAYS)
def test_trainer(team: Team, way: str) -> None:
    team(train, way, ranks=2, env=QUIET)


def compare(rank: Rank) -> None:
    """Two passes a step, clipping, decay, a schedule, and a start from a checkpoint: as with DDP and torch's optimizer."""
    from transformers import Trainer, TrainingArguments

    from paramhub.transformers import HubTrainer

    def trained(kind: type[Trainer], **given: Any) -> nn.Module:
        folder = str(rank.folder / kind.__name__)
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.01,
            weight_decay=0.1, max_grad_norm=0.5, lr_scheduler_type="linear", save_steps=1, logging_steps=1,
            report_to=[], disable_tqdm=True, seed=3, **given,
        )  # fmt: skip
        model = Model()
        trainer = kind(model, arguments, train_dataset=Points())
        trainer.train(
            resume_from_checkpoint=f"{folder}/checkpoint-1" if given["num_train_epochs"] == 2 else None
        )
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        print(kind.__name__, norms)
        if kind is HubTrainer:
            trainer.optimizer.optimizer.close()
        return model

    for epochs in [1, 2]:
        ours, torchs = (trained(kind, num_train_epochs=epochs) for kind in [HubTrainer, Trainer])
        for (name, own), expected in zip(ours.named_parameters(), torchs.parameters(), strict=True):
            torch.testing.assert_close(
                own, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    # Another trainer of a model takes it from the first, and a clipped step may leave parameters unused.
    model = Model()
    for _ in range(2):
        arguments = TrainingArguments(
            str(rank.folder / "again"), use_cpu=True, max_steps=2, per_device_train_batch_size=4, eval_strategy="steps",
            eval_steps=1, save_steps=1, load_best_model_at_end=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        HubTrainer(model, arguments, train_dataset=Points(), eval_dataset=Points()).train()
    with pytest.raises(paramhub.MisuseError, match=r"no optimizer for Adafactor.*choose adamw_torch"):
        HubTrainer(
            Model(), TrainingArguments("out", use_cpu=True, optim="adafactor"), train_dataset=Points()
        ).train()
    dist.destroy_process_group()


def test_trainer_with_hub_optimizer_equals_that_with_torchs(team: Team) -> None:
    team(compare, ranks=2, env=QUIET)
