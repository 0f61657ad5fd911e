"""The layers that HubOptimizer exchanges as factors, its lines about them, and its refusals."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest
import torch
from hub_training import begin
from team import Rank, Team

import paramhub
from paramhub.torch import HubOptimizer


class Mixed(torch.nn.Module):
    """One Linear that may be exchanged as factors, and one of every kind that may not."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.embedding = torch.nn.Embedding(32, 64)
        self.plain = linear(64, 64)
        self.head = linear(64, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.twice = linear(64, 64)
        self.again = linear(64, 64)
        self.again.bias = self.twice.bias
        self.penalised = linear(64, 64)
        self.hooked = linear(64, 64)
        self.hooked.bias.register_hook(lambda gradient: 2 * gradient)
        self.direct = linear(64, 64)
        self.attention = torch.nn.MultiheadAttention(64, 2, batch_first=True)
        self.transposed = linear(64, 64)
        self.transposed.weight = torch.nn.Parameter(torch.randn(64, 64).t() / 8)
        self.ours = Scaled(64, 64)
        self.frozen = linear(64, 64).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in (
            self.plain,
            self.twice,
            self.again,
            self.penalised,
            self.hooked,
            self.frozen,
        ):
            x = torch.tanh(layer(x))
        x = (
            x
            + self.ours(x)
            + self.transposed(x)
            + torch.nn.functional.linear(x, self.direct.weight, self.direct.bias)
        )
        x = x + self.attention(x, x, x)[0]
        return self.head(x)


class Scaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


REASONS = {
    "plain": ("factors", "as asked"),
    "head": ("hub", "it is tied: embedding has the same parameter"),
    "twice": ("hub", "it is tied: again has the same parameter"),
    "again": ("hub", "it is tied: twice has the same parameter"),
    "penalised": ("hub", "do not make its whole gradient"),
    "hooked": ("hub", "do not make its whole gradient"),
    "direct": ("hub", "its forward pass was not seen"),
    "attention.out_proj": ("hub", "its forward pass was not seen"),
    "transposed": ("hub", "does not lie row by row"),
    "ours": ("hub", "its forward pass is not torch.nn.Linear's"),
}


def mixed(rank: Rank) -> dict[str, tuple[str, str]]:
    model = begin(rank, Mixed)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.01), scheme="factors")
    for step in range(3):
        optimizer.zero_grad()
        tokens = torch.randint(0, 32, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank.rank))
        loss = model(tokens).square().mean() + 1e-2 * model.penalised.weight.square().sum()
        loss.backward()
        optimizer.step()
    # The copy and the model are independent.
    copy.deepcopy(model)(tokens).sum().backward()
    optimizer.close()
    model(tokens).sum().backward()
    return optimizer.schemes


def test_layers_without_factors_go_by_the_hub_with_a_reason(team: Team) -> None:
    found = team(mixed, ranks=2)
    assert found[0] == found[1]
    assert found[0].keys() == REASONS.keys()
    for name, (scheme, why) in REASONS.items():
        assert found[0][name][0] == scheme and why in found[0][name][1], (name, found[0][name])


class Transformer(torch.nn.Module):
    """The Linears of a layer of examples/pytorch/char_transformer.py."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(144, 576)
        self.down = torch.nn.Linear(576, 144)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def planned(rank: Rank, shape: tuple[int, ...]) -> dict[str, tuple[str, str]]:
    model = begin(rank, Transformer)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.01), scheme="auto")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(*shape)).sum().backward()
        optimizer.step()
    optimizer.synchronize()
    schemes = optimizer.schemes
    for _ in range(2):
        sent = optimizer._step.job.statistics()["factor_bytes_sent"]
        assert (sent > 0) == (schemes["up"][0] == "factors")
        # This opens another job, which keeps the choice.
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        model(torch.ones(*shape)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
    assert optimizer.schemes == schemes
    optimizer.close()
    return schemes


def test_sequences_count_as_samples(team: Team) -> None:
    cheapest = "it moves least over the busiest link"
    # Each step has eight windows of 64 characters.
    of_sequences = team(planned, (8, 64, 144), ranks=4)
    assert of_sequences == 4 * [dict.fromkeys(("up", "down"), ("hub", cheapest))]
    of_vectors = team(planned, (4, 144), ranks=4)
    assert of_vectors == 4 * [dict.fromkeys(("up", "down"), ("factors", cheapest))]


def refusals(rank: Rank) -> None:
    def model_and(**options: Any) -> tuple[torch.nn.Module, HubOptimizer]:
        model = begin(rank, Transformer)
        return model, HubOptimizer(model, paramhub.SGD(lr=0.01), **options)

    for options, message in [
        ({"scheme": "ps"}, "scheme is 'hub', 'factors' or 'auto', not 'ps'"),
        ({"scheme": "factors", "max_grad_norm": 1.0}, "as clipping by the global norm, LARS and LAMB need"),
        ({"scheme": "factors", "reject_non_finite": True}, "hubs look at every gradient"),
        ({"scheme": "auto", "samples": {"left": 3}}, r"samples names \['left'\]"),
        ({"scheme": "auto", "samples": 0}, "samples are numbers from 1"),
    ]:
        with pytest.raises(paramhub.MisuseError, match=message):
            model_and(**options)
    with pytest.raises(paramhub.MisuseError, match="registered at hubs"):
        HubOptimizer(begin(rank, Transformer), paramhub.Optimizer("muon"), scheme="factors")
    _, optimizer = model_and(scheme="auto", max_grad_norm=1.0)
    assert {scheme for scheme, _ in optimizer.schemes.values()} == {"hub"}
    optimizer.close()

    def spoilt(message: str, spoil: Any, **options: Any) -> None:
        model, optimizer = model_and(scheme="factors", **options)
        model(torch.ones(4, 144)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(paramhub.MisuseError, match=message):
            spoil(model, optimizer)
            optimizer.step()

    def larger(model: torch.nn.Module, optimizer: HubOptimizer) -> None:
        model(torch.ones(9, 144)).sum().backward()

    def penalised(model: torch.nn.Module, optimizer: HubOptimizer) -> None:
        (model(torch.ones(4, 144)).sum() + model.up.weight.square().sum()).backward()

    def scaled(model: torch.nn.Module, optimizer: HubOptimizer) -> None:
        with optimizer.no_sync():
            model(torch.ones(4, 144)).sum().backward()
        model.up.weight.grad *= 0.5

    def by_hand(model: torch.nn.Module, optimizer: HubOptimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def compiled(model: torch.nn.Module, optimizer: HubOptimizer) -> None:
        # This process has many guards, and torch 2.7 takes their numbers for dynamic sizes.
        torch.compiler.reset()
        torch.compile(model, backend="eager")(torch.ones(4, 144)).sum().backward()

    # Compiled before the first step, so that no hook gets the inputs.
    model, optimizer = model_and(scheme="factors")
    torch.compile(model, backend="eager")(torch.ones(4, 144)).sum().backward()
    optimizer.step()
    assert all(scheme == "hub" and "was not seen" in why for scheme, why in optimizer.schemes.values())
    optimizer.close()

    spoilt("has 9 samples in this step, but was planned for 8", larger, samples={"up": 8, "down": 8})
    for spoil in (penalised, scaled, by_hand, compiled):
        spoilt("is not what this step's inputs and output gradients", spoil)


def test_gradients_that_the_factors_do_not_make_are_refused(team: Team) -> None:
    team(refusals, ranks=1)


_kept: list[HubOptimizer] = []


def dies(rank: Rank) -> None:
    model = begin(rank, Transformer)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.01), scheme="factors")
    # It lives until the process ends. If its job were gone, rank 0 would not know of the failure, and would wait for the others.
    _kept.append(optimizer)
    for step in range(5):
        if step == 3 and rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        try:
            model(torch.ones(4, 144)).sum().backward()
            optimizer.step()
            optimizer.synchronize()
        except paramhub.JobFailedError as error:
            assert step == 3 and error.culprit == 1, error
            return
    raise AssertionError("no rank has noticed")


def test_a_rank_that_dies_is_named(team: Team) -> None:
    team(dies, ranks=3, dies=(1,))


def dropped(rank: Rank) -> None:
    """Optimizers that are dropped without `close`, and several models at once."""
    models = [begin(rank, Transformer) for _ in range(2)]
    optimizers = [HubOptimizer(model, paramhub.SGD(lr=0.01), scheme="factors") for model in models]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(4, 144)).sum().backward()
            optimizer.step()
    del optimizers[0], optimizer
    optimizers[0].zero_grad()
    for model in models:
        model(torch.ones(4, 144)).sum().backward()
    optimizers[0].step()


def test_jobs_by_factors_end_with_their_optimizers_and_the_process(team: Team) -> None:
    team(dropped, ranks=3)
