"""Processes that are forked from a process with jobs. They have its sockets and none of its threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy
import pytest
from launching import PYTHON, Ended, Program
from team import Rank, Team
from workers import TIMEOUT, new_job

import paramhub


def forks(rank: Rank, ticket: paramhub.JobTicket, ends: str) -> list[str]:
    """Rank 0 forks while requests are under way, and both ranks go on."""
    weight, gradient = numpy.zeros(10_000, "f4"), numpy.ones(10_000, "f4")
    messages: list[str] = []
    with paramhub.connect(*ticket, rank.rank) as job:
        job.init({"w": weight}, optimizer=paramhub.SGD(lr=1.0))
        handle = job.push_pull("w", gradient, out=weight)
        if rank.rank == 0:
            messages = in_a_child(lambda: refusals(job, handle, weight, ticket), ends)
        handle.wait(TIMEOUT)
        for _ in range(3):
            job.push_pull("w", gradient, out=weight).wait(TIMEOUT)
        assert (weight == -4.0).all()
    return messages


def refusals(
    job: paramhub.Job, handle: paramhub.Handle, weight: numpy.ndarray, ticket: paramhub.JobTicket
) -> list[str]:
    """The errors that a child gets from all uses of its parent's objects."""
    messages = []
    for call in (
        lambda: job.push("w", weight),
        lambda: job.push_pull("w", weight, weight),
        lambda: handle.wait(),
        lambda: job.statistics(),
        lambda: job.leave(),
        lambda: job.gradient_tensor("w"),
        lambda: paramhub.connect(*ticket, 1),
        lambda: paramhub.Hub(),
    ):
        try:
            call()
            messages.append("nothing")
        except paramhub.MisuseError as error:
            messages.append(str(error))
    return messages


def in_a_child(call: Callable[[], list[str]], ends: str) -> list[str]:
    if ends == "multiprocessing":
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        process = context.Process(target=lambda: answers.put(call()))
        process.start()
        messages = answers.get()
        process.join(TIMEOUT)
        assert process.exitcode == 0
        return messages
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, "\n".join(call()).encode())
        if ends == "exit":
            sys.exit(0)  # With all steps of a normal end.
        os._exit(0)
    os.close(write)
    with open(read, encoding="utf8") as file:
        messages = file.read().splitlines()
    _, status = os.waitpid(child, 0)
    assert status == 0
    return messages


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("ends", ["exit", "_exit", "multiprocessing"])
def test_a_forked_child_is_refused_and_harms_no_rank(
    hub: paramhub.Hub, team: Team, ends: str, transport: str
) -> None:
    messages, _ = team(forks, new_job(hub, 2), ends, ranks=2, env={"PARAMHUB_TRANSPORT": transport})
    assert len(messages) == 8
    for message in messages:
        assert "forked" in message
        assert "`spawn` or `forkserver`" in message


def forks_under_a_hub(rank: Rank) -> None:
    with paramhub.Hub() as hub:
        child = os.fork()
        if child == 0:
            try:
                hub.stop()
            except paramhub.MisuseError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        with paramhub.connect(*hub.create_job("after", 1), 0) as job:
            weight = numpy.zeros(10, "f4")
            job.init({"w": weight})
            job.push_pull("w", weight, weight).wait(TIMEOUT)


def test_a_hub_stays_its_parents(team: Team) -> None:
    team(forks_under_a_hub, ranks=1)


def test_a_fork_before_anything_was_started_is_free(hub: paramhub.Hub, launch: Callable[..., Ended]) -> None:
    """A program may import the package and then fork workers, which was Python's default up to 3.13."""
    program = """
import multiprocessing, sys
import array, paramhub

def worker(rank):
    one = array.array("f", [1.0 + rank])
    with paramhub.connect(*sys.argv[1:4], rank) as job:
        job.init({"w": one})
        job.push_pull("w", one, one).wait(30)
    print(one[0], flush=True)

workers = [multiprocessing.get_context("fork").Process(target=worker, args=(rank,)) for rank in range(2)]
for one in workers:
    one.start()
for one in workers:
    one.join()
    assert one.exitcode == 0
"""
    assert launch(PYTHON, "-c", program, *new_job(hub, 2)) == (0, "1.5\n1.5\n")


def test_a_killed_workers_child_does_not_keep_it_alive(
    hub: paramhub.Hub, start: Callable[..., Program]
) -> None:
    """A forked child has its parent's sockets, as a data loader's process has. So streams do not end with the worker, and the
    others notice its death by its silence."""
    program = """
import array, os, sys, time, paramhub
one = array.array("f", [0.0])
job = paramhub.connect(*sys.argv[1:4], 1).init({"w": one})
if os.fork() == 0:
    time.sleep(600)
job.push_pull("w", one, one).wait()
print("stepped", flush=True)
time.sleep(600)
"""
    ticket = new_job(hub, 2, dead_after=2.0)
    other = start(PYTHON, "-c", program, *ticket)
    with (
        pytest.raises(paramhub.JobFailedError, match="rank 1") as failed,
        paramhub.connect(*ticket, 0, transport="tcp") as job,
    ):
        weight = numpy.zeros(1, "f4")
        job.init({"w": weight})
        job.push_pull("w", weight, weight).wait(TIMEOUT)
        other.await_output("^stepped$")
        other.signal(signal.SIGKILL)
        job.push_pull("w", weight, weight).wait(TIMEOUT)
    assert failed.value.culprit == 1


def test_programs_that_a_worker_starts_do_not_disturb_it(hub: paramhub.Hub) -> None:
    with paramhub.connect(*new_job(hub, 1), 0) as job:
        weight = numpy.zeros(10_000, "f4")
        job.init({"w": weight})
        ended = threading.Event()

        def exchange() -> None:
            while not ended.is_set():
                job.push_pull("w", weight, weight).wait(TIMEOUT)

        thread = threading.Thread(target=exchange)
        thread.start()
        try:
            for _ in range(20):
                # preexec_fn makes it a real fork with Python in the child.
                assert subprocess.run(["true"], preexec_fn=lambda: None).returncode == 0
        finally:
            ended.set()
            thread.join(TIMEOUT)
