"""Operations, stores and misuse where processes are connected anew (`enable_reconfigure=True`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from reconfiguring import (
    CAN_RECONFIGURE,
    LARGE,
    SMALL,
    begin,
    begin_alone,
    check,
    connect,
    exchange,
    network,
)
from team import Died, Rank, Team
from torch.nn.parallel import DistributedDataParallel

import paramhub.torch
from paramhub.errors import ConnectError, MisuseError
from paramhub.torch import _collectives, _watchdog
from paramhub.torch._rendezvous import allgather_json

pytestmark = pytest.mark.skipif(not CAN_RECONFIGURE, reason="this torch has no reconfigure")


def lose_one_while_the_next_group_connects(rank: Rank, victim: int, has_said_where_it_listens: bool) -> None:
    begin(rank, 3)
    connect(rank, 10, [0, 1, 2])
    if rank.rank == victim:
        if has_said_where_it_listens:
            _collectives.allgather_json = meet_and_die
            paramhub.torch.broadcast_object(1)
        os.kill(os.getpid(), signal.SIGKILL)
    # The connections that it makes are others than those of the process group.
    expected = rf"rank {victim} of 3 does not arrive: .*rank {victim} is lost"
    if victim == 0:
        # The ranks meet in its store.
        expected += r"|the store in which the ranks meet, at 127\.0\.0\.1:\d+, does not answer any more"
    with pytest.raises(paramhub.ConnectError, match=expected):
        paramhub.torch.broadcast_object(1)
    dist.destroy_process_group()


def meet_and_die(*arguments, **options) -> None:
    allgather_json(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", [2, 1, 0])
@pytest.mark.parametrize("has_said_where_it_listens", [False, True])
def test_a_rank_that_dies_is_not_awaited_for_the_whole_timeout_by_its_next_group(
    team: Team, victim: int, has_said_where_it_listens: bool
) -> None:
    team(
        lose_one_while_the_next_group_connects,
        victim,
        has_said_where_it_listens,
        ranks=3,
        dies=(victim,),
        timeout=45,
    )


def end_operations(rank: Rank) -> None:
    begin(rank, 2)
    connect(rank, 10, [0, 1])
    pair = dist.new_group([0, 1])
    if rank.rank == 0:
        for group in (None, pair):
            dist.all_reduce(torch.ones(LARGE), group=group)
        works = [
            dist.all_reduce(torch.ones(elements), group=group, async_op=True)
            for group in (None, pair)
            for elements in (SMALL, LARGE)
        ]
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                works[0].wait()
            except RuntimeError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        connect(rank, 20, [0, 1])
        waiting.join()
        for error in [*raised, *(work.exception() for work in works)]:
            assert "to reconfigure the process group" in str(error), error
    else:
        for group in (None, pair):
            dist.all_reduce(torch.ones(LARGE), group=group)
        connect(rank, 20, [0, 1])
    with pytest.raises(RuntimeError, match="to reconfigure the process group"):
        dist.all_reduce(torch.ones(SMALL), group=pair)
    dist.destroy_process_group()


def test_operations_under_way_end_and_old_subgroups_refuse(team: Team) -> None:
    team(end_operations, ranks=2)


def meet_nobody(rank: Rank) -> None:
    begin(rank, 2)
    connect(rank, 10, [0, 1])
    if rank.rank == 1:
        rank.await_mark("failed")
        return
    work = dist.all_reduce(torch.ones(LARGE), async_op=True)
    order: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="to reconfigure the process group"):
            work.wait()
        order.append("the operation")

    waiting = threading.Thread(target=wait)
    waiting.start()
    own = dist._get_reconfigure_handle()
    # It takes connections, and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        parts = own.split(":")
        mute = ":".join([*parts[:3], "0" * 32, str(silent.getsockname()[1]), parts[5]])
        with pytest.raises(ConnectError, match="has said nothing for 3 s"):
            dist._reconfigure(20, [mute, own], timeout=timedelta(seconds=3))
        order.append("the reconfigure")
    waiting.join()
    assert order == ["the operation", "the reconfigure"]
    rank.mark("failed")


def test_operations_end_before_a_silent_rank_0_is_given_up(team: Team) -> None:
    team(meet_nobody, ranks=2)


class Endless:
    """A work whose request does not end."""

    @property
    def handles(self) -> tuple[Endless]:
        return (self,)

    def done(self) -> bool:
        return False

    def awaited_ranks(self) -> list[int]:
        return [1]


class Stopped:
    """The store of a process that has stopped."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    def set(self, key: str, text: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        self.is_asked.set()
        threading.Event().wait()
        raise AssertionError


def watch_on(rank: Rank) -> None:
    store, found = Stopped(), threading.Event()
    old = _watchdog.Watchdog("old", 0, 2, store, lambda: None, lambda *_: None)
    old.add_collective("allreduce", None, Endless(), 0.0)
    assert store.is_asked.wait(60)
    old.close()
    _watchdog.replace_thread()
    new = _watchdog.Watchdog("new", 0, 2, store, lambda: RuntimeError("lost"), lambda *_: found.set())
    new.add_collective("allreduce", None, Endless(), 60.0)
    assert found.wait(60)


def test_new_operations_are_watched_while_an_old_store_says_nothing(team: Team) -> None:
    team(watch_on, ranks=1)


def order_by_set(rank: Rank) -> None:
    if rank.rank == 2:
        begin_alone()
    else:
        begin(rank, 2)
        connect(rank, 10, [1, 0])
    assert dist._supports_reconfigure()
    handles = exchange(rank, 20, [0, 1, 2])
    dist._reconfigure(20, set(handles)).wait()
    # Those that were connected before keep their order, and the newcomer comes after them.
    check([1, 0, 2][rank.rank], 3)
    if rank.rank > 0:
        # A handle of before stands for the same process.
        handles[rank.rank] = dist._get_reconfigure_handle()
        dist._reconfigure(30, [handles[2], handles[1]]).wait()
        check([2, 1].index(rank.rank), 2)
        dist._reconfigure(40 + rank.rank, [dist._get_reconfigure_handle()]).wait()
        check(0, 1)


def test_a_set_keeps_the_ranks_of_those_that_stay(team: Team) -> None:
    team(order_by_set, ranks=3)


def misuse(rank: Rank) -> None:
    with pytest.raises(MisuseError, match=r"init_process_group\("):
        dist.init_process_group(
            "cpu:paramhub,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True
        )
    begin(rank, 2)
    for refused in (
        lambda: dist.all_reduce(torch.ones(SMALL)),
        lambda: dist.barrier(),
        lambda: dist.monitored_barrier(),
        lambda: dist.all_gather_object([None, None], 1),
        lambda: dist.new_group([0, 1]),
        lambda: DistributedDataParallel(network()),
        lambda: paramhub.torch.init(),
    ):
        with pytest.raises(MisuseError, match=r"not connected.*_get_reconfigure_handle.*_reconfigure"):
            refused()
    own = dist._get_reconfigure_handle()
    other = own.replace(own.split(":")[3], "0" * 32)
    for handles, message in (
        (["gloo:0:-1:0:127.0.0.1:1"], "no handle of this backend"),
        ([other], "is not among those"),
        ([own, own], "position 1 stands there twice"),
        ([], "is not among those"),
    ):
        with pytest.raises(MisuseError, match=message):
            dist._reconfigure(1, handles)
    connect(rank, 10, [0, 1])
    handles = exchange(rank, 20, [0, 1])
    with pytest.raises(MisuseError, match="uuid 10 was used before"):
        dist._reconfigure(10, handles)
    # A refusal ends nothing.
    check(rank.rank, 2)
    if rank.rank == 0:
        handles = [handles[0], own.replace(own.split(":")[3], "0" * 32)]
    with pytest.raises(MisuseError, match=r"rank . of 2 reconfigured with other handles"):
        dist._reconfigure(20, handles)
    with pytest.raises(
        MisuseError, match=r"the reconfigure with uuid 20 has failed.*_get_reconfigure_handle"
    ):
        dist.barrier()
    connect(rank, 30, [0, 1])
    dist.destroy_process_group()
    paramhub.torch.init(rank=0, size=1, store=dist.HashStore())
    with pytest.raises(MisuseError, match="leave it out"):
        begin_alone()


def test_misuse_is_refused(team: Team) -> None:
    team(misuse, ranks=2)


def miss_processes(rank: Rank) -> None:
    begin(rank, 3)
    connect(rank, 10, [0, 1, 2])
    handles = exchange(rank, 20, [0, 1, 2])
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    await_end = time.monotonic() + 60
    while time.monotonic() < await_end:
        with pytest.raises(ConnectError) as failed:
            dist._reconfigure(int(time.monotonic_ns()), handles, timeout=timedelta(seconds=1))
        if "reconfigure without its handle" in str(failed.value):
            break
    assert "is to be rank 0 does not answer" in str(failed.value)
    if rank.rank == 1:
        with pytest.raises(ConnectError, match=r"rank 1 of 2 did not arrive within 1 s.*with uuid 25"):
            dist._reconfigure(25, handles[1:], timeout=timedelta(seconds=1))
        rank.mark("missed")
    rank.await_mark("missed")
    dist._reconfigure(30, handles[1:]).wait()
    check(rank.rank - 1, 2)


def test_processes_that_do_not_come_are_named(team: Team) -> None:
    assert team(miss_processes, ranks=3, dies=(0,))[0] == Died(-signal.SIGKILL)


def show_the_store(rank: Rank) -> list[str]:
    texts: list[str] = []
    set_text = dist.Store.set

    def record(store: dist.Store, key: str, text: str) -> None:
        texts.append(text)
        set_text(store, key, text)

    begin(rank, 2)
    dist.PrefixStore.set = record
    connect(rank, 10, [0, 1])
    dist.destroy_process_group()
    return texts


def test_the_secret_is_agreed_on_as_without_reconfigure(team: Team) -> None:
    texts = [text for its in team(show_the_store, ranks=2, env={"PARAMHUB_TRANSPORT": "tcp"}) for text in its]
    # See test_run_secret.py.
    assert [json.loads(text)["from"] for text in texts if text.startswith('{"from"')] == ["memory"]
    # The hub's URL and token, and the ticket of the job that sums.
    assert sum(text.startswith("sealed:") for text in texts) == 2
    assert not any("http" in text for text in texts)


def begin_as_ever(rank: Rank) -> None:
    begin_with = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("paramhub", **begin_with)
    assert not dist._supports_reconfigure() and not dist._supports_window()
    dist.all_reduce(torch.ones(SMALL))
    dist.destroy_process_group()


def test_without_the_option_nothing_changes(team: Team) -> None:
    team(begin_as_ever, ranks=1)
