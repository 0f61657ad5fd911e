"""init_process_group("paramhub"): sums of sparse tensors, and DDP with sparse gradients, compared with gloo's."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from embeddings import STEPS, train
from tcp_traffic import bytes_sent
from team import Died, Rank, Team
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramhub
import paramhub.torch

TCP = {"PARAMHUB_TRANSPORT": "tcp"}


def sample(
    rank: int, elements: int, shape: tuple[int, ...], sparse: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Elements at random places, some of which come twice."""
    generator = torch.Generator().manual_seed(1000 * elements + rank)
    places = [torch.randint(0, extent, (elements,), generator=generator) for extent in shape[:sparse]]
    values = torch.randn(elements, *shape[sparse:], generator=generator)
    values = values if dtype.is_floating_point else values * 100
    return torch.sparse_coo_tensor(torch.stack(places), values.to(dtype), shape, check_invariants=True)


def check_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.is_coalesced() and theirs.is_coalesced()
    assert torch.equal(ours.indices(), theirs.indices())
    assert torch.equal(ours.values(), theirs.values()), (ours.values() - theirs.values()).abs().max()


def sum_everything(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    gloo = dist.new_group(backend="gloo")
    own = rank.rank
    for shape, sparse in (((50, 8), 1), ((50, 8), 2), ((50,), 1), ((7, 5, 3), 2)):
        # As many on each rank; more on some ranks; none on the first; none at all.
        for elements in (20, 3 * own + 1, 9 * own, 0):
            for dtype in (torch.float32, torch.float64, torch.int64):
                given = sample(own, elements, shape, sparse, dtype)
                for tensor in (given, given.coalesce()):
                    ours, theirs = tensor.clone(), tensor.clone()
                    dist.all_reduce(ours)
                    dist.all_reduce(theirs, group=gloo)
                    check_same(ours, theirs)
    # gloo refuses f16, adds bf16 in bf16, and makes numbers of bools that are none.
    for dtype in (torch.float16, torch.bfloat16, torch.bool):
        tensors = [sample(each, 30, (40, 3), dtype=dtype).coalesce() for each in range(rank.size)]
        total = torch.stack([each.to_dense().float() for each in tensors]).sum(0).to(dtype)
        dist.all_reduce(tensors[own])
        assert torch.equal(tensors[own].to_dense(), total)
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_sums_are_those_of_gloo(team: Team, transport: str) -> None:
    team(sum_everything, env={"PARAMHUB_TRANSPORT": transport})


def sum_without_waiting(rank: Rank) -> None:
    """No rank waits for another one within the call, and what comes between the calls does no harm."""
    dist.init_process_group("paramhub", timeout=timedelta(seconds=30))
    own, token = rank.rank, torch.zeros(1)
    tensors = [sample(own, 5 + each + own, (30, 4)) for each in range(8)]
    expected = [
        sum(sample(r, 5 + each + r, (30, 4)).to_dense() for r in range(rank.size)) for each in range(8)
    ]
    if own == 1:
        dist.recv(token, 0)
    works: list[Any] = []
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
        works.append(dist.all_reduce(torch.ones(3), async_op=True))
    if own == 0:
        assert not works[0].is_completed()
        dist.send(token, 1)
    futures = [work.get_future() for work in works]
    for work in reversed(works):
        work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    for tensor, total, future in zip(tensors, expected, futures[::2], strict=True):
        torch.testing.assert_close(tensor.to_dense(), total)
        future.wait()
        assert future.value()[0] is tensor
    # One for which nobody waits ends before the group.
    last = dist.all_reduce(tensors[0], async_op=True)
    dist.destroy_process_group()
    assert last.is_completed()
    last.wait()
    torch.testing.assert_close(tensors[0].to_dense(), rank.size * expected[0])


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_sum_waits_for_nobody_when_it_is_called(team: Team, transport: str) -> None:
    team(sum_without_waiting, ranks=2, env={"PARAMHUB_TRANSPORT": transport})


def misuse(rank: Rank) -> dict[str, str]:
    dist.init_process_group("paramhub")
    odd = rank.rank == 1
    messages: dict[str, str] = {}

    def refused(name: str, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        with pytest.raises(paramhub.MisuseError) as error:
            dist.all_reduce(tensor, op)
        messages[name] = str(error.value)

    refused("shape", sample(0, 3, (30 + odd, 4)))
    refused("type", sample(0, 3, (30, 4), dtype=torch.float64 if odd else torch.float32))
    refused("dimensions", sample(0, 3, (30, 4), sparse=2 if odd else 1))
    refused("mean", sample(0, 3, (30, 4)), dist.ReduceOp.AVG)
    work = dist.all_reduce(sample(0, 3, (30 + odd, 4)), async_op=True)
    with pytest.raises(RuntimeError, match="rank 0 has"):
        work.get_future().wait()
    assert work.is_completed() and not work.is_success()
    group: Any = dist.group.WORLD
    with pytest.raises(paramhub.MisuseError, match="one sparse tensor in a call"):
        group.allreduce([sample(0, 3, (30, 4)), sample(0, 3, (30, 4))])
    # The group goes on.
    last = sample(rank.rank, 3, (30, 4))
    dist.all_reduce(last)
    torch.testing.assert_close(last.to_dense(), sum(sample(r, 3, (30, 4)).to_dense() for r in (0, 1)))
    return messages


def test_tensors_that_do_not_match_are_refused_on_every_rank(team: Team) -> None:
    parts = {
        "shape": "rank 0 has torch.float32 of shape [30, 4] with 1 sparse dimensions, and rank 1 torch.float32 of shape [31, 4]",
        "type": "and rank 1 torch.float64 of shape [30, 4]",
        "dimensions": "and rank 1 torch.float32 of shape [30, 4] with 2 sparse dimensions",
        "mean": "only sums, and has no 'average'",
    }
    for messages in team(misuse, ranks=2):
        assert messages.keys() == parts.keys()
        for name, part in parts.items():
            assert part in messages[name], messages[name]


def die(rank: Rank, ending: str) -> str:
    dist.init_process_group("paramhub", timeout=timedelta(seconds=5 if ending == "late" else 60))
    dist.all_reduce(sample(rank.rank, 3, (30, 4)))
    if rank.rank == 1:
        if ending == "late":
            rank.await_mark("0-failed")
            rank.await_mark("2-failed")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(paramhub.JobFailedError) as failed:
        for _ in range(1000):
            dist.all_reduce(sample(rank.rank, 3, (30, 4)))
    rank.mark(f"{rank.rank}-failed")
    return str(failed.value)


@pytest.mark.parametrize("ending", ["killed", "late"])
def test_a_rank_that_is_lost_or_late_is_named(team: Team, ending: str) -> None:
    results = team(die, ending, ranks=3, dies=[1])
    assert isinstance(results[1], Died)
    messages = [results[0], results[2]]
    assert all("rank 1" in message for message in messages), messages
    if ending == "late":
        assert any("sum_sparse has not ended within 5 s: rank 1 has not called it" in m for m in messages), (
            messages
        )


def train_on_both(rank: Rank) -> list[torch.Tensor]:
    dist.init_process_group("paramhub")
    gloo = dist.new_group(backend="gloo")
    found: list[torch.Tensor] = []
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        model, gradients = train(rank.rank, None, options)
        other, expected = train(rank.rank, gloo, options)
        for own, its in zip(gradients, expected, strict=True):
            assert torch.equal(own.coalesce().indices(), its.coalesce().indices())
            torch.testing.assert_close(own.to_dense(), its.to_dense(), rtol=1e-4, atol=1e-6)
        for own, its in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-6)
        found += [parameter.detach() for parameter in model.parameters()]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_ddp_trains_as_with_gloo(team: Team, transport: str) -> None:
    first, *others = team(train_on_both, ranks=3, env={"PARAMHUB_TRANSPORT": transport})
    for other in others:
        assert all(torch.equal(own, its) for own, its in zip(first, other, strict=True))


def train_a_large_embedding(rank: Rank) -> tuple[int, int]:
    """The bytes that a step sends, and those of the dense gradient."""
    dist.init_process_group("paramhub")
    model = nn.Embedding(100_000, 64, sparse=True)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent = []
    for step in range(STEPS):
        before = bytes_sent()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank.rank)
        ddp(torch.randint(0, 100_000, (128,), generator=generator)).sum().backward()
        optimizer.step()
        sent.append(bytes_sent() - before)
    dist.barrier()
    # A connection that ends takes its count with it.
    return sorted(sent)[STEPS // 2], model.weight.numel() * 4


def test_a_step_sends_rows_and_no_dense_gradient(team: Team) -> None:
    for sent, dense in team(train_a_large_embedding, ranks=2, env=TCP):
        rows = 128 * (64 * 4 + 8)
        assert 0.9 * rows < sent < 1.5 * rows < dense / 500, (sent, rows, dense)
