"""init_process_group("paramhub"): every collective compared with gloo's on the same inputs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from team import Rank, Team
from torch.testing import assert_close

import paramhub.torch

SIZES = [0, 1, 7, 1000, 300_001]
"""The last size is large enough for the hub, and odd."""
REDUCED = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"]
WITHOUT_GLOO = ["int16", "bool"]


def begin() -> dist.ProcessGroup:
    """Makes the default group with paramhub's backend. Returns a group with gloo's."""
    dist.init_process_group("paramhub")
    return dist.new_group(backend="gloo")


def sample(dtype: torch.dtype, size: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Random elements, so small that their sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 3, (size,), generator=generator).to(dtype)


def reduce_everything(rank: Rank, name: str) -> None:
    gloo = begin()
    dtype = getattr(torch, name)
    operations = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
    for size in SIZES:
        own = sample(dtype, size, rank.rank)
        of_all_ranks = torch.stack([sample(dtype, size, each) for each in range(rank.size)])
        for operation in operations:
            ours, theirs = own.clone(), own.clone()
            dist.all_reduce(ours, operation)
            if size:
                dist.all_reduce(theirs, operation, group=gloo)
            assert torch.equal(ours, theirs), (size, operation)
            ours, theirs = own.clone(), own.clone()
            dist.reduce(ours, 2, operation)
            if size:
                dist.reduce(theirs, 2, operation, group=gloo)
            assert torch.equal(ours, theirs if rank.rank == 2 else own), (size, operation)
        if dtype.is_floating_point:
            ours = own.clone()
            dist.all_reduce(ours, dist.ReduceOp.AVG)
            assert_close(ours, of_all_ranks.double().mean(0).to(dtype))
        else:
            for operation in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
                ours, theirs = own.clone(), own.clone()
                dist.all_reduce(ours, operation)
                if size:
                    dist.all_reduce(theirs, operation, group=gloo)
                assert torch.equal(ours, theirs), (size, operation)
    for size in SIZES:
        parts = [sample(dtype, size, rank.rank, seed) for seed in range(rank.size)]
        expected = torch.stack([sample(dtype, size, each, rank.rank) for each in range(rank.size)])
        total = expected.sum(0, dtype=torch.float64).to(dtype)
        output = torch.empty(size, dtype=dtype)
        dist.reduce_scatter(output, parts)
        assert torch.equal(output, total)
        dist.reduce_scatter_tensor(output.zero_(), torch.cat(parts))
        assert torch.equal(output, total)
        if dtype.is_floating_point:
            dist.reduce_scatter_tensor(output.zero_(), torch.cat(parts), dist.ReduceOp.AVG)
            assert_close(output, expected.double().mean(0).to(dtype))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_reductions_are_those_of_gloo(team: Team, name: str, transport: str) -> None:
    team(reduce_everything, name, env={"PARAMHUB_TRANSPORT": transport})


def reduce_without_gloo(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    short = torch.tensor([rank.rank, -5, 7], dtype=torch.int16)
    dist.all_reduce(short)
    assert short.tolist() == [6, -20, 28]
    truth = torch.tensor([rank.rank == 1, rank.rank > 3, True])
    everywhere = truth.clone()
    dist.all_reduce(truth, dist.ReduceOp.MAX)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    assert truth.tolist() == [True, False, True] and everywhere.tolist() == [False, False, True]
    complexes = torch.full((50_000,), complex(rank.rank, 1.0))
    dist.all_reduce(complexes)
    assert torch.equal(complexes, torch.full((50_000,), complex(6.0, 4.0)))
    premultiplied = torch.full((5,), float(rank.rank))
    dist.all_reduce(premultiplied, dist._make_nccl_premul_sum(0.5))
    assert premultiplied.tolist() == [3.0] * 5
    odd = torch.full((3,), float("nan") if rank.rank == 2 else 1.0)
    dist.all_reduce(odd, dist.ReduceOp.MAX)
    assert odd.isnan().all()
    for refused in (torch.zeros(3, dtype=torch.float8_e4m3fn), torch.eye(3).to_sparse_csr()):
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_reduce(refused)
    with pytest.raises(ValueError, match="average"):
        dist.all_reduce(torch.zeros(3, dtype=torch.int32), dist.ReduceOp.AVG)
    dist.barrier()


def test_types_that_gloo_does_not_reduce(team: Team) -> None:
    team(reduce_without_gloo)


def move_everything(rank: Rank, name: str) -> None:
    gloo = begin()
    dtype = getattr(torch, name)
    own, ranks = rank.rank, range(rank.size)
    for size in SIZES:
        mine = sample(dtype, size, own)
        of_all_ranks = [sample(dtype, size, each) for each in ranks]
        tensor = mine.clone()
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, of_all_ranks[1])
        outputs = [torch.empty(size, dtype=dtype) for _ in ranks]
        dist.all_gather(outputs, mine)
        theirs = [torch.empty(size, dtype=dtype) for _ in ranks]
        if size:
            dist.all_gather(theirs, mine, group=gloo)
        for output, expected, other in zip(outputs, of_all_ranks, theirs, strict=True):
            assert torch.equal(output, expected) and torch.equal(other, expected)
        single = torch.empty(size * rank.size, dtype=dtype)
        dist.all_gather_into_tensor(single, mine)
        assert torch.equal(single, torch.cat(of_all_ranks))
        # As with FSDP, the rank's own part is in its place already.
        single = torch.zeros(size * rank.size, dtype=dtype)
        part = single[own * size : (own + 1) * size]
        part.copy_(mine)
        dist.all_gather_into_tensor(single, part)
        assert torch.equal(single, torch.cat(of_all_ranks))
        gathered = [torch.empty(size, dtype=dtype) for _ in ranks] if own == 3 else None
        dist.gather(mine, gathered, 3)
        if gathered is not None:
            assert torch.equal(torch.cat(gathered), torch.cat(of_all_ranks))
        output = torch.empty(size, dtype=dtype)
        parts = [sample(dtype, size, each, 5) for each in ranks]
        dist.scatter(output, parts if own == 2 else None, 2)
        assert torch.equal(output, parts[own])
        inputs = [sample(dtype, size, own, each) for each in ranks]
        expected = [sample(dtype, size, each, own) for each in ranks]
        single = torch.empty(size * rank.size, dtype=dtype)
        dist.all_to_all_single(single, torch.cat(inputs))
        assert torch.equal(single, torch.cat(expected))
        outputs = [torch.empty(size, dtype=dtype) for _ in ranks]
        dist.all_to_all(outputs, inputs)
        assert torch.equal(torch.cat(outputs), torch.cat(expected))
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_moves_are_those_of_gloo(team: Team, name: str) -> None:
    team(move_everything, name)


def move_unequal_parts(rank: Rank) -> None:
    gloo = begin()
    own, ranks = rank.rank, range(rank.size)
    rows = [[(sender + 2 * receiver) % 4 for receiver in ranks] for sender in ranks]
    sent, received = rows[own], [rows[sender][own] for sender in ranks]
    source = torch.arange(sum(sent) * 5.0).view(-1, 5) + 1000 * own
    ours, theirs = torch.empty(sum(received), 5), torch.empty(sum(received), 5)
    dist.all_to_all_single(ours, source, received, sent)
    dist.all_to_all_single(theirs, source, received, sent, group=gloo)
    assert torch.equal(ours, theirs)
    parts = list(source.split(sent))
    outputs = [torch.empty(count, 5) for count in received]
    dist.all_to_all(outputs, parts)
    assert torch.equal(torch.cat(outputs), theirs)
    lengths = [3, 0, 70_000, 1]
    outputs = [torch.empty(length) for length in lengths]
    dist.all_gather(outputs, torch.full((lengths[own],), float(own)))
    assert all(bool((output == each).all()) for each, output in enumerate(outputs))
    output = torch.empty(lengths[own])
    dist.reduce_scatter(output, [torch.full((length,), own + 1.0) for length in lengths])
    assert bool((output == 10.0).all())


def test_parts_may_differ_in_length(team: Team) -> None:
    team(move_unequal_parts)


def use_strided_tensors(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    own = rank.rank
    for size in (3, 400):
        matrix = torch.full((size, size), float(own + 1))
        dist.all_reduce(matrix.t()[:, ::2])
        assert bool((matrix[::2] == 10.0).all()) and bool((matrix[1::2] == own + 1.0).all())
        matrix = torch.full((size, size), float(own))
        work = dist.broadcast(matrix[:, 1], 3, async_op=True)
        values: list[float] = work.get_future().wait()[0].tolist()
        assert values == [3.0] * size and bool((matrix[:, 0] == own).all())
        wide = torch.zeros(size, 2 * rank.size)
        columns = [wide[:, 2 * each] for each in range(rank.size)]
        dist.all_gather(columns, torch.full((size,), float(own)))
        assert wide[0].tolist() == [0.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0]
        transposed = torch.zeros(size, rank.size).t()
        dist.all_gather_into_tensor(transposed, torch.full((size,), float(own)))
        assert transposed[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_tensors_need_not_be_contiguous(team: Team) -> None:
    team(use_strided_tensors)


def work_in_the_background(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    small, large = torch.ones(10), torch.ones(3_000_000)
    if rank.rank == 0:
        rank.await_mark("others-wait")
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (small, large, small.clone())]
    if rank.rank == 1:
        assert not any(work.is_completed() for work in works)
        rank.mark("others-wait")
    futures = [work.get_future() for work in works]
    for work, future in zip(works, futures, strict=True):
        assert work.wait()
        assert work.is_completed()
        assert future.wait()[0][0].item() == 4.0
        assert future.then(lambda done: done.value()[0].numel()).wait() in (10, 3_000_000)
    many = [torch.full((size,), 1.0) for size in (5, 40_000, 1_000_001, 300, 262_144) * 8]
    pending = [dist.all_reduce(tensor, async_op=True) for tensor in many]
    while not all(work.is_completed() for work in pending):
        time.sleep(0.01)
    assert all(bool((tensor == 4.0).all()) for tensor in many)


def test_results_can_be_waited_for_polled_and_chained(team: Team) -> None:
    team(work_in_the_background)
    team(work_in_the_background, env={"PARAMHUB_TRANSPORT": "tcp"})


def choose_ways(rank: Rank, shares_memory: bool) -> None:
    dist.init_process_group("paramhub")
    (group,) = paramhub.torch._initialization.world()._groups
    for elements, dtype, operation, is_for_hub in [
        (10, torch.float32, "sum", False),
        (100_000, torch.float32, "sum", True),
        (100_000, torch.bfloat16, "average", True),
        (100_000, torch.float64, "sum", False),
        (100_000, torch.float32, "max", False),
    ]:
        before = sum(job.statistics()["requests"] for job in group._sums._jobs)
        tensor = torch.ones(elements, dtype=dtype)
        group.allreduce(tensor, operation).wait()
        assert tensor[-1].item() == (2.0 if operation == "sum" else 1.0)
        requests = sum(job.statistics()["requests"] for job in group._sums._jobs) - before
        goes_there = is_for_hub and not shares_memory
        assert (requests > 0) == goes_there, (elements, dtype, operation, requests)
    # The hub's memory is bounded by its slots, and larger tensors use the same slots.
    large = torch.full((20_000_001,), 3.0)
    group.allreduce(large, "sum").wait()
    assert bool((large == 6.0).all()) and len(group._sums._jobs) == (0 if shares_memory else 2)
    world = paramhub.torch._initialization.world().group()
    text = torch.tensor([7, rank.rank], dtype=torch.uint8)
    world.broadcast(text, 1).wait()
    calls: list[int] = []
    work = world.allreduce(large, "average")
    work.add_done_callback(lambda done: calls.append(int(done.done())))
    work.wait(60.0)
    assert text.tolist() == [7, 1] and bool((large == 6.0).all())
    while not calls:
        time.sleep(0.01)
    assert calls == [1]


def test_large_sums_go_through_the_hub_unless_the_ranks_share_memory(team: Team) -> None:
    team(choose_ways, False, ranks=2, env={"PARAMHUB_TRANSPORT": "tcp"})
    team(choose_ways, True, ranks=2)


def exchange_messages(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    own, size = rank.rank, rank.size
    right, left = (own + 1) % size, (own - 1) % size
    received = [torch.empty(3), torch.empty(100_000)]
    receives = [dist.irecv(received[tag], left, tag=tag) for tag in (1, 0)]
    sends = [
        dist.isend(torch.full((count,), 10.0 * own + tag), right, tag=tag)
        for tag, count in ((1, 100_000), (0, 3))
    ]
    for work in sends + receives:
        work.wait()
    assert received[0].tolist() == [10.0 * left] * 3 and received[1][0].item() == 10.0 * left + 1
    operations = [
        dist.P2POp(dist.irecv, received[0], left),
        dist.P2POp(dist.isend, torch.full((3,), float(own)), right),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received[0].tolist() == [float(left)] * 3
    if own == 0:
        sources = []
        for _ in range(size - 1):
            tensor = torch.empty(2)
            source = dist.recv(tensor)
            assert tensor.tolist() == [float(source)] * 2
            sources.append(source)
        assert sorted(sources) == [1, 2, 3]
    else:
        dist.send(torch.full((2,), float(own)), 0)
    objects = [{"from": own}, None] if own == 1 else [None, None]
    if own == 1:
        dist.send_object_list(objects, 2)
    if own == 2:
        dist.recv_object_list(objects, 1)
        assert objects[0] == {"from": 1}
    dist.barrier()


def test_messages_are_matched_by_tag_and_source(team: Team) -> None:
    team(exchange_messages)


def exchange_objects(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    own = rank.rank
    of_all_ranks: list = [None] * rank.size
    dist.all_gather_object(of_all_ranks, {"rank": own, "text": "x" * 1000 * own})
    assert [each["rank"] for each in of_all_ranks] == [0, 1, 2, 3] and len(of_all_ranks[3]["text"]) == 3000
    given = ["a", {"b": 1}] if own == 2 else [None, None]
    dist.broadcast_object_list(given, 2)
    assert given == ["a", {"b": 1}]
    gathered: list | None = [None] * rank.size if own == 1 else None
    dist.gather_object(("from", own), gathered, 1)
    assert gathered is None or gathered == [("from", each) for each in range(4)]
    got: list = [None]
    dist.scatter_object_list(got, [f"for {each}" for each in range(4)] if own == 3 else None, 3)
    assert got == [f"for {own}"]


def test_objects(team: Team) -> None:
    team(exchange_objects)


def coalesce(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    own, size = rank.rank, rank.size
    tensors = [torch.full((count,), float(own)) for count in (4, 100_000, 1)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(bool((tensor == 6.0).all()) for tensor in tensors)
    outputs = [torch.empty(size * count) for count in (3, 50)]
    with dist._coalescing_manager():
        for output, count in zip(outputs, (3, 50), strict=True):
            dist.all_gather_into_tensor(output, torch.full((count,), float(own)))
    assert all(output[0].item() == 0.0 and output[-1].item() == 3.0 for output in outputs)
    outputs = [torch.empty(count) for count in (3, 50)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.full((output.numel() * size,), 2.0))
    assert all(bool((output == 8.0).all()) for output in outputs)
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 1 << 20, 2)


def test_coalesced_collectives(team: Team) -> None:
    team(coalesce)


def divide_into_groups(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    own = rank.rank
    pairs = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = pairs[own % 2]
    for count in (5, 100_000):
        tensor = torch.full((count,), own + 1.0)
        dist.all_reduce(tensor, group=mine)
        assert bool((tensor == (4.0 if own % 2 == 0 else 6.0)).all())
    tensor = torch.tensor([own])
    dist.broadcast(tensor, 2 if own % 2 == 0 else 3, group=mine)
    assert tensor.item() == (2 if own % 2 == 0 else 3)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name, expected in (("outer", [2.0, 4.0]), ("inner", [1.0, 5.0])):
        tensor = torch.full((40_000,), float(own))
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor[0].item() == expected[own % 2 if name == "outer" else own // 2]
    dist.destroy_process_group(mine)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 3
    dist.destroy_process_group()
    # A second time, in the same processes with the same store.
    dist.init_process_group("paramhub")
    dist.all_reduce(tensor)
    assert tensor.tolist() == [16.0] * 3
    dist.destroy_process_group()


def test_groups_of_some_ranks(team: Team) -> None:
    team(divide_into_groups)


def be_alone(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    for count in (3, 100_000):
        tensor = torch.full((count,), 7.0)
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            dist.all_reduce(tensor, operation)
        dist.broadcast(tensor, 0)
        outputs = [torch.empty(count)]
        dist.all_gather(outputs, tensor)
        dist.reduce_scatter_tensor(tensor, outputs[0])
        dist.all_to_all_single(tensor, outputs[0])
        assert bool((tensor == 7.0).all())
    dist.barrier()
    dist.destroy_process_group()


def test_a_group_of_one(team: Team) -> None:
    team(be_alone, ranks=1)
