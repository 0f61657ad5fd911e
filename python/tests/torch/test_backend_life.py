"""init_process_group("paramhub"): how groups begin, fail and end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import TORCHRUN, Ended
from team import Died, Rank, Team

import paramhub.torch
from paramhub.errors import LateError

SMALL, LARGE = 10, 100_000
"""Numbers of elements that go over the mesh and, where no memory is shared, through the hub."""
TCP = {"PARAMHUB_TRANSPORT": "tcp"}


def be_late(rank: Rank, elements: int) -> str:
    dist.init_process_group("paramhub", timeout=timedelta(seconds=60))
    tensor = torch.ones(elements)
    dist.all_reduce(tensor)
    dist.group.WORLD.set_timeout(timedelta(seconds=2))
    if rank.rank == 2:
        rank.await_mark("0-failed")
        rank.await_mark("1-failed")
        rank.await_mark("3-failed")
        # The hub may have all contributions now, but the group has failed, and raises soon.
        with pytest.raises(RuntimeError):
            for _ in range(1000):
                dist.all_reduce(tensor)
                time.sleep(0.01)
        return ""
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    with pytest.raises(RuntimeError) as failed:
        work.wait()
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    with pytest.raises(RuntimeError):
        future.wait()
    with pytest.raises(RuntimeError):
        dist.all_reduce(tensor)
    rank.mark(f"{rank.rank}-failed")
    return str(failed.value)


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_rank_that_does_not_come_is_named(team: Team, elements: int) -> None:
    messages = team(be_late, elements, env=TCP)
    for rank in (0, 1, 3):
        assert "rank 2 has not called it" in messages[rank] or "ended the mesh" in messages[rank], messages[
            rank
        ]
    assert any("rank 2 has not called it" in message and "2 s" in message for message in messages)


def wait_a_little(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    tensor = torch.ones(3)
    if rank.rank == 1:
        rank.await_mark("waited")
        dist.all_reduce(tensor)
        return
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(LateError, match="rank 1"):
        work.wait(timedelta(seconds=1))
    assert not work.is_completed()
    rank.mark("waited")
    work.wait(timedelta(seconds=60))
    assert tensor.tolist() == [2.0] * 3


def test_an_impatient_wait_ends_nothing(team: Team) -> None:
    team(wait_a_little, ranks=2)


def interrupt(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    for elements in (SMALL, LARGE):
        tensor = torch.ones(elements)
        if rank.rank == 1:
            rank.await_mark(f"interrupted-{elements}")
            dist.all_reduce(tensor)
            continue
        work = dist.all_reduce(tensor, async_op=True)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        rank.mark(f"interrupted-{elements}")
        work.wait()
        assert tensor[0].item() == 2.0


def test_a_wait_answers_ctrl_c(team: Team) -> None:
    team(interrupt, ranks=2, env=TCP)
    team(interrupt, ranks=2)


def monitor(rank: Rank) -> str:
    dist.init_process_group("paramhub")
    message = ""
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    if rank.rank in (1, 3):
        rank.await_mark("failed")
    else:
        with pytest.raises(RuntimeError) as failed:
            dist.group.WORLD.monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
        message = str(failed.value)
        rank.mark("failed")
    # The group still works.
    dist.barrier()
    return message


def test_a_monitored_barrier_names_the_missing_ranks(team: Team) -> None:
    messages = team(monitor)
    assert "ranks 1, 3 did not come" in messages[0] and "ranks 1, 3 did not come" in messages[2]


def disagree(rank: Rank, elements: int, other: int) -> str:
    dist.init_process_group("paramhub")
    dist.all_reduce(torch.ones(LARGE))
    with pytest.raises(RuntimeError) as failed:
        if rank.rank == 1:
            dist.broadcast(torch.ones(other), 0) if elements == SMALL else dist.all_reduce(torch.ones(other))
        else:
            dist.all_reduce(torch.ones(elements))
        # A rank that did not have to wait for the others gets the error here.
        dist.barrier()
    return str(failed.value)


DISAGREEMENTS = [
    (SMALL, SMALL, ("broadcast", "allreduce")),
    # At the hub the first pieces of both would use the same slots.
    (LARGE, LARGE + 4096, ("400000 bytes", "416384 bytes")),
    (LARGE, 3 * LARGE, ("400000 bytes", "1200000 bytes")),
    (LARGE, SMALL, ("400000 bytes", "40 bytes")),
]


@pytest.mark.parametrize(("elements", "other", "expected"), DISAGREEMENTS)
def test_ranks_that_call_different_collectives_get_an_error(
    team: Team, elements: int, other: int, expected: tuple[str, str]
) -> None:
    for message in team(disagree, elements, other, ranks=3, env=TCP):
        assert all(each in message for each in expected), message


def die(rank: Rank, elements: int) -> str:
    dist.init_process_group("paramhub")
    tensor = torch.ones(elements)
    dist.all_reduce(tensor)
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as failed:
        for _ in range(2):
            dist.all_reduce(tensor)
    print(f"raised after {time.monotonic() - began:.2f} s")
    return str(failed.value)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_a_rank_that_dies_is_named(team: Team, elements: int, transport: str) -> None:
    results = team(die, elements, env={"PARAMHUB_TRANSPORT": transport}, dies=(2,))
    assert results[2] == Died(-signal.SIGKILL)
    for rank in (0, 1, 3):
        assert "rank 2" in results[rank] or "worker 2" in results[rank], results[rank]


def lose_rank_0(rank: Rank) -> str:
    dist.init_process_group("paramhub")
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor)
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as failed:
        for _ in range(2):
            dist.all_reduce(tensor)
    return str(failed.value)


def test_the_hub_goes_with_rank_0_and_is_missed(team: Team) -> None:
    results = team(lose_rank_0, dies=(0,), env=TCP)
    assert all(results[rank] for rank in (1, 2, 3))


def miss_a_rank(rank: Rank) -> str:
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, rank.size, rank.rank == 0, wait_for_workers=False)
    if rank.rank == 1:
        rank.await_mark("failed")
        return ""
    with pytest.raises(RuntimeError) as failed:
        dist.init_process_group(
            "paramhub", store=store, rank=rank.rank, world_size=rank.size, timeout=timedelta(seconds=2)
        )
    rank.mark("failed")
    return str(failed.value)


def test_a_rank_that_never_starts_is_named(team: Team) -> None:
    assert "rank 1 of 2 did not arrive within 2 s" in team(miss_a_rank, ranks=2)[0]


def be_beside_another(rank: Rank) -> None:
    dist.init_process_group("cpu:paramhub,cuda:gloo")
    for elements in (SMALL, LARGE):
        tensor = torch.ones(elements)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert bool((tensor == 2.0).all()) and work.get_future().value()[0].numel() == elements
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    # Rank 0 is not in the group, and the default group has another backend.
    alone = dist.new_group([1], backend="paramhub")
    both = dist.new_group([1, 0], backend="paramhub")
    if rank.rank == 1:
        dist.broadcast(tensor, 1, group=alone)
    tensor = torch.full((LARGE,), float(rank.rank))
    dist.all_reduce(tensor, group=both)
    dist.broadcast(tensor, 0, group=both)
    assert tensor[0].item() == 1.0
    assert not paramhub.torch.is_initialized()
    dist.destroy_process_group()


@pytest.mark.skipif(
    not paramhub.torch.backend.HAS_BACKENDS,
    reason="before torch 2.14 a Python class cannot be one of two backends",
)
def test_other_backends_can_be_beside_paramhub(team: Team) -> None:
    team(be_beside_another, ranks=2)


def debug(rank: Rank, backend: str) -> None:
    # torch was imported before this rank was made.
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    dist.init_process_group(backend)
    for elements in (SMALL, LARGE):
        tensor = torch.ones(elements)
        dist.all_reduce(tensor)
    outputs: list = [None] * rank.size
    dist.all_gather_object(outputs, rank.rank)
    assert tensor[0].item() == 2.0 and outputs == [0, 1]
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "backend", ["paramhub"] + ["cpu:paramhub,cuda:gloo"] * paramhub.torch.backend.HAS_BACKENDS
)
def test_under_torchs_detailed_debugging(team: Team, backend: str) -> None:
    team(debug, backend, ranks=2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_DIST_NAN_CHECK": "1"})


def share_a_world(rank: Rank) -> None:
    paramhub.torch.init(reproducible=True)
    dist.init_process_group("paramhub")
    tensor = torch.full((LARGE,), rank.rank + 0.1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    # The process group did not make the world, so it does not end it.
    assert paramhub.torch.is_initialized() and paramhub.torch.size() == 2
    dist.init_process_group("paramhub")
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    paramhub.torch.shutdown()


def test_the_process_group_joins_a_world_that_is_there(team: Team) -> None:
    team(share_a_world, ranks=2)


def begin_without_a_launcher(rank: Rank) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    address = f"tcp://127.0.0.1:{os.environ.pop('MASTER_PORT')}"
    dist.init_process_group("paramhub", init_method=address, rank=rank.rank, world_size=rank.size)
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor)
    assert paramhub.torch.local_size() == 2 and paramhub.torch.rank() == rank.rank
    dist.destroy_process_group()
    assert not paramhub.torch.is_initialized()


def test_ranks_that_no_launcher_started(team: Team) -> None:
    team(begin_without_a_launcher, ranks=2)


SCRIPT = """
import torch, torch.distributed as dist
{imports}
dist.init_process_group("paramhub")
tensor = torch.ones(100_000)
dist.all_reduce(tensor)
assert tensor[0] == dist.get_world_size()
print("rank", dist.get_rank(), "done")
{end}
"""


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_under_torchrun(launch: Callable[..., Ended], tmp_path: Path, end: str) -> None:
    imports = "" if paramhub.torch.backend.HAS_BACKENDS else "import paramhub.torch"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(imports=imports, end=end))
    code, output = launch(*TORCHRUN, "--nproc-per-node=2", str(script))
    assert code == 0, output
    assert output.count("done") == 2 and "rank 0 runs the hub" in output
    assert "Traceback" not in output and "warn" not in output.lower(), output


def test_one_rank_that_fails_ends_the_run(launch: Callable[..., Ended], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    end = "if dist.get_rank() == 1: raise ValueError('on purpose')\ndist.barrier()"
    script.write_text(SCRIPT.format(imports="import paramhub.torch", end=end))
    code, output = launch(*TORCHRUN, "--nproc-per-node=2", str(script))
    assert code != 0 and "on purpose" in output, output
