"""A hub that is killed while PyTorch trains is replaced by its standby, and training ends at the bits of an undisturbed run."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, TORCHRUN, Ended, Program
from team import Rank, Team

import paramhub.torch
from paramhub.errors import MisuseError

PROGRAM = """
import os, sys, time, zlib
import torch
import paramhub
import paramhub.torch
from torch.nn.parallel import DistributedDataParallel

paramhub.torch.init(reproducible=True)
rank = paramhub.torch.rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 9000), torch.nn.Tanh(), torch.nn.Linear(9000, 4))
by_hook = sys.argv[1] == "hook"
if by_hook:
    torch.distributed.init_process_group("gloo")
    trained = DistributedDataParallel(model)
    trained.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
else:
    trained, optimizer = model, paramhub.torch.HubOptimizer(model, paramhub.AdamW(lr=0.01))
generator = torch.Generator().manual_seed(rank)
for step in range(40):
    inputs, targets = torch.randn(5, 8, generator=generator), torch.randint(0, 4, (5,), generator=generator)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(trained(inputs), targets).backward()
    optimizer.step()
    if step == 10:
        os.write(1, b"is at step 10\\n")
    while step == 30 and not os.path.exists("may-end"):
        time.sleep(0.01)
if not by_hook:
    optimizer.synchronize()
values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
os.write(1, f"rank {rank} ends with {zlib.crc32(values):08x}\\n".encode())
paramhub.torch.shutdown()
if by_hook:
    torch.distributed.destroy_process_group()
"""


def torchrun(url: str) -> tuple[tuple[str, ...], dict[str, str]]:
    environment = {"PARAMHUB_URL": url, "PARAMHUB_JOB_HUBS": "2", "PARAMHUB_JOB_REPLICAS": "1"}
    return (*TORCHRUN, "--nproc-per-node=2"), environment | {"PARAMHUB_JOB_HUB_LABEL": "kept"}


def run(url: str) -> tuple[tuple[str, ...], dict[str, str]]:
    options = ("--hub", url, "--hubs", "2", "--replicas", "1", "--hub-label", "kept")
    return (*PARAMHUB, "run", "-n", "2", *options, "--", PYTHON), {}


@pytest.mark.parametrize(
    ("launcher", "way"), [(torchrun, "optimizer"), (run, "optimizer"), (torchrun, "hook")]
)
def test_a_killed_hub_is_replaced_and_no_bit_changes(
    start: Callable[..., Program],
    launch: Callable[..., Ended],
    tmp_path: Path,
    launcher: Callable[[str], tuple[tuple[str, ...], dict[str, str]]],
    way: str,
) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    hub = (*PARAMHUB, "hub", "--listen", "127.0.0.1:0")
    first = start(*hub, "--manager", "127.0.0.1:0", "--label", "kept")
    url = first.await_output(r"(http://\S+)")[1]
    second = start(*hub, "--join", url, "--label", "kept")
    other = start(*hub, "--join", url)
    other.await_output("hub ready")
    command, environment = launcher(url)
    may_end = tmp_path / "may-end"
    may_end.touch()
    code, undisturbed = launch(*command, program, way, env=environment)
    assert code == 0, undisturbed
    may_end.unlink()
    disturbed = start(*command, program, way, env=environment)
    disturbed.await_output(r"is at step 10")
    second.signal(signal.SIGKILL)
    may_end.touch()
    code, output = disturbed.wait()
    assert code == 0, output
    ends = [sorted(re.findall(r"rank \d ends with \w+", each)) for each in (undisturbed, output)]
    assert len(ends[0]) == 2 and ends[0] == ends[1], output
    assert "takes over" in first.output()
    assert "routes" not in other.output(), "it does not have the label that the jobs ask for"


def initialise(rank: Rank, options: dict[str, object]) -> str:
    with pytest.raises((MisuseError, RuntimeError)) as refused:
        paramhub.torch.init(**options)
    return str(refused.value)


def test_replicas_without_a_second_hub_are_refused(team: Team) -> None:
    [message] = team(initialise, {"replicas": 1}, ranks=1)
    assert "would start the only hub itself" in message
    [message] = team(initialise, {"url": "http://127.0.0.1:1", "replicas": 1, "host_hub": True}, ranks=1)
    assert "leave one of them out" in message
    [message] = team(initialise, {}, ranks=1, env={"PARAMHUB_JOB_REPLICAS": "x"})
    assert "PARAMHUB_JOB_REPLICAS is 'x': a whole number" in message


def test_a_choice_of_hubs_that_cannot_be_is_refused(team: Team) -> None:
    [message] = team(initialise, {"hub_label": "ssd"}, ranks=1)
    assert "would start its hub itself" in message
    [message] = team(initialise, {"url": "http://127.0.0.1:1"}, ranks=1, env={"PARAMHUB_JOB_MAX_HUBS": "x"})
    assert "PARAMHUB_JOB_MAX_HUBS is 'x': a whole number" in message
