"""HubOptimizer compared with torch.optim on the same mean gradient, with real ranks and a real hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from device import group_differently
from hub_training import Net, Reference, all_parameters, begin, compare, largest_difference, loss_of, made
from team import Rank, Team

import paramhub
from paramhub.torch import HubOptimizer

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
MOMENTUM = {"lr": 0.05, "momentum": 0.9}


class LionOfThePaper(torch.optim.Optimizer):
    """Program 1 of "Symbolic Discovery of Optimization Algorithms" (2023)."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = torch.sign(0.9 * m + 0.1 * p.grad)
                p.sub_(group["lr"] * (update + group["weight_decay"] * p))
                m.mul_(0.99).add_(p.grad, alpha=0.01)


SAME: list[tuple[paramhub.Optimizer, Any, dict[str, Any]]] = [
    (paramhub.SGD(lr=0.1), SGD, {"lr": 0.1}),
    (paramhub.SGD(**MOMENTUM, dampening=0.1), SGD, {**MOMENTUM, "dampening": 0.1}),
    (
        paramhub.Nesterov(**MOMENTUM, weight_decay=1e-2),
        SGD,
        {**MOMENTUM, "nesterov": True, "weight_decay": 1e-2},
    ),
    (paramhub.Adam(lr=3e-3, weight_decay=1e-2), ADAM, {"lr": 3e-3, "weight_decay": 1e-2}),
    (
        paramhub.AdamW(lr=3e-3, betas=(0.8, 0.99), eps=1e-6),
        ADAMW,
        {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-6},
    ),
    (paramhub.Adam(lr=3e-3, amsgrad=True), ADAM, {"lr": 3e-3, "amsgrad": True}),
    (
        paramhub.AdamW(lr=3e-3, amsgrad=True, maximize=True),
        ADAMW,
        {"lr": 3e-3, "amsgrad": True, "maximize": True},
    ),
    (paramhub.Adagrad(), torch.optim.Adagrad, {}),
    (
        paramhub.Adagrad(lr=0.02, lr_decay=0.1, weight_decay=1e-2, initial_accumulator_value=0.1, eps=1e-6),
        torch.optim.Adagrad,
        {"lr": 0.02, "lr_decay": 0.1, "weight_decay": 1e-2, "initial_accumulator_value": 0.1, "eps": 1e-6},
    ),
    (paramhub.RMSprop(lr=1e-3), torch.optim.RMSprop, {"lr": 1e-3}),
    (
        paramhub.RMSprop(lr=1e-3, alpha=0.9, eps=1e-3, momentum=0.5, centered=True),
        torch.optim.RMSprop,
        {"lr": 1e-3, "alpha": 0.9, "eps": 1e-3, "momentum": 0.5, "centered": True},
    ),
    (paramhub.Adadelta(), torch.optim.Adadelta, {}),
    (
        paramhub.Adadelta(lr=0.5, rho=0.8, eps=1e-4),
        torch.optim.Adadelta,
        {"lr": 0.5, "rho": 0.8, "eps": 1e-4},
    ),
    (paramhub.NAdam(lr=1e-3), torch.optim.NAdam, {"lr": 1e-3}),
    (
        paramhub.NAdam(lr=1e-3, weight_decay=0.1, momentum_decay=0.1, decoupled_weight_decay=True),
        torch.optim.NAdam,
        {"lr": 1e-3, "weight_decay": 0.1, "momentum_decay": 0.1, "decoupled_weight_decay": True},
    ),
]


def every_optimizer(rank: Rank, overlap_forward: bool) -> list[bytes]:
    ends = []
    for mine, theirs, options in SAME:
        model = begin(rank)
        optimizer = HubOptimizer(model, mine, overlap_forward=overlap_forward)
        compare(rank, model, optimizer, made(theirs, options))
        ends += all_parameters(model)
        optimizer.close()
    return ends


@pytest.mark.parametrize(("transport", "overlap_forward"), [("shm", True), ("tcp", True), ("shm", False)])
def test_every_optimizer_is_torchs(team: Team, transport: str, overlap_forward: bool) -> None:
    ends = team(every_optimizer, overlap_forward, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1] == ends[2] == ends[3]
    assert len(ends[0]) == len(SAME) * len(list(Net().parameters()))


class Staged(HubOptimizer):
    """A HubOptimizer that stages parameters as it does those of a device."""

    _stages_all = True


def staged(rank: Rank) -> list[bytes]:
    group_differently(rank.rank)
    model = begin(rank)
    optimizer = Staged(model, paramhub.AdamW(lr=3e-3))
    assert optimizer._step.stage is not None
    compare(rank, model, optimizer, made(ADAMW, {"lr": 3e-3}), steps=10)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    compare_bits = list(all_parameters(model))
    loss_of(model, rank.rank, 11).backward()
    optimizer.step()
    ends = list(all_parameters(model))
    assert ends != compare_bits
    optimizer.close()
    return ends


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tensors_of_a_device_pass_through_the_host(team: Team, transport: str) -> None:
    ends = team(staged, ranks=2, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1]


Make = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def schedules() -> list[tuple[paramhub.Optimizer, Any, dict[str, Any], Make]]:
    at = torch.optim.lr_scheduler

    def warmup(optimizer: torch.optim.Optimizer) -> Any:
        return at.SequentialLR(
            optimizer, [at.LinearLR(optimizer, 0.1, total_iters=5), at.CosineAnnealingLR(optimizer, 15)], [5]
        )

    return [
        (paramhub.SGD(**MOMENTUM), SGD, MOMENTUM, lambda o: at.StepLR(o, 4, gamma=0.3)),
        (paramhub.SGD(**MOMENTUM), SGD, MOMENTUM, lambda o: at.LambdaLR(o, lambda step: 1 / (1 + step))),
        # This scheduler cycles the momentum, too.
        (paramhub.SGD(**MOMENTUM), SGD, MOMENTUM, lambda o: at.OneCycleLR(o, 0.1, total_steps=21)),
        (paramhub.Adam(lr=1e-3), ADAM, {"lr": 1e-3}, lambda o: at.OneCycleLR(o, 0.01, total_steps=21)),
        (paramhub.AdamW(lr=1e-2), ADAMW, {"lr": 1e-2}, warmup),
    ]


def every_schedule(rank: Rank) -> None:
    for mine, theirs, options, make in schedules():
        model = begin(rank)
        optimizer = HubOptimizer(model, mine)
        scheduler = make(optimizer)
        if rank.rank > 0:
            # Only rank 0's hyperparameters are used.
            scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.9)
        compare(
            rank,
            model,
            optimizer,
            made(theirs, options),
            scheduler,
            make,
        )
        optimizer.close()


def test_schedules_are_torchs(team: Team) -> None:
    team(every_schedule)


def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [
        {"params": decayed, "weight_decay": 0.1, "momentum": 0.5, "mine": "kept"},
        {"params": others, "lr": 0.02},
    ]


def every_group(rank: Rank) -> None:
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.SGD(**MOMENTUM), params=grouped(model))
    assert optimizer.param_groups[0]["mine"] == "kept"

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1.0])

    compare(rank, model, optimizer, lambda m: SGD(grouped(m), **MOMENTUM), schedule(optimizer), schedule)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_groups_have_numbers_of_their_own(team: Team, transport: str) -> None:
    team(every_group, env={"PARAMHUB_TRANSPORT": transport})


PASSES = 3


def accumulated(rank: Rank, way: str) -> None:
    model = begin(rank)
    optimizer = HubOptimizer(
        model,
        paramhub.Nesterov(lr=0.01, momentum=0.9),
        backward_passes_per_step=PASSES if way == "counted" else 1,
    )
    reference = Reference(model, rank.size, made(SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}))

    def backward(batches: Iterable[int]) -> None:
        for batch in batches:
            loss_of(model, rank.rank, batch).backward()

    for step in range(12):
        # With fewer passes than counted, step() sends the gradients.
        passes = PASSES - 1 if way == "counted" and step % 2 else PASSES
        batches = range(PASSES * step, PASSES * step + passes)
        optimizer.zero_grad(set_to_none=way != "closure")
        if way == "counted":
            backward(batches)
        elif way == "last":
            with optimizer.no_sync():
                backward(batches[:-1])
            backward(batches[-1:])
        elif way == "none":
            # Gradients that user code sets, and gradients of passes without exchange.
            with optimizer.no_sync():
                backward(batches)
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clone()
        if way == "closure":
            evaluate = partial(unsynchronised, optimizer, partial(backward, batches))
            assert optimizer.step(evaluate) == "loss"
        else:
            assert optimizer.step() is None
        if rank.rank == 0:
            reference.backward(*batches)
            reference.optimizer.step()
            reference.check(model)
    optimizer.close()


def unsynchronised(optimizer: HubOptimizer, backward: Callable[[], None]) -> str:
    with optimizer.no_sync():
        backward()
    return "loss"


def every_accumulation(rank: Rank) -> None:
    for way in ("counted", "last", "none", "closure"):
        accumulated(rank, way)


def test_passes_add_up(team: Team) -> None:
    team(every_accumulation, ranks=2)


def in_one_bit(rank: Rank) -> list[bytes]:
    # One bit in both directions, except for one matrix: near the reference, and not equal.
    model = begin(rank)
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.05), codec="one-bit", codecs={matrices[-1]: "f32"})
    reference = compare(rank, model, optimizer, made(SGD, {"lr": 0.05}), tolerance=0.5)
    assert rank.rank > 0 or largest_difference(model, reference.model) > 1e-4
    with pytest.raises(paramhub.MisuseError, match="codecs names"):
        HubOptimizer(begin(rank), paramhub.SGD(lr=0.05), codecs={"no such": "one-bit"})
    return list(all_parameters(model))


def test_matrices_in_one_bit_are_alike_at_all_ranks_and_near_the_exact_ones(team: Team) -> None:
    ends = team(in_one_bit, ranks=2)
    assert ends[0] == ends[1]


def half(rank: Rank) -> list[bytes]:
    ends = []
    # bf16 gradients of f32 parameters: near the reference, and not equal.
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.05), codec="bf16")
    reference = compare(rank, model, optimizer, made(SGD, {"lr": 0.05}), tolerance=5e-2)
    assert rank.rank > 0 or largest_difference(model, reference.model) > 1e-5
    ends += all_parameters(model)
    # bf16 parameters: the hub has f32 ones, which change even at learning rates that are too small for bf16. So do those that
    # ranks keep of matrices in one bit.
    for codec in (None, "one-bit", "int8"):
        torch.manual_seed(3)
        model = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
        optimizer = HubOptimizer(model, paramhub.SGD(lr=2**-12), codec=codec)
        before = model.weight.detach().float().clone()
        for _ in range(64):
            optimizer.zero_grad()
            model(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        moved = (before - model.weight.detach().float()).mean()
        assert abs(moved - 64 * 2**-12) < 1e-3, (codec, moved)
        ends += [model.weight.detach().float().numpy().tobytes()]
    # Autocast needs no scaler.
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.05))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, rank.rank, 0)
    loss.backward()
    optimizer.step()
    return ends + list(all_parameters(model))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_half_precision(team: Team, transport: str) -> None:
    ends = team(half, ranks=2, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1]
