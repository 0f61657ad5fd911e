"""`DistributedOptimizer` compared with DDP over gloo."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import group_differently
from team import Rank, Team
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import STEPS, Net, difference, loss_of, make, parameters_of

TOLERANCE = 1e-6


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.002)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


def reference(rank: Rank, make_optimizer: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    model = make()
    ddp = DistributedDataParallel(model)
    optimizer = make_optimizer(ddp.parameters())
    scheduler = halving(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, step, rank.rank).backward()
        optimizer.step()
        scheduler.step()
    return parameters_of(model)


def distributed(
    rank: Rank, make_optimizer: Callable[..., torch.optim.Optimizer], **options: Any
) -> list[torch.Tensor]:
    import paramhub.torch

    model = make()
    optimizer = make_optimizer(model.parameters())
    optimizer = paramhub.torch.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), **options
    )
    scheduler = halving(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        optimizer.step()
        scheduler.step()
    return parameters_of(model)


def compare(rank: Rank) -> list[float]:
    dist.init_process_group("gloo")
    return [
        difference(distributed(rank, make_optimizer), reference(rank, make_optimizer))
        for make_optimizer in (sgd, adamw)
    ]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_optimizer_steps_as_ddp_does(team: Team, transport: str) -> None:
    for differences in team(compare, env={"PARAMHUB_TRANSPORT": transport}):
        assert max(differences) < TOLERANCE, differences


def staged(rank: Rank) -> list[float]:
    """Tensors are staged as a device's tensors are; the device is the CPU."""
    from paramhub.torch import _gradients

    _gradients.needs_stage = lambda device: True
    group_differently(rank.rank)
    return compare(rank)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_optimizer_steps_by_way_of_a_stage(team: Team, transport: str) -> None:
    for differences in team(staged, ranks=2, env={"PARAMHUB_TRANSPORT": transport}):
        assert max(differences) < TOLERANCE, differences


def reproduce(rank: Rank) -> list[bytes]:
    import paramhub.torch

    paramhub.torch.init(reproducible=True)
    return [tensor.numpy().tobytes() for tensor in distributed(rank, sgd)]


def test_reproducible_runs_are_bit_equal(team: Team) -> None:
    first, second = team(reproduce), team(reproduce, env={"PARAMHUB_TRANSPORT": "tcp"})
    assert all(rank == first[0] for rank in first + second)


def compressed(rank: Rank) -> list[float]:
    import paramhub.torch

    paramhub.torch.init()
    exact = distributed(rank, sgd)
    compression = paramhub.torch.Compression
    return [
        difference(distributed(rank, sgd, compression=by), exact)
        for by in (compression.none, compression.fp16, compression.bf16)
    ]


def test_compression_rounds_what_travels(team: Team) -> None:
    for none, fp16, bf16 in team(compressed, ranks=2):
        assert none < TOLERANCE < fp16 < bf16 < 0.1


def quantised(rank: Rank) -> list[float]:
    import paramhub.torch

    paramhub.torch.init()
    with pytest.raises(paramhub.MisuseError, match="use it with DistributedOptimizer"):
        paramhub.torch.allreduce(torch.ones(2, 2), compression=paramhub.torch.Compression.one_bit)
    exact = distributed(rank, sgd)
    compression = paramhub.torch.Compression
    return [
        difference(distributed(rank, sgd, compression=by), exact)
        for by in (compression.one_bit, compression.two_bit, compression.int8)
    ]


def test_matrices_in_one_and_two_bits_stay_near_the_exact_ones(team: Team) -> None:
    results = team(quantised, ranks=2)
    # These are differences between parameters, which are equal on all ranks.
    assert results[0] == results[1]
    one, two, byte = results[0]
    assert TOLERANCE < byte < two < one < 0.5, (one, two, byte)


def sums(rank: Rank) -> list[float]:
    import paramhub.torch

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = paramhub.torch.DistributedOptimizer(optimizer, op=paramhub.torch.Sum)
    model(torch.full((1, 3), float(rank.rank + 1))).sum().backward()
    optimizer.synchronize()
    return model.weight.grad.flatten().tolist()


def test_sum(team: Team) -> None:
    assert team(sums, ranks=3) == [[6.0] * 6] * 3


def accumulates(rank: Rank) -> list[float]:
    import paramhub.torch

    dist.init_process_group("gloo")

    def run(ours: bool) -> list[torch.Tensor]:
        model = make()
        ddp = model if ours else DistributedDataParallel(model)
        optimizer = sgd(model.parameters())
        if ours:
            optimizer = paramhub.torch.DistributedOptimizer(
                optimizer, model.named_parameters(), backward_passes_per_step=3
            )
        for step in range(4):
            optimizer.zero_grad()
            for part in range(3):
                if ours or part == 2:
                    loss_of(ddp, 3 * step + part, rank.rank).backward()
                else:
                    with ddp.no_sync():
                        loss_of(ddp, 3 * step + part, rank.rank).backward()
            optimizer.step()
        return parameters_of(model)

    apart = difference(run(True), run(False))
    # With fewer passes than announced, the gradients so far are exchanged.
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = paramhub.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=2
    )
    model(torch.full((1, 1), float(rank.rank))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    model(torch.full((1, 1), float(rank.rank))).sum().backward()
    optimizer.step()
    return [apart, model.weight.item()]


def test_backward_passes_add_up(team: Team) -> None:
    for apart, weight in team(accumulates, ranks=2):
        assert apart < TOLERANCE
        assert weight == -1.0


def clipped(rank: Rank) -> float:
    import paramhub.torch

    dist.init_process_group("gloo")

    def run(ours: bool, skips: bool = True) -> list[torch.Tensor]:
        model = make()
        ddp = model if ours else DistributedDataParallel(model)
        optimizer = sgd(model.parameters())
        if ours:
            optimizer = paramhub.torch.DistributedOptimizer(optimizer, model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, step, rank.rank).backward()
            if ours:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if ours and skips:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        return parameters_of(model)

    expected = run(False)
    return max(difference(run(True), expected), difference(run(True, skips=False), expected))


def test_clipping_between_synchronize_and_step(team: Team) -> None:
    assert max(team(clipped, ranks=2)) < TOLERANCE


def scaled(rank: Rank) -> tuple[float, list[float]]:
    """A GradScaler around the exchange. At step 3 rank 1's gradient overflows, and no rank may make the step."""
    import paramhub.torch

    def run(by: float) -> list[torch.Tensor]:
        model = make()
        optimizer = paramhub.torch.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=by, enabled=by != 1.0, growth_interval=100)
        for step in range(6):
            optimizer.zero_grad()
            if step == 3:
                if by == 1.0:
                    continue
                loss = loss_of(model, step, rank.rank) * (float("inf") if rank.rank == 1 else 1.0)
            else:
                loss = loss_of(model, step, rank.rank)
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
        return parameters_of(model)

    scales: list[float] = []
    apart = difference(run(1024.0), run(1.0))
    return apart, scales


def test_a_grad_scaler_steps_on_all_ranks_or_none(team: Team) -> None:
    for apart, scales in team(scaled, ranks=2):
        assert apart < TOLERANCE
        assert scales == [512.0, 1.0]


def unused(rank: Rank) -> list[Any]:
    """Each rank uses another head, and no rank uses one of the parameters."""
    import paramhub.torch

    model = make(Net)
    unused_parameter = nn.Parameter(torch.ones(5))
    named = [*model.named_parameters(), ("unused_parameter", unused_parameter)]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    optimizer = paramhub.torch.DistributedOptimizer(optimizer, named)
    loss_of(model, 0, rank.rank, rank.rank % 2).backward()
    assert model.heads[1 - rank.rank % 2].weight.grad is None
    optimizer.synchronize()
    own = make(Net)
    loss_of(own, 0, 0, 0).backward()
    return [
        difference([model.heads[0].weight.grad], [own.heads[0].weight.grad / 2]),
        unused_parameter.grad.tolist(),
    ]


def test_an_unused_parameter_contributes_zeros(team: Team) -> None:
    for apart, unused_parameter in team(unused, ranks=2):
        assert apart < TOLERANCE
        assert unused_parameter == [0.0] * 5


def layouts(rank: Rank) -> dict[str, Any]:
    """Gradients with other layouts than their parameters, on one rank only."""
    import paramhub.torch

    results: dict[str, Any] = {}
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    gapped = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    embedding = nn.Embedding(4, 2, sparse=True)
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    named = [
        ("convolution", convolution.weight),
        ("gapped", gapped),
        ("embedding", embedding.weight),
        ("half", half),
    ]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    optimizer = paramhub.torch.DistributedOptimizer(optimizer, named, sparse_as_dense=True)
    factor = torch.arange(convolution.weight.numel(), dtype=torch.float32).view(4, 3, 3, 3)
    if rank.rank == 1:
        # Backward adds to the present gradient, in its layout.
        convolution.weight.grad = torch.zeros(4, 3, 3, 3)
    (convolution.weight * factor).sum().backward()
    (gapped * torch.arange(12.0).view(4, 3)).sum().backward()
    embedding(torch.tensor([rank.rank])).sum().backward()
    (half * torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)).sum().backward()
    optimizer.synchronize()
    results["convolution"] = torch.equal(convolution.weight.grad, factor)
    results["gapped"] = gapped.grad.flatten().tolist()
    assert embedding.weight.grad.is_sparse, "as backward made it"
    results["embedding"] = embedding.weight.grad.to_dense().tolist()
    results["half"] = half.grad.float().tolist()
    # This optimizer takes sparse gradients only.
    lone = nn.Embedding(4, 2, sparse=True)
    before = lone.weight.detach().clone()
    sparse_adam = torch.optim.SparseAdam(lone.parameters(), lr=0.5)
    sparse_adam = paramhub.torch.DistributedOptimizer(sparse_adam, sparse_as_dense=True)
    lone(torch.tensor([rank.rank])).sum().backward()
    sparse_adam.step()
    results["moved"] = (before - lone.weight.detach()).round(decimals=3).tolist()
    return results


def test_any_layout_and_type_of_gradient(team: Team) -> None:
    for results in team(layouts, ranks=2):
        assert results["convolution"] is True
        assert results["gapped"] == [float(number) for number in range(12)]
        assert results["embedding"] == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]
        assert results["half"] == [1.0, 2.0, 3.0]
        assert results["moved"] == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]


def several(rank: Rank) -> list[float]:
    """Two optimizers for two parts of a model, one after another for the same part, and frozen parameters."""
    import paramhub.torch

    dist.init_process_group("gloo")

    def run(ours: bool) -> list[torch.Tensor]:
        model = make()
        model.convolution.bias.requires_grad_(False)
        ddp = model if ours else DistributedDataParallel(model)
        front = [(n, p) for n, p in model.named_parameters() if n.startswith(("scale", "convolution"))]
        back = [(n, p) for n, p in model.named_parameters() if not n.startswith(("scale", "convolution"))]
        for round_ in range(2):
            optimizers = [
                torch.optim.SGD([p for _, p in front], lr=0.05),
                torch.optim.Adam([p for _, p in back], lr=0.001),
            ]
            if ours:
                optimizers = [
                    paramhub.torch.DistributedOptimizer(optimizer, named)
                    for optimizer, named in zip(optimizers, (front, back), strict=True)
                ]
            for step in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_of(ddp, 3 * round_ + step, rank.rank).backward()
                for optimizer in optimizers:
                    optimizer.step()
            del optimizer, optimizers
            gc.collect()
        return parameters_of(model)

    return [difference(run(True), run(False))]


def test_several_optimizers_side_by_side_and_in_turn(team: Team) -> None:
    assert max(apart for (apart,) in team(several, ranks=2)) < TOLERANCE


def alone(rank: Rank) -> float:
    model = make()
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, 0).backward()
        optimizer.step()
        if step % 5 == 4:
            optimizer.param_groups[0]["lr"] *= 0.5
    return difference(distributed(rank, sgd), parameters_of(model))


def test_one_rank_steps_as_the_optimizer_alone(team: Team) -> None:
    assert team(alone, ranks=1) == [0.0]
