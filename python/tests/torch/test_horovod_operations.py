"""Horovod's operations beside allreduce, broadcast and allgather, and their gradients."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from team import Rank, Team

import paramhub


def scaled_and_grouped(rank: Rank) -> None:
    import paramhub.torch as hvd

    hvd.init()
    mine = float(rank.rank + 1)
    total = sum(range(1, hvd.size() + 1))
    tensor = torch.full((3,), mine)
    assert hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5).tolist() == [0.5 * total] * 3
    assert hvd.allreduce(tensor, postscale_factor=3.0).tolist() == [3.0 * total / hvd.size()] * 3
    assert tensor.tolist() == [mine] * 3
    # Products of integers are rounded towards zero, each by itself.
    integers = torch.tensor([3, -3])
    assert hvd.allreduce(integers, op=hvd.Sum, prescale_factor=0.5).tolist() == [hvd.size(), -hvd.size()]
    assert hvd.allreduce(integers, postscale_factor=0.5).tolist() == [1, -1]
    # A mean is rounded once: a third times three would be less than one.
    assert hvd.allreduce(torch.tensor(7), postscale_factor=3.0).item() == 21
    half = hvd.allreduce(torch.full((2,), 0.1).half(), op=hvd.Sum, prescale_factor=3.0)
    assert torch.equal(half, (torch.full((2,), 0.1).half() * 3.0) * hvd.size())

    tensors = [torch.full((n,), mine) for n in (1, 70_000, 3)]
    for reduced in (
        hvd.grouped_allreduce(tensors, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)),
        hvd.grouped_allreduce(tensors, op=hvd.Sum, compression=hvd.Compression.fp16),
    ):
        assert all(torch.equal(each, torch.full_like(each, total)) for each in reduced)
    assert tensors[0].item() == mine
    in_place = hvd.grouped_allreduce_(tensors, op=hvd.Max)
    assert all(one is other for one, other in zip(in_place, tensors, strict=True))
    assert tensors[1][-1].item() == hvd.size()
    rows = [torch.full((rank.rank, 2), mine), torch.tensor(rank.rank)]
    matrix, scalars = hvd.grouped_allgather(rows)
    assert matrix.tolist() == [[r + 1.0] * 2 for r in range(hvd.size()) for _ in range(r)]
    assert scalars.tolist() == list(range(hvd.size()))
    assert len(hvd.synchronize(hvd.grouped_allgather_async(rows))) == 2


def parts(rank: Rank) -> None:
    """alltoall, reducescatter and sparse tensors, with parts of different sizes."""
    import paramhub.torch as hvd

    hvd.init()
    size = hvd.size()
    rows = torch.full((size, 2), rank.rank, dtype=torch.int16)
    received = hvd.alltoall(rows)
    assert received[:, 0].tolist() == list(range(size)) and received.dtype == torch.int16
    # Rank 0 sends nothing, and rank r sends r rows to each rank.
    splits = torch.full((size,), rank.rank)
    received, counts = hvd.alltoall(torch.full((size * rank.rank,), float(rank.rank)), splits)
    assert received.tolist() == [float(r) for r in range(size) for _ in range(r)]
    assert counts.tolist() == list(range(size)) and counts.dtype == splits.dtype
    assert hvd.synchronize(hvd.alltoall_async(rows))[1].dtype == torch.int32

    rows = torch.arange(2.0 * size + 2).view(-1, 2) * (rank.rank + 1)
    total = torch.arange(2.0 * size + 2).view(-1, 2) * sum(range(1, size + 1))
    begin = 0 if rank.rank == 0 else rank.rank + 1
    expected = total[begin : begin + (2 if rank.rank == 0 else 1)]
    assert torch.equal(hvd.reducescatter(rows, op=hvd.Sum), expected)
    assert torch.allclose(hvd.reducescatter(rows), expected / size)
    assert torch.equal(hvd.reducescatter(rows, op=hvd.Sum, compression=hvd.Compression.fp16), expected)
    assert torch.equal(
        hvd.reducescatter(rows, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), expected / 2
    )
    integers = torch.tensor([-5 - rank.rank] * size)
    assert hvd.reducescatter(integers).tolist() == [-((5 * size + sum(range(size))) // size)]
    grouped = hvd.grouped_reducescatter([rows, rows[:, 0]], op=hvd.Sum)
    assert torch.equal(grouped[0], expected) and torch.equal(grouped[1], expected[:, 0])
    assert torch.equal(hvd.synchronize(hvd.grouped_reducescatter_async([rows], op=hvd.Sum))[0], expected)
    assert hvd.synchronize(hvd.reducescatter_async(rows[:1])).shape == ((1, 2) if rank.rank == 0 else (0, 2))

    # Rank 0 has no value at all.
    dense = torch.zeros(4, 2)
    dense[: rank.rank] = 3.0
    for op in (hvd.Average, hvd.Sum):
        handle = hvd.sparse_allreduce_async(dense.to_sparse(), op=op)
        assert torch.allclose(handle().to_dense(), hvd.allreduce(dense, op=op))
    assert hvd.poll(handle) and torch.equal(hvd.synchronize(handle).to_dense(), handle().to_dense())


def gradients(rank: Rank) -> None:
    """The gradients of Horovod 0.28, with its factors: that of a sum is multiplied by the number of ranks."""
    import paramhub.torch as hvd

    hvd.init()
    size = hvd.size()
    mean = sum(range(1, size + 1)) / size

    def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], rows: int = size) -> list[float]:
        tensor = torch.ones(rows, requires_grad=True)
        (function(tensor) * (rank.rank + 1.0)).sum().backward()
        return tensor.grad.tolist()

    weights = [r + 1.0 for r in range(size)]
    assert (
        gradient_of(lambda t: hvd.allreduce(t, op=hvd.Sum, postscale_factor=2.0)) == [2 * mean * size] * size
    )
    assert gradient_of(hvd.alltoall) == weights
    assert gradient_of(lambda t: hvd.alltoall(t, [rank.rank] * size)[0], size * rank.rank) == [
        weight for weight in weights for _ in range(rank.rank)
    ]
    assert gradient_of(hvd.reducescatter) == weights
    assert gradient_of(lambda t: hvd.reducescatter(t, op=hvd.Sum, prescale_factor=0.5)) == [
        weight * size / 2 for weight in weights
    ]
    one, other = (torch.ones(size, requires_grad=True) for _ in range(2))
    for function, expected in (
        (hvd.grouped_allreduce, [mean] * size),
        (hvd.grouped_allgather, [mean] * size),
        (hvd.grouped_reducescatter, weights),
    ):
        one.grad = other.grad = None
        first, second = function([one, other])
        # The ranks use different results, and yet agree on what to exchange.
        ((first if rank.rank else first + second) * (rank.rank + 1.0)).sum().backward()
        assert one.grad.tolist() == expected, function
    once = torch.ones(size, requires_grad=True)
    squared = hvd.allreduce(once, op=hvd.Sum).square().sum()
    (first,) = torch.autograd.grad(squared, once, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with pytest.raises(paramhub.MisuseError, match="no gradient"):
        gradient_of(lambda t: hvd.reducescatter(t, op=hvd.Max))


def refusals(rank: Rank) -> dict[str, str]:
    """What every rank refuses, after which the ranks still agree."""
    import paramhub.torch as hvd

    hvd.init()
    messages: dict[str, str] = {}

    def refused(name: str, action: Callable[[], Any]) -> None:
        with pytest.raises(paramhub.MisuseError) as error:
            action()
        messages[name] = str(error.value)

    size, odd = hvd.size(), rank.rank % 2
    refused("adasum", lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum))
    refused("scalar", lambda: hvd.reducescatter(torch.tensor(1.0)))
    refused("equal", lambda: hvd.alltoall(torch.ones(size + 1)))
    refused("sum", lambda: hvd.alltoall(torch.ones(2), [1] * size))
    refused("one rank's sum", lambda: hvd.alltoall(torch.ones(size), [1] * (size - odd)))
    refused("one rank's object", lambda: hvd.allgather_object((lambda: 1) if odd else 1))
    refused("root's object", lambda: hvd.broadcast_object((lambda: 1) if odd else 1, 1))
    refused("floats", lambda: hvd.alltoall(torch.ones(size), torch.ones(size)))
    refused("shape", lambda: hvd.alltoall(torch.ones(size, 2 + odd)))
    refused("type", lambda: hvd.allgather(torch.ones(2, dtype=torch.int32 if odd else torch.float32)))
    refused("dimensions", lambda: hvd.grouped_allgather([torch.ones(1), torch.ones([2] * (2 + odd))]))
    refused("dense", lambda: hvd.sparse_allreduce_async(torch.ones(2)))
    refused("sparse", lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), op=hvd.Min))
    refused("sparse shape", lambda: hvd.sparse_allreduce_async(torch.ones(2 + odd, 2).to_sparse(1)))
    refused("bools", lambda: hvd.allreduce(torch.tensor(True)))
    refused("bools in parts", lambda: hvd.reducescatter(torch.ones(size, dtype=torch.bool)))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    # An allreduce is not described beforehand: it fails on every rank, and the group with it.
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.allreduce(torch.ones(2 + odd))
    messages["lengths"] = str(error.value)
    hvd.shutdown()
    hvd.init()
    with pytest.raises(hvd.HorovodInternalError) as error:
        hvd.broadcast(torch.ones(2, dtype=torch.int32 if odd else torch.float32), 0)
        hvd.barrier()
    messages["type of a broadcast"] = str(error.value)
    return messages


def everything(rank: Rank) -> dict[str, str]:
    scaled_and_grouped(rank)
    parts(rank)
    gradients(rank)
    return refusals(rank)


def test_results_gradients_and_refusals(team: Team) -> None:
    expected = {
        "adasum": "Adasum is not implemented: use Average",
        "scalar": "a scalar has no rows",
        "equal": "4 rows are not 3 equal parts, one for each rank: give it splits",
        "sum": "2 rows cannot be split into [1, 1, 1] for 3 ranks",
        "one rank's object": "allgather_object: the object of rank 1 cannot be pickled",
        "root's object": "broadcast_object: the object of rank 1 cannot be pickled",
        "floats": "whole numbers of rows, one for each rank, not torch.float32",
        "shape": "rank 0 has torch.float32 of shape [3, 2], and rank 1 torch.float32 of shape [3, 3]",
        "type": "rank 0 has torch.float32 of shape [2], and rank 1 torch.int32 of shape [2]",
        "dimensions": "rank 0 has torch.float32 of shape [2, 2], and rank 1 torch.float32 of shape [2, 2, 2]",
        "dense": "takes a sparse COO tensor",
        "sparse": "by Average or Sum, not by paramhub.torch.Min",
        "sparse shape": "rank 0 has torch.float32 of shape [2, 2], and rank 1 torch.float32 of shape [3, 2]",
        "bools": "a tensor of torch.bool has no mean",
        "bools in parts": "a tensor of torch.bool has no mean",
        "lengths": "allreduce(average of f32, 12 bytes) at rank 1",
        "type of a broadcast": "broadcast(i32, 8 bytes, root 0) at rank 1",
    }
    for rank, messages in enumerate(team(everything, ranks=3)):
        expected["one rank's sum"] = (
            "3 rows cannot be split into [1, 1] for 3 ranks"
            if rank == 1
            else "alltoall: rank 1 has refused its arguments"
        )
        assert messages.keys() == expected.keys()
        for name, part in expected.items():
            assert part in messages[name], (name, messages[name])


def about_hosts(rank: Rank, url: str) -> tuple[int, int, bool, list[bool]]:
    import paramhub.torch as hvd

    with pytest.raises(paramhub.MisuseError, match="init"):
        hvd.cross_rank()
    # Two ranks on the first host and one on the second, which is this one under another name.
    os.environ["PARAMHUB_HOST"] = "one" if rank.rank < 2 else "other"
    local = {name: os.environ.pop(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    hvd.init(url)
    places = hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()
    hvd.shutdown()
    del os.environ["PARAMHUB_HOST"]
    os.environ.update(local)
    hvd.init(url)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    path = rank.folder / "timeline.json"
    with pytest.raises(paramhub.MisuseError, match=re.escape("start_timeline() was not called")):
        hvd.stop_timeline()
    for _ in range(2):
        hvd.start_timeline(str(path), mark_cycles=True)
        with pytest.raises(paramhub.MisuseError, match="recorded already, call stop_timeline"):
            hvd.start_timeline(str(path))
        hvd.allreduce(torch.ones(5))
        hvd.stop_timeline()
        if rank.rank == 0:
            assert "allreduce of 20 bytes" in path.read_text() and '"rank 2 (' in path.read_text()
            path.unlink()
        hvd.barrier()
        assert [each.name for each in rank.folder.glob("timeline*")] == []
    built = ["mpi_built", "mpi_enabled", "gloo_built", "gloo_enabled", "nccl_built", "ddl_built", "ccl_built"]
    built += ["cuda_built", "rocm_built", "mpi_threads_supported"]
    return *places, [getattr(hvd, name)() for name in built]


def test_hosts_builds_and_timelines(team: Team, hub: paramhub.Hub) -> None:
    told = team(about_hosts, hub.url, ranks=3)
    assert [each[:3] for each in told] == [(0, 2, False), (0, 1, False), (1, 2, False)]
    assert not any(value for *_, built in told for value in built)
