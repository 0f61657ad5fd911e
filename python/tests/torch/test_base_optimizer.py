"""HubOptimizer's start does not import torch's compiler, which takes as long as importing torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launching import PYTHON, Ended

PROGRAM = """
import sys
import torch
import paramhub.torch

paramhub.torch.init()
model = torch.nn.Linear(2, 1)
torch.nn.init.zeros_(model.weight)
optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.5))

def train(model):
    before = model.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return (model.weight.detach() - before).tolist()

print("without", train(model), "torch._dynamo" in sys.modules)
compiled = torch.compile(model, backend="eager")
print("with", train(compiled), "torch._dynamo" in sys.modules)
"""


def test_the_compiler_is_imported_by_programs_alone_that_compile(
    launch: Callable[..., Ended], tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    code, output = launch(PYTHON, program)
    assert code == 0, output
    assert "without [[-1.0, -1.0]] False" in output and "with [[-1.0, -1.0]] True" in output, output
