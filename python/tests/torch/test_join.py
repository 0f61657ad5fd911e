"""Horovod's join: ranks that have run out of data serve the others."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from team import Died, Rank, Team
from training import loss_of, make, parameters_of


def uneven(rank: Rank) -> None:
    """Rank r has r batches more than rank 0, in each of two epochs."""
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    size = hvd.size()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    with pytest.raises(paramhub.MisuseError, match="between backward and step"):
        loss_of(model, 0, rank.rank).backward()
        hvd.join()
    optimizer.step()
    for epoch in range(2):
        for step in range(2 + rank.rank):
            going_on = size if step < 2 else size - (step - 1)
            optimizer.zero_grad()
            loss_of(model, step, rank.rank).backward()
            if rank.rank == size - 1 and step == 1 + rank.rank:
                alone = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            if rank.rank == size - 1 and step == 1 + rank.rank:
                # The others gave zeros, and the mean is still that of all ranks.
                for parameter, own in zip(model.parameters(), alone, strict=True):
                    assert torch.allclose(parameter.grad, own / size, atol=1e-7)
            handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
            large = hvd.allreduce_async(torch.ones(70_000))
            assert hvd.synchronize(handle).tolist() == [going_on] * 3
            while not hvd.poll(large):
                time.sleep(0.01)
            assert hvd.synchronize(large)[-1].item() == pytest.approx(going_on / size)
            for op, own in ((hvd.Min, 2), (hvd.Max, -2), (hvd.Product, 2)):
                expected = own**going_on if op is hvd.Product else own
                assert hvd.allreduce(torch.tensor(own, dtype=torch.int64), op=op).item() == expected
            assert hvd.allreduce(torch.tensor(-1.5), op=hvd.Max).item() == -1.5
            if going_on < size:
                assert hvd.broadcast(torch.tensor(rank.rank), size - 1).item() == size - 1
                part = hvd.reducescatter(torch.ones(size), op=hvd.Sum)
                assert part.tolist() == [going_on]
                hvd.barrier()
                for refused in (hvd.allgather, hvd.alltoall, lambda t: hvd.allgather_object("x")):
                    with pytest.raises(paramhub.MisuseError, match="rank 0 has called join"):
                        refused(torch.ones(size))
        if rank.rank == size - 1:
            # It is served although this rank does not wait for it before it joins.
            left_over = hvd.allreduce_async(torch.ones(1))
        last = hvd.join()
        assert last == size - 1, (epoch, last)
        assert rank.rank < size - 1 or hvd.synchronize(left_over).item() == pytest.approx(1 / size)
        hvd.broadcast_parameters(model.state_dict(), last)
        assert hvd.allgather(torch.tensor([epoch])).tolist() == [epoch] * size
        flat = torch.cat([parameter.flatten() for parameter in parameters_of(model)])
        assert torch.equal(hvd.allreduce(flat, op=hvd.Max), flat)
    # All join at the same time, and one alone.
    assert hvd.join() in range(size)


def test_ranks_with_less_data_serve_the_others(team: Team) -> None:
    team(uneven, ranks=3)
    # Large sums and means then go through the hub.
    team(uneven, ranks=2, env={"PARAMHUB_TRANSPORT": "tcp"})


def dying(rank: Rank) -> str:
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1))
    if rank.rank == 1:
        hvd.broadcast(torch.ones(1), 0)
        rank.await_mark("joins")
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 0:
        hvd.broadcast(torch.ones(1), 0)
    rank.mark("joins")
    with pytest.raises(paramhub.JobFailedError) as error:
        hvd.join()
    if rank.rank == 0:
        # It has the store, in which rank 2 may still be waiting.
        rank.await_mark("told")
    rank.mark("told")
    return str(error.value)


def losing_the_store(rank: Rank, dies: bool) -> None:
    """Rank 0, which has the store, dies or stops while one rank has joined and another one waits for an operation."""
    import paramhub
    import paramhub.torch as hvd

    hvd.init(dead_after=2.0)
    hvd.allreduce(torch.ones(1))
    if rank.rank == 0:
        (rank.folder / "process").write_text(str(os.getpid()))
        rank.mark("ready")
        # The others look into the store by then.
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL if dies else signal.SIGSTOP)
    rank.await_mark("ready")
    try:
        with pytest.raises(paramhub.JobFailedError):
            hvd.join() if rank.rank == 1 else hvd.allreduce(torch.ones(1))
    finally:
        if not dies:
            rank.mark(f"told-{rank.rank}")
            if rank.rank == 1:
                rank.await_mark("told-2")
                os.kill(int((rank.folder / "process").read_text()), signal.SIGKILL)


def leaving(rank: Rank) -> None:
    """Rank 1 ends without joining."""
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1))
    if rank.rank == 0:
        with pytest.raises(paramhub.JobFailedError, match=r"rank 1 has left without join\(\)"):
            hvd.join()


def giving(rank: Rank) -> str:
    """Rank 0 joins, and the other one wants a broadcast from it."""
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    with pytest.raises(paramhub.ParamhubError) as error:
        if rank.rank == 0:
            hvd.join()
        else:
            hvd.broadcast(torch.ones(1), 0)
    return str(error.value)


def test_a_joined_rank_notices_failures(team: Team) -> None:
    told = team(dying, ranks=3, dies=[1])
    assert isinstance(told[1], Died) and "rank 1" in told[0] and "rank 1" in told[2], told
    for message in team(giving, ranks=2):
        assert "rank 0 has called join(), and rank 1 called broadcast with rank 0 as root" in message


def test_a_joined_rank_does_not_wait_for_a_lost_store_or_a_rank_that_has_left(team: Team) -> None:
    assert isinstance(team(losing_the_store, True, ranks=3, dies=[0])[0], Died)
    assert isinstance(team(losing_the_store, False, ranks=3, dies=[0])[0], Died)
    team(leaving, ranks=2)
