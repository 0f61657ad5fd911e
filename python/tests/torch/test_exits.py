"""The ends of the surviving ranks, for each way of training and kind of death: `bench/pytorch/ends.py`, and single rules."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from survivors import RANK_1, check_ends, find_ends
from team import Died, Rank, Team
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, make

WAYS = ("optimizer", "hook", "distributed", "backend", "backend-small")
DEATHS = ("raised", "killed", "ended", "stalled")
NEVER = 3600.0
"""Seconds of a wait that must not happen: it would exceed the test's timeout."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return find_ends(tmp_path_factory.mktemp("ends"), timeout=900)


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("way", WAYS)
def test_survivors_raise_what_names_the_rank_that_ended(
    ends: list[dict[str, Any]], way: str, death: str
) -> None:
    check_ends(ends, way, death)


def test_survivors_name_rank_0_that_ran_their_hub(tmp_path: Path) -> None:
    ways = ["--way", "optimizer", "--way", "hook", "--death", "killed", "--victim", "0"]
    rows = find_ends(tmp_path, *ways, timeout=300)
    assert [(row["way"], row["rank"]) for row in rows] == [
        (way, rank) for way in ("optimizer", "hook") for rank in (1, 2)
    ]
    for row in rows:
        assert row["code"] == 1, row
        assert row["message"].startswith("JobFailedError: "), row
        assert re.search(r"the hub at [0-9.:]+ \(in the process of rank 0\)", row["message"]), row


def disable_exit_timeouts() -> None:
    """Gives the waits at a normal end a timeout that never comes."""
    from paramhub.torch import _collectives, _run_store, _world

    _world.EXIT_TIMEOUT = _run_store.EXIT_TIMEOUT = NEVER
    _collectives.LEAVE_TIMEOUT = NEVER


def clean_up_after_a_death(rank: Rank) -> str:
    disable_exit_timeouts()
    dist.init_process_group("paramhub")
    ddp = DistributedDataParallel(make())
    try:
        for step in range(3):
            loss = loss_of(ddp, step, rank.rank)
            if (step, rank.rank) == (2, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    # No exception is being handled any more, so the world must still know that the group has failed.
    dist.destroy_process_group()
    return message


def test_rank_0_does_not_wait_for_the_dead_after_its_group_is_destroyed(team: Team) -> None:
    results = team(clean_up_after_a_death, ranks=3, dies=(1,))
    assert results[1] == Died(-signal.SIGKILL)
    for rank in (0, 2):
        assert results[rank].startswith("JobFailedError: ") and RANK_1.search(results[rank]), results[rank]


def gives_up(rank: Rank) -> str:
    """The error of ranks whose group another leaves because of an exception of its own."""
    import paramhub
    import paramhub.torch
    from paramhub.torch import _initialization

    disable_exit_timeouts()
    paramhub.torch.init()
    group = _initialization.world().group()
    if rank.rank == 2:
        try:
            raise ValueError("the loss of step 7\nis not a number")
        except ValueError:
            paramhub.torch.shutdown(abandon=True)
        return ""
    with pytest.raises(paramhub.JobFailedError) as failed:
        group.barrier().wait()
    paramhub.torch.shutdown(abandon=True)
    return str(failed.value)


def test_a_rank_that_gives_up_tells_the_others_why(team: Team) -> None:
    for message in team(gives_up, ranks=3)[:2]:
        assert (
            "rank 2 of group `world` has given up: ValueError: the loss of step 7 is not a number" in message
        )


def catches(rank: Rank, asks: bool) -> tuple[str, str]:
    """The error of a job that has lost rank 1, and what this rank prints of it at its end. If it ``asks``, it gets the error
    as an exception, otherwise it ends before it exchanges again."""
    import paramhub
    import paramhub.torch

    disable_exit_timeouts()
    model = make()
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.05))
    loss_of(model, 0, rank.rank).backward()
    optimizer.step()
    optimizer.synchronize()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while (failure := optimizer._step.job.failure()) is None:
        time.sleep(0.01)
    if asks:
        with pytest.raises(paramhub.JobFailedError):
            loss_of(model, 1, rank.rank).backward()
            optimizer.step()
            optimizer.synchronize()
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        paramhub.torch.shutdown()
    return str(failure), printed.getvalue()


@pytest.mark.parametrize("asks", [True, False])
def test_an_error_that_the_program_got_is_not_printed_again(team: Team, asks: bool) -> None:
    failure, printed = team(catches, asks, ranks=2, dies=(1,))[0]
    assert RANK_1.search(failure), failure
    assert printed.count(failure) == (0 if asks else 1), printed


def interrupted(rank: Rank) -> str:
    disable_exit_timeouts()
    dist.init_process_group("paramhub")
    ddp = DistributedDataParallel(make())
    for step in range(2):
        loss_of(ddp, step, rank.rank).backward()
    loss = loss_of(ddp, 2, rank.rank)
    if rank.rank == 1:
        rank.await_mark("interrupted")
        with pytest.raises(RuntimeError) as failed:
            loss.backward()
        return str(failed.value)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        try:
            loss.backward()
        finally:
            # Rank 1 never calls the sums under way, and this does not wait for it.
            dist.destroy_process_group()
            rank.mark("interrupted")
    return ""


def test_ctrl_c_ends_ddp_on_the_backend_and_its_clean_up(team: Team) -> None:
    message = team(interrupted, ranks=2)[1]
    assert re.search(r"\brank 0\b", message), message


def interrupted_in_a_step(rank: Rank) -> bool:
    """Returns whether the exchange that never ends still goes on when this rank has shut down."""
    import torch

    import paramhub.torch

    model = make()
    optimizer = paramhub.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters()
    )
    if rank.rank == 0:
        rank.await_mark("left")
        return True
    loss_of(model, 0, rank.rank).backward()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    handle = optimizer._exchange._sent[0].handle
    with pytest.raises(KeyboardInterrupt):
        try:
            optimizer.step()
        finally:
            # Leaving a job waits 30 s for requests under way, and then fails them.
            paramhub.torch.shutdown()
    goes_on = not handle.done()
    rank.mark("left")
    return goes_on


def test_shutting_down_after_ctrl_c_does_not_wait_for_a_rank_that_hangs(team: Team) -> None:
    assert team(interrupted_in_a_step, ranks=2) == [True, True]
