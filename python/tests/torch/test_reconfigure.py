"""init_process_group("paramhub", enable_reconfigure=True): processes are connected anew after a loss, and with newcomers."""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reconfiguring import (
    CAN_RECONFIGURE,
    LARGE,
    batch,
    begin,
    begin_alone,
    check_same,
    check_training,
    connect,
    exchange,
    network,
    train,
)
from team import Died, Rank, Team, await_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paramhub.torch

pytestmark = pytest.mark.skipif(not CAN_RECONFIGURE, reason="this torch has no reconfigure")


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
