"""Everything ends at once, the hub too, and the same command goes on from the checkpoints."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, TORCHRUN, Program
from team import free_port

PROGRAM = """
import os, sys, time, zlib
import torch
import paramhub
import paramhub.torch

def say(text):
    os.write(1, f"{text}\\n".encode())

end, waits_at = int(sys.argv[1]), int(sys.argv[2])
paramhub.torch.init(on_worker_loss="rewind", reproducible=True)
rank = paramhub.torch.rank()
torch.manual_seed(7 + rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.BatchNorm1d(300), torch.nn.Tanh(), torch.nn.Linear(300, 4))
optimizer = paramhub.torch.HubOptimizer(model, paramhub.AdamW(lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
state = paramhub.torch.State(optimizer, model=model, scheduler=scheduler, batch=0)

@paramhub.torch.run(state)
def train():
    say(f"rank {rank}: from step {optimizer.resumed_step}, batch {state.batch}")
    while state.batch < end:
        if state.batch == waits_at:
            optimizer.synchronize()
            say(f"rank {rank} waits as process {os.getpid()}")
            time.sleep(600)
        # The data follow from the state alone: the generator's, and the position.
        inputs, targets = torch.randn(6, 8), torch.randint(0, 4, (6,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs) + state.batch, targets).backward()
        optimizer.step()
        scheduler.step()
        state.batch += 1
        state.commit()

train()
optimizer.synchronize()
values = [*model.parameters(), *model.buffers()]
digest = zlib.crc32(b"".join(value.detach().numpy().tobytes() for value in values))
say(f"rank {rank}: at the end {digest:08x}, rate {scheduler.get_last_lr()[0]}")
"""

Start = Callable[..., Program]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def ends(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d: at the end .*", output))


def kill(*processes: int) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)


def checkpoints(folder: Path, run: str) -> list[int]:
    """The steps of which the hub has written checkpoints of a run. A job that is faster than the disk misses some."""
    written = folder.glob(f"train-{run}*/step-*/hub-0.json")
    return [int(path.parent.name.removeprefix("step-").split(".")[0]) for path in written]


def await_checkpoint(folder: Path, run: str) -> None:
    """Waits until the hub has written a checkpoint of a run."""
    deadline = time.monotonic() + 60
    while not checkpoints(folder, run):
        assert time.monotonic() < deadline, list(folder.rglob("*"))
        time.sleep(0.02)


def test_ranks_and_a_hub_that_are_killed_together_go_on_by_the_same_commands(
    start: Start, program: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "ck"

    def start_hub() -> tuple[Program, str]:
        where = ("--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", "--checkpoints", folder)
        hub = start(*PARAMHUB, "hub", *where)
        return hub, hub.await_output(r"(http://\S+)")[1]

    def ranks(url: str, run: str, waits_at: int) -> list[Program]:
        common = {"PARAMHUB_URL": url, "PARAMHUB_RUN_ID": run, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(free_port()), "PARAMHUB_JOB_CHECKPOINT_EVERY": "2"}
        words = (PYTHON, program, "9", str(waits_at))
        return [start(*words, env={**common, "RANK": str(rank)}) for rank in (0, 1)]

    def finish(started: list[Program]) -> str:
        outputs = []
        for rank in started:
            code, output = rank.wait()
            assert code == 0, output
            outputs.append(output)
        return "".join(outputs)

    hub, url = start_hub()
    undisturbed = finish(ranks(url, "undisturbed", -1))
    assert len(ends(undisturbed)) == 2

    started = ranks(url, "mine", 5)
    processes = [int(rank.await_output(r"waits as process (\d+)")[1]) for rank in started]
    await_checkpoint(folder, "mine")
    hub.signal(signal.SIGKILL)
    kill(*processes)
    hub.wait()
    step = str(max(checkpoints(folder, "mine")))
    hub, url = start_hub()
    # Another run must not get what this one has left.
    other = finish(ranks(url, "theirs", -1))
    assert re.findall(r"from step (\w+), batch (\d)", other) == [("None", "0")] * 2
    again = finish(ranks(url, "mine", -1))
    assert re.findall(r"from step (\w+), batch (\d)", again) == [(step, step)] * 2, again
    assert ends(again) == ends(undisturbed) == ends(other), again
    # It has finished, so its name begins anew, and says so.
    anew = finish(ranks(url, "mine", -1))
    assert re.findall(r"from step (\w+), batch (\d)", anew) == [("None", "0")] * 2, anew
    assert "WARNING: run mine finished at step 9" in anew
    hub.signal(signal.SIGTERM)
    hub.wait()


def test_torchrun_that_is_killed_with_its_ranks_and_their_hub_goes_on_by_the_same_command(
    start: Start, program: Path, tmp_path: Path
) -> None:
    def run(name: str, waits_at: int) -> Program:
        variables = {
            "PARAMHUB_RUN_ID": name,
            "PARAMHUB_JOB_CHECKPOINTS": "ck",
            "PARAMHUB_JOB_CHECKPOINT_EVERY": "2",
        }
        command = (*TORCHRUN, "--nproc-per-node=2", "--monitor-interval=0.1", program, "9", str(waits_at))
        return start(*command, env=variables)

    code, undisturbed = run("undisturbed", -1).wait()
    assert code == 0 and len(ends(undisturbed)) == 2, undisturbed
    first = run("mine", 7)
    processes = [int(first.await_output(rf"rank {rank} waits as process (\d+)")[1]) for rank in (0, 1)]
    await_checkpoint(tmp_path / "ck", "mine")
    # The hub ends with torchrun.
    first.signal(signal.SIGKILL)
    kill(*processes)
    first.wait()
    step = max(checkpoints(tmp_path / "ck", "mine"))
    code, output = run("mine", -1).wait()
    assert code == 0, output
    # The hub may have written another one before it ended.
    begun = {number for found in re.findall(r"from step (\w+), batch (\d)", output) for number in found}
    assert len(begun) == 1 and step <= int(begun.pop()), output
    assert ends(output) == ends(undisturbed), output
