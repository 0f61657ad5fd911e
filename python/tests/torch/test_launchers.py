"""Ranks meet under real launchers, and end as a launcher expects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, TORCHRUN, Ended

PROGRAM = """
import torch
import paramhub.torch
from paramhub.torch import _initialization, _tensors

paramhub.torch.init()
rank, size = paramhub.torch.rank(), paramhub.torch.size()
assert (rank, size) == (paramhub.torch.local_rank(), paramhub.torch.local_size())
world = _initialization.world()
assert world.allgather_text("greeting", f"from {rank}") == [f"from {other}" for other in range(size)]
gradient = torch.full((1000,), 1.0 + rank)
job = world.jobs.open("test", {"keys": [_tensors.key("w", gradient)], "optimizer": {"name": "sum"}}, inherits=True)
job.push_pull_in_place([0], [_tensors.memory_range(gradient)], gradient).wait(60)
print(f"{world.launcher}: rank {rank} of {size} has {gradient.mean():g}")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_torchrun(launch: Callable[..., Ended], program: Path) -> None:
    code, output = launch(*TORCHRUN, "--nproc-per-node=2", program)
    assert code == 0, output
    for rank in range(2):
        assert f"torchrun: rank {rank} of 2 has 3" in output


def test_a_variable_that_nothing_reads_is_named_once(launch: Callable[..., Ended], program: Path) -> None:
    wrong = {"PARAMHUB_TRASNPORT": "tcp"}
    warning = "the environment sets PARAMHUB_TRASNPORT, which nothing reads: did you mean PARAMHUB_TRANSPORT?"
    for launcher in ([*TORCHRUN, "--nproc-per-node=2"], [*PARAMHUB, "run", "-n", "2", "--", PYTHON]):
        code, output = launch(*launcher, program, env=wrong)
        assert code == 0, output
        assert output.count(warning) == 1, output


def test_paramhub_run(launch: Callable[..., Ended], program: Path) -> None:
    code, output = launch(*PARAMHUB, "run", "-n", "2", "--", PYTHON, program)
    assert code == 0, output
    for rank in range(2):
        assert f"environment: rank {rank} of 2 has 3" in output


def test_a_process_without_a_launcher(launch: Callable[..., Ended], program: Path) -> None:
    code, output = launch(PYTHON, program)
    assert code == 0, output
    assert "none: rank 0 of 1 has 1" in output
