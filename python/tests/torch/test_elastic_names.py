"""A script that was written for Horovod's elastic runs goes back with its state when a worker is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import PARAMHUB, PYTHON, Ended, Program
from team import Rank, Team

import paramhub
import paramhub.torch as hvd
from paramhub.errors import MisuseError

PROGRAM = """
import os, random, sys, time, zlib
import torch
import torch.nn.functional as F
import paramhub
import paramhub.torch as hvd

def say(text):
    # One write, so that the lines of several processes do not mix.
    os.write(1, f"{text}\\n".encode())

hvd.init(on_worker_loss="rewind", linger=60, reproducible=True)
generator = torch.Generator().manual_seed(1)
dataset = torch.utils.data.TensorDataset(
    torch.randn(250, 8, generator=generator), torch.randint(0, 4, (250,), generator=generator)
)
sampler = hvd.elastic.ElasticSampler(dataset)
# Each pass over a loader draws a number, and passes that begin once more would change the numbers of dropout.
loader = torch.utils.data.DataLoader(dataset, batch_size=5, sampler=sampler, generator=torch.Generator())
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(8, 3000), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(3000, 4))
optimizer = hvd.HubOptimizer(model, paramhub.AdamW(lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)

@hvd.elastic.run
def train(state, epochs):
    say(f"rank {hvd.rank()}: from step {state.optimizer.resumed_step} as process {os.getpid()}")
    for state.epoch in range(state.epoch, epochs):
        for number, (inputs, targets) in enumerate(loader):
            # No kill comes after the end.
            while state.step == epochs * 25 - 1 and not os.path.exists("all-kills-are-over"):
                time.sleep(0.01)
            time.sleep(random.uniform(0, 0.01))
            state.optimizer.zero_grad()
            F.cross_entropy(state.model(inputs), targets).backward()
            state.optimizer.step()
            scheduler.step()
            sampler.record_batch(number, len(inputs))
            state.seen = state.seen + inputs.sum()
            if state.step % 25 == 0:
                sampler.set_epoch(state.epoch + 1)
                state.epoch += 1
            state.commit()
    return state.epoch

state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0, seen=torch.zeros(1)
)
state.register_reset_callbacks([lambda: say(f"rank {hvd.rank()} was reset to epoch {state.epoch}")])
last = train(state, 4)
values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
updates = {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
seen = state.seen.numpy().tobytes()
say(f"rank {hvd.rank()} ends: {zlib.crc32(values):08x}, seen {zlib.crc32(seen):08x}, updates {updates}, epoch {last}")
"""


def run(restarts: int) -> tuple[str, ...]:
    options = ("run", "-n", "2", "--on-worker-loss", "rewind", "--max-restarts", str(restarts))
    return (*PARAMHUB, *options, "--", PYTHON)


def ends(output: str) -> list[str]:
    """How each rank has ended, by rank."""
    return sorted(re.findall(r"rank \d ends: .*", output))


def test_a_horovod_script_ends_as_if_no_worker_had_been_killed(
    start: Callable[..., Program], launch: Callable[..., Ended], tmp_path: Path
) -> None:
    script, are_over = tmp_path / "train.py", tmp_path / "all-kills-are-over"
    script.write_text(PROGRAM)
    are_over.touch()
    code, output = launch(*run(0), script)
    assert code == 0, output
    undisturbed = ends(output)
    assert len(undisturbed) == 2 and "updates {100}, epoch 4" in undisturbed[0], output
    assert "was reset" not in output
    are_over.unlink()
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    disturbed, victim = start(*run(1), script), chance.randrange(2)
    process = int(disturbed.await_output(rf"rank {victim}: from step None as process (\d+)")[1])
    time.sleep(chance.uniform(0, 0.5))
    os.kill(process, signal.SIGKILL)
    disturbed.await_output(rf"rank {1 - victim} was reset to epoch \d")
    are_over.touch()
    code, output = disturbed.wait()
    assert code == 0, output
    assert ends(output) == undisturbed, output


def misuse(rank: Rank) -> None:
    hvd.init()
    model = torch.nn.Linear(4, 3)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in (None, plain, hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())):
        with pytest.raises(MisuseError, match=r"HubOptimizer\(model, paramhub\.SGD"):
            hvd.elastic.TorchState(model, given, epoch=0)
    optimizer = hvd.HubOptimizer(model, paramhub.SGD(lr=0.1))
    with pytest.raises(MisuseError, match="one optimizer: 'other'"):
        hvd.elastic.TorchState(model, optimizer, other=plain)
    with pytest.raises(MisuseError, match="a TorchState cannot be called 'sync'"):
        hvd.elastic.TorchState(model, optimizer, sync=1)
    state = hvd.elastic.TorchState(model, optimizer, epoch=3)
    assert state.model is model and state.optimizer is optimizer and state.epoch == 3

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, more: int) -> int:
        state.sync()
        state.check_host_updates()
        state.commit()
        return state.epoch + more

    assert train(state, more=2) == 5
    with pytest.raises(MisuseError, match=r"first argument of train\(\) is to be a TorchState, not int"):
        train(3, more=2)


def test_misuse_is_refused(team: Team) -> None:
    team(misuse, ranks=1)


def sample(rank: Rank, length: int, batch: int) -> tuple[list[int], list[int]]:
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(length), seed=4)
    first = list(sampler)[:batch]
    assert len(sampler) == -(-length // rank.size)
    sampler.record_batch(0, batch)
    another = hvd.elastic.ElasticSampler(range(length), seed=4)
    another.load_state_dict(sampler.state_dict())
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(sampler) == -(-length // rank.size)
    return first, list(another)


@pytest.mark.parametrize(("length", "batch"), [(30, 4), (14, 3), (7, 2)])
def test_a_sampler_divides_what_is_left(team: Team, length: int, batch: int) -> None:
    results = team(sample, length, batch, ranks=3)
    first = [index for its, _ in results for index in its]
    rest = [index for _, its in results for index in its]
    assert len(set(first)) == len(first) == 3 * batch
    assert set(rest) == set(range(length)) - set(first)
    assert len({len(its) for _, its in results}) == 1
