"""A job that goes on without lost ranks keeps its learning rate schedule when rank 0 is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from launching import PARAMHUB, PYTHON, Ended

PROGRAM = """
import os, signal
import torch
import paramhub
import paramhub.torch

paramhub.torch.init()
rank = paramhub.torch.rank()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=1.0))
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[6, 9], gamma=0.5)
for step in range(12):
    if rank == 0 and step == 4:
        optimizer.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    # The gradient of the weight is 1.
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    scheduler.step()
optimizer.synchronize()
os.write(1, f"rank {rank}: rate {scheduler.get_last_lr()[0]}, weight {model.weight.item()}\\n".encode())
"""


def test_the_schedule_goes_on_without_rank_0(launch: Callable[..., Ended], tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    code, output = launch(*PARAMHUB, "run", "-n", "3", "--on-worker-loss", "continue", "--", PYTHON, program)
    assert code == 0, output
    # Six steps with a rate of 1, three with 0.5 and three with 0.25.
    for rank in (1, 2):
        assert f"rank {rank}: rate 0.25, weight -8.25" in output, output
    assert "rank 0:" not in output, output
