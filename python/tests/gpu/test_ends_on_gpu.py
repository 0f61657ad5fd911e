"""The ends of ranks that train on a GPU, also while the device computes: their exit codes, and what they print."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, Ended

SUPPORT = str(Path(__file__).resolve().parents[1] / "support")
WAYS = ("optimizer", "hook", "distributed")

SCRIPT = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paramhub
import paramhub.torch
from device import DEVICE, begin, keep_busy, loss_of, make

way, end = sys.argv[1:]
begin()
if way == "hook":
    dist.init_process_group("gloo")
paramhub.torch.init()
model = called = make()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if way == "optimizer":
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.05))
elif way == "distributed":
    optimizer = paramhub.torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
else:
    called = DistributedDataParallel(model)
    called.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
rank = paramhub.torch.rank()
for step in range(3):
    optimizer.zero_grad()
    loss = loss_of(called, step, rank)
    if step == 2 and end != "tidy":
        keep_busy()
    loss.backward()
    if step == 2 and end == "in a step":
        # All ranks end here: the device still computes gradients, for which a thread waits.
        raise SystemExit(3)
    optimizer.step()
if end == "tidy":
    if way == "optimizer":
        optimizer.close()
    if way == "hook":
        dist.destroy_process_group()
    paramhub.torch.shutdown()
print(f"rank {rank} has come to its end\\n", end="")
"""


@pytest.mark.parametrize("end", ["tidy", "at once", "in a step"])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_end_with_their_own_code(
    launch: Callable[..., Ended], tmp_path: Path, way: str, end: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = [SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
    code, output = launch(
        *PARAMHUB,
        "run",
        "-n",
        "2",
        "--",
        PYTHON,
        script,
        way,
        end,
        env={"PYTHONPATH": os.pathsep.join(path)},
        timeout=100,
    )
    if end == "in a step":
        assert code == 3, output
    else:
        assert code == 0, output
        assert len(re.findall(r"rank \d has come to its end", output)) == 2, output
    for sign in ("Segmentation", "Fatal Python error", "terminate called", "core dumped"):
        assert sign not in output, output
