"""init_process_group("paramhub", enable_reconfigure=True): processes are connected anew after a loss, and with newcomers."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from team import Died, Rank, Team, await_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paramhub.torch
from paramhub.errors import ConnectError, MisuseError
from paramhub.torch import _collectives, _watchdog
from paramhub.torch._rendezvous import allgather_json

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure") or not paramhub.torch.backend.HAS_BACKENDS,
    reason="this torch has no reconfigure",
)

SMALL, LARGE = 10, 100_000
"""Numbers of elements that go over the mesh, and through the hub."""
TIMEOUT = timedelta(seconds=60)


def begin(rank: Rank, size: int, timeout: timedelta = TIMEOUT) -> None:
    """Initialises torch.distributed as one of ``size`` processes that are started together."""
    dist.init_process_group(
        "paramhub",
        init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
        rank=rank.rank,
        world_size=size,
        timeout=timeout,
        enable_reconfigure=True,
    )


def begin_alone() -> None:
    """Initialises torch.distributed as a process that comes later, when the store of the first ones may be gone."""
    dist.init_process_group(
        "paramhub", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT, enable_reconfigure=True
    )


def exchange(rank: Rank, uuid: int, members: Sequence[int]) -> list[str]:
    """The handles of the members, through files."""
    own = rank.folder / f"handle-{uuid}-{rank.rank}"
    own.with_suffix(".part").write_text(dist._get_reconfigure_handle())
    own.with_suffix(".part").rename(own)
    handles = []
    for member in members:
        path = rank.folder / f"handle-{uuid}-{member}"
        await_file(path, 60)
        handles.append(path.read_text())
    return handles


def connect(rank: Rank, uuid: int, members: Sequence[int]) -> None:
    """Connects the members, whose new ranks are their places among these."""
    dist._reconfigure(uuid, exchange(rank, uuid, members)).wait()
    check(list(members).index(rank.rank), len(members))


def check(rank: int, size: int) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert dist.get_process_group_ranks(None) == list(range(size))
    for elements in (SMALL, LARGE):
        tensor = torch.full((elements,), float(rank + 1))
        dist.all_reduce(tensor)
        assert bool((tensor == size * (size + 1) / 2).all())
    ranks: list = [None] * size
    dist.all_gather_object(ranks, rank)
    assert ranks == list(range(size))


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(40, 512), nn.ReLU(), nn.Linear(512, 300), nn.Tanh(), nn.Linear(300, 7))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 40, generator=generator), torch.randint(0, 7, (8,), generator=generator)


def train(model: nn.Module, steps: int = 5) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, labels = batch(step, dist.get_rank())
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_training() -> None:
    gloo = dist.new_group(backend="gloo")
    ours = train(DistributedDataParallel(network(), bucket_cap_mb=1))
    theirs = train(DistributedDataParallel(network(), bucket_cap_mb=1, process_group=gloo))
    check_same(ours, theirs)


def check_same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert torch.linalg.vector_norm(own - other) <= 1e-6 * torch.linalg.vector_norm(other)


def lose_one_and_take_another(rank: Rank, victim: int) -> str:
    left = [other for other in range(3) if other != victim]
    if rank.rank == 3:
        rank.await_mark("others-train")
        begin_alone()
        connect(rank, 30, [*left, 3])
        check_training()
        dist.destroy_process_group()
        return ""
    begin(rank, 3)
    connect(rank, 10, [0, 1, 2])
    if rank.rank == victim:
        for other in left:
            rank.await_mark(f"{other}-calls")
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    rank.mark(f"{rank.rank}-calls")
    with pytest.raises(RuntimeError) as failed:
        dist.all_reduce(torch.ones(LARGE))
    connect(rank, 20, left)
    check_training()
    rank.mark("others-train")
    connect(rank, 30, [*left, 3])
    check_training()
    dist.destroy_process_group()
    return str(failed.value)


@pytest.mark.parametrize("victim", [2, 0])
def test_ranks_go_on_without_a_lost_one_and_with_a_newcomer(team: Team, victim: int) -> None:
    results = team(lose_one_and_take_another, victim, dies=(victim,))
    assert results[victim] == Died(-signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        assert str(victim) in results[rank], results[rank]


def go_on_training(rank: Rank) -> list[torch.Tensor]:
    """The loop of docs/recovery.md."""
    begin(rank, 3)
    model, step, members = network(), 0, [0, 1, 2]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    while step < 10:
        handles = exchange(rank, len(members), members)
        try:
            dist._reconfigure(len(members), handles).wait()
            step = paramhub.torch.broadcast_object(step)
            paramhub.torch.broadcast_optimizer_state(optimizer)
            ddp = DistributedDataParallel(model, bucket_cap_mb=1)
            while step < 10:
                if step == 5 and len(members) == 3:
                    rank.mark(f"{rank.rank}-is-at-5")
                    if rank.rank == 0:
                        rank.await_mark("1-is-at-5")
                        rank.await_mark("2-is-at-5")
                        os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                inputs, labels = batch(step, dist.get_rank())
                F.cross_entropy(ddp(inputs), labels).backward()
                optimizer.step()
                step += 1
        except (paramhub.JobFailedError, paramhub.ConnectError):
            members = [1, 2]
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_loop_goes_on_at_the_step_in_which_a_rank_was_lost(team: Team) -> None:
    _, first, second = team(go_on_training, ranks=3, dies=(0,))
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(10):
        optimizer.zero_grad()
        size = 3 if step < 5 else 2
        for member in range(size):
            inputs, labels = batch(step, member)
            (F.cross_entropy(alone(inputs), labels) / size).backward()
        optimizer.step()
    check_same(first, list(alone.parameters()))
    assert all(torch.equal(own, other) for own, other in zip(first, second, strict=True))


FIRST, KILLS = 3, 4


def plan(seed: int) -> tuple[list[list[int]], list[int]]:
    """The members of each round, and who is killed in each but the last. In the place of each comes another."""
    chance, rounds, victims = random.Random(seed), [list(range(FIRST))], []
    for kill in range(KILLS):
        victims.append(chance.choice(rounds[-1]))
        rounds.append([member for member in rounds[-1] if member != victims[-1]] + [FIRST + kill])
    return rounds, victims


def survive(rank: Rank, seed: int) -> tuple[int, list[torch.Tensor]]:
    rounds, victims = plan(seed)
    if rank.rank == rank.size - 1:
        chance = random.Random(seed + 1)
        for number, victim in enumerate(victims):
            if number % 2 == 0:
                for member in rounds[number]:
                    rank.await_mark(f"{member}-trains-{number}")
            else:
                # It dies while it connects, or soon after.
                await_file(rank.folder / f"handle-{number}-{victim}", 60)
            time.sleep(chance.uniform(0, 0.1 if number % 2 else 0.4))
            os.kill(int((rank.folder / f"process-{victim}").read_text()), signal.SIGKILL)
            rank.mark(f"{victim}-is-lost")
        return 0, []
    (rank.folder / f"process-{rank.rank}").write_text(str(os.getpid()))
    rank.mark(f"{rank.rank}-is-there")
    for other in range(rank.size - 1):
        rank.await_mark(f"{other}-is-there")
    if rank.rank < FIRST:
        begin(rank, FIRST)
    else:
        rank.await_mark(f"{victims[rank.rank - FIRST]}-is-lost")
        begin_alone()
    model, step, last = network(), 0, None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number, members in enumerate(rounds):
        if rank.rank not in members:
            continue
        try:
            handles = exchange(rank, number, members)
            limit = timedelta(seconds=3 if number % 2 else 60)
            dist._reconfigure(number, handles, timeout=limit).wait()
            step = paramhub.torch.broadcast_object(step)
            paramhub.torch.broadcast_optimizer_state(optimizer)
            ddp = DistributedDataParallel(model, bucket_cap_mb=1)
            if number == KILLS:
                last = step + 5
            while step != last:
                optimizer.zero_grad()
                inputs, labels = batch(step, dist.get_rank())
                F.cross_entropy(ddp(inputs), labels).backward()
                optimizer.step()
                step += 1
                rank.mark(f"{rank.rank}-trains-{number}")
        except (paramhub.JobFailedError, paramhub.ConnectError) as error:
            print(f"round {number}: {type(error).__name__}: {error}")
            rank.await_mark(f"{victims[number]}-is-lost")
    dist.destroy_process_group()
    return step, [parameter.detach().clone() for parameter in model.parameters()]


def test_ranks_that_die_at_any_moment_are_replaced(team: Team) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rounds, victims = plan(seed)
    results = team(survive, seed, ranks=FIRST + KILLS + 1, dies=victims, timeout=240)
    (step, first), *others = [results[member] for member in rounds[-1]]
    for its_step, its in others:
        assert its_step == step > 5
        assert all(torch.equal(own, other) for own, other in zip(first, its, strict=True))


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


def keep_ddp(rank: Rank) -> list[torch.Tensor]:
    begin(rank, 3)
    connect(rank, 10, [0, 1, 2])
    model = DistributedDataParallel(network(), bucket_cap_mb=1)
    train(model)
    if rank.rank == 0:
        # The one that had the hub and the store leaves.
        dist.destroy_process_group()
        return []
    connect(rank, 20, [2, 1])
    alone, own = network(), [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(alone.parameters(), own, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        for member in range(2):
            inputs, labels = batch(step, member)
            (F.cross_entropy(alone(inputs), labels) / 2).backward()
        optimizer.step()
    ours = train(model)
    check_same(ours, list(alone.parameters()))
    return ours


def test_ddp_stays_where_no_backward_pass_has_failed(team: Team) -> None:
    _, first, second = team(keep_ddp, ranks=3)
    assert all(torch.equal(own, other) for own, other in zip(first, second, strict=True))


def shard_anew(rank: Rank) -> None:
    if rank.rank == 2:
        begin_alone()
    else:
        begin(rank, 2)
        connect(rank, 10, [0, 1])
        # The newcomer has made fewer groups than the others.
        dist.new_group([0, 1])
        fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))
    connect(rank, 20, [0, 1, 2])
    model, alone = network(), network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    train(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        for member in range(3):
            inputs, labels = batch(step, member)
            (F.cross_entropy(alone(inputs), labels) / 3).backward()
        optimizer.step()
    check_same([parameter.full_tensor() for parameter in model.parameters()], list(alone.parameters()))
    pair = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        tensor = torch.ones(LARGE)
        dist.all_reduce(tensor, group=pair)
        assert tensor[0].item() == 2.0
    dist.destroy_process_group()


def test_fsdp_and_subgroups_among_the_new_ranks(team: Team) -> None:
    team(shard_anew, ranks=3)


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
    texts = [text for its in team(show_the_store, ranks=2) for text in its]
    # See test_run_secret.py.
    assert [json.loads(text)["from"] for text in texts if text.startswith('{"from"')] == ["memory"]
    # The hub's URL and token, and the ticket of the job that sums.
    assert sum(text.startswith("sealed:") for text in texts) == 2
    assert not any("http" in text for text in texts)


def train_with_the_hub(rank: Rank) -> None:
    begin(rank, 3)
    connect(rank, 10, [0, 1, 2])
    assert paramhub.torch.size() == 3
    optimizer = paramhub.torch.HubOptimizer(network(), paramhub.SGD(lr=0.05))
    if rank.rank == 0:
        rank.await_mark("1-trains")
        rank.await_mark("2-trains")
        os.kill(os.getpid(), signal.SIGKILL)
    rank.mark(f"{rank.rank}-trains")
    with pytest.raises(RuntimeError):
        dist.barrier()
    connect(rank, 20, [1, 2])
    assert (paramhub.torch.rank(), paramhub.torch.size()) == (rank.rank - 1, 2)
    del optimizer
    model = network()
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.05))
    for step in range(5):
        optimizer.zero_grad()
        inputs, labels = batch(step, dist.get_rank())
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    hooked = DistributedDataParallel(network())
    hooked.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    check_same([parameter.detach() for parameter in model.parameters()], train(hooked))
    optimizer.close()


def test_hub_optimizer_and_hook_are_made_anew(team: Team) -> None:
    team(train_with_the_hub, ranks=3, dies=(0,))


def begin_as_ever(rank: Rank) -> None:
    begin_with = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("paramhub", **begin_with)
    assert not dist._supports_reconfigure() and not dist._supports_window()
    dist.all_reduce(torch.ones(SMALL))
    dist.destroy_process_group()


def test_without_the_option_nothing_changes(team: Team) -> None:
    team(begin_as_ever, ranks=1)
