"""Horovod's functions, and a script written for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import TORCHRUN, Ended
from team import Rank, Team
from training import make, parameters_of

ROOT = Path(__file__).parents[3]


def reductions(rank: Rank) -> None:
    import paramhub.torch as hvd

    hvd.init()
    ranks = torch.arange(1.0, hvd.size() + 1)
    expected = {
        hvd.Average: ranks.mean(),
        hvd.Sum: ranks.sum(),
        hvd.Min: ranks.min(),
        hvd.Max: ranks.max(),
        hvd.Product: ranks.prod(),
    }
    mine = float(rank.rank + 1)
    # A scalar, an odd size, a tensor for the hub, and one that is not contiguous.
    for shape in ((), (3, 5), (70_001,)):
        for op, value in expected.items():
            tensor = torch.full(shape, mine)
            result = hvd.allreduce(tensor, op=op)
            assert torch.equal(tensor, torch.full(shape, mine)), "the argument stays as it is"
            assert torch.equal(result, torch.full(shape, value.item())), (op, shape)
            assert hvd.allreduce_(tensor, op=op) is tensor
            assert torch.equal(tensor, result)
    transposed = torch.full((40, 2_000), mine).t()
    hvd.allreduce_(transposed)
    assert torch.equal(transposed, torch.full((2_000, 40), ranks.mean().item()))
    assert torch.equal(hvd.allreduce(torch.tensor([mine]), average=False), ranks.sum().view(1))
    assert torch.equal(hvd.allreduce(torch.tensor([mine]), average=True, name="x"), ranks.mean().view(1))

    integers = torch.tensor([rank.rank, -rank.rank - 1])
    total = sum(range(hvd.size()))
    assert hvd.allreduce(integers, op=hvd.Sum).tolist() == [total, -total - hvd.size()]
    assert hvd.allreduce(integers).tolist() == [total // hvd.size(), -((total + hvd.size()) // hvd.size())]
    assert hvd.allreduce(torch.tensor(mine, dtype=torch.float64)).dtype == torch.float64

    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        exact = torch.linspace(0.1, 0.9, 1_000) * mine
        rounded = hvd.allreduce(exact, compression=compression)
        assert rounded.dtype == torch.float32
        assert 0 < (rounded - hvd.allreduce(exact)).abs().max() < 0.02

    handles = [hvd.allreduce_async(torch.full((n,), mine), op=hvd.Sum) for n in range(1, 30)]
    in_place = torch.full((9,), mine)
    handles.append(hvd.allreduce_async_(in_place, op=hvd.Sum))
    for handle in reversed(handles):
        result = hvd.synchronize(handle)
        assert hvd.poll(handle)
        assert torch.equal(result, torch.full_like(result, ranks.sum().item()))
    assert result is not in_place and torch.equal(in_place, torch.full((9,), ranks.sum().item()))


def test_reductions(team: Team) -> None:
    team(reductions)


def moves(rank: Rank) -> None:
    import paramhub.torch as hvd

    hvd.init()
    tensor = torch.full((3, 2), rank.rank, dtype=torch.int32)
    assert torch.equal(hvd.broadcast(tensor, 1), torch.ones(3, 2, dtype=torch.int32))
    assert tensor[0, 0].item() == rank.rank
    assert hvd.synchronize(hvd.broadcast_async(tensor, 2))[0, 0].item() == 2
    assert hvd.broadcast_(tensor, 1) is tensor and tensor[0, 0].item() == 1
    mask = torch.tensor([rank.rank == 0, True])
    assert hvd.synchronize(hvd.broadcast_async_(mask, 0)).tolist() == [True, True]

    # Rank 0 has no row at all.
    rows = torch.full((rank.rank, 2), float(rank.rank))
    gathered = hvd.allgather(rows)
    assert gathered.tolist() == [[float(r)] * 2 for r in range(hvd.size()) for _ in range(r)]
    assert hvd.allgather(torch.tensor(rank.rank)).tolist() == list(range(hvd.size()))
    assert hvd.synchronize(hvd.allgather_async(rows.half())).dtype == torch.float16

    own = {"rank": rank.rank, "text": "x" * 1000 * rank.rank}
    assert hvd.broadcast_object(own if rank.rank == 2 else None, 2) == {"rank": 2, "text": "x" * 2000}
    assert [each["rank"] for each in hvd.allgather_object(own)] == list(range(hvd.size()))

    before = hvd.allgather_object(None)
    hvd.barrier()
    assert before == [None] * hvd.size()


def test_moves(team: Team) -> None:
    team(moves, ranks=3)


def gradients(rank: Rank) -> None:
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    size = hvd.size()
    weight = float(rank.rank + 1)
    mean, total = sum(range(1, size + 1)) / size, float(sum(range(1, size + 1)))

    def gradient_of(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        tensor = torch.ones(2, 3, requires_grad=True)
        (function(tensor) * weight).sum().backward()
        return tensor.grad

    assert torch.equal(gradient_of(hvd.allreduce), torch.full((2, 3), mean))
    assert torch.equal(gradient_of(lambda t: hvd.allreduce(t, op=hvd.Sum)), torch.full((2, 3), total))
    assert torch.equal(
        gradient_of(lambda t: hvd.allreduce(t, compression=hvd.Compression.bf16)), torch.full((2, 3), mean)
    )
    received = mean if rank.rank == 1 else 0.0
    assert torch.equal(gradient_of(lambda t: hvd.broadcast(t, 1)), torch.full((2, 3), received))
    assert torch.equal(gradient_of(hvd.allgather), torch.full((2, 3), mean))
    with pytest.raises(paramhub.MisuseError, match="no gradient"):
        gradient_of(lambda t: hvd.allreduce(t, op=hvd.Max))
    with torch.no_grad():
        assert not hvd.allreduce(torch.ones(1, requires_grad=True)).requires_grad


def test_gradients(team: Team) -> None:
    team(gradients, ranks=2)


def parameters(rank: Rank) -> None:
    import paramhub.torch as hvd

    hvd.init()
    expected = make()
    for shape_of in (
        lambda model: model.state_dict(),
        lambda model: model.named_parameters(),
        lambda model: list(model.named_parameters()),
        lambda model: model.parameters(),
    ):
        torch.manual_seed(rank.rank)
        model = type(expected)()
        if rank.rank == 1:
            model.load_state_dict(expected.state_dict())
        hvd.broadcast_parameters(shape_of(model), root_rank=1)
        for mine, theirs in zip(parameters_of(model), parameters_of(expected), strict=True):
            assert torch.equal(mine, theirs)
        assert model.tied.weight is model.tied_again.weight and model.first.weight.requires_grad


def test_parameters_of_one_rank_become_those_of_all(team: Team) -> None:
    team(parameters, ranks=3)


def optimizer_states(rank: Rank, dtype: torch.dtype) -> None:
    import paramhub.torch as hvd

    hvd.init()
    for make_optimizer in (
        lambda params: torch.optim.Adam(params, lr=0.5 + rank.rank, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.5 + rank.rank, momentum=0.5),
        lambda params: torch.optim.SGD(params, lr=0.5 + rank.rank),
    ):
        model = make().to(dtype)
        optimizer = make_optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if rank.rank == 1:
            for step in range(2):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, step + 1.0)
                optimizer.step()
            optimizer.zero_grad()
        groups = optimizer.param_groups
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert optimizer.param_groups is groups
        # The earlier scheduler still works with the groups.
        scheduler.step()
        states = [
            (position, name, value.dtype, value.tolist())
            if isinstance(value, torch.Tensor)
            else (position, name, value)
            for position, state in optimizer.state_dict()["state"].items()
            for name, value in state.items()
        ]
        assert all(
            value[2] in (dtype, torch.float32) if len(value) == 4 else value[2] is None for value in states
        )
        gathered = hvd.allgather_object((repr(states), [group["lr"] for group in optimizer.param_groups]))
        assert all(each == gathered[1] for each in gathered)
        assert gathered[0][1] == [0.75]


def test_optimizer_state_of_one_rank_becomes_that_of_all(team: Team) -> None:
    team(optimizer_states, torch.float32, ranks=3)
    team(optimizer_states, torch.bfloat16, ranks=2)


def misused(rank: Rank) -> dict[str, str]:
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    messages: dict[str, str] = {}

    def refused(name: str, action: Callable[[], Any]) -> None:
        with pytest.raises(paramhub.MisuseError) as error:
            action()
        messages[name] = str(error.value)

    tensor = torch.ones(2)
    refused("root", lambda: hvd.broadcast(tensor, 2))
    refused("both", lambda: hvd.allreduce(tensor, average=True, op=hvd.Sum))
    refused("op", lambda: hvd.allreduce(tensor, op="sum"))
    refused("rows", lambda: hvd.allgather(torch.ones(2, 2 + rank.rank)))
    refused("tensor", lambda: hvd.broadcast_parameters(tensor))
    refused("object", lambda: hvd.broadcast_parameters({"step": 3}))
    model = torch.nn.Linear(2 + rank.rank, 2)
    refused("model", lambda: hvd.broadcast_parameters(model.state_dict()))
    # After all that the ranks still agree.
    assert hvd.allreduce(torch.tensor(float(rank.rank))).item() == 0.5
    return messages


def test_misuse_is_refused_with_a_reason(team: Team) -> None:
    expected = {
        "root": "root_rank 2 is none of 2 ranks",
        "both": "average or op, not both",
        "op": "not 'sum'",
        "rows": "rank 0 has torch.float32 of shape [2, 2], and rank 1 torch.float32 of shape [2, 3]",
        "tensor": "use broadcast_ for a tensor",
        "object": "'step' is no tensor but int",
        "model": "rank 0 and rank 1 differ at position 1: rank 0 has weight torch.float32 [2, 2], rank 1 has weight "
        "torch.float32 [2, 3]",
    }
    for messages in team(misused, ranks=2):
        assert messages.keys() == expected.keys()
        for name, part in expected.items():
            assert part in messages[name], (name, messages[name])


def test_a_script_written_for_horovod(launch: Callable[..., Ended]) -> None:
    script = ROOT / "examples" / "pytorch" / "horovod_digits.py"
    ended = launch(*TORCHRUN, "--nproc-per-node=4", script, "--epochs=6", timeout=300)
    assert ended.code == 0, ended.output
    accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", ended.output)]
    assert len(accuracies) == 6, ended.output
    assert accuracies[-1] > 0.9, ended.output
