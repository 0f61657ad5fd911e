"""Ranks that are started again go on with the parameters and the optimizer state that the hub holds."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, TORCHRUN, Ended, Program
from team import Rank, Team, TeamError, free_port

import paramhub
import paramhub.torch
from paramhub.errors import ConnectError

PROGRAM = """
import os, sys, time, zlib
import torch
import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer

def say(text):
    # One write, so that the lines of several processes do not mix.
    os.write(1, f"{text}\\n".encode())

options = dict(word.split("=") for word in sys.argv[1:])
end, start = int(options["end"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", options.get("start", 0)))
paramhub.torch.init(on_worker_loss="continue", linger=60)
rank = paramhub.torch.rank()
# Parameters are rank 0's of the first start, whatever a later start begins with.
torch.manual_seed(7 + rank + 100 * start)
model = torch.nn.Sequential(torch.nn.Linear(8, 3000), torch.nn.Tanh(), torch.nn.Linear(3000, 4))
optimizer = HubOptimizer(model, paramhub.AdamW(lr=0.01))
if "load" in options:
    optimizer.load_state_dict(optimizer.state_dict())
say(f"rank {rank}, start {start}: from step {optimizer.resumed_step}")
for step in range(optimizer.resumed_step or 0, end):
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs, targets = torch.randn(5, 8, generator=generator), torch.randint(0, 4, (5,), generator=generator)
    if start == 0 and step == int(options.get("waits_at", -1)):
        optimizer.synchronize()
        say(f"rank {rank} waits as process {os.getpid()}")
        time.sleep(600)
    if "slow" in options:
        time.sleep(0.005)
        if step % 10 == 0:
            say(f"rank {rank}, start {start}: step {step} as process {os.getpid()}")
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
optimizer.synchronize()
values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
updates = {int(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
say(f"rank {rank}: {end}, {zlib.crc32(values):08x}, updates {updates}")
if "fails" in options and start == 0 and rank == 1:
    optimizer.close()
elif "all_leave" in options and start == 0:
    paramhub.torch.shutdown()
    if rank == 0:
        raise RuntimeError("the evaluation has failed")
elif "fails" in options and start == 0:
    # The other has left by then.
    time.sleep(1)
    raise RuntimeError("the evaluation has failed")
"""

DIES_EARLY = """
import os, signal, threading
import torch
import paramhub
import paramhub.torch

start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
paramhub.torch.init(on_worker_loss="rewind")
# The hub needs some time to open a job of this size.
model = torch.nn.Sequential(*(torch.nn.Linear(1500, 1500) for _ in range(10)))
if start == 0 and paramhub.torch.rank() == 1:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
optimizer = paramhub.torch.HubOptimizer(model, paramhub.AdamW(lr=0.001))
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 1500)).square().mean().backward()
    optimizer.step()
    optimizer.synchronize()
os.write(1, f"start {start} has ended\\n".encode())
"""

Start = Callable[..., Program]
Launch = Callable[..., Ended]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def torchrun(restarts: int) -> tuple[str, ...]:
    return (*TORCHRUN, "--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1")


def ends(output: str) -> list[str]:
    """The last line of each rank, by rank."""
    return sorted(re.findall(r"rank \d: \d+, .*", output))


def begins(output: str) -> list[str]:
    """The steps from which each start went on, without repetitions."""
    found = sorted(set(re.findall(r"start (\d+): from step (\w+)", output)))
    return [step for _, step in found]


def hub_processes(folder: Path) -> list[int]:
    """The hubs that ranks with this working directory have started."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_hub = process.name.isdigit() and b"paramhub._hub_process" in (process / "cmdline").read_bytes()
            if is_hub and (process / "cwd").resolve() == folder:
                found.append(int(process.name))
    return found


def await_end_of_hubs(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while left := hub_processes(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_ranks_that_torchrun_starts_again_go_on_to_the_same_bits(
    start: Start, launch: Launch, program: Path, tmp_path: Path
) -> None:
    code, output = launch(*torchrun(0), program, "end=9")
    assert code == 0, output
    undisturbed = ends(output)
    assert len(undisturbed) == 2 and "updates {9}" in undisturbed[0], output
    for victim, options in ((1, ()), (0, ("load=1",))):
        run = start(*torchrun(1), program, "end=9", "waits_at=5", *options)
        processes = [run.await_output(rf"rank {rank} waits as process (\d+)")[1] for rank in (0, 1)]
        os.kill(int(processes[victim]), signal.SIGKILL)
        code, output = run.wait()
        assert code == 0, output
        assert begins(output) == ["None", "5"], output
        assert output.count("a process beside rank 0 runs the hub") == 1, output
        assert "parameters and optimizer state are those at the hubs, of step 5" in output
        assert ends(output) == undisturbed, output
        await_end_of_hubs(tmp_path)


def test_kills_at_any_moment_cost_a_step_each_at_most(start: Start, program: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance, kills = random.Random(seed), 3
    run = start(*torchrun(kills), program, "end=200", "slow=1")
    for kill in range(kills):
        victim = chance.randrange(2)
        found = run.await_output(rf"rank {victim}, start {kill}: step \d+ as process (\d+)")
        time.sleep(chance.uniform(0, 0.2))
        os.kill(int(found[1]), signal.SIGKILL)
    code, output = run.wait()
    assert code == 0, output
    steps = [int(step) for step in begins(output)[1:]]
    assert len(steps) == kills and steps == sorted(steps), output
    first, second = ends(output)
    assert first.split(":")[1] == second.split(":")[1], output
    updates = {int(count) for count in re.search(r"updates \{(.*)\}", first)[1].split(",")}
    assert all(200 - kills <= count <= 200 for count in updates), output


def test_ranks_that_are_killed_while_their_job_begins_are_started_again(
    launch: Launch, tmp_path: Path
) -> None:
    script = tmp_path / "early.py"
    script.write_text(DIES_EARLY)
    # New processes ask for their ranks for 10 s, and the hub notices after 8 s that nobody opens streams: on a busy machine a
    # second start may be needed.
    code, output = launch(*torchrun(2), script)
    assert code == 0, output
    assert len(re.findall(r"start [12] has ended", output)) == 2, output


def test_a_rank_that_has_left_is_started_again_too(launch: Launch, program: Path) -> None:
    code, output = launch(*torchrun(1), program, "end=4", "fails=1")
    assert code == 0, output
    assert begins(output) == ["None", "4"], output
    assert len(set(ends(output))) == 2 and len(ends(output)) == 4, output


def test_a_start_after_all_ranks_have_left_says_that_it_begins_anew(launch: Launch, program: Path) -> None:
    code, output = launch(*torchrun(1), program, "end=4", "all_leave=1")
    assert code == 0, output
    assert begins(output) == ["None", "None"], output
    warnings = re.findall(r"WARNING: run \w+ finished at step (\d+): all of its ranks had left", output)
    assert warnings == ["4"], output
    assert "This start begins anew, at step 0" in output


def test_training_begins_anew_without_its_hub(start: Start, program: Path, tmp_path: Path) -> None:
    run = start(*torchrun(1), program, "end=6", "waits_at=3")
    run.await_output(r"rank 0 waits")
    (hub,) = hub_processes(tmp_path)
    os.kill(hub, signal.SIGKILL)
    found = run.await_output(r"rank 1 waits as process (\d+)")
    # It may have noticed that its hub is gone.
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(found[1]), signal.SIGKILL)
    code, output = run.wait()
    assert code == 0, output
    assert "has ended, so training begins anew" in output
    assert begins(output) == ["None", "None"], output


def test_the_hub_ends_with_torchrun(start: Start, program: Path, tmp_path: Path) -> None:
    run = start(*torchrun(0), program, "end=6", "waits_at=3")
    processes = [int(run.await_output(rf"rank {rank} waits as process (\d+)")[1]) for rank in (0, 1)]
    assert len(hub_processes(tmp_path)) == 1
    run.signal(signal.SIGKILL)
    await_end_of_hubs(tmp_path)
    # They sleep, and torchrun cannot end them any more.
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def test_other_launchers_name_the_run_and_a_hub(start: Start, program: Path) -> None:
    hub = start(*PARAMHUB, "hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0")
    url = hub.await_output(r"(http://\S+)")[1]

    def ranks(number: int, *options: str) -> list[Program]:
        common = {"PARAMHUB_URL": url, "PARAMHUB_RUN_ID": "mine", "WORLD_SIZE": "2"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        words = (program, "end=6", f"start={number}", *options)
        return [start(PYTHON, *words, env={**common, "RANK": str(rank)}) for rank in (0, 1)]

    for rank in ranks(0, "waits_at=3"):
        found = rank.await_output(r"waits as process (\d+)")
        os.kill(int(found[1]), signal.SIGKILL)
    with pytest.raises(ConnectError, match="has 2 ranks, not 3: start as many ranks as before"):
        paramhub.create_job(url, "train-mine/hub-optimizer-0", 3, find=True)
    for rank in ranks(1):
        code, output = rank.wait()
        assert code == 0, output
        assert begins(output) == ["3"], output


def initialise(rank: Rank, arguments: dict[str, str]) -> None:
    paramhub.torch.init(**arguments)


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        ({"on_worker_loss": "stop"}, {}, "on_worker_loss is `fail`, `continue` or `rewind`, not 'stop'"),
        ({"on_worker_loss": "continue"}, {}, "nothing tells the processes of a later start which run is"),
        ({"on_worker_loss": "continue"}, {"PARAMHUB_RUN_ID": "mine"}, "rank 0 would run the hub"),
        (
            {},
            {"PARAMHUB_JOB_ON_WORKER_LOSS": "continue", "PARAMHUB_RUN_ID": "a/b"},
            "PARAMHUB_RUN_ID is 'a/b'",
        ),
        (
            {},
            {"PARAMHUB_JOB_ON_WORKER_LOSS": "continue", "PARAMHUB_RUN_ID": "a", "PARAMHUB_JOB_LINGER": "x"},
            "a number",
        ),
        ({"checkpoint_every": "10"}, {}, "no folder is named in which that would write"),
        (
            {"on_worker_loss": "rewind", "checkpoints": "ck"},
            {"PARAMHUB_RUN_ID": "mine", "PARAMHUB_URL": "http://127.0.0.1:1"},
            "the hub at http://127.0.0.1:1 has its own",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(
    team: Team, arguments: dict[str, str], variables: dict[str, str], reason: str
) -> None:
    with pytest.raises(TeamError) as raised:
        team(initialise, arguments, ranks=2, env=variables)
    assert reason in str(raised.value)
