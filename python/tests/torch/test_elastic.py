"""Ranks that are all started again, more or fewer than before, go on where the hub is."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import PARAMHUB, PYTHON, Program
from team import Rank, Team, TeamError, free_port

import paramhub.torch

PROGRAM = """
import os, random, sys, time
import torch
import paramhub
import paramhub.torch

options = dict(word.split("=") for word in sys.argv[1:])
end, waits_at = int(options["end"]), int(options.get("waits_at", -1))
paramhub.torch.init(on_worker_loss="rewind", max_workers=4, linger=60, dead_after=5)
rank, size = paramhub.torch.rank(), paramhub.torch.size()
model = torch.nn.Linear(3, 2, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=1.0))
random.seed(rank)
state = paramhub.torch.State(optimizer, batch=0, drawn=0.0)

def say(text):
    os.write(1, f"{text}\\n".encode())

def value():
    return f"{model.weight[0, 0].item():.6f}"

say(f"rank {rank} of {size} is process {os.getpid()}")
say(f"rank {rank} of {size} begins at {optimizer.resumed_step}, batch {state.batch}, drawn {state.drawn:.9f}")

@paramhub.torch.run(state)
def train():
    while state.batch < end and not os.path.exists("changes-are-over"):
        if state.batch == waits_at:
            following = random.Random()
            following.setstate(random.getstate())
            say(f"rank {rank} waits with {value()}, drawn {state.drawn:.9f}, next {following.random():.9f}")
            time.sleep(600)
        if "slow" in options:
            time.sleep(0.05)
        optimizer.zero_grad()
        # The gradient of each element is rank + 1.
        (model(torch.ones(1, 3)) * (rank + 1)).sum().backward()
        optimizer.step()
        state.batch, state.drawn = state.batch + 1, random.random()
        state.commit()
    optimizer.synchronize()

train()
say(f"rank {rank} ends with {value()} after {state.batch}")
"""

Start = Callable[..., Program]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def url(start: Start) -> str:
    hub = start(*PARAMHUB, "hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0")
    return hub.await_output(r"(http://\S+)")[1]


def test_each_start_goes_on_with_as_many_ranks_as_it_has(start: Start, program: Path, url: str) -> None:
    def ranks(size: int, *options: str) -> list[Program]:
        common = {"PARAMHUB_URL": url, "PARAMHUB_RUN_ID": "mine", "WORLD_SIZE": str(size)}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [start(PYTHON, program, *options, env={**common, "RANK": str(rank)}) for rank in range(size)]

    expected, made, drawn = 0.0, 0, ["0.000000000"]
    for size, until in ((2, 4), (3, 9), (1, 12), (2, 15)):
        # The mean gradient is (size + 1) / 2.
        expected -= (until - made) * (size + 1) / 2
        started = ranks(size, "end=100", f"waits_at={until}")
        waits = [
            process.await_output(r"rank \d waits with (\S+), drawn (\S+), next (\S+)") for process in started
        ]
        for rank, process in enumerate(started):
            begins = re.findall(r"begins at (\w+), batch (\d+), drawn (\S+)", process.output())
            # A rank that was not there before has rank 0's values.
            own = drawn[rank] if rank < len(drawn) else drawn[0]
            assert begins == [(str(made) if made else "None", str(made), own)]
            assert float(waits[rank][1]) == pytest.approx(expected)
        assert len({wait[3] for wait in waits}) == size, "each rank has random numbers of its own"
        made, drawn = until, [wait[2] for wait in waits]
        for process in started:
            process.signal(signal.SIGKILL)
            process.wait()
    for process in ranks(4, "end=16"):
        code, output = process.wait()
        assert code == 0, output
        assert f"ends with {expected - 2.5:.6f} after 16" in output


def test_torchrun_goes_on_with_the_hosts_that_there_are(start: Start, program: Path, url: str) -> None:
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--monitor-interval=0.1"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=hosts"]
    options += ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"]

    def agent() -> Program:
        words = (PYTHON, "-m", "torch.distributed.run", *options, program, "end=100000", "slow=1")
        # With the store that they share, agents of torch 2.15 that come later wait in vain for its address.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return start(*words, env={"PARAMHUB_URL": url, "PARAMHUB_RUN_ID": "hosts", **own_store})

    first = agent()
    first.await_output(r"rank 0 of 1 begins at None")
    second = agent()
    # torchrun ends all ranks when a host comes, and starts them again.
    joined = second.await_output(r"rank \d of 2 begins at (\d+), batch (\d+)")
    assert joined[1] == joined[2] and int(joined[1]) > 0
    first.await_output(rf"rank \d of 2 begins at {joined[1]}, batch {joined[1]}")
    # The rank is in a session of its own.
    [process] = re.findall(r"rank \d of 2 is process (\d+)", second.output())
    second.signal_group(signal.SIGKILL)
    os.kill(int(process), signal.SIGKILL)
    alone = first.await_output(r"rank 0 of 1 begins at ([1-9]\d*), batch (\d+)")
    assert alone[1] == alone[2] and int(alone[1]) >= int(joined[1])
    (program.parent / "changes-are-over").touch()
    code, output = first.wait()
    assert code == 0, output
    assert "rank 0 ends with" in output


def initialise(rank: Rank, arguments: dict[str, str | int]) -> None:
    paramhub.torch.init(**arguments)  # type: ignore[arg-type]
    # The job is created with the optimizer.
    paramhub.torch.HubOptimizer(torch.nn.Linear(2, 2), paramhub.SGD(lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (
            {"on_worker_loss": "continue", "max_workers": 4},
            {},
            "max_workers is 4, but on_worker_loss is `continue`",
        ),
        (
            {"on_worker_loss": "rewind"},
            {"PARAMHUB_JOB_MAX_WORKERS": "many"},
            "PARAMHUB_JOB_MAX_WORKERS is 'many'",
        ),
        ({"on_worker_loss": "rewind", "max_workers": 1}, {}, "max_workers is 1, less than the 2 workers"),
    ],
)
def test_what_cannot_change_is_refused(
    team: Team, url: str, arguments: dict[str, str | int], variables: dict[str, str], reason: str
) -> None:
    with pytest.raises(TeamError) as raised:
        team(initialise, arguments, ranks=2, env={"PARAMHUB_URL": url, "PARAMHUB_RUN_ID": "a", **variables})
    assert reason in str(raised.value)
