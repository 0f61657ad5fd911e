"""`hub_hook` with the sparse gradients of embeddings, compared with DDP's own allreduce over gloo."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from embeddings import train
from tcp_traffic import bytes_sent
from team import Died, Rank, Team
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def check_same(own: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def train_on_both(rank: Rank) -> list[torch.Tensor]:
    import paramhub.torch

    dist.init_process_group("gloo")
    found: list[torch.Tensor] = []
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        model, gradients = train(rank.rank, None, options, paramhub.torch.HubState())
        other, expected = train(rank.rank, None, options)
        for own, its in zip(gradients, expected, strict=True):
            assert own.is_sparse and torch.equal(own.coalesce().indices(), its.coalesce().indices())
        check_same([each.to_dense() for each in gradients], [each.to_dense() for each in expected])
        check_same(list(model.parameters()), list(other.parameters()))
        found += [parameter.detach() for parameter in model.parameters()]
    # The gradients of other models, with a codec, go their own way.
    train(rank.rank, None, {}, paramhub.torch.HubState(codec="bf16", in_place=True))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_it_trains_as_with_gloo(team: Team, transport: str) -> None:
    first, *others = team(train_on_both, ranks=3, env={"PARAMHUB_TRANSPORT": transport})
    for other in others:
        assert all(torch.equal(own, its) for own, its in zip(first, other, strict=True))


def train_embeddings_alone(rank: Rank) -> tuple[int, int]:
    """A model without a dense gradient, on some of the ranks. The bytes that a step sends, and those of the dense gradient."""
    import paramhub.torch

    dist.init_process_group("gloo")
    group = dist.new_group([0, 2])
    model = nn.Embedding(100_000, 64, sparse=True)
    paramhub.torch.init()
    if rank.rank == 1:
        dist.barrier()
        return 0, 0
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    sent = []
    for step in range(4):
        before = bytes_sent()
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank.rank)
        ddp(torch.randint(0, 100_000, (128,), generator=generator)).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.is_sparse
        sent.append(bytes_sent() - before)
    torch.testing.assert_close(model.weight.grad.to_dense().sum(), torch.tensor(128.0 * 64))
    dist.barrier()
    # The first step connects the ranks.
    return max(sent[1:]), model.weight.numel() * 4


def test_rows_alone_go_between_some_of_the_ranks(team: Team) -> None:
    results = team(train_embeddings_alone, ranks=3, env={"PARAMHUB_TRANSPORT": "tcp"})
    rows = 128 * (64 * 4 + 8)
    for sent, dense in (results[0], results[2]):
        assert 0.9 * rows < sent < 1.5 * rows < dense / 500, (sent, rows, dense)


def dying(rank: Rank) -> str:
    import paramhub
    import paramhub.torch

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    try:
        for step in range(1000):
            ddp.zero_grad()
            if rank.rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            ddp(torch.tensor([rank.rank])).sum().backward()
    except paramhub.JobFailedError as error:
        return str(error)
    raise AssertionError("nothing was noticed")


def test_a_dying_rank_fails_the_others(team: Team) -> None:
    results = team(dying, ranks=3, dies=[1])
    assert isinstance(results[1], Died)
    assert all("rank 1" in message for message in (results[0], results[2])), results
