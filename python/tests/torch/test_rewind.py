"""Ranks that go back to an earlier step when one of them is lost end with the bits of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import AWAITED_S, PARAMHUB, PYTHON, TORCHRUN, Ended, Program

PROGRAM = """
import os, random, sys, time, zlib
import torch
import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer

def say(text):
    # One write, so that the lines of several processes do not mix.
    os.write(1, f"{text}\\n".encode())

options = dict(word.split("=") for word in sys.argv[1:])
end = int(options["end"])
paramhub.torch.init(on_worker_loss="rewind", linger=60, reproducible=True, rewind_every=int(options.get("every", 1)))
rank = paramhub.torch.rank()
torch.manual_seed(os.getpid())
model = torch.nn.Sequential(
    torch.nn.Linear(8, 3000), torch.nn.BatchNorm1d(3000), torch.nn.Dropout(0.2), torch.nn.Linear(3000, 4)
)
if rank == 0:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(number)).mul_(0.1)
optimizer = HubOptimizer(model, paramhub.AdamW(lr=0.01))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, end // 3)
# Data and dropout come from generators whose states the program's state carries.
torch.manual_seed(rank)
random.seed(rank)
state = paramhub.torch.State(optimizer, model=model, scheduler=scheduler, epoch=0, batch=0, seen=torch.zeros(1))

@paramhub.torch.run(state)
def train():
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    say(f"rank {rank}, start {start}: from step {optimizer.resumed_step} as process {os.getpid()}")
    while state.epoch < end // 10:
        while state.batch < 10:
            # No kill comes after the end.
            while state.step == end - 1 and not os.path.exists("all-kills-are-over"):
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.01))
            inputs, targets = torch.randn(5, 8), torch.randint(0, 4, (5,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            state.batch += 1
            state.seen = state.seen + inputs.sum()
            scheduler.step()
            if state.batch < 10:
                state.commit()
        state.epoch, state.batch = state.epoch + 1, 0
        state.commit()
    optimizer.synchronize()

train()
values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
updates = {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
own = b"".join(buffer.numpy().tobytes() for buffer in model.buffers()) + state.seen.numpy().tobytes()
if "fails" in options and not os.path.exists("has-failed"):
    if rank == 0:
        # The other has left by then.
        time.sleep(1)
        open("has-failed", "w")
        raise RuntimeError("the evaluation has failed")
    optimizer.close()
say(f"rank {rank} ends: {zlib.crc32(values):08x}, own {zlib.crc32(own):08x}, updates {updates}")
"""

Start = Callable[..., Program]
Launch = Callable[..., Ended]


def run(restarts: int) -> tuple[str, ...]:
    options = ("run", "-n", "2", "--on-worker-loss", "rewind", "--max-restarts", str(restarts))
    return (*PARAMHUB, *options, "--", PYTHON)


def torchrun(restarts: int) -> tuple[str, ...]:
    return (*TORCHRUN, "--nproc-per-node=2", "--monitor-interval=0.1", f"--max-restarts={restarts}")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def ends(output: str) -> list[str]:
    """How each rank has ended, by rank."""
    return sorted(re.findall(r"rank \d ends: .*", output))


@pytest.mark.parametrize(("launcher", "every"), [(torchrun, 7), (run, 1)])
def test_kills_at_any_moment_change_no_bit(
    start: Start, launch: Launch, program: Path, launcher: Callable[[int], tuple[str, ...]], every: int
) -> None:
    steps, kills, are_over = 120, 3, program.parent / "all-kills-are-over"
    are_over.touch()
    code, output = launch(*launcher(0), program, f"end={steps}", f"every={every}")
    assert code == 0, output
    undisturbed = ends(output)
    assert len(undisturbed) == 2 and f"updates {{{steps}}}" in undisturbed[0], output
    are_over.unlink()
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    disturbed = start(*launcher(kills), program, f"end={steps}", f"every={every}")
    killed: list[int] = []
    for kill in range(kills):
        # torchrun starts all ranks again, and `paramhub run` the one that was killed.
        start_number = kill if launcher is torchrun else 0
        pattern = rf"rank {chance.randrange(2)}, start {start_number}: from step \w+ as process (\d+)"
        killed.append(newest_process(disturbed, pattern, killed))
        time.sleep(chance.uniform(0, 0.4))
        os.kill(killed[-1], signal.SIGKILL)
    are_over.touch()
    code, output = disturbed.wait()
    assert code == 0, output
    assert ends(output) == undisturbed, output
    assert len(set(re.findall(r"from step (\w+)", output))) > 1, output


def test_a_rank_that_has_ended_well_is_started_again_when_the_others_go_back(
    launch: Launch, program: Path
) -> None:
    (program.parent / "all-kills-are-over").touch()
    code, output = launch(*run(2), program, "end=20", "every=7", "fails=1")
    assert code == 0, output
    assert "worker 1 had ended, and its job goes back; it is started again (1 of 2)" in output
    assert len(ends(output)) == 3 and len(set(ends(output))) == 2, output


def test_all_ranks_end_with_one_that_is_not_started_again(start: Start, program: Path) -> None:
    training = start(*run(0), program, "end=20")
    process = int(training.await_output(r"rank 1, start 0: from step None as process (\d+)")[1])
    os.kill(process, signal.SIGKILL)
    code, output = training.wait()
    assert code == 128 + signal.SIGKILL, output
    assert "paramhub: worker 1 was killed by SIGKILL" in output


def newest_process(program: Program, pattern: str, killed: list[int]) -> int:
    """The process in the newest line with this pattern, once it is none of those that were killed."""
    deadline = time.monotonic() + AWAITED_S
    while True:
        program.await_output(pattern)
        found = [int(process) for process in re.findall(pattern, program.output())]
        if found[-1] not in killed:
            return found[-1]
        assert time.monotonic() < deadline, program.output()
        time.sleep(0.01)
