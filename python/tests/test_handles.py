"""All ways of waiting for requests under way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
from workers import TIMEOUT, new_job

import paramhub
import paramhub._native


class Held:
    """Rank 0 of two with a tensor ``w``, and the other rank, which contributes at `release`."""

    def __init__(self, hub: paramhub.Hub) -> None:
        self._url = hub.url
        ticket = new_job(hub, 2)
        with _other(lambda: paramhub.connect(*ticket, 1)) as other:
            self.job = paramhub.connect(*ticket, 0)
        self._other = other[0]
        self.gradient = numpy.ones(1000, "f4")
        with _other(lambda: self._other.init({"w": numpy.zeros(1000, "f4")})):
            self.job.init({"w": self.gradient})

    def push_pull(self) -> paramhub.Handle:
        """A request that cannot end before `release`."""
        return self.job.push_pull("w", self.gradient, numpy.empty(1000, "f4"))

    def release(self) -> None:
        self._other.push("w", numpy.full(1000, 3.0, "f4")).wait(TIMEOUT)

    def stop(self, reason: str) -> None:
        """Fails the job."""
        paramhub._native.stop_job(self._url, self.job.name, reason)

    def leave(self) -> None:
        with contextlib.suppress(paramhub.JobFailedError), _other(self._leave_other):
            self.job.leave()

    def _leave_other(self) -> None:
        with contextlib.suppress(paramhub.JobFailedError):
            self._other.leave()


class _other:
    """A context beside which another thread makes a call that waits for this rank."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._results: list[object] = []
        self._thread = threading.Thread(target=lambda: self._results.append(call()))

    def __enter__(self) -> list[object]:
        self._thread.start()
        return self._results

    def __exit__(self, *_: object) -> None:
        self._thread.join(TIMEOUT)


@pytest.fixture
def held(hub: paramhub.Hub) -> Iterator[Held]:
    held = Held(hub)
    yield held
    held.leave()


def test_a_wait_may_end_before_the_exchange(held: Held) -> None:
    handle = held.push_pull()
    assert not handle.done()
    assert handle.exception() is None
    assert handle.finished_ns == 0
    for timeout in (0, 0.0, 0.05, 0.15):
        with pytest.raises(TimeoutError, match=f"has not ended within {timeout:g} s"):
            handle.wait(timeout)
    for timeout in (-1, float("nan"), float("-inf")):
        with pytest.raises(paramhub.MisuseError, match="0 or more seconds"):
            handle.wait(timeout)
    held.release()
    handle.wait(TIMEOUT)
    handle.wait()
    handle.wait(0)
    assert handle.done()
    assert 0 < handle.submitted_ns <= handle.finished_ns <= time.monotonic_ns()


def test_several_threads_may_wait_for_one(held: Held) -> None:
    handle = held.push_pull()
    waited: list[int] = []

    def wait(number: int) -> None:
        handle.wait(TIMEOUT)
        waited.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    held.release()
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(waited) == [0, 1, 2, 3]


def test_other_threads_go_on_while_one_waits(held: Held) -> None:
    handle = held.push_pull()
    counted = 0

    def count() -> None:
        nonlocal counted
        while counted < 100_000:
            counted += 1
        held.release()

    thread = threading.Thread(target=count)
    thread.start()
    # It would wait for ever if it kept other threads from running.
    handle.wait(TIMEOUT)
    thread.join(TIMEOUT)
    assert counted == 100_000


def test_callbacks_are_called_once_with_the_handle(held: Held) -> None:
    handle = held.push_pull()
    called: list[tuple[str, bool, int]] = []
    all_called = threading.Event()

    def note(name: str) -> Callable[[paramhub.Handle], None]:
        def callback(ended: paramhub.Handle) -> None:
            ended.wait(0)
            called.append((name, ended.done(), threading.get_ident()))
            if len(called) == 3:
                all_called.set()

        return callback

    for name in "abc":
        handle.add_done_callback(note(name))
    held.release()
    assert all_called.wait(TIMEOUT)
    assert [(name, done) for name, done, _ in called] == [("a", True), ("b", True), ("c", True)]
    assert threading.get_ident() not in {thread for *_, thread in called}
    # A callback that is added too late is called at once, on this thread.
    handle.add_done_callback(note("d"))
    assert called[3] == ("d", True, threading.get_ident())


def test_an_exception_in_a_callback_stops_nothing(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(unraisable.exc_value))
    called = threading.Event()
    handle = held.push_pull()

    def fails(_: paramhub.Handle) -> None:
        raise ValueError("on purpose")

    handle.add_done_callback(fails)
    handle.add_done_callback(lambda _: called.set())
    held.release()
    assert called.wait(TIMEOUT)
    assert [str(error) for error in reported] == ["on purpose"]
    with pytest.raises(ValueError, match="on purpose"):
        handle.add_done_callback(fails)


def test_callbacks_may_use_the_job(held: Held) -> None:
    second: list[paramhub.Handle] = []
    submitted = threading.Event()

    def again(_: paramhub.Handle) -> None:
        second.append(held.push_pull())
        submitted.set()

    held.push_pull().add_done_callback(again)
    held.release()
    assert submitted.wait(TIMEOUT)
    held.release()
    second[0].wait(TIMEOUT)


def test_a_dropped_handle_still_ends_and_calls_back(held: Held) -> None:
    called = threading.Event()
    handle = held.push_pull()
    handle.add_done_callback(lambda _: called.set())
    del handle
    gc.collect()
    held.release()
    assert called.wait(TIMEOUT)


def test_handles_can_be_awaited(held: Held) -> None:
    async def wait() -> str:
        handle = held.push_pull()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while not handle.done():
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        # Several coroutines wait for one handle, and the loop goes on meanwhile.
        waiting = [asyncio.create_task(_until(handle)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(held.release)
        await asyncio.gather(*waiting, ticking)
        assert ticks > 1
        await handle  # It has ended already.
        return "done"

    assert asyncio.run(wait()) == "done"


async def _until(handle: paramhub.Handle) -> None:
    await handle


def test_giving_up_an_await_leaves_the_exchange_alone(held: Held) -> None:
    async def wait() -> None:
        handle = held.push_pull()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_until(handle), 0.05)
        task = asyncio.create_task(_until(handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(held.release)
        await handle

    asyncio.run(wait())


def test_an_event_loop_that_ends_first_harms_no_other(held: Held, capfd: pytest.CaptureFixture[str]) -> None:
    handles: list[paramhub.Handle] = []

    async def abandon() -> None:
        handles.append(held.push_pull())
        task = asyncio.create_task(_until(handles[0]))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(abandon())
    called = threading.Event()
    handles[0].add_done_callback(lambda _: called.set())
    held.release()
    # The loop's own callback was called before this one.
    assert called.wait(TIMEOUT)
    handles[0].wait(TIMEOUT)
    assert capfd.readouterr().err == ""


def test_every_way_of_waiting_raises_the_failure(held: Held) -> None:
    handle = held.push_pull()
    errors: list[BaseException | None] = []
    called = threading.Event()

    def record_exception(ended: paramhub.Handle) -> None:
        errors.append(ended.exception())
        called.set()

    handle.add_done_callback(record_exception)
    held.stop("for the test")
    assert called.wait(TIMEOUT)
    with pytest.raises(paramhub.JobFailedError, match="for the test"):
        handle.wait()
    with pytest.raises(paramhub.JobFailedError, match="for the test"):
        asyncio.run(_until(handle))
    with pytest.raises(paramhub.JobFailedError, match="for the test"):
        held.push_pull()
    assert handle.done()
    for error in (errors[0], handle.exception(), held.job._native.failure()):
        assert isinstance(error, paramhub.JobFailedError)
        assert error.culprit is None
        assert "for the test" in str(error)


def test_the_first_failure_of_a_process_blocks_no_thread() -> None:
    program = Path(__file__).parent / "support" / "first_failures.py"
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


CALLED_AT_THE_END = """
import array, sys, threading, time
import paramhub
url, job, secret = sys.argv[1:4]
one = array.array("f", [0.0])
def connect_other():
    other.append(paramhub.connect(url, job, secret, 1))
    other[0].init({"w": one})
other = []
thread = threading.Thread(target=connect_other)
thread.start()
mine = paramhub.connect(url, job, secret, 0)
mine.init({"w": one})
thread.join()
called = threading.Event()
def call_back(handle):
    called.set()
    for _ in range(500):
        time.sleep(0.001)  # It gives the GIL up and takes it again.
    print("returned", flush=True)
handle = mine.push_pull("w", one, one)
handle.add_done_callback(call_back)
other[0].push_pull("w", one, one)
called.wait()
"""


def test_the_process_ends_after_a_callback_that_is_under_way(hub: paramhub.Hub) -> None:
    ticket = new_job(hub, 2)
    program = [sys.executable, "-c", CALLED_AT_THE_END, *ticket]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT)
    assert (ended.returncode, ended.stdout) == (0, "returned\n"), ended.stderr


def test_leaving_waits_for_what_is_under_way(held: Held) -> None:
    out = numpy.zeros(1000, "f4")
    handle = held.job.push_pull("w", held.gradient, out)
    with _other(held.job.leave):
        time.sleep(0.05)
        assert not handle.done()
        held.release()
    handle.wait(0)
    assert (out == 2.0).all()
