"""LARS and LAMB with HubOptimizer, against their papers' algorithms on the mean of all ranks' gradients, in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hub_training import all_parameters, begin, compare, loss_of, made
from team import Rank, Team

import paramhub
from paramhub.errors import ConnectError, MisuseError
from paramhub.torch import HubOptimizer


def ratio(coefficient: float, parameters: torch.Tensor, update: torch.Tensor | float) -> float:
    norm, other = parameters.double().norm().item(), float(update)
    return coefficient * norm / other if coefficient > 0 and norm > 0 and other > 0 else 1.0


class Lars(torch.optim.Optimizer):
    """Algorithm 1 of You, Gitman and Ginsburg, 2017."""

    def __init__(self, parameters: Iterable[Any], **options: float) -> None:
        super().__init__(
            parameters, {"trust_coefficient": 1e-3, "weight_decay": 0.0, "momentum": 0.9, **options}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            decay = group["weight_decay"]
            for parameter in group["params"]:
                gradient = parameter.grad
                norm = parameter.double().norm().item()
                whole = gradient.double().norm().item()
                whole = whole + decay * norm if whole > 0 else 0.0
                rate = group["lr"] * ratio(group["trust_coefficient"], parameter, whole)
                buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                buffer.mul_(group["momentum"]).add_(gradient + decay * parameter, alpha=rate)
                parameter.sub_(buffer)


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of You et al., 2020."""

    def __init__(self, parameters: Iterable[Any], **options: Any) -> None:
        defaults = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2, "trust_coefficient": 1.0}
        super().__init__(parameters, {**defaults, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                first = state.setdefault("exp_avg", torch.zeros_like(parameter))
                second = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
                first.mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                denominator = (second / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
                update = (
                    first / (1 - beta1 ** state["step"]) / denominator + group["weight_decay"] * parameter
                )
                scale = ratio(group["trust_coefficient"], parameter, update.double().norm())
                parameter.sub_(update, alpha=group["lr"] * scale)


KINDS: list[tuple[paramhub.Optimizer, Any, dict[str, Any]]] = [
    (paramhub.LARS(lr=2.0), Lars, {"lr": 2.0}),
    (
        paramhub.LARS(lr=1.0, momentum=0.5, weight_decay=0.01, trust_coefficient=0.01),
        Lars,
        {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.01, "trust_coefficient": 0.01},
    ),
    (paramhub.LAMB(lr=0.01), Lamb, {"lr": 0.01}),
    (
        paramhub.LAMB(lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
        Lamb,
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
]
TOLERANCE = 2e-5
"""Kernels and torch round otherwise, and a ratio carries each tensor's rounding to all of its elements."""


def trains(rank: Rank) -> list[bytes]:
    ends = []
    for mine, theirs, options in KINDS:
        model = begin(rank)
        optimizer = HubOptimizer(model, mine)
        compare(rank, model, optimizer, made(theirs, options), tolerance=TOLERANCE)
        ends += all_parameters(model)

        # The state goes through a file's form, and the run goes on bit by bit.
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        for step in range(20, 23):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step).backward()
            optimizer.step()
        expected = list(all_parameters(model))
        optimizer.close()
        resumed = begin(rank)
        optimizer = HubOptimizer(resumed, mine)
        resumed.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        for step in range(20, 23):
            optimizer.zero_grad()
            loss_of(resumed, rank.rank, step).backward()
            optimizer.step()
        assert list(all_parameters(resumed)) == expected
        assert optimizer.last_grad_norm is not None and math.isfinite(optimizer.last_grad_norm)
        optimizer.close()
    return ends


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_lars_and_lamb_make_their_papers_steps(team: Team, transport: str) -> None:
    ends = team(trains, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1] == ends[2] == ends[3]


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices}, {"params": others, "trust_coefficient": 0.0, "weight_decay": 0.0}]


def groups_and_clipping(rank: Rank) -> None:
    for mine, theirs, options in KINDS:
        for clip in (None, 0.5) if theirs is Lars else (None,):
            model = begin(rank)
            optimizer = HubOptimizer(model, mine, params=groups_of(model), max_grad_norm=clip)
            reference = begin(rank)
            reference.load_state_dict(model.state_dict())
            other = theirs(groups_of(reference), **options)
            scheduler, others = (
                torch.optim.lr_scheduler.ExponentialLR(each, 0.8) for each in (optimizer, other)
            )
            for step in range(10):
                optimizer.zero_grad()
                loss_of(model, rank.rank, step).backward()
                optimizer.step()
                scheduler.step()
                other.zero_grad()
                losses = [loss_of(reference, each, step) for each in range(rank.size)]
                (sum(losses) / rank.size).backward()
                torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or math.inf)
                other.step()
                others.step()
            for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            optimizer.close()


def test_groups_without_a_coefficient_and_clipping(team: Team) -> None:
    team(groups_and_clipping, ranks=2)


def misuses(rank: Rank) -> None:
    for options in ({"max_grad_norm": 1.0}, {"grad_scaler": torch.amp.GradScaler("cpu")}):
        with pytest.raises(MisuseError, match=r"lamb .* leave clip_norm \(max_grad_norm\)"):
            HubOptimizer(torch.nn.Linear(4, 3), paramhub.LAMB(), **options)
    with pytest.raises(ConnectError, match="trust_coefficient is -1; it must be 0 or more"):
        HubOptimizer(torch.nn.Linear(4, 3), paramhub.LARS(lr=1.0, trust_coefficient=-1.0))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(4, 3))
    optimizer = HubOptimizer(model, paramhub.LARS(lr=1.0), find_unused_parameters=True)
    model[0](torch.ones(1, 4)).sum().backward()
    with pytest.raises(MisuseError, match="LARS and LAMB need all gradients"):
        optimizer.step()


def test_misuse_is_refused(team: Team) -> None:
    team(misuses, ranks=1)


def scales(rank: Rank) -> None:
    """LARS with a GradScaler: the norms are those of the unscaled gradients."""
    plain, scaled = begin(rank), begin(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    one = HubOptimizer(plain, paramhub.LARS(lr=2.0, weight_decay=0.01))
    other = HubOptimizer(scaled, paramhub.LARS(lr=2.0, weight_decay=0.01), grad_scaler=scaler)
    for step in range(5):
        one.zero_grad()
        other.zero_grad()
        loss_of(plain, rank.rank, step).backward()
        one.step()
        scaler.scale(loss_of(scaled, rank.rank, step)).backward()
        scaler.step(other)
        scaler.update()
    assert list(all_parameters(plain)) == list(all_parameters(scaled))


def test_lars_with_a_grad_scaler(team: Team) -> None:
    team(scales, ranks=2)
