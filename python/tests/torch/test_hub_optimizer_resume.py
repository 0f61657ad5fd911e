"""HubOptimizer resumes from checkpoints of the hubs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, Ended

PROGRAM = """
import hashlib, sys, zlib
import torch
import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer

end, scheme = int(sys.argv[1]), sys.argv[2]
paramhub.torch.init(reproducible=True)
torch.manual_seed(paramhub.torch.rank())
frozen = torch.nn.Linear(8, 40)
frozen.requires_grad_(False)
model = torch.nn.Sequential(frozen, torch.nn.Tanh(), torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4))
optimizer = HubOptimizer(
    model,
    paramhub.AdamW(lr=0.01),
    params=[
        {"params": list(frozen.parameters())},
        {"params": list(model[2].parameters())},
        {"params": list(model[4].parameters()), "weight_decay": 0.1},
    ],
    scheme=scheme,
)
begin = optimizer.resumed_step or 0
for step in range(begin, end):
    if len(sys.argv) > 3 and step == int(sys.argv[3]):
        optimizer.broadcast_parameters()
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step)
    generator = torch.Generator().manual_seed(1000 * step + paramhub.torch.rank())
    inputs, targets = torch.randn(5, 8, generator=generator), torch.randint(0, 4, (5,), generator=generator)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
updates = {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
print(f"rank {paramhub.torch.rank()}: {begin} to {end}, {zlib.crc32(values):08x}, updates {updates}")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


Run = Callable[..., str]


@pytest.fixture
def run(launch: Callable[..., Ended], program: Path, tmp_path: Path) -> Run:
    """``run(end, scheme, *options)`` trains with two ranks, by default with a checkpoint every three steps."""

    def train(
        end: int, *options: str, scheme: str = "hub", name: str = "net", last: tuple[str, ...] = ()
    ) -> str:
        code, output = launch(
            *(*PARAMHUB, "run", "-n", "2", "--name", name, "--checkpoints", tmp_path / "ck", *options),
            *("--", PYTHON, program, str(end), scheme, *last),
        )
        assert code == 0, output
        return output

    return train


def ends(output: str) -> list[str]:
    return sorted(line[line.index("rank ") :] for line in output.splitlines() if "updates" in line)


@pytest.mark.parametrize("scheme", ["hub", "auto"])
def test_a_resumed_run_goes_on_to_the_same_bits(run: Run, scheme: str) -> None:
    every = ("--checkpoint-every", "3")
    whole = ends(run(9, *every, scheme=scheme, name="whole"))
    assert len(whole) == 2 and "0 to 9" in whole[0] and "updates {9}" in whole[0], whole
    assert whole[0].split(",")[1] == whole[1].split(",")[1], "ranks differ"
    run(5, *every, scheme=scheme)
    output = run(9, *every, "--resume", scheme=scheme)
    assert "parameters and optimizer state are those at the hubs, of step 5" in output
    assert ends(output) == [end.replace("0 to 9", "5 to 9") for end in whole]
    stays = (
        "layers 2, 4 go by hub: the layer's parameters are at the workers alone, and hubs write checkpoints"
    )
    assert (stays in output) == (scheme == "auto"), output


def test_layers_may_leave_the_hub_without_more_checkpoints(run: Run) -> None:
    run(4, "--checkpoint-every", "2")
    resumed = ("--checkpoint-every", "1000000", "--resume=4")
    expected = ends(run(8, *resumed))
    assert all("4 to 8" in end and "updates {8}" in end for end in expected), expected


def test_a_job_that_is_made_anew_has_checkpoints_of_its_own(run: Run, tmp_path: Path) -> None:
    output = run(4, "--checkpoint-every", "2", last=("2",))
    assert "no more checkpoints" not in output, output
    for job in ("net", "train-net%2Fhub-optimizer-1"):
        assert list((tmp_path / "ck" / job).glob("step-*/hub-0.json")), (job, output)


def test_factors_alone_are_refused_with_checkpoints(
    launch: Callable[..., Ended], program: Path, tmp_path: Path
) -> None:
    code, output = launch(
        *(*PARAMHUB, "run", "-n", "2", "--name", "net", "--checkpoints", tmp_path / "ck"),
        *("--", PYTHON, program, "2", "factors"),
    )
    assert code != 0
    assert "the scheme factors cannot be combined with `checkpoint_every`" in output
