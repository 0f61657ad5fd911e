"""The recipes of docs/pytorch.md, which tests run unchanged."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from team import await_file
from torch import nn
from torch.utils.data import Dataset

DOCS = Path(__file__).resolve().parents[3] / "docs" / "pytorch.md"
SECTION = "## Accelerate, Hugging Face's Trainer, Lightning, Ray\n"
LR = 0.1
BATCH = 4
STEPS = 4


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a file's tests if the package is missing, and prints why."""
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(
        is_missing, reason=f"{package} is not installed, with which recipes of docs/pytorch.md are tested"
    )


def recipe(name: str, number: int = 0) -> str:
    """The code block with this number, from 0, in the part of the section that begins with the name in bold letters."""
    section = DOCS.read_text(encoding="utf-8").split(SECTION)[1].split("\n## ")[0]
    part = section.split(f"**{name}**")[1].split("\n**")[0]
    return textwrap.dedent(re.findall(r"```python\n(.*?)```", part, re.DOTALL)[number])


def run(code: str, **names: Any) -> dict[str, Any]:
    """Runs a recipe with these global names, and returns them with the names that the recipe has defined."""
    exec(compile(code, str(DOCS), "exec"), names)
    return names


def network() -> nn.Sequential:
    """A network whose gradients go through the hub: the backend sends tensors of less than 64 KiB over the mesh."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(20, 1024), nn.Tanh(), nn.Linear(1024, 3))


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """As many points as two ranks use in all steps together."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(9)
        self.inputs = torch.randn(2 * BATCH * STEPS, 20, generator=source)
        self.labels = torch.randint(0, 3, (len(self.inputs),), generator=source)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def check_trained(model: nn.Module, seen: list[torch.Tensor], rank: int, folder: Path) -> None:
    """Checks that the model equals one that a single process trains on all ranks' batches. ``seen`` are this rank's indices
    into `Points`, by step."""
    torch.save(seen, folder / f"seen-{rank}-part")
    (folder / f"seen-{rank}-part").rename(folder / f"seen-{rank}")
    await_file(folder / f"seen-{1 - rank}", 60)
    of_both = [torch.load(folder / f"seen-{each}") for each in range(2)]
    assert len(seen) == STEPS and [len(each) for each in of_both] == [STEPS, STEPS]
    assert sorted(torch.cat([*of_both[0], *of_both[1]]).tolist()) == list(range(2 * BATCH * STEPS)), (
        "every rank sees other points"
    )
    reference, points = network(), Points()
    optimizer = sgd(reference)
    for indices in zip(*of_both, strict=True):
        at = torch.cat(indices)
        optimizer.zero_grad()
        loss_of(reference(points.inputs[at]), points.labels[at]).backward()
        optimizer.step()
    start = network().state_dict()
    for name, expected in reference.state_dict().items():
        own = model.state_dict()[name]
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)
        assert not torch.equal(own, start[name])
