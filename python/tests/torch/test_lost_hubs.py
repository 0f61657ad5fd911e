"""A hub that is lost, of a run with checkpoints: ranks go back to the newest one by themselves, and end with the bits of an
undisturbed run."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from launching import AWAITED_S, PARAMHUB, PYTHON, TORCHRUN, Program
from team import free_port

PROGRAM = """
import os, random, time, zlib
import torch
import paramhub
import paramhub.torch

def say(text):
    os.write(1, f"{text}\\n".encode())

END = 40
paramhub.torch.init(
    on_worker_loss="rewind", linger=90, reproducible=True, checkpoint_every="5", timeout=90, dead_after=10
)
rank = paramhub.torch.rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 9000), torch.nn.BatchNorm1d(9000), torch.nn.Linear(9000, 4))
optimizer = paramhub.torch.HubOptimizer(model, paramhub.AdamW(lr=0.01))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, END)
# The data comes from the generator whose state the program's state carries.
torch.manual_seed(rank)
state = paramhub.torch.State(optimizer, model=model, scheduler=scheduler, batch=0)

@paramhub.torch.run(state)
def train():
    say(f"rank {rank} begins at {optimizer.resumed_step} and is process {os.getpid()}")
    while state.batch < END:
        while state.batch == END - 1 and not os.path.exists("may-end"):
            time.sleep(0.01)
        inputs, targets = torch.randn(5, 8), torch.randint(0, 4, (5,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
        state.batch += 1
        state.commit()
        time.sleep(0.01)
        say(f"rank {rank} has made {state.batch}")
    optimizer.synchronize()

train()
values = b"".join(parameter.detach().numpy().tobytes() for parameter in [*model.parameters(), *model.buffers()])
say(f"rank {rank} ends with {zlib.crc32(values):08x}")
"""

Start = Callable[..., Program]


class Place(NamedTuple):
    """A run with a folder of checkpoints."""

    start: Start
    folder: Path

    def hub(self, *options: object) -> Program:
        hub = self.start(*PARAMHUB, "hub", "--checkpoints", self.folder / "checkpoints", *options)
        hub.await_output(r"hub ready|http://")
        return hub

    def ranks(self, url: str, run: str, hubs: int = 1) -> Program:
        program = self.folder / "train.py"
        program.write_text(PROGRAM)
        environment = {"PARAMHUB_URL": url, "PARAMHUB_JOB_HUBS": str(hubs), "PARAMHUB_RUN_ID": run}
        return self.start(*TORCHRUN, "--nproc-per-node=2", program, env=environment)

    def undisturbed(self, url: str, hubs: int = 1) -> list[str]:
        (self.folder / "may-end").touch()
        code, output = self.ranks(url, "undisturbed", hubs).wait()
        assert code == 0, output
        (self.folder / "may-end").unlink()
        return ends(output)

    def await_checkpoint(self, job: str, step: int, hubs: int = 1) -> None:
        """Waits until a checkpoint of this step or a later one is whole."""
        deadline = time.monotonic() + AWAITED_S
        parts = [f"hub-{hub}.json" for hub in range(hubs)]
        while time.monotonic() < deadline:
            for folder in (self.folder / "checkpoints").glob(f"{job}*/step-*"):
                if int(folder.name[5:15]) >= step and all((folder / part).exists() for part in parts):
                    return
            time.sleep(0.01)
        raise AssertionError(f"no checkpoint of step {step} or later")

    def end(self, ranks: Program) -> str:
        (self.folder / "may-end").touch()
        code, output = ranks.wait()
        assert code == 0, output
        return output


@pytest.fixture
def place(start: Start, tmp_path: Path) -> Place:
    return Place(start, tmp_path)


def ends(output: str) -> list[str]:
    found = sorted(re.findall(r"rank \d ends with \w+", output))
    assert len(found) == 2, output
    return found


def beginnings(output: str) -> list[str]:
    return re.findall(r"rank 0 begins at (\w+)", output)


def kill_a_rank(ranks: Program, chance: random.Random) -> None:
    """Kills one of the two ranks, unless it has just ended."""
    process = chance.choice(re.findall(r"is process (\d+)", ranks.output())[-2:])
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(process), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_hub_with_its_manager_is_started_again_and_the_ranks_go_on(place: Place, number: int) -> None:
    manager, data = free_port(), free_port()
    options = (
        "--listen",
        f"127.0.0.1:{data}",
        "--manager",
        f"127.0.0.1:{manager}",
        "--state",
        place.folder / "state",
    )
    hub, url = place.hub(*options), f"http://127.0.0.1:{manager}"
    undisturbed = place.undisturbed(url)
    ranks = place.ranks(url, "disturbed")
    for starts, step in ((2, 5), (3, 20)):
        place.await_checkpoint("train-disturbed", step)
        hub.signal(number)
        hub.wait()
        hub = place.hub(*options)
        ranks.await_output(rf"(?:rank 0 begins at[\s\S]*){{{starts}}}")
    output = place.end(ranks)
    assert ends(output) == undisturbed, output
    began = beginnings(output)
    assert began[0] == "None" and int(began[1]) >= 5 and int(began[2]) >= 20, output
    made = [re.findall(r"rank 0 has made (\d+)", part) for part in output.split("rank 0 begins at")[1:3]]
    lost = [int(steps[-1]) - int(step) for steps, step in zip(made, began[1:], strict=True)]
    if number == signal.SIGTERM:
        # It takes a last checkpoint when it shuts down, if the ranks reach a step together in time.
        assert min(lost) <= 1, output


def test_kills_of_ranks_and_their_hub_at_any_moment_change_no_bit(place: Place) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    manager, data = free_port(), free_port()
    options = (
        "--listen",
        f"127.0.0.1:{data}",
        "--manager",
        f"127.0.0.1:{manager}",
        "--state",
        place.folder / "state",
    )
    hub, url = place.hub(*options), f"http://127.0.0.1:{manager}"
    undisturbed = place.undisturbed(url)
    command = (
        "run",
        "-n",
        "2",
        "--hub",
        url,
        "--on-worker-loss",
        "rewind",
        "--max-restarts",
        "20",
        "--name",
        "disturbed",
        "--checkpoint-every",
        "3",
    )
    ranks = place.start(*PARAMHUB, *command, "--", PYTHON, place.folder / "train.py")
    # Before the first checkpoint the loss of the hub ends the run.
    place.await_checkpoint("disturbed", 3)
    for _ in range(6):
        time.sleep(chance.uniform(0.0, 1.5))
        if chance.random() < 0.6:
            hub.signal(signal.SIGKILL)
            hub.wait()
            time.sleep(chance.choice([0.0, 0.0, 1.0]))
            hub = place.hub(*options)
        else:
            kill_a_rank(ranks, chance)
    output = place.end(ranks)
    assert ends(output) == undisturbed, output


def test_kills_of_ranks_and_hubs_with_standbys_change_no_bit(place: Place) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    manager = place.start(*PARAMHUB, "manager", "--listen", "127.0.0.1:0")
    url = manager.await_output(r"(http://\S+)")[1]
    hubs = [place.hub("--listen", "127.0.0.1:0", "--join", url) for _ in range(2)]
    undisturbed = place.undisturbed(url, hubs=2)
    command = ["run", "-n", "2", "--hub", url, "--hubs", "2", "--replicas", "1", "--on-worker-loss", "rewind"]
    command += ["--max-restarts", "20", "--name", "disturbed", "--checkpoint-every", "3", "--dead-after", "2"]
    ranks = place.start(*PARAMHUB, *command, "--", PYTHON, place.folder / "train.py")
    place.await_checkpoint("disturbed", 3, hubs=2)
    begun = len(beginnings(ranks.output()))
    # The first hub costs nothing while all chunks have standbys.
    hubs.pop(chance.randrange(2)).signal(signal.SIGKILL)
    ranks.await_output("goes on at its standbys|takes over|rank 0 goes on over")
    assert len(beginnings(ranks.output())) == begun
    hubs.append(place.hub("--listen", "127.0.0.1:0", "--join", url))
    # A rank that was only frozen hears from the manager that the others have gone back, and joins again.
    process = int(re.findall(r"is process (\d+)", ranks.output())[-1])
    os.kill(process, signal.SIGSTOP)
    ranks.await_output(r"rank \d was lost: it has not been heard for 2 s")
    os.kill(process, signal.SIGCONT)
    ranks.await_output(rf"(?:is process {process}\b[\s\S]*){{2}}")
    for _ in range(4):
        time.sleep(chance.uniform(0.0, 1.5))
        if chance.random() < 0.5:
            # Sometimes another hub still receives the chunks of this one, and ranks go back.
            hubs.pop(0).signal(signal.SIGKILL)
            time.sleep(chance.choice([0.0, 0.0, 1.0]))
            hubs.append(place.hub("--listen", "127.0.0.1:0", "--join", url))
        else:
            kill_a_rank(ranks, chance)
    output = place.end(ranks)
    assert ends(output) == undisturbed, output


def test_a_killed_hub_of_two_is_replaced_by_another(place: Place) -> None:
    manager = place.start(*PARAMHUB, "manager", "--listen", "127.0.0.1:0")
    url = manager.await_output(r"(http://\S+)")[1]
    hubs = [place.hub("--listen", "127.0.0.1:0", "--join", url) for _ in range(2)]
    undisturbed = place.undisturbed(url, hubs=2)
    ranks = place.ranks(url, "disturbed", hubs=2)
    place.await_checkpoint("train-disturbed", 5, hubs=2)
    hubs[0].signal(signal.SIGKILL)
    hubs[0].wait()
    place.hub("--listen", "127.0.0.1:0", "--join", url)
    output = place.end(ranks)
    assert ends(output) == undisturbed, output
    began = beginnings(output)
    assert began[0] == "None" and int(began[-1]) >= 5, output


def test_a_hub_that_is_lost_before_its_first_checkpoint_ends_the_run(place: Place) -> None:
    manager = place.start(*PARAMHUB, "manager", "--listen", "127.0.0.1:0")
    url = manager.await_output(r"(http://\S+)")[1]
    hub = place.hub("--listen", "127.0.0.1:0", "--join", url)
    ranks = place.ranks(url, "early")
    ranks.await_output(r"rank 0 has made 2$")
    hub.signal(signal.SIGKILL)
    hub.wait()
    place.hub("--listen", "127.0.0.1:0", "--join", url)
    (place.folder / "may-end").touch()
    code, output = ranks.wait()
    if code == 0:
        # The first checkpoint was whole before the kill.
        assert len(beginnings(output)) == 2, output
    else:
        assert "a hub was lost before its first checkpoint was whole" in output, output
