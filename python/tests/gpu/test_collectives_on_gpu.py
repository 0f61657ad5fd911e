"""The backend's collectives on tensors of a device."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, STREAMS, begin_collectives, keep_busy
from team import Rank, Team
from torch.testing import assert_close

from paramhub.errors import JobFailedError, MisuseError

SIZES = [0, 1, 1000, 100_001, 2_000_003]
"""Elements of a tensor. Those of 100,001 may go through the hub, and those of the last size go in several pieces."""
LARGE = 3_000_001


def sample(dtype: torch.dtype, size: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Random elements, so small that their sums are exact in every type, on the host."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 3, (size,), generator=generator).to(dtype)


def are(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    assert tensor.device == DEVICE
    return torch.equal(tensor.cpu(), expected)


def reduces(rank: Rank, name: str) -> None:
    begin_collectives()
    dtype = getattr(torch, name)
    ranks = range(rank.size)
    for size in SIZES:
        own = sample(dtype, size, rank.rank).to(DEVICE)
        summed = sum(sample(dtype, size, each) for each in ranks)
        tensor = own.clone()
        dist.all_reduce(tensor)
        assert are(tensor, summed)
        tensor = own.clone()
        dist.reduce(tensor, 1)
        assert are(tensor, summed if rank.rank == 1 else own.cpu())
        tensor = own.clone()
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert are(tensor, torch.stack([sample(dtype, size, each) for each in ranks]).amax(0))
        inputs = [sample(dtype, size, rank.rank, seed).to(DEVICE) for seed in ranks]
        expected = sum(sample(dtype, size, each, rank.rank) for each in ranks)
        output = torch.empty(size, dtype=dtype, device=DEVICE)
        dist.reduce_scatter(output, inputs)
        assert are(output, expected)
        dist.reduce_scatter_tensor(output.zero_(), torch.cat(inputs))
        assert are(output, expected)
    if dtype.is_floating_point:
        tensor = own.clone()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert_close(tensor.cpu(), (summed.double() / rank.size).to(dtype))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "uint8"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_reductions(team: Team, name: str, transport: str) -> None:
    team(reduces, name, env={"PARAMHUB_TRANSPORT": transport}, ranks=3)


def moves(rank: Rank, name: str) -> None:
    begin_collectives()
    dtype = getattr(torch, name)
    own, ranks = rank.rank, range(rank.size)
    for size in SIZES:
        mine = sample(dtype, size, own).to(DEVICE)
        of_ranks = [sample(dtype, size, each) for each in ranks]
        tensor = mine.clone()
        dist.broadcast(tensor, 1)
        assert are(tensor, of_ranks[1])
        outputs = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(outputs, mine)
        assert all(are(output, expected) for output, expected in zip(outputs, of_ranks, strict=True))
        single = torch.empty(size * rank.size, dtype=dtype, device=DEVICE)
        dist.all_gather_into_tensor(single, mine)
        assert are(single, torch.cat(of_ranks))
        # As with FSDP, the rank's own part is in its place already.
        single.zero_()
        part = single[own * size : (own + 1) * size]
        part.copy_(mine)
        dist.all_gather_into_tensor(single, part)
        assert are(single, torch.cat(of_ranks))
        outputs = [torch.empty_like(mine) for _ in ranks]
        dist.gather(mine, outputs if own == 2 else None, 2)
        if own == 2:
            assert all(are(output, expected) for output, expected in zip(outputs, of_ranks, strict=True))
        inputs = [sample(dtype, size, own, seed).to(DEVICE) for seed in ranks]
        tensor = torch.empty_like(mine)
        dist.scatter(tensor, inputs if own == 0 else None, 0)
        assert are(tensor, sample(dtype, size, 0, own))
        outputs = [torch.empty_like(mine) for _ in ranks]
        dist.all_to_all(outputs, inputs)
        assert all(are(outputs[each], sample(dtype, size, each, own)) for each in ranks)
        single = torch.empty(size * rank.size, dtype=dtype, device=DEVICE)
        dist.all_to_all_single(single, torch.cat(inputs))
        assert are(single, torch.cat([sample(dtype, size, each, own) for each in ranks]))
        if own == 0:
            dist.send(mine, 1, tag=5)
        elif own == 1:
            tensor = torch.empty_like(mine)
            assert dist.recv(tensor, tag=5) == 0
            assert are(tensor, of_ranks[0])
    # Numbers of rows that differ from rank to rank.
    rows = torch.full((6, 3), own, dtype=dtype, device=DEVICE)
    output = torch.empty((2 * rank.size, 3), dtype=dtype, device=DEVICE)
    dist.all_to_all_single(output, rows, [2] * rank.size, [2] * rank.size)
    assert are(output, torch.arange(rank.size).repeat_interleave(2)[:, None].expand(-1, 3).to(dtype))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["float32", "bool", "complex64"])
def test_moves(team: Team, name: str) -> None:
    team(moves, name, ranks=3)


def goes_on_in_order(rank: Rank) -> None:
    """Operations on late tensors of the device, on ones of other streams, and on ones of the host, in one order."""
    begin_collectives()
    side = STREAMS.Stream()
    late, other = torch.zeros(LARGE, device=DEVICE), torch.zeros(LARGE, device=DEVICE)
    STREAMS.synchronize()
    keep_busy()
    late += rank.rank + 1
    of_late = dist.all_reduce(late, async_op=True)
    with STREAMS.stream(side):
        other += rank.rank + 2
        of_other = dist.all_reduce(other, async_op=True)
    on_host = torch.full((LARGE,), float(rank.rank + 3))
    dist.all_reduce(on_host)
    assert torch.equal(on_host, torch.full((LARGE,), 7.0))
    dist.barrier()
    of_late.wait()
    late *= 10
    with STREAMS.stream(side):
        of_other.wait()
        other *= 10
    STREAMS.synchronize()
    assert are(late, torch.full((LARGE,), 30.0)) and are(other, torch.full((LARGE,), 50.0))
    # A result that is there can be used on the current stream, as torch promises.
    again = torch.ones(LARGE, device=DEVICE)
    work = dist.all_reduce(again, async_op=True)
    while not work.is_completed():
        pass
    assert are(again * 2, torch.full((LARGE,), 4.0))
    # A gradient that is dropped while its sum is under way, and one whose memory is written again.
    works = []
    for _ in range(4):
        dropped = torch.ones(LARGE, device=DEVICE)
        works.append(dist.all_reduce(dropped, async_op=True))
        del dropped
        blocks = [torch.full((LARGE,), -1.0, device=DEVICE) for _ in range(3)]
    for work in works:
        work.wait()
    STREAMS.synchronize()
    assert all(are(block, torch.full((LARGE,), -1.0)) for block in blocks)
    dist.destroy_process_group()


def test_operations_have_one_order_on_the_host_and_on_streams(team: Team) -> None:
    team(goes_on_in_order, ranks=2)


def layouts(rank: Rank) -> None:
    begin_collectives()
    grid = torch.arange(1_200_000.0, device=DEVICE).view(1000, 1200)
    transposed = grid.t()
    dist.all_reduce(transposed)
    assert are(grid, 2 * torch.arange(1_200_000.0).view(1000, 1200))
    column = torch.zeros(5, 4, device=DEVICE)
    dist.broadcast(column[:, 1] if rank.rank else torch.arange(5.0, device=DEVICE), 0)
    if rank.rank:
        assert column[:, 1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and float(column.sum()) == 10.0
    with torch.inference_mode():
        inferred = torch.ones(10, device=DEVICE)
        dist.all_reduce(inferred)
        assert inferred.tolist() == [2.0] * 10
    parameter = torch.nn.Parameter(torch.full((4,), float(rank.rank), device=DEVICE))
    dist.broadcast(parameter, 1)
    assert parameter.tolist() == [1.0] * 4 and parameter.requires_grad
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank.rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    if DEVICE.type != "cpu":
        with pytest.raises(MisuseError, match="one operation has tensors on"):
            dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1, device=DEVICE))
    with pytest.raises(MisuseError, match="cannot compute with elements"):
        dist.all_reduce(torch.zeros(3, device=DEVICE).to(torch.float8_e4m3fn))
    dist.barrier()
    dist.destroy_process_group()


def test_layouts_and_kinds_of_tensors(team: Team) -> None:
    team(layouts, ranks=2)


def differs(rank: Rank, name: str) -> str:
    begin_collectives()
    # Both lengths are cut into the same first pieces, so that only the whole shows the difference.
    own = torch.ones((3 if rank.rank else 2) << 20, device=DEVICE)
    outputs = [torch.empty_like(own) for _ in range(2)]
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: dist.all_reduce(own),
        "reduce": lambda: dist.reduce(own, 0),
        "broadcast": lambda: dist.broadcast(own, 0),
        "allgather": lambda: dist.all_gather(outputs, own),
        "reduce_scatter": lambda: dist.reduce_scatter(outputs[0], [own, own]),
    }
    with pytest.raises(JobFailedError) as failed:
        calls[name]()
        # Ranks that share memory may have the result before they have compared.
        for _ in range(10_000):
            dist.barrier()
    return str(failed.value)


@pytest.mark.parametrize("name", ["allreduce", "reduce", "broadcast", "allgather", "reduce_scatter"])
def test_ranks_whose_tensors_differ_get_an_error(team: Team, name: str) -> None:
    parts = 2 if name in ("allgather", "reduce_scatter") else 1
    for message in team(differs, name, ranks=2):
        assert f"{parts * 8388608} bytes" in message and f"{parts * 12582912} bytes" in message, message


def dies(rank: Rank) -> str | None:
    begin_collectives()
    dist.all_reduce(torch.ones(LARGE, device=DEVICE))
    if rank.rank == 1:
        os._exit(7)
    keep_busy()
    tensor = torch.ones(LARGE, device=DEVICE)
    work = dist.all_reduce(tensor, async_op=True)
    later = dist.all_reduce(torch.ones(5, device=DEVICE), async_op=True)
    with pytest.raises(JobFailedError) as failed:
        work.wait()
    with pytest.raises(JobFailedError):
        later.wait()
    return str(failed.value)


def test_a_rank_that_dies_ends_the_others_operations(team: Team) -> None:
    results = team(dies, ranks=3, dies=[1])
    for rank in (0, 2):
        assert "rank 1" in results[rank]
