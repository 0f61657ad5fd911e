"""The memory that jobs accept and refuse, and how long they keep it alive."""

from __future__ import annotations

import array
import gc
import threading
import weakref
from collections.abc import Iterator

import numpy
import pytest
from workers import TIMEOUT, new_job

import paramhub


@pytest.fixture
def job(hub: paramhub.Hub) -> Iterator[paramhub.Job]:
    """A job of one rank with a tensor ``w`` of 2 x 3 elements of f32."""
    with paramhub.connect(*new_job(hub, 1), 0) as job:
        yield job.init({"w": numpy.zeros((2, 3), "f4")})


GOOD = numpy.zeros((2, 3), "f4")
BAD = {
    "not contiguous": (numpy.zeros((3, 2), "f4").T, "contiguous"),
    "a part of rows": (numpy.zeros((2, 6), "f4")[:, :3], "contiguous"),
    "in Fortran's order": (numpy.asfortranarray(GOOD), "contiguous"),
    "too few elements": (numpy.zeros((2, 2), "f4"), "24 bytes of f32, but one of 16 bytes of f32"),
    "too many elements": (numpy.zeros((3, 3), "f4"), "24 bytes of f32, but one of 36 bytes of f32"),
    "another type of as many bytes": (numpy.zeros(12, "f2"), "24 bytes of f32, but one of 24 bytes of f16"),
    "a type hubs do not sum": (numpy.zeros((2, 3), "f8"), "f32 or f16"),
    "integers": (numpy.zeros((2, 3), "i4"), "f32 or f16"),
    "the other byte order": (numpy.zeros((2, 3), ">f4"), "f32 or f16"),
    "bytes": (bytearray(24), "f32 or f16"),
    "a list": ([0.0] * 6, "a list lends no memory"),
    "nothing": (None, "NoneType lends no memory"),
    "a number": (1.5, "float lends no memory"),
    "text": ("w", "str lends no memory"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_memory_that_does_not_fit_is_refused(job: paramhub.Job, bad: tuple[object, str]) -> None:
    tensor, reason = bad
    for call in (
        lambda: job.push("w", tensor),
        lambda: job.pull("w", tensor),
        lambda: job.push_pull("w", tensor, out=GOOD),
        lambda: job.push_pull("w", GOOD, out=tensor),
    ):
        with pytest.raises(paramhub.MisuseError, match=reason):
            call()
    # The hub received no frame of these calls.
    assert job.next_step("w") == 0
    job.push_pull("w", GOOD.copy(), out=GOOD.copy()).wait(TIMEOUT)


def test_memory_that_cannot_be_written_is_only_sent(job: paramhub.Job) -> None:
    frozen = numpy.ones((2, 3), "f4")
    frozen.flags.writeable = False
    with pytest.raises(paramhub.MisuseError, match="contiguous and writable"):
        job.pull("w", frozen)
    with pytest.raises(paramhub.MisuseError, match="contiguous and writable"):
        job.push_pull("w", frozen, out=frozen)
    out = numpy.empty((2, 3), "f4")
    job.push_pull("w", frozen, out=out).wait(TIMEOUT)
    assert (out == 1.0).all()


def test_only_tensors_that_are_there_have_names(job: paramhub.Job) -> None:
    for call in (
        lambda: job.push("v", GOOD),
        lambda: job.next_step("v"),
        lambda: job.gradient_tensor("v"),
        lambda: job.parameter_tensor(""),
    ):
        with pytest.raises(paramhub.MisuseError, match=r"job `test-\d+`, rank 0: no tensor is called '"):
            call()


TABLES = {
    "a type": ({"w": numpy.zeros(3, "f8")}, "format `d`"),
    "no memory": ({"w": [1.0]}, "lends no memory"),
    "a name twice": ([("w", GOOD), ("w", GOOD)], "w"),
    "no name": ({"": GOOD}, "name"),
    "no tensor": ({}, "key"),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_tables_that_cannot_be_are_refused(hub: paramhub.Hub, table: tuple[object, str]) -> None:
    tensors, reason = table
    with paramhub.connect(*new_job(hub, 1), 0) as job, pytest.raises(paramhub.MisuseError, match=reason):
        job.init(tensors)


SETTINGS = {
    "consistency": {"consistency": "sometimes"},
    "staleness": {"consistency": {"bounded_staleness": -1}},
    "codec": {"codec": "zip"},
    "chunk_bytes": {"chunk_bytes": 3},
    "optimizer": {"optimizer": paramhub.Optimizer("no-such")},
    "learning_rate": {"optimizer": paramhub.SGD(lr=-1.0)},
}


@pytest.mark.parametrize("wrong", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_that_cannot_be_are_refused(hub: paramhub.Hub, wrong: dict[str, object]) -> None:
    with paramhub.connect(*new_job(hub, 1), 0) as job, pytest.raises(paramhub.ParamhubError) as refused:
        job.init({"w": GOOD.copy()}, **wrong)
    assert isinstance(refused.value, (paramhub.MisuseError, paramhub.ConnectError)), refused.value


def test_lent_memory_stays_where_it_is_until_the_handle_has_ended(hub: paramhub.Hub) -> None:
    ticket = new_job(hub, 2)
    others = threading.Barrier(2)
    ended = []

    def other() -> None:
        with paramhub.connect(*ticket, 1) as job:
            job.init({"w": numpy.zeros(3, "f4")})
            others.wait(TIMEOUT)
            job.push("w", numpy.ones(3, "f4")).wait(TIMEOUT)
            ended.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    with paramhub.connect(*ticket, 0) as job:
        floats = array.array("f", [1.0, 2.0, 3.0])
        job.init({"w": floats})
        handle = job.push_pull("w", floats, floats)
        with pytest.raises(BufferError):
            floats.append(4.0)  # This would move the array.
        others.wait(TIMEOUT)
        handle.wait(TIMEOUT)
        thread.join(TIMEOUT)
        del handle
        gc.collect()
        assert floats.tolist() == [1.0, 1.5, 2.0]
        floats.append(4.0)
    assert ended


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_tensors_are_kept_by_their_requests_and_no_longer(hub: paramhub.Hub, transport: str) -> None:
    """Drops all objects that Python could free at once, in every order, while requests are under way."""
    steps, elements = 30, 40_000
    ticket = new_job(hub, 2)
    leaks: list[weakref.ref[numpy.ndarray]] = []

    def rank(number: int) -> None:
        with paramhub.connect(*ticket, number, transport=transport) as job:
            # A key takes one request at a time, and the test does not wait for all, so each step has its own keys.
            names = [[f"{step}-{i}" for i in range(4)] for step in range(steps)]
            table = {name: numpy.zeros(elements, "f4") for step in names for name in step}
            job.init(table, optimizer=paramhub.Sum())
            for step in range(steps):
                for name in names[step]:
                    gradient = numpy.full(elements, float(step), "f4")
                    out = numpy.zeros(elements, "f4")
                    leaks.append(weakref.ref(gradient))
                    handle = job.push_pull(name, gradient, out)
                # By now three of four handles and all gradients are dropped, while their requests are under way.
                del gradient
                gc.collect()
                # These would reuse memory that was freed too early.
                rubbish = [numpy.full(elements, -1e9, "f4") for _ in range(4)]
                handle.wait(TIMEOUT)
                assert (out == 2.0 * step).all(), step
                del rubbish

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * TIMEOUT)
        assert not thread.is_alive()
    gc.collect()
    assert len(leaks) == 2 * 4 * steps
    assert not [leak for leak in leaks if leak() is not None]
