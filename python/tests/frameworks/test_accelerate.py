"""Accelerate's recipes of docs/pytorch.md."""

from __future__ import annotations

import math

import pytest
import recipes
import torch
import torch.distributed as dist
from team import Rank, Team
from torch.utils.data import DataLoader

import paramhub.torch

pytestmark = recipes.needs("accelerate")

WAYS = ["backend", "hook", "optimizer"]
"""The recipes, in their order."""


class Indices(recipes.Points):
    """Points with their indices, so that the test knows which rank has used them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.labels[index], index


def train(rank: Rank, way: str) -> None:
    from accelerate import Accelerator

    model = recipes.network()
    optimizer = recipes.sgd(model)
    batches = DataLoader(Indices(), batch_size=recipes.BATCH, shuffle=True)
    names = {"torch": torch, "paramhub": paramhub, "Accelerator": Accelerator}
    if way == "hook":
        names["accelerator"] = Accelerator(cpu=True)
    made = recipes.run(
        recipes.recipe("Accelerate", WAYS.index(way)),
        **names,
        model=model,
        optimizer=optimizer,
        batches=batches,
    )
    assert dist.get_backend() == ("paramhub" if way == "backend" else "gloo")
    accelerator, model, optimizer = made["accelerator"], made["model"], made["optimizer"]
    seen = []
    for inputs, labels, indices in made["batches"]:
        optimizer.zero_grad()
        accelerator.backward(recipes.loss_of(model(inputs), labels))
        optimizer.step()
        seen.append(indices)
    recipes.check_trained(accelerator.unwrap_model(model), seen, rank.rank, rank.folder)
    if way == "hook":
        ((_, state),) = model._comm_hooks
        assert state._buckets is not None
    if way == "optimizer":
        assert model is accelerator.unwrap_model(model), "nothing is around the model"
        optimizer.optimizer.close()
    accelerator.end_training()


@pytest.mark.parametrize("way", WAYS)
def test_accelerate(team: Team, way: str) -> None:
    team(train, way, ranks=2)


def refuse(rank: Rank) -> None:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    with pytest.raises(ValueError, match="backend paramhub is not available"):
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="paramhub")])


def test_accelerate_refuses_what_docs_say(team: Team) -> None:
    team(refuse, ranks=2)


def accumulate(rank: Rank) -> None:
    """Steps of two passes, clipped, are those of one process with all batches."""
    from paramhub.accelerate import HubAccelerator

    accelerator = HubAccelerator(cpu=True, gradient_accumulation_steps=2)
    model, points = recipes.network(), recipes.Points()
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=recipes.LR), max_grad_norm=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    reference = recipes.network()
    local = torch.optim.SGD(reference.parameters(), lr=recipes.LR)
    norms: list[float] = []
    true_norms: list[float] = []
    for number in range(4):
        at = slice(8 * number + 4 * rank.rank, 8 * number + 4 * rank.rank + 4)
        with accelerator.accumulate(model):
            accelerator.backward(recipes.loss_of(model(points.inputs[at]), points.labels[at]))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.01)))
                with pytest.raises(paramhub.MisuseError, match=r"max_norm=0\.2.*max_grad_norm=0\.01"):
                    accelerator.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
        of_all = slice(8 * number, 8 * number + 8)
        (recipes.loss_of(reference(points.inputs[of_all]), points.labels[of_all]) / 2).backward()
        if number % 2 == 1:
            true_norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)))
            local.step()
            local.zero_grad()
            assert optimizer.optimizer.last_grad_norm == pytest.approx(true_norms[-1], rel=1e-4)
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
    assert min(true_norms) > 0.01, "the steps were clipped"
    for number, norm in enumerate(norms):
        known = true_norms[max(number - 1, 0) : number + 1]
        assert any(norm == pytest.approx(one, rel=1e-4) for one in known) or (
            number == 0 and math.isnan(norm)
        )
    optimizer.optimizer.close()
    # A model with another optimizer is prepared as usual.
    model = recipes.network()
    other, _ = accelerator.prepare(model, recipes.sgd(model))
    assert isinstance(other, torch.nn.parallel.DistributedDataParallel)
    accelerator.end_training()


def test_accelerate_accumulates_and_clips(team: Team) -> None:
    team(accumulate, ranks=2)


class WithUnusedLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(20, 3)
        self.network = recipes.network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.network(inputs)


def scale(rank: Rank) -> None:
    """A step in which one rank's gradients overflow is left out on all, and does not count for the schedule."""
    from paramhub.accelerate import HubAccelerator

    accelerator = HubAccelerator(cpu=True)
    # Accelerate makes it for fp16, which it has on a GPU only.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model, points = recipes.network(), recipes.Points()
    for arguments in ({}, {"grad_scaler": torch.amp.GradScaler("cpu")}):
        unscaled = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=recipes.LR), **arguments)
        with pytest.raises(paramhub.MisuseError, match=r"grad_scaler=accelerator\.scaler"):
            accelerator.prepare(model, unscaled)
        unscaled.close()
    optimizer = paramhub.torch.HubOptimizer(
        model, paramhub.SGD(lr=recipes.LR), grad_scaler=accelerator.scaler
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    rates = []
    for number in range(4):
        at = slice(8 * number + 4 * rank.rank, 8 * number + 4 * rank.rank + 4)
        loss = recipes.loss_of(model(points.inputs[at]), points.labels[at])
        accelerator.backward(loss * math.inf if (number, rank.rank) == (1, 1) else loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped == optimizer.step_was_skipped == (number == 1)
        rates.append(schedule.get_last_lr()[0] / recipes.LR)
    # With two ranks a prepared schedule makes two steps at once.
    assert rates == [1 / 4, 1 / 4, 1 / 16, 1 / 64]
    assert accelerator.scaler.get_scale() == 128.0
    optimizer.optimizer.close()


def test_accelerate_leaves_steps_out_that_overflow(team: Team) -> None:
    team(scale, ranks=2)


def ask_in_mid_step(rank: Rank) -> None:
    """What asks for parameters between backward and step() waits for none of their new values."""
    from paramhub.accelerate import HubAccelerator

    accelerator, points = HubAccelerator(cpu=True), recipes.Points()
    model = WithUnusedLayer()
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.1), find_unused_parameters=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        with accelerator.no_sync(model):
            accelerator.backward(recipes.loss_of(model(points.inputs[:4]), points.labels[:4]))
        accelerator.backward(recipes.loss_of(model(points.inputs[4:8]), points.labels[4:8]))
        assert math.isnan(accelerator.clip_grad_norm_(model.parameters(), math.inf))
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(paramhub.MisuseError, match="other parameters than those of one HubOptimizer"):
        accelerator.clip_grad_norm_(model.network.parameters(), math.inf)
    optimizer.optimizer.close()
    # After close() another optimizer trains the model as usual.
    model, _ = accelerator.prepare(model, recipes.sgd(model))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    part = recipes.network()
    trains_part = paramhub.torch.HubOptimizer(part, paramhub.SGD(lr=0.1), params=part[0].parameters())
    with pytest.raises(paramhub.MisuseError, match="nothing would average the gradients of the rest"):
        accelerator.prepare(part, trains_part)
    trains_part.close()
    accelerator.end_training()


def test_accelerate_asks_for_parameters_in_mid_step(team: Team) -> None:
    team(ask_in_mid_step, ranks=2)
