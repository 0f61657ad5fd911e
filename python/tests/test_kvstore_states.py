"""The optimizer's state of key-value stores, which another store goes on from, and stores whose ranks do not wait for others."""

from __future__ import annotations

import numpy
import pytest
from stores import KINDS, open_store
from team import Rank, Team
from workers import TIMEOUT, new_job

import paramhub
import paramhub.kvstore as kvs

SHAPES = {"w": (300, 40), 3: (5,), "one": (1,)}
STEPS = 6
State = dict[kvs.Key, tuple[list[bytes], int]]


def gradient(rank: int, step: int, key: kvs.Key) -> numpy.ndarray:
    random = numpy.random.default_rng([rank, step, list(SHAPES).index(key)])
    return numpy.asarray(random.normal(size=SHAPES[key]), "f4")


def train(
    kv: kvs.KVStore, steps: range, parameters: dict[kvs.Key, numpy.ndarray], state: State | None = None
) -> None:
    kv.init(list(SHAPES), list(parameters.values()))
    kv.set_optimizer(paramhub.Adam(lr=0.1))
    for key, (slots, updates) in (state or {}).items():
        kv.set_optimizer_state(key, slots, updates)
    for step in steps:
        for key, out in parameters.items():
            kv.pushpull(key, gradient(kv.rank, step, key), out=out)
        kv.wait(timeout=TIMEOUT)


def continues(rank: Rank, tickets: list[paramhub.JobTicket], kind: str) -> None:
    whole, parts = ({key: numpy.ones(shape, "f4") for key, shape in SHAPES.items()} for _ in range(2))
    state: State = {}
    with open_store(rank, tickets[0], kind, **{"reproducible": True} if kind == "hub" else {}) as kv:
        train(kv, range(STEPS), whole)
    for ticket, steps in zip(tickets[1:], (range(2), range(2, STEPS)), strict=True):
        with open_store(rank, ticket, kind, **{"reproducible": True} if kind == "hub" else {}) as kv:
            train(kv, steps, parts, state)
            state = {key: kv.optimizer_state(key) for key in SHAPES}
            kv.barrier(TIMEOUT)
        assert all(
            [len(slot) for slot in slots] == [4 * parts[key].size] * 2 for key, (slots, _) in state.items()
        )
        assert state["w"][1] == steps.stop
    for key, expected in whole.items():
        assert parts[key].tobytes() == expected.tobytes(), key


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_goes_on_from_the_state_of_another(hub: paramhub.Hub, team: Team, kind: str) -> None:
    team(continues, [new_job(hub, 2) for _ in range(3)], kind, ranks=2)


def test_a_state_that_does_not_fit_is_refused() -> None:
    with kvs.create("local") as kv:
        kv.init("w", numpy.zeros(3, "f4"))
        with pytest.raises(paramhub.MisuseError, match="there is no optimizer"):
            kv.optimizer_state("w")
        kv.set_optimizer(paramhub.SGD(lr=0.1, momentum=0.9))
        assert kv.optimizer_state("w") == ([bytes(12)], 0)
        with pytest.raises(paramhub.MisuseError, match="key 'v': it has no value yet"):
            kv.optimizer_state("v")
        with pytest.raises(
            paramhub.MisuseError, match=r"key w: the optimizer's state is 1 slots of 3 values, not \[2\]"
        ):
            kv.set_optimizer_state("w", [bytes(8)], 1)
        kv.set_optimizer_state("w", [bytes(12)], 1)
        kv.pushpull("w", numpy.ones(3, "f4")).wait(TIMEOUT)
        with pytest.raises(paramhub.MisuseError, match="state is restored before the first push"):
            kv.set_optimizer_state("w", [bytes(12)], 1)


def too_late(rank: Rank, ticket: paramhub.JobTicket) -> None:
    with open_store(rank, ticket, "hub") as kv:
        kv.init("w", numpy.zeros(3, "f4"))
        kv.set_optimizer(paramhub.SGD(lr=0.1, momentum=0.9))
        # Before the first push every rank asks, and opens the job.
        assert kv.optimizer_state("w") == ([bytes(12)], 0)
        with pytest.raises(paramhub.MisuseError, match="state is restored before the first push"):
            kv.set_optimizer_state("w", [bytes(12)], 1)
        kv.pushpull("w", numpy.ones(3, "f4")).wait(TIMEOUT)
        assert kv.optimizer_state("w") == ([numpy.ones(3, "f4").tobytes()], 1)


def test_a_hub_takes_no_state_once_the_job_is_open(hub: paramhub.Hub, team: Team) -> None:
    team(too_late, new_job(hub, 2), ranks=2)


def asynchronous(rank: Rank, ticket: paramhub.JobTicket) -> None:
    with open_store(rank, ticket, "hub", consistency="async") as kv:
        own, out = numpy.ones(7, "f4"), numpy.zeros(7, "f4")
        kv.init("w", out)
        kv.set_optimizer(paramhub.SGD(lr=0.5))
        # Rank 0 pushes more often, and waits for nobody.
        for _ in range(5 if rank.rank == 0 else 2):
            kv.pushpull("w", own, out=out).wait(TIMEOUT)
        kv.barrier(TIMEOUT)
        kv.pushpull("w", numpy.zeros(7, "f4"), out=out).wait(TIMEOUT)
        assert (out == -3.5).all(), out


def test_asynchronous_ranks_push_for_themselves(hub: paramhub.Hub, team: Team) -> None:
    team(asynchronous, new_job(hub, 2), ranks=2)


@pytest.mark.parametrize(
    ("kind", "consistency", "message"),
    [
        ("local", "async", "`consistency` would have no effect with the exchange"),
        ("depcha", "sync", "`consistency` would have no effect with the exchange"),
        ("hub", "eventually", "unknown consistency `eventually`: expected sync, async or staleness:STEPS"),
    ],
)
def test_a_wrong_consistency_is_refused(kind: str, consistency: str, message: str) -> None:
    with pytest.raises(paramhub.MisuseError, match=message):
        kvs.create(
            kind, consistency=consistency, url="http://127.0.0.1:9", job="0" * 32, secret="0" * 64, rank=0
        )
