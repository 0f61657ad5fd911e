"""GradScaler with HubOptimizer: against torch.optim in one process, with steps in which one rank's gradients overflow."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hub_training import Reference, begin, loss_of, made
from team import Rank, Team

import paramhub
from paramhub.errors import MisuseError
from paramhub.torch import HubOptimizer

OVERFLOWS = {0: 1, 4: 0, 5: 1}
"""The rank whose gradients overflow, by step."""
STEPS = 10


def scaled_loss(scaler: torch.amp.GradScaler, model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    loss = loss_of(model, rank, step)
    return scaler.scale(loss * math.inf if OVERFLOWS.get(step) == rank else loss)


def trains(rank: Rank) -> None:
    for (hubs, kind, options), clip in itertools.product(
        (
            (paramhub.SGD(lr=0.05, momentum=0.9), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
            (paramhub.AdamW(lr=0.01), torch.optim.AdamW, {"lr": 0.01}),
        ),
        (None, 0.5),
    ):
        model = begin(rank)
        # The scales of the ranks differ at first, and rank 0's holds.
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 * (1 + rank.rank), growth_interval=3)
        optimizer = HubOptimizer(model, hubs, grad_scaler=scaler, max_grad_norm=clip)
        assert scaler.get_scale() == 1024.0
        reference, theirs = Reference(model, rank.size, made(kind, options)), 1024.0
        steps_since = 0
        for step in range(STEPS):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            scaled_loss(scaler, model, rank.rank, step).backward()
            scaler.step(optimizer)
            scaler.update()
            if step in OVERFLOWS:
                theirs, steps_since = theirs / 2, 0
                assert not math.isfinite(optimizer.last_grad_norm)
                assert all(torch.equal(was, p) for was, p in zip(before, model.parameters(), strict=True))
            else:
                steps_since += 1
                if steps_since == 3:
                    theirs, steps_since = theirs * 2, 0
                reference.backward(step)
                norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), clip or math.inf)
                assert optimizer.last_grad_norm == pytest.approx(norm.item(), rel=1e-5)
                reference.optimizer.step()
                reference.check(model, 1e-5)
            assert scaler.get_scale() == theirs, f"step {step}"
        # Adam has not counted the steps that were left out.
        for entry in optimizer.state_dict()["state"].values():
            assert entry.get("step", STEPS - 3) == STEPS - 3


def test_a_step_whose_gradients_overflow_on_one_rank_is_left_out_on_all(team: Team) -> None:
    team(trains, ranks=2)


def computes_in_f16(rank: Rank) -> list[float]:
    """Real overflows: the scale begins so high that f16 gradients overflow, and comes down until they do not."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1), grad_scaler=scaler)
    generator = torch.Generator().manual_seed(rank.rank)
    inputs = torch.randn(32, 16, generator=generator)
    targets = torch.randint(0, 4, (32,), generator=generator)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and scaler.get_scale() < 2.0**24
    return [scaler.get_scale(), *(p.double().sum().item() for p in model.parameters())]


def test_training_in_f16_finds_its_scale(team: Team) -> None:
    first, second = team(computes_in_f16, ranks=2)
    assert first == second


def misuses(rank: Rank) -> None:
    model = torch.nn.Linear(4, 3)
    with pytest.raises(MisuseError, match=r"grad_scaler is to be a torch\.amp\.GradScaler, not 1024"):
        HubOptimizer(model, paramhub.SGD(lr=0.1), grad_scaler=1024)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(MisuseError, match="max_grad_norm is to be a finite number above 0, not 0"):
        HubOptimizer(model, paramhub.SGD(lr=0.1), grad_scaler=scaler, max_grad_norm=0)

    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1), grad_scaler=scaler)
    before = model.weight.detach().clone()

    def backward() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()

    backward()
    scaler.unscale_(optimizer)
    with pytest.raises(MisuseError, match=r"leave unscale_\(\) out, and give HubOptimizer max_grad_norm"):
        scaler.step(optimizer)
    scaler.update()
    backward()
    other = torch.amp.GradScaler("cpu")
    other.scale(torch.ones(1))
    with pytest.raises(MisuseError, match="by another GradScaler"):
        other.step(optimizer)
    assert torch.equal(model.weight, before), "both steps were left out"

    # step() need not be called by the scaler.
    backward()
    optimizer.step()
    scaler.update()
    assert not torch.equal(model.weight, before)


def test_misuse_is_refused_and_leaves_the_step_out(team: Team) -> None:
    team(misuses, ranks=2)


def is_interrupted(rank: Rank) -> float:
    """In step 1, rank 1's backward pass raises after a part of its gradients has left."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1), grad_scaler=scaler)

    def interrupt(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("interrupted")

    for step in range(5):
        optimizer.zero_grad()
        hidden = model[0](torch.ones(2, 4))
        if step == 1 and rank.rank == 1:
            hidden.register_hook(interrupt)
            with pytest.raises(ValueError, match="interrupted"):
                scaler.scale(model[1](hidden).sum()).backward()
            continue
        scaler.scale(model[1](hidden).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 16.0 * 2 ** ((step + 1) // 2)
    return model[0].weight.double().sum().item()


def test_scales_stay_equal_when_an_exception_interrupts_a_rank(team: Team) -> None:
    first, second = team(is_interrupted, ranks=2)
    assert first == second


def test_a_scaler_that_is_off_changes_nothing(team: Team) -> None:
    team(is_off, ranks=1)


def is_off(rank: Rank) -> None:
    model = torch.nn.Linear(4, 3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1), grad_scaler=scaler)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before) and optimizer.last_grad_norm is None
