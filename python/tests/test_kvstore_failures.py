"""The errors at the other ranks of a store when one ends, and waits that do not end. Every rank is a process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable

import numpy
import pytest
from launching import PARAMHUB, PYTHON, Ended, Program
from stores import COLLECTIVE, KINDS, open_store
from team import Died, Rank, Team
from workers import TIMEOUT, new_job

import paramhub
import paramhub.kvstore as kvs

ENOUGH = 20.0
"""Seconds within which ranks must notice an end: well below the 30 after which a silent rank counts as dead."""


def ends_in_a_step(rank: Rank, ticket: paramhub.JobTicket, kind: str, how: str) -> tuple[str, int | None]:
    with pytest.raises(paramhub.JobFailedError) as failed, open_store(rank, ticket, kind) as kv:
        weight = numpy.zeros(100_000, "f4")
        kv.init("layer.weight", weight)
        kv.pushpull("layer.weight", weight).wait(TIMEOUT)
        rank.mark(f"stepped-{rank.rank}")
        if rank.rank == 1:
            # Rank 1 ends after the others have their sums: a request under way would fail, too.
            for other in range(rank.size):
                rank.await_mark(f"stepped-{other}")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                raise ValueError("on purpose")
            sys.exit(3)
        for _ in range(1000):
            kv.pushpull("layer.weight", weight).wait(ENOUGH)
    return str(failed.value), failed.value.culprit


@pytest.mark.parametrize("how", ["killed", "raises", "exits"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_ends_is_named_to_the_others(
    hub: paramhub.Hub, team: Team, launch: Callable[..., Ended], kind: str, how: str
) -> None:
    results = team(ends_in_a_step, new_job(hub, 4), kind, how, ranks=4, dies=[1])
    assert results[1] == Died({"killed": -signal.SIGKILL, "raises": 1, "exits": 3}[how])
    for number in (0, 2, 3):
        message, culprit = results[number]
        assert culprit == 1, message
        assert message.startswith(f"key-value store `{kind}`, rank {number}: "), message
        assert "layer.weight" in message and "rank 1" in message, message
        if how == "raises" and kind in COLLECTIVE:
            assert "rank 1 has failed: ValueError: on purpose" in message, message
    code, output = launch(*PARAMHUB, "jobs", "list", "--hub", hub.url)
    assert code == 0 and "failed" in output and "finished" not in output, output


def leaves_early(rank: Rank, ticket: paramhub.JobTicket, kind: str) -> str:
    kv = open_store(rank, ticket, kind)
    kv.init("w", numpy.zeros(10, "f4"))
    kv.pushpull("w", numpy.zeros(10, "f4")).wait(TIMEOUT)
    if rank.rank == 1:
        kv.barrier(TIMEOUT)
        # The other ranks may fail before the barrier ends.
        with contextlib.suppress(paramhub.JobFailedError):
            kv.leave(TIMEOUT)
        return ""
    with pytest.raises(paramhub.JobFailedError) as failed, kv:
        # If one of these two ranks has failed already, because rank 1 has ended, the barrier raises at the other.
        kv.barrier(TIMEOUT)
        for _ in range(1000):
            kv.pushpull("w", numpy.zeros(10, "f4")).wait(ENOUGH)
    return str(failed.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_leaves_before_the_others_are_done_is_named(
    hub: paramhub.Hub, team: Team, kind: str
) -> None:
    results = team(leaves_early, new_job(hub, 3), kind, ranks=3)
    assert all("rank 1" in results[number] for number in (0, 2)), results


def waits_for_a_late_rank(rank: Rank, ticket: paramhub.JobTicket, kind: str) -> int:
    with open_store(rank, ticket, kind) as kv:
        kv.init("w", numpy.zeros(10, "f4"))
        own = numpy.ones(10, "f4")
        counted = 0
        if rank.rank == 1:
            rank.await_mark("counted")
        else:
            handle = kv.pushpull("w", own)
            for wait in (
                handle.wait,
                lambda seconds: kv.wait("w", seconds),
                lambda seconds: kv.wait(None, seconds),
            ):
                with pytest.raises(TimeoutError, match="within"):
                    wait(0.05)

            def count() -> None:
                nonlocal counted
                while counted < 100_000:
                    counted += 1
                rank.mark("counted")

            # This would never end if the wait kept other threads from running.
            threading.Thread(target=count).start()
            handle.wait(TIMEOUT)
            assert (own == 2).all()
        if rank.rank == 1:
            kv.pushpull("w", own).wait(TIMEOUT)
        return counted


@pytest.mark.parametrize("kind", KINDS)
def test_waits_time_out_and_let_other_threads_run(hub: paramhub.Hub, team: Team, kind: str) -> None:
    assert team(waits_for_a_late_rank, new_job(hub, 2), kind, ranks=2) == [100_000, 0]


def pushes_ahead(rank: Rank, ticket: paramhub.JobTicket) -> float:
    """Makes far more calls than the queue of the store's thread holds. In the first of them the thread waits for the other
    rank."""
    with open_store(rank, ticket, "funnel") as kv:
        kv.init("w", numpy.zeros(10, "f4"))
        own, out = numpy.ones(10, "f4"), numpy.zeros(10, "f4")
        if rank.rank == 1:
            rank.await_mark("full")
        else:
            stuck = threading.Timer(1.0, lambda: rank.mark("full"))
            stuck.start()
        for _ in range(6000):
            kv.push("w", own)
        kv.pull("w", out).wait(TIMEOUT)
        return float(out[0])


def test_calls_that_the_store_has_no_room_for_wait(hub: paramhub.Hub, team: Team) -> None:
    assert team(pushes_ahead, new_job(hub, 2), ranks=2) == [2.0, 2.0]


INTERRUPTED = """
import sys, threading, numpy, paramhub.kvstore as kvs
url, job, secret, kind, what = sys.argv[1:]
def store(rank):
    return kvs.create(kind, url=url, job=job, secret=secret, rank=rank)
kept = []
if what != "create":
    threading.Thread(target=lambda: kept.append(store(1)), daemon=True).start()
print("waiting", flush=True)
kv = store(0)
one = numpy.zeros(10, "f4")
if what == "init":
    kv.init("w", one)
elif what == "barrier":
    kv.barrier()
"""


@pytest.mark.parametrize("what", ["create", "init", "barrier"])
@pytest.mark.parametrize("kind", ["hub", "funnel"])
def test_ctrl_c_ends_every_wait(
    hub: paramhub.Hub, start: Callable[..., Program], kind: str, what: str
) -> None:
    ticket = new_job(hub, 2, rendezvous_timeout=600)
    program = start(PYTHON, "-c", INTERRUPTED, ticket.url, ticket.job, ticket.secret, kind, what)
    program.await_output("waiting")
    program.await_sleep()
    program.signal(signal.SIGINT)
    # The store's thread, which still waits, does not delay the end.
    ended = program.wait(ENOUGH)
    assert ended.code == -signal.SIGINT, ended
    assert "KeyboardInterrupt" in ended.output, ended.output


def drops_it(rank: Rank, ticket: paramhub.JobTicket) -> str:
    kv = open_store(rank, ticket, "depcha")
    kv.init("w", numpy.zeros(10, "f4"))
    if rank.rank == 1:
        kvs._open.discard(kv)
        del kv
        rank.mark("dropped")
        return ""
    rank.await_mark("dropped")
    with pytest.raises(paramhub.JobFailedError) as failed:
        kv.pushpull("w", numpy.zeros(10, "f4")).wait(ENOUGH)
    return str(failed.value)


def test_a_store_that_is_dropped_is_given_up(hub: paramhub.Hub, team: Team) -> None:
    results = team(drops_it, new_job(hub, 2), ranks=2)
    assert "rank 1 dropped its key-value store without leaving it" in results[0]
