"""Accelerate's recipes of docs/pytorch.md."""

from __future__ import annotations

import pytest
import recipes
import torch
import torch.distributed as dist
from team import Rank, Team
from torch.utils.data import DataLoader

import paramhub.torch

pytestmark = recipes.needs("accelerate")


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
        recipes.recipe("Accelerate", {"backend": 0, "hook": 1}[way]),
        **names,
        model=model,
        optimizer=optimizer,
        batches=batches,
    )
    assert dist.get_backend() == {"backend": "paramhub", "hook": "gloo"}[way]
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
    accelerator.end_training()


@pytest.mark.parametrize("way", ["backend", "hook"])
def test_accelerate(team: Team, way: str) -> None:
    team(train, way, ranks=2)


def refuse(rank: Rank) -> None:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    with pytest.raises(ValueError, match="backend paramhub is not available"):
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="paramhub")])


def test_accelerate_refuses_what_docs_say(team: Team) -> None:
    team(refuse, ranks=2)
