"""Horovod's functions on tensors of a device."""

from __future__ import annotations

import torch
from device import DEVICE, begin_horovod, keep_busy
from team import Rank, Team

import paramhub.torch as hvd

LARGE = 2_000_003
"""Elements that go in several pieces."""


def are(tensor: torch.Tensor, value: float) -> bool:
    assert tensor.device == DEVICE
    return bool((tensor == value).all())


def calls_everything(rank: Rank) -> None:
    begin_horovod()
    own = rank.rank + 1.0
    for elements in (3, LARGE):
        keep_busy()
        tensor = torch.full((elements,), own, device=DEVICE)
        assert are(hvd.allreduce(tensor), 2.0) and are(tensor, own)
        assert are(hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5), 6.0)
        assert are(hvd.allreduce(tensor, op=hvd.Max, compression=hvd.Compression.fp16), 3.0)
        handle = hvd.allreduce_async_(tensor.clone(), op=hvd.Sum)
        assert are(hvd.synchronize(handle), 6.0)
        assert are(hvd.allreduce(torch.full((elements,), 5, device=DEVICE)), 5)
        assert are(hvd.broadcast(tensor, 1), 2.0)
        gathered = hvd.allgather(torch.full((rank.rank + 1, elements), own, device=DEVICE))
        assert gathered.shape == (6, elements)
        assert gathered[:, 0].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
        received, splits = hvd.alltoall(tensor[:3], torch.tensor([1, 1, 1]))
        assert received.tolist() == [1.0, 2.0, 3.0] and splits.tolist() == [1, 1, 1]
        assert are(hvd.reducescatter(torch.full((3, elements), own, device=DEVICE)), 2.0)
        both = hvd.grouped_allreduce([tensor, 2 * tensor], op=hvd.Sum)
        assert are(both[0], 6.0) and are(both[1], 12.0)
    if DEVICE.type != "simulated":
        # A view whose elements are the negatives of what its memory has. The simulated device has none.
        negative = torch.full((3,), complex(1, 2), device=DEVICE).conj().imag
        assert hvd.allreduce_(negative, op=hvd.Sum).tolist() == [-6.0] * 3
    wanted = torch.ones(4, device=DEVICE, requires_grad=True)
    hvd.allreduce(wanted).sum().backward()
    assert are(wanted.grad, 1.0)
    model = torch.nn.Linear(3, 2).to(DEVICE)
    hvd.broadcast_parameters(model.state_dict(), root_rank=2)
    norms = hvd.allgather_object(float(sum(each.double().sum() for each in model.parameters())))
    assert len(set(norms)) == 1


def test_every_function(team: Team) -> None:
    team(calls_everything, ranks=3)


def sums_sparse(rank: Rank) -> None:
    begin_horovod()
    indices = torch.tensor([[rank.rank, 3]], device=DEVICE)
    values = torch.full((2, 2), rank.rank + 1.0, device=DEVICE)
    sparse = torch.sparse_coo_tensor(indices, values, (4, 2))
    handle = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)
    dense = handle().to_dense()
    assert dense.device == DEVICE
    assert dense[:, 0].tolist() == [1.0, 2.0, 0.0, 3.0]


def test_sparse_sums(team: Team) -> None:
    team(sums_sparse, ranks=2)


def joins(rank: Rank) -> None:
    """Rank 1 has fewer batches, and serves the operations of rank 0, which go in pieces."""
    begin_horovod()
    for batch in range(4 - 2 * rank.rank):
        tensor = torch.full((LARGE,), 2.0, device=DEVICE)
        mean = hvd.allreduce(tensor)
        assert are(mean, 2.0 if batch < 2 else 1.0)
        part = hvd.reducescatter(torch.full((2, LARGE), 2.0, device=DEVICE), op=hvd.Sum)
        assert are(part, 4.0 if batch < 2 else 2.0)
        assert are(hvd.broadcast(torch.full((LARGE,), float(batch), device=DEVICE), 0), batch)
    assert hvd.join() == 0


def test_join_serves_operations_in_pieces(team: Team) -> None:
    team(joins, ranks=2)
