"""The numbers of every kind of key-value store. Every rank is a process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy
import pytest
from launching import PARAMHUB, PYTHON, Ended
from stores import COLLECTIVE, KINDS, open_store
from team import Rank, Team
from workers import TIMEOUT, new_job

import paramhub
import paramhub._native
import paramhub.kvstore as kvs

SHAPES = {"conv.weight": (16, 3, 3), "conv.bias": (16,), "fc.weight": (300, 400), 7: (5,), 0: ()}


def gradient(rank: int, step: int, key: kvs.Key) -> numpy.ndarray:
    random = numpy.random.default_rng([rank, step, list(SHAPES).index(key)])
    return numpy.asarray(random.normal(size=SHAPES[key]), "f4")


def sums(rank: Rank, ticket: paramhub.JobTicket, kind: str) -> dict[kvs.Key, bytes]:
    with open_store(rank, ticket, kind) as kv:
        assert (kv.type, kv.rank, kv.num_workers, kv.size) == (kind, rank.rank, rank.size, rank.size)
        outs = {key: numpy.full(shape, numpy.nan, "f4") for key, shape in SHAPES.items()}
        for key, shape in SHAPES.items():
            kv.init(key, numpy.full(shape, 5.0 - rank.rank, "f4"))
        for key, out in outs.items():
            kv.pull(key, out).wait(TIMEOUT)
            assert (out == 5.0).all(), "rank 0's value, at every rank"
        for step in range(3):
            pushed = [kv.push(key, gradient(rank.rank, step, key)) for key in outs]
            pulled = [
                kv.pull(key, out=out, priority=-number) for number, (key, out) in enumerate(outs.items())
            ]
            kv.wait(timeout=TIMEOUT)
            assert all(handle.done() for handle in pushed + pulled)
            for key, out in outs.items():
                expected = sum(gradient(other, step, key).astype("f8") for other in range(rank.size))
                assert numpy.allclose(out, expected, rtol=1e-6, atol=1e-6), (step, key)
        kv.barrier(TIMEOUT)
        return {key: out.tobytes() for key, out in outs.items()}


def test_sums_are_all_ranks_and_those_of_collectives_are_equal_to_the_bit(
    hub: paramhub.Hub, team: Team
) -> None:
    found = []
    for kind in KINDS:
        results = team(sums, new_job(hub, 4), kind, ranks=4)
        assert all(result == results[0] for result in results), f"{kind}: every rank has the same"
        found.append(results[0])
    assert all(result == found[1] for result in found[2:])


def lists(rank: Rank, ticket: paramhub.JobTicket, kind: str) -> None:
    with open_store(rank, ticket, kind, **({"check": True} if kind in COLLECTIVE else {})) as kv:
        one = float(rank.rank)
        a, b = numpy.full((2, 3), one, "f4"), numpy.full(4, 10 * one, "f4")
        kv.broadcast(["a", "b"], [a, b], out=[a, b]).wait(TIMEOUT)
        assert not a.any() and not b.any()
        # First in place, then from two tensors into two others.
        a += one
        b += 10 * one
        kv.pushpull(["a", "b"], [a, b]).wait(TIMEOUT)
        assert (a == 6).all() and (b == 60).all()
        devices = [numpy.full((2, 3), one + more, "f4") for more in (0.0, 0.5)]
        outs = [numpy.zeros((2, 3), "f4") for _ in range(2)]
        kv.pushpull("a", devices, out=outs).wait(TIMEOUT)
        assert all((out == 14).all() for out in outs)
        kv.push(["a", "b"], [devices, [b, b]]).wait(TIMEOUT)
        kv.pull(["a", "b"], out=[outs, b]).wait(TIMEOUT)
        assert (outs[1] == 14).all() and (b == 480).all()
        # A key that is named twice has two values.
        kv.push(["a", "a"], devices)
        kv.pull("a", outs[0])
        # A tensor that is being pulled may be pushed at once, because the store keeps the order.
        kv.push("a", outs[0])
        kv.pull("a", outs[0])
        kv.wait("a", TIMEOUT)
        assert (outs[0] == 4 * 14).all()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_come_in_lists(hub: paramhub.Hub, team: Team, kind: str) -> None:
    # Collectives need no hub.
    ticket = new_job(hub, 4, **({"hubs": 0} if kind in COLLECTIVE else {}))
    team(lists, ticket, kind, ranks=4)


def means(rank: Rank, ticket: paramhub.JobTicket, kind: str) -> None:
    with open_store(rank, ticket, kind) as kv:
        own, out = numpy.full(7, float(rank.rank), "f4"), numpy.zeros(7, "f4")
        kv.init("w", own)
        kv.set_optimizer(paramhub.Mean())
        for _ in range(3):
            kv.pushpull("w", own, out=out).wait(TIMEOUT)
            assert (out == 1.5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_means_are_had_for_the_asking(hub: paramhub.Hub, team: Team, kind: str) -> None:
    team(means, new_job(hub, 4), kind, ranks=4)


def test_a_local_store_has_one_process_and_needs_no_environment() -> None:
    with kvs.create() as kv:
        assert (kv.type, kv.rank, kv.num_workers) == ("local", 0, 1)
        out = numpy.zeros(3, "f2")
        kv.init(3, numpy.ones(3, "f2"))
        kv.pull(3, out).wait(TIMEOUT)
        assert (out == 1).all()
        kv.pushpull(numpy.int64(3), [numpy.full(3, 2.5, "f2")] * 4, out=out).wait(TIMEOUT)
        assert (out == 10).all()
        kv.barrier()
    kv.leave()
    with pytest.raises(paramhub.MisuseError, match="local`, rank 0: the store was left"):
        kv.push(3, out)


def test_handles_can_be_awaited() -> None:
    async def exchange(kv: kvs.KVStore) -> numpy.ndarray:
        out = numpy.zeros(1000, "f4")
        await kv.pushpull("w", numpy.ones(1000, "f4"), out=out)
        return out

    with kvs.create("local") as kv:
        kv.init("w", numpy.zeros(1000, "f4"))
        assert asyncio.run(exchange(kv)).all()


def test_tensors_are_kept_while_they_are_under_way() -> None:
    with kvs.create("local") as kv:
        kv.init("w", numpy.zeros(100_000, "f4"))
        for number in range(200):
            # The test keeps no reference to the tensors or the handles.
            kv.push("w", numpy.full(100_000, float(number), "f4"))
            kv.pull("w", numpy.empty(100_000, "f4"))
        out = numpy.empty(100_000, "f4")
        kv.pull("w", out).wait(TIMEOUT)
        assert (out == 199).all()


def test_memory_is_given_back_when_a_call_has_ended() -> None:
    with kvs.create("local") as kv:
        value, out = bytearray(4000), bytearray(4000)
        kv.init("w", numpy.frombuffer(value, "f4"))
        kv.pushpull("w", numpy.frombuffer(value, "f4"), out=numpy.frombuffer(out, "f4")).wait(TIMEOUT)
        # No request uses the memory any more, so another view of it may be passed.
        kv.init("half", numpy.frombuffer(value, "f4")[500:])
        kv.barrier()
    # Threads without the GIL cannot release buffers; the next call of the library does it.
    paramhub._native.now_ns()
    # A bytearray with an exported buffer could not be made longer.
    value.append(0)
    out.append(0)


TRAINS = """
import sys, numpy, paramhub, paramhub.kvstore as kvs
kv = kvs.create(sys.argv[1])
w = numpy.zeros(1000, "f4")
kv.init("w", w)
kv.set_optimizer("sgd", lr=1.0)
for step in range(5):
    kv.push("w", numpy.full(1000, float(kv.rank), "f4"))
    kv.pull("w", w)
kv.wait(timeout=60)
assert (w == -7.5).all(), w
if kv.rank == 0:
    print(kv.type, "reached", w[0])
if len(sys.argv) > 2:
    kv.leave()
"""


@pytest.mark.parametrize("kind", [*KINDS, "depcha, left at exit"])
def test_a_program_of_four_ranks_finishes_its_job(
    hub: paramhub.Hub, launch: Callable[..., Ended], kind: str
) -> None:
    name, _, at_exit = kind.partition(", ")
    arguments = (PYTHON, "-c", TRAINS, name, *(() if at_exit else ("leaves",)))
    code, output = launch(
        *PARAMHUB, "run", "-n", "4", "--hub", hub.url, "--name", "training", "--", *arguments
    )
    assert code == 0, output
    assert f"{name} reached -7.5" in output, output
    code, output = launch(*PARAMHUB, "jobs", "list", "--hub", hub.url)
    assert code == 0 and "finished" in output, output


def test_a_number_and_a_name_of_the_same_digits_are_one_key_too_many() -> None:
    with kvs.create("local") as kv:
        kv.init(3, numpy.zeros(2, "f4"))
        with pytest.raises(paramhub.MisuseError, match="key '3': it has its value already"):
            kv.init("3", numpy.zeros(2, "f4"))
        with pytest.raises(paramhub.MisuseError, match="key '3': it has no value yet"):
            kv.push("3", numpy.zeros(2, "f4"))
