"""The errors at the other ranks when a process dies. Hub and ranks are separate processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy
import pytest
from launching import PARAMHUB, PYTHON, Program
from team import Died, Rank, Team
from workers import TIMEOUT, new_job

import paramhub

ENOUGH = 20.0
"""Seconds within which ranks must notice a loss: well below the 30 after which a silent worker counts as dead."""


def dies_in_a_step(rank: Rank, ticket: paramhub.JobTicket, victim: int, where: str) -> tuple[str, int | None]:
    weight = numpy.zeros(1_000_000, "f4")
    with paramhub.connect(*ticket, rank.rank) as job:
        job.init({"w": weight}, optimizer=paramhub.SGD(lr=0.1))
        job.push_pull("w", numpy.ones_like(weight), out=weight).wait(TIMEOUT)
        rank.mark(f"stepped-{rank.rank}")
        if rank.rank == victim:
            # The victim dies after the others have their results: a request under way would fail, too.
            for other in range(rank.size):
                rank.await_mark(f"stepped-{other}")
            if where == "under way":
                job.push_pull("w", numpy.ones_like(weight), out=weight)
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(paramhub.JobFailedError) as failed:
            for _ in range(1000):
                job.push_pull("w", numpy.ones_like(weight), out=weight).wait(ENOUGH)
        with pytest.raises(paramhub.JobFailedError):
            job.push("w", weight)
        failure = job._native.failure()
        assert isinstance(failure, paramhub.JobFailedError)
        assert failure.culprit == failed.value.culprit
        job._native.abandon()
        return str(failed.value), failed.value.culprit


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("where", ["between steps", "under way"])
def test_a_killed_worker_is_named_to_the_others(
    hub: paramhub.Hub, team: Team, transport: str, where: str
) -> None:
    ticket = new_job(hub, 3)
    results = team(dies_in_a_step, ticket, 1, where, ranks=3, dies=[1], env={"PARAMHUB_TRANSPORT": transport})
    assert results[1] == Died(-signal.SIGKILL)
    for message, culprit in (results[0], results[2]):
        assert culprit == 1, message
        assert "rank 1" in message, message
    # The hub still serves other jobs.
    with paramhub.connect(*new_job(hub, 1), 0) as job:
        job.init({"w": numpy.ones(10, "f4")})
        job.push("w", numpy.ones(10, "f4")).wait(TIMEOUT)


def raises_in_a_step(rank: Rank, ticket: paramhub.JobTicket) -> str:
    weight = numpy.zeros(1000, "f4")
    # The block leaves the job at its end, which would raise the failure, too.
    with pytest.raises(paramhub.JobFailedError) as failed, paramhub.connect(*ticket, rank.rank) as job:
        job.init({"w": weight})
        if rank.rank == 1:
            raise ValueError("on purpose")
        job.push_pull("w", weight, out=weight).wait(ENOUGH)
    return str(failed.value)


def test_a_worker_that_raises_takes_the_others_along(hub: paramhub.Hub, team: Team) -> None:
    results = team(raises_in_a_step, new_job(hub, 2), ranks=2, dies=[1])
    assert results[1] == Died(1)
    assert "rank 1 gave up: its program has failed: ValueError: on purpose" in results[0]


ENDS_BY_AN_EXCEPTION = """
import sys
import numpy
import paramhub

job = paramhub.connect(*sys.argv[1:], rank=1).init({"w": numpy.zeros(1000, "f4")})
raise ValueError("on purpose")
"""


def test_a_program_that_ends_by_an_exception_takes_the_others_along(
    hub: paramhub.Hub, start: Callable[..., Program]
) -> None:
    ticket = new_job(hub, 2)
    other = start(PYTHON, "-c", ENDS_BY_AN_EXCEPTION, *ticket)
    weight = numpy.zeros(1000, "f4")
    why = "rank 1 gave up: its program has failed: ValueError: on purpose"
    with pytest.raises(paramhub.JobFailedError, match=why), paramhub.connect(*ticket, 0) as job:
        job.init({"w": weight})
        job.push_pull("w", weight, out=weight).wait(ENOUGH)
    assert other.wait().code == 1


def keeps_the_others_waiting(rank: Rank, ticket: paramhub.JobTicket) -> str:
    weight = numpy.zeros(1000, "f4")
    with pytest.raises(paramhub.JobFailedError) as failed, paramhub.connect(*ticket, rank.rank) as job:
        job.init({"w": weight})
        for step in range(1000):
            if rank.rank == 1 and step == 3:
                # It is stuck in its own code, while the library still sends heartbeats.
                rank.await_mark("failed-0")
            job.push_pull("w", weight, out=weight).wait(ENOUGH)
    rank.mark(f"failed-{rank.rank}")
    assert failed.value.culprit == 1
    return str(failed.value)


def test_a_rank_that_keeps_the_others_waiting_ends_the_job_where_asked(hub: paramhub.Hub, team: Team) -> None:
    ticket = new_job(hub, 3, progress_timeout=4.0)
    for message in team(keeps_the_others_waiting, ticket, ranks=3):
        assert "rank 1 made no progress" in message, message
        assert "its contribution to step 3 of key `w`" in message, message


def loses_its_hub(rank: Rank, ticket: paramhub.JobTicket) -> str:
    weight = numpy.zeros(1000, "f4")
    with pytest.raises(paramhub.JobFailedError) as failed, paramhub.connect(*ticket, rank.rank) as job:
        job.init({"w": weight})
        job.push_pull("w", weight, out=weight).wait(TIMEOUT)
        rank.mark(f"runs-{rank.rank}")
        while True:
            job.push_pull("w", weight, out=weight).wait(ENOUGH)
    return str(failed.value)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_killed_hub_is_named_to_all_ranks(
    start: Callable[..., Program], team: Team, transport: str
) -> None:
    program = start(*PARAMHUB, "hub", "--manager", "127.0.0.1:0", "--listen", "127.0.0.1:0")
    url = program.await_output(r"^hub ready: manager (\S+) data (\S+)")[1]
    killer = start(
        "sh",
        "-c",
        'while ! ls */mark-runs-0 */mark-runs-1 >&2; do sleep 0.05; done; kill -9 "$0"',
        str(program.pid),
    )
    messages = team(
        loses_its_hub,
        paramhub.create_job(url, "doomed", 2),
        ranks=2,
        env={"PARAMHUB_TRANSPORT": transport},
    )
    killer.wait(TIMEOUT)
    assert program.wait(TIMEOUT).code == -signal.SIGKILL
    assert all("hub" in message for message in messages), messages


def test_a_stopped_hub_is_named_to_all_ranks() -> None:
    hub = paramhub.Hub()
    job = paramhub.connect(*new_job(hub, 1), 0)
    weight = numpy.zeros(1000, "f4")
    job.init({"w": weight})
    hub.stop()
    hub.stop()
    assert hub.failure() is None
    with pytest.raises(paramhub.JobFailedError):
        for _ in range(1000):
            job.push_pull("w", weight, out=weight).wait(ENOUGH)
    with pytest.raises(paramhub.ConnectError):
        hub.create_job("late", 1)


def test_a_gradient_that_is_no_number_is_refused_where_asked(hub: paramhub.Hub) -> None:
    with paramhub.connect(*new_job(hub, 1), 0) as job:
        gradient = numpy.ones(1000, "f4")
        job.init({"layer.weight": gradient}, reject_non_finite=True)
        gradient[500] = numpy.nan
        handle = job.push_pull("layer.weight", gradient, gradient)
        with pytest.raises(paramhub.JobFailedError, match=r"layer\.weight") as failed:
            handle.wait(TIMEOUT)
        assert failed.value.culprit == 0
        job._native.abandon()


def takes_the_rank_of_another(rank: Rank, ticket: paramhub.JobTicket) -> tuple[int | None, list[float]]:
    """Process 1 has rank 1 and dies after three steps; process 2 takes the rank."""
    number = min(rank.rank, 1)
    if rank.rank == 2:
        rank.await_mark("dies")
    deadline = time.monotonic() + ENOUGH
    while True:
        try:
            job = paramhub.connect(*ticket, number)
            break
        except paramhub.ParamhubError:
            # The hub has not noticed yet that the process has died.
            assert rank.rank == 2 and time.monotonic() < deadline
            time.sleep(0.02)
    weight = numpy.zeros(100_000, "f4")
    with job:
        job.init({"w": weight}, optimizer=paramhub.SGD(lr=1.0, momentum=0.5))
        joined_at = job.resumed_step
        while job.next_step("w") < 8:
            if rank.rank == 1 and job.next_step("w") == 3:
                rank.mark("dies")
                os.kill(os.getpid(), signal.SIGKILL)
            job.push_pull("w", numpy.full_like(weight, 1 + number), out=weight).wait(ENOUGH)
    return joined_at, [float(weight.min()), float(weight.max())]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_another_process_takes_the_rank_of_a_killed_one(
    hub: paramhub.Hub, team: Team, transport: str
) -> None:
    ticket = new_job(hub, 2, on_worker_loss="continue", min_workers=2)
    env = {"PARAMHUB_TRANSPORT": transport}
    results = team(takes_the_rank_of_another, ticket, ranks=3, dies=[1], env=env)
    assert results[1] == Died(-signal.SIGKILL)
    expected, velocity = 0.0, 0.0
    for _ in range(8):
        velocity = 0.5 * velocity + 1.5
        expected -= velocity
    # No step was made without rank 1: it died between two of them.
    assert results[0] == (None, [expected, expected])
    assert results[2] == (3, [expected, expected])


def joins_later(rank: Rank, ticket: paramhub.JobTicket) -> tuple[int | None, float]:
    weight = numpy.zeros(1000, "f4")
    if rank.rank == 1:
        rank.await_mark("stepped")
    with paramhub.connect(*ticket, rank.rank) as job:
        job.init({"w": weight}, optimizer=paramhub.SGD(lr=1.0))
        if rank.rank == 1:
            rank.mark("joined")
        step = 0
        while job.next_step("w") < 40:
            job.push_pull("w", numpy.full_like(weight, 1 + rank.rank), out=weight).wait(ENOUGH)
            rank.mark("stepped")
            step += 1
            if rank.rank == 0 and step == 20:
                rank.await_mark("joined")
        return job.resumed_step, float(weight[0])


def test_a_rank_joins_a_job_that_has_begun_without_it(hub: paramhub.Hub, team: Team) -> None:
    ticket = new_job(hub, 1, on_worker_loss="continue", max_workers=2)
    (resumed, alone), (joined_at, together) = team(joins_later, ticket, ranks=2)
    assert resumed is None
    assert joined_at is not None and 0 < joined_at <= 20
    # Its first step is made together, with the mean of 1 and 2.
    assert alone == together == -(joined_at + 1.5 * (40 - joined_at))
    with pytest.raises(paramhub.MisuseError, match="max_workers is 1"):
        new_job(hub, 2, on_worker_loss="continue", max_workers=1)
    with pytest.raises(paramhub.ConnectError, match="the same workers to its end"):
        new_job(hub, 1, max_workers=2)
