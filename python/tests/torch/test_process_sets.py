"""Horovod's process sets: operations and optimizers of some of the ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from team import Rank, Team
from training import loss_of, make, parameters_of


def sets(rank: Rank) -> dict[str, str]:
    """Two sets from `init`, one added later, and all operations in a set whose first rank is not 0."""
    import paramhub
    import paramhub.torch as hvd

    messages: dict[str, str] = {}

    def refused(name: str, action: Callable[[], Any]) -> None:
        with pytest.raises(paramhub.MisuseError) as error:
            action()
        messages[name] = str(error.value)

    first, outer = hvd.ProcessSet([0]), hvd.ProcessSet([2, 0])
    assert (first.process_set_id, first.size(), first.rank()) == (None, None, None)
    refused("twice in a list", lambda: hvd.init(process_sets=[first, hvd.ProcessSet([0])]))
    assert not hvd.is_initialized()
    refused("no set", lambda: hvd.init(process_sets=[[0]]))
    refused("no list", lambda: hvd.init(process_sets=first))
    refused("no ranks", lambda: hvd.ProcessSet("ab"))
    refused("one rank twice", lambda: hvd.ProcessSet([1, 1]))
    hvd.init(process_sets=[first, outer])
    assert hvd.global_process_set.ranks == [0, 1, 2] and hvd.global_process_set.process_set_id == 0
    assert (first.process_set_id, outer.process_set_id, outer.ranks, outer.size()) == (1, 2, [0, 2], 2)
    refused("all", lambda: hvd.add_process_set([2, 1, 0]))
    refused("known", lambda: hvd.add_process_set([0, 2]))
    refused("absent", lambda: hvd.add_process_set([0, 3]))
    refused("ranks disagree", lambda: hvd.add_process_set([rank.rank, (rank.rank + 1) % 3]))
    later = hvd.add_process_set(hvd.ProcessSet(range(1, 3)))
    assert later.included() == (rank.rank > 0) and later.process_set_id == 3

    assert copy.deepcopy(later) is later and copy.deepcopy([hvd.global_process_set]) == [
        hvd.global_process_set
    ]
    sent = pickle.loads(pickle.dumps([later, hvd.global_process_set]))
    assert sent[0].ranks == [1, 2] and sent[0].size() is None and sent[1] is hvd.global_process_set

    refused("unused", lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0, 1])))
    if rank.rank == 0:
        refused("foreign", lambda: hvd.allreduce(torch.ones(1), process_set=later))
    else:
        refused("root", lambda: hvd.broadcast(torch.ones(1), 0, process_set=later))
        assert later.rank() == rank.rank - 1
        mine = torch.tensor([[float(rank.rank)]])
        options = {"process_set": later}
        assert hvd.allreduce(mine, **options).item() == 1.5
        assert hvd.broadcast(mine, 2, **options).item() == 2.0
        assert hvd.allgather(mine.expand(rank.rank, 1), **options).flatten().tolist() == [1.0, 2.0, 2.0]
        assert [each.item() for each in hvd.grouped_allreduce([mine, mine], op=hvd.Sum, **options)] == [3, 3]
        received, splits = hvd.alltoall(mine.expand(3, 1), [1, 2], **options)
        assert received.flatten().tolist() == [1.0, 2.0] if rank.rank == 1 else [1.0, 1.0, 2.0, 2.0]
        assert splits.tolist() == [rank.rank] * 2
        part = hvd.reducescatter(torch.arange(3.0), op=hvd.Sum, **options)
        assert part.tolist() == [[0.0, 2.0], [4.0]][later.rank()]
        sparse = torch.tensor([0.0, mine.item()]).to_sparse()
        assert hvd.sparse_allreduce_async(sparse, "s", hvd.Average, later)().to_dense().tolist() == [0.0, 1.5]
        assert hvd.broadcast_object(rank.rank, 2, **options) == 2
        assert hvd.allgather_object(rank.rank, **options) == [1, 2]
        weights = {"weight": mine.clone()}
        hvd.broadcast_parameters(weights, 2, **options)
        assert weights["weight"].item() == 2.0
        differentiable = mine.clone().requires_grad_()
        (hvd.allgather(differentiable, **options) * mine).sum().backward()
        assert differentiable.grad.item() == 1.5
        hvd.barrier(later)

    # Ranks outside of the set make their own steps.
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=later)
    loss_of(model, 0, rank.rank).backward()
    optimizer.step()
    flat = torch.cat([parameter.flatten() for parameter in parameters_of(model)])
    steps = hvd.allgather(flat.unsqueeze(0))
    assert torch.equal(steps[1], steps[2]) and not torch.equal(steps[0], steps[1])

    assert hvd.remove_process_set(later) and not hvd.remove_process_set(later)
    assert not hvd.remove_process_set(hvd.global_process_set)
    refused("removed", lambda: hvd.barrier(later))
    again = hvd.add_process_set([1, 2])
    if again.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == 2.0
    hvd.shutdown()
    assert again.process_set_id is None and outer.size() is None
    hvd.init(process_sets="dynamic")
    hvd.init(process_sets=[outer])
    assert outer.process_set_id == 1
    return messages


def test_operations_and_optimizers_of_a_set(team: Team) -> None:
    expected = {
        "twice in a list": "the process set of ranks [0] exists already",
        "no set": "not to have [0]",
        "no list": "not ProcessSet(process_set_id=None, ranks=[0])",
        "no ranks": "made of a list of ranks, not of 'ab'",
        "one rank twice": "has each rank once, but was given [1, 1]",
        "all": "the process set of ranks [0, 1, 2] exists already",
        "known": "the process set of ranks [0, 2] exists already",
        "absent": "rank 3, which is none of 3 ranks",
        "ranks disagree": "all ranks add the same sets in the same order",
        "unused": "is not in use: give it to paramhub.torch.init",
        "removed": "is not in use",
    }
    for rank, messages in enumerate(team(sets, ranks=3)):
        whose = (
            {"foreign": "rank 0 is not in ProcessSet(process_set_id=3, ranks=[1, 2])"}
            if rank == 0
            else {"root": "root_rank 0 is none of the process set's ranks, [1, 2]"}
        )
        assert messages.keys() == expected.keys() | whose.keys()
        for name, part in (expected | whose).items():
            assert part in messages[name], (name, messages[name])
