"""The calls that key-value stores refuse, and their messages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy
import pytest
from stores import COLLECTIVE, KINDS, open_store
from team import Rank, Team
from workers import TIMEOUT, new_job

import paramhub
import paramhub.kvstore as kvs


def floats(*shape: int) -> numpy.ndarray:
    return numpy.zeros(shape, "f4")


@pytest.fixture
def kv() -> Iterator[kvs.KVStore]:
    with kvs.create("local") as kv:
        kv.init("w", floats(2, 3))
        yield kv


CALLS: dict[str, Callable[[kvs.KVStore], object]] = {
    r"rank 0: key 'v': it has no value yet: give it one with init": lambda kv: kv.push("v", floats(2, 3)),
    r"rank 0: key 5: it has no value yet": lambda kv: kv.wait(5),
    r"key 'w': it has its value already": lambda kv: kv.init("w", floats(2, 3)),
    r"key 'x': it begins with one value, and 2 were passed": lambda kv: kv.init("x", [floats(2), floats(2)]),
    r"key 'w': its value has the shape \[2, 3\] in f32, but one of \[3, 2\] in f32": lambda kv: kv.push(
        "w", floats(3, 2)
    ),
    r"in f32, but one of \[2, 3\] in f16 was passed": lambda kv: kv.pull("w", numpy.zeros((2, 3), "f2")),
    r"a NoneType lends no memory": lambda kv: kv.push("w", [None]),
    r"key 'w': no tensor was passed": lambda kv: kv.push("w", []),
    r"2 keys came with 1 tensors": lambda kv: kv.push(["w", "w"], floats(2, 3)),
    r"a key is a name or a number from 0, not -1": lambda kv: kv.init(-1, floats(2)),
    r"a key is a name or a number from 0, not ''": lambda kv: kv.init("", floats(2)),
    r"a key is a name or a number from 0, not 1\.5": lambda kv: kv.init(1.5, floats(2)),
    r"0 or more seconds, not nan": lambda kv: kv.wait(timeout=float("nan")),
    r"there is no optimizer, choose one": lambda kv: kv.set_hyperparameters(learning_rate=1),
    r"SGD takes lr, .*, and not rho": lambda kv: kv.set_optimizer("SGD", rho=1),
    r"has its numbers: change them there": lambda kv: kv.set_optimizer(paramhub.SGD(), lr=1),
    r"muon": lambda kv: kv.set_optimizer("muon"),
}


@pytest.mark.parametrize(("message", "call"), CALLS.items(), ids=range(len(CALLS)))
def test_wrong_calls_are_misuse_and_harm_nothing(
    kv: kvs.KVStore, message: str, call: Callable[[kvs.KVStore], object]
) -> None:
    with pytest.raises(paramhub.MisuseError, match=message):
        call(kv)
    kv.pushpull("w", floats(2, 3)).wait(TIMEOUT)


def test_the_optimizer_comes_before_the_first_push(kv: kvs.KVStore) -> None:
    kv.push("w", floats(2, 3))
    with pytest.raises(paramhub.MisuseError, match="the optimizer is chosen before the first push"):
        kv.set_optimizer(paramhub.SGD(lr=0.1))


def test_read_only_memory_may_be_pushed_and_not_pulled_into(kv: kvs.KVStore) -> None:
    value = numpy.frombuffer(bytes(24), "f4").reshape(2, 3)
    kv.push("w", value).wait(TIMEOUT)
    with pytest.raises(paramhub.MisuseError):
        kv.pull("w", value)


def test_memory_that_is_under_way_may_be_passed_again_and_not_a_part_of_it(
    hub: paramhub.Hub,
) -> None:
    ticket = new_job(hub, 2)
    whole = numpy.zeros(2001, "f4")
    opened = {}

    def rank(number: int) -> None:
        store = kvs.create("depcha", url=ticket.url, job=ticket.job, secret=ticket.secret, rank=number)
        for key in ("w", "v"):
            store.init(key, floats(2000))
        opened[number] = store

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    # This cannot end, because the other rank has not pushed yet.
    first = opened[0].pushpull("w", whole[:2000])
    again = opened[0].pushpull("v", whole[:2000])
    with pytest.raises(paramhub.MisuseError, match="8000 bytes of f32 overlap 8000 bytes of f32"):
        opened[0].push("w", whole[1:])
    assert not first.done() and not again.done()
    one = numpy.ones(2000, "f4")
    opened[1].pushpull("w", one.copy())
    opened[1].pushpull("v", one.copy())
    again.wait(TIMEOUT)
    assert (whole[:2000] == 2).all(), "what was pulled first was pushed then"
    leaving = threading.Thread(target=opened[1].leave)
    leaving.start()
    opened[0].leave()
    leaving.join(TIMEOUT)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dist_sync", {}, "no store `dist_sync`: expected hub, local, funnel, concom, depcha"),
        ("local", {"outstanding": 2}, "`outstanding` would have no effect with the exchange local"),
        ("local", {"check": True}, r"checked collectives .* would have no effect"),
        ("local", {"codec": "bf16"}, "`codec` would have no effect"),
        ("local", {"compute_threads": 0}, "0 threads for compute operations: expected 1 to 256"),
    ],
)
def test_wrong_stores_are_misuse(kind: str, options: dict, message: str) -> None:
    with pytest.raises(paramhub.MisuseError, match=message):
        kvs.create(kind, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_ranks_needs_its_rank_and_job(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for name in ("PARAMHUB_URL", "PARAMHUB_JOB", "PARAMHUB_SECRET", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        paramhub.MisuseError, match=r"URL is missing: start the worker with .*pass it to create\(\)"
    ):
        kvs.create(kind)


@pytest.mark.parametrize("kind", ["hub", "concom"])
def test_ranks_that_do_not_come_are_named(hub: paramhub.Hub, kind: str) -> None:
    ticket = new_job(hub, 3, rendezvous_timeout=1.0)
    with pytest.raises(paramhub.ConnectError, match="ranks 1 and 2 have not connected"):
        kvs.create(kind, url=ticket.url, job=ticket.job, secret=ticket.secret, rank=0)


def differs(rank: Rank, ticket: paramhub.JobTicket, kind: str) -> str:
    with pytest.raises(paramhub.JobFailedError) as failed, open_store(rank, ticket, kind, check=True) as kv:
        # The first and the third key use one communicator, even with concom's two.
        for key in "abc":
            kv.init(key, floats(10))
        for key in "abc" if rank.rank != 2 else "cba":
            kv.push(key, floats(10))
            kv.pull(key, floats(10))
        kv.wait(timeout=TIMEOUT)
    return str(failed.value)


@pytest.mark.parametrize("kind", COLLECTIVE)
def test_a_checked_store_names_the_rank_that_calls_something_else(
    hub: paramhub.Hub, team: Team, kind: str
) -> None:
    for message in team(differs, new_job(hub, 3), kind, ranks=3):
        assert "rank 2 does not do what rank 0 does" in message, message
        assert "`a`" in message and "`c`" in message, message


def late_key(rank: Rank, ticket: paramhub.JobTicket) -> None:
    with open_store(rank, ticket, "hub") as kv:
        kv.init("a", floats(10))
        kv.pushpull("a", floats(10)).wait(TIMEOUT)
        with pytest.raises(
            paramhub.MisuseError, match=r"key late: .* init all of them before the first push"
        ):
            kv.init("late", floats(10))
        kv.pushpull("a", floats(10)).wait(TIMEOUT)


def whole_tensors(rank: Rank, ticket: paramhub.JobTicket, kind: str) -> None:
    with open_store(rank, ticket, kind) as kv:
        if kind == "hub":
            with pytest.raises(
                paramhub.MisuseError, match="the optimizer lamb: at a hub it updates no key before"
            ):
                kv.set_optimizer(paramhub.LAMB())
            kv.set_optimizer(paramhub.SGD(lr=0.1))
        else:
            # Where ranks have whole tensors themselves, their norms are at hand.
            kv.set_optimizer(paramhub.LARS(lr=1.0, momentum=0.0, trust_coefficient=0.5))
        kv.init("w", numpy.full(4, 2.0, "f4"))
        kv.init("v", floats(4))
        found = numpy.ones(4, "f4")
        kv.pushpull("w", numpy.full(4, 8.0, "f4"), out=found).wait(TIMEOUT)
        # The norm of the parameters is 4, that of the gradient 16: the rate is 0.5 * 4 / 16.
        assert (found == (2.0 - 0.1 * 8.0 if kind == "hub" else 1.0)).all(), found


@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_of_whole_tensors_need_a_store_without_hubs(
    hub: paramhub.Hub, team: Team, kind: str
) -> None:
    team(whole_tensors, new_job(hub, 2), kind, ranks=2)


def test_a_hub_knows_all_keys_before_the_first_push(hub: paramhub.Hub, team: Team) -> None:
    team(late_key, new_job(hub, 2), ranks=2)


def test_a_forked_child_is_refused(kv: kvs.KVStore) -> None:
    child = os.fork()
    if child == 0:
        try:
            kv.push("w", floats(2, 3))
        except paramhub.MisuseError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    kv.pushpull("w", floats(2, 3)).wait(TIMEOUT)
