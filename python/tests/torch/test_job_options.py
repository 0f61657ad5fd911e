"""What a run asks of its jobs, under plain torchrun and under `paramhub run`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import PARAMHUB, PYTHON, TORCHRUN, Ended, Program
from team import Rank, Team, free_port

import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer

CHECKPOINTED = """
import os, sys, time, zlib
import torch
import paramhub
import paramhub.torch

END, WAITS_AT = 40, int(sys.argv[1])
paramhub.torch.init(checkpoints="checkpoints", checkpoint_every="5", reproducible=True)
rank = paramhub.torch.rank()
torch.manual_seed(1)
model = torch.nn.Linear(8, 4)
optimizer = paramhub.torch.HubOptimizer(model, paramhub.AdamW(lr=0.01))
os.write(1, f"rank {rank}: from step {optimizer.resumed_step}\\n".encode())
for step in range(optimizer.resumed_step or 0, END):
    if step == WAITS_AT:
        while not any(name.startswith("step-0000000030") for _, names, _ in os.walk("checkpoints") for name in names):
            time.sleep(0.01)
        os.write(1, f"rank {rank} waits as process {os.getpid()}\\n".encode())
        time.sleep(600)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    optimizer.zero_grad()
    model(torch.randn(5, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
optimizer.synchronize()
values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
os.write(1, f"rank {rank}: ends with {zlib.crc32(values):08x}\\n".encode())
optimizer.close()
"""

WAITS = """
import os, time
import torch
import paramhub
import paramhub.torch

models = [torch.nn.Linear(8, 4) for _ in range(2)]
optimizers = [paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.1)) for model in models]
averages = paramhub.torch.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))
os.write(1, f"rank {paramhub.torch.rank()} waits as process {os.getpid()}\\n".encode())
while not os.path.exists("may-end"):
    time.sleep(0.01)
"""

AGAIN = """
import torch
import paramhub.torch as hvd

for _ in range(2):
    hvd.init()
    layer = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    layer(torch.full((1, 3), float(hvd.rank()))).sum().backward()
    optimizer.step()
    assert layer.weight.grad.tolist() == [[0.5, 0.5, 0.5]], layer.weight.grad
    hvd.shutdown()
"""

OF_EVERY_JOB = ("weight 3", "max_hubs 1", "hub_label fast", "redial_grace_s 0", "progress_timeout_s 50")
ENVIRONMENT = {
    "PARAMHUB_JOB_WEIGHT": "3",
    "PARAMHUB_JOB_REDIAL_GRACE": "0",
    "PARAMHUB_JOB_MAX_HUBS": "1",
    "PARAMHUB_JOB_HUB_LABEL": "fast",
    "PARAMHUB_JOB_PROGRESS_TIMEOUT": "50",
    "PARAMHUB_JOB_STRAGGLERS": "drop:0.5",
}

Start = Callable[..., Program]
Launch = Callable[..., Ended]


def ends(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d: ends with .*", output))


def test_torchrun_goes_on_from_a_checkpoint_of_rank_0s_hub(start: Start, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(CHECKPOINTED)

    def run(name: str, waits_at: int) -> Program:
        return start(*TORCHRUN, "--nproc-per-node=2", f"--rdzv-id={name}", program, str(waits_at))

    code, undisturbed = run("undisturbed", -1).wait()
    assert code == 0 and len(ends(undisturbed)) == 2, undisturbed
    cut_off = run("resnet", 33)
    for rank in range(2):
        cut_off.await_output(rf"rank {rank} waits as process")
    for process in re.findall(r"waits as process (\d+)", cut_off.output()):
        os.kill(int(process), signal.SIGKILL)
    code, output = cut_off.wait()
    assert code != 0 and "into" in output and "as run resnet" in output, output
    code, output = run("resnet", -1).wait()
    assert code == 0 and ends(output) == ends(undisturbed), (undisturbed, output)
    assert set(re.findall(r"from step (\w+)", output)) == {"30"}, output
    # That run has finished, so its name begins anew.
    code, output = run("resnet", -1).wait()
    assert code == 0 and set(re.findall(r"from step (\w+)", output)) == {"None"}, output


def test_every_job_of_a_run_has_its_options(start: Start, launch: Launch, tmp_path: Path) -> None:
    program, url = tmp_path / "train.py", f"http://127.0.0.1:{free_port()}"
    program.write_text(WAITS)
    hub = start(
        *PARAMHUB,
        "hub",
        "--manager",
        url.removeprefix("http://"),
        "--listen",
        "127.0.0.1:0",
        "--label",
        "fast",
    )
    hub.await_output(r"hub ready|http://")
    by_run = f"--weight 3 --redial-grace 0 --max-hubs 1 --hub-label fast --progress-timeout 50 --stragglers drop:0.5 --hub {url}"
    starts = [
        ((*TORCHRUN, "--nproc-per-node=2", program), {"PARAMHUB_URL": url, **ENVIRONMENT}),
        ((*PARAMHUB, "run", "-n", "2", *by_run.split(), "--", PYTHON, program), {}),
    ]
    for command, environment in starts:
        ranks = start(*command, env=environment)
        for rank in range(2):
            ranks.await_output(rf"rank {rank} waits as process")
        code, output = launch(*PARAMHUB, "jobs", "list", "--state", "living", "--json", "--hub", url)
        assert code == 0, output
        jobs = json.loads(output)
        (tmp_path / "may-end").touch()
        code, output = ranks.wait()
        assert code == 0, output
        (tmp_path / "may-end").unlink()
        assert sorted(job["optimizer"] for job in jobs) == ["mean", "sgd", "sgd"]
        for job in jobs:
            asked = job["options"].split(", ")
            assert set(OF_EVERY_JOB) <= set(asked), job
            # A job without parameters cannot leave out what is late.
            assert ("stragglers drop:0.5" in asked) == (job["optimizer"] == "sgd"), job


def train_at_own_pace(rank: Rank) -> None:
    paramhub.torch.init(consistency="async", codec="bf16")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.02))
    for step in range(10 if rank.rank == 0 else 60):
        if rank.rank == 0 and step == 5:
            rank.await_mark("fast")
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank.rank))
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
    if rank.rank == 1:
        rank.mark("fast")
    assert model.weight.sub(1).abs().max() < 0.2, model.weight
    optimizer.close()


def test_an_asynchronous_rank_waits_for_nobody(team: Team) -> None:
    team(train_at_own_pace, ranks=2)


def ask_for_what_cannot_be_had(rank: Rank) -> None:
    for options, refusal in (
        ({"consistency": "soon"}, "`sync`, `async` or `staleness:STEPS`, not 'soon'"),
        ({"checkpoint_every": "100"}, "give checkpoints=DIR"),
        ({"checkpoints": "ck", "url": "http://127.0.0.1:1"}, "has its own"),
        ({"checkpoints": "ck", "resume": "latest"}, r"init\(run_id=\)"),
        ({"max_workers": 4}, '"rewind"'),
        ({"run_id": "a b"}, "run_id is 'a b'"),
        ({"hub_label": "fast"}, "PARAMHUB_URL"),
    ):
        if "run_id" in options:
            options |= {"checkpoints": "ck"}
        with pytest.raises(paramhub.MisuseError, match=refusal):
            paramhub.torch.init(**options)
    os.environ["PARAMHUB_JOB_WEIGHT"] = "heavy"
    with pytest.raises(paramhub.MisuseError, match="PARAMHUB_JOB_WEIGHT is 'heavy': a whole number"):
        paramhub.torch.init()


def test_what_cannot_be_had_is_refused(team: Team) -> None:
    team(ask_for_what_cannot_be_had, ranks=1)


def test_ranks_of_paramhub_run_may_begin_again(launch: Launch, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(AGAIN)
    code, output = launch(*PARAMHUB, "run", "-n", "2", "--", PYTHON, program)
    assert code == 0, output
