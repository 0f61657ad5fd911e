"""HubOptimizer with layers that are exchanged as factors, compared with the same training through the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hub_training import all_parameters, begin
from team import Rank, Team

import paramhub
from paramhub.torch import HubOptimizer

BATCH, STEPS = 8, 20


class Perceptron(torch.nn.Module):
    """Linears that are exchanged as factors, of which one is called twice, with an in-place operation after it; and parameters
    that cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))
        self.fc1 = torch.nn.Linear(64, 96)
        self.fc2 = torch.nn.Linear(96, 96, bias=False)
        self.norm = torch.nn.LayerNorm(96)
        self.out = torch.nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A smooth function: with a kink, the last bit of a parameter could decide on which side an element is.
        x = self.fc1(x * self.scale).tanh_()
        x = self.norm(x + self.fc2(torch.tanh(self.fc2(x))))
        return self.out(x)


def loss_of(model: torch.nn.Module, rank: int, step: int, count: int = BATCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(count, 64, generator=generator)
    return torch.nn.functional.cross_entropy(model(inputs), torch.arange(count) % 10)


Train = Callable[[torch.nn.Module, HubOptimizer, Rank], None]


def plainly(model: torch.nn.Module, optimizer: HubOptimizer, rank: Rank) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        # The last batch is smaller.
        loss_of(model, rank.rank, step, BATCH if step < STEPS - 1 else 3).backward()
        optimizer.step()


def both_ways(
    rank: Rank,
    mine: Callable[[], paramhub.Optimizer],
    train: Train = plainly,
    make: Callable[[], torch.nn.Module] = Perceptron,
    **options: Any,
) -> tuple[torch.nn.Module, torch.nn.Module, HubOptimizer]:
    """The model trained with factors, the same model trained through the hub, and the first one's optimizer."""
    ends = []
    for scheme in ("hub", "factors"):
        model = begin(rank, make)
        optimizer = HubOptimizer(model, mine(), scheme=scheme, **options)
        train(model, optimizer, rank)
        optimizer.synchronize()
        ends.append((model, optimizer))
    (dense, through_hub), (model, optimizer) = ends
    through_hub.close()
    return model, dense, optimizer


def difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    with torch.no_grad():
        return max(
            float((mine - theirs).abs().max())
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True)
        )


OPTIMIZERS: list[Callable[[], paramhub.Optimizer]] = [
    lambda: paramhub.SGD(lr=0.1),
    lambda: paramhub.Nesterov(lr=0.05, momentum=0.9, weight_decay=1e-2),
    lambda: paramhub.AdamW(lr=3e-3, eps=1e-6),
]


def every_optimizer(rank: Rank) -> list[bytes]:
    ends = []
    for mine in OPTIMIZERS:
        model, dense, optimizer = both_ways(rank, mine)
        assert difference(model, dense) < 1e-5
        assert {name: scheme for name, (scheme, _) in optimizer.schemes.items()} == dict.fromkeys(
            ("fc1", "fc2", "out"), "factors"
        )
        assert optimizer._step.job.statistics()["factor_bytes_sent"] > 0
        ends += all_parameters(model)
        optimizer.close()
    return ends


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_factors_train_as_the_hub_does(team: Team, transport: str) -> None:
    ends = team(every_optimizer, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1] == ends[2] == ends[3]


def scheduled(model: torch.nn.Module, optimizer: HubOptimizer, rank: Rank) -> None:
    """Groups with hyperparameters of their own, and a schedule that cycles the momentum, too."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.02], total_steps=STEPS + 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank.rank, step).backward()
        optimizer.step()
        scheduler.step()


def accumulated(model: torch.nn.Module, optimizer: HubOptimizer, rank: Rank) -> None:
    """Passes whose gradients `step` sends, passes whose gradients are dropped, and gradients that are zeroed in place."""
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 3 == 0:
            with optimizer.no_sync():
                loss_of(model, rank.rank, 500 + step).backward()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, rank.rank, step).backward()
        with torch.no_grad():
            model(torch.zeros(5, 64))
        inputs = torch.ones(2, 64, requires_grad=True)
        torch.autograd.grad(model(inputs).sum(), inputs)
        loss_of(model, rank.rank, 100 + step, 5).backward()
        optimizer.step()


class Checkpointed(Perceptron):
    """Drops inputs, and runs parts of its forward pass again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        checkpoint = torch.utils.checkpoint.checkpoint
        x = checkpoint(self.first, x * self.scale, use_reentrant=self.use_reentrant)
        return self.out(self.norm(x))

    def first(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc2(torch.nn.functional.silu(self.fc1(x))))


def every_way(rank: Rank) -> list[bytes]:
    def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        return [{"params": matrices}, {"params": others, "weight_decay": 0.1}]

    nesterov = OPTIMIZERS[1]
    ways: list[tuple[Train, Callable[[], torch.nn.Module], dict[str, Any]]] = [
        (scheduled, Perceptron, {"params": grouped}),
        # The first step drops no passes, but some have other sizes.
        (accumulated, Perceptron, {"backward_passes_per_step": 2}),
        (plainly, lambda: Checkpointed(use_reentrant=False), {}),
        (plainly, lambda: Checkpointed(use_reentrant=True), {}),
    ]
    ends = []
    for train, make, options in ways:
        models = []
        for scheme in ("hub", "factors"):
            model = begin(rank, make)
            given = {name: value(model) if callable(value) else value for name, value in options.items()}
            optimizer = HubOptimizer(model, nesterov(), scheme=scheme, **given)
            train(model, optimizer, rank)
            optimizer.synchronize()
            models.append(model)
            if scheme == "factors":
                assert {scheme for scheme, _ in optimizer.schemes.values()} == {"factors"}
            optimizer.close()
        assert difference(*models) < 1e-5
        ends += all_parameters(models[1])
    return ends


def test_schedules_accumulation_and_checkpointing_are_as_through_the_hub(team: Team) -> None:
    ends = team(every_way, ranks=2)
    assert ends[0] == ends[1]


def steps_in(dtype: torch.dtype, steps: int) -> Train:
    def train(model: torch.nn.Module, optimizer: HubOptimizer, rank: Rank) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = loss_of(model, rank.rank, step)
            loss.backward()
            optimizer.step()

    return train


def autocast(rank: Rank) -> list[bytes]:
    def ways(dtype: torch.dtype, steps: int) -> tuple[torch.nn.Module, torch.nn.Module, float]:
        model, dense, optimizer = both_ways(rank, lambda: paramhub.SGD(lr=0.05), steps_in(dtype, steps))
        assert {scheme for scheme, _ in optimizer.schemes.values()} == {"factors"}
        sent = optimizer._step.job.statistics()["factor_bytes_sent"]
        optimizer.close()
        return model, dense, sent

    half = torch.bfloat16
    _, one, _ = ways(half, 1)
    model, dense, _ = ways(half, 2)
    # Both begin the second step with equal parameters. Autograd rounds the product of each call to bf16, by 2^-9 of it, and so
    # the sum of two calls. The product of the factors is not rounded.
    assert 0 < difference(model, dense) < 2**-7 * difference(dense, one)
    # Later forward passes increase the difference, but it stays below the error of bf16 itself.
    model, dense, sent = ways(half, STEPS)
    _, exact, sent_in_f32 = ways(torch.float32, STEPS)
    # Each number takes two bytes less to the one other rank. The first step went through the hub.
    numbers = BATCH * (64 + 96 + 2 * (96 + 96) + 96 + 10)
    assert sent_in_f32 - sent == (STEPS - 1) * numbers * 2
    assert difference(model, dense) < difference(dense, exact)
    return list(all_parameters(model))


def changing(rank: Rank) -> str:
    def train(model: torch.nn.Module, optimizer: HubOptimizer) -> None:
        for step, enabled in enumerate([True, True, False]):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = loss_of(model, rank.rank, step)
            loss.backward()
            optimizer.step()

    model = begin(rank, Perceptron)
    with pytest.raises(paramhub.MisuseError) as error:
        train(model, HubOptimizer(model, paramhub.SGD(lr=0.05), scheme="factors"))
    return str(error.value)


def test_factors_wider_than_they_travel_are_refused(team: Team) -> None:
    for message in team(changing, ranks=2):
        assert "works in torch.float32 in this step, but its factors travel in torch.bfloat16" in message


def test_under_autocast_factors_are_at_least_as_exact(team: Team) -> None:
    ends = team(autocast, ranks=2)
    assert ends[0] == ends[1]


class Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.layers[number](x))
        return x


def branches(rank: Rank) -> list[bytes]:
    """Ranks use different layers in different orders. In some steps no rank uses one of the layers."""
    orders = [[[0, 1, 2, 3], [3, 2, 1]], [[0, 2], [2, 1]], [[1, 3, 0], [0, 3, 1]], [[2], [3, 1, 2, 0]]]
    models = []
    for scheme in ("hub", "factors"):
        model = begin(rank, Branches)
        optimizer = HubOptimizer(
            model, paramhub.AdamW(lr=1e-3, eps=1e-6), scheme=scheme, find_unused_parameters=True
        )
        for step in range(12):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(1000 * step + rank.rank)
            if step % 5 != 3 or rank.rank == 0:
                inputs = torch.randn(BATCH, 64, generator=generator)
                model(inputs, orders[step % 4][rank.rank]).square().sum().backward()
            optimizer.step()
            if step == 6:
                # Some layers have made fewer steps than others.
                optimizer.param_groups[0]["lr"] = 3e-4
        optimizer.synchronize()
        models.append(model)
    assert {scheme for scheme, _ in optimizer.schemes.values()} == {"factors"}
    assert difference(*models) < 1e-5
    optimizer.close()
    return list(all_parameters(models[1]))


def test_ranks_may_use_other_layers_in_other_orders(team: Team) -> None:
    ends = team(branches, ranks=2)
    assert ends[0] == ends[1]


def saved_and_loaded(rank: Rank) -> list[bytes]:
    model = begin(rank, Perceptron)
    optimizer = HubOptimizer(model, OPTIMIZERS[2](), scheme="factors")
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank.rank, step).backward()
        optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][1]["step"] == 3 and saved["state"][1]["exp_avg"].shape == model.fc1.weight.shape
    parameters = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def go_on(model: torch.nn.Module, optimizer: HubOptimizer) -> list[bytes]:
        for step in range(3, 6):
            optimizer.zero_grad()
            loss_of(model, rank.rank, step).backward()
            optimizer.step()
        return list(all_parameters(model))

    ends = go_on(model, optimizer)
    # Into the same optimizer, whose layers are exchanged as factors already; then parameters are broadcast by hand.
    model.load_state_dict(parameters)
    optimizer.load_state_dict(saved)
    assert go_on(model, optimizer) == ends
    assert next(iter(optimizer.schemes.values()))[0] == "factors"
    optimizer.broadcast_parameters()
    optimizer.close()
    # Into a new optimizer, whose first step goes through the hub.
    model.load_state_dict(parameters)
    with_hub = HubOptimizer(model, OPTIMIZERS[2](), scheme="auto")
    with_hub.load_state_dict(saved)
    torch_reads = torch.optim.AdamW(Perceptron().parameters(), lr=1.0)
    torch_reads.load_state_dict(saved)
    again = go_on(model, with_hub)
    pairs = zip(again, ends, strict=True)
    assert all(torch.allclose(number(mine), number(theirs), atol=1e-5) for mine, theirs in pairs)
    with_hub.close()
    return ends


def number(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def test_state_of_factor_layers_is_saved_and_loaded(team: Team) -> None:
    ends = team(saved_and_loaded, ranks=2)
    assert ends[0] == ends[1]


class Staged(HubOptimizer):
    """A HubOptimizer that stages parameters as it does those of a device."""

    _stages_all = True


def staged(rank: Rank) -> list[bytes]:
    models = []
    for kind, scheme in ((HubOptimizer, "hub"), (Staged, "factors")):
        model = begin(rank, Perceptron)
        optimizer = kind(model, OPTIMIZERS[1](), scheme=scheme, backward_passes_per_step=1)
        plainly(model, optimizer, rank)
        optimizer.synchronize()
        models.append(model)
    assert optimizer._step.stage is not None and {s for s, _ in optimizer.schemes.values()} == {"factors"}
    assert difference(*models) < 1e-5
    optimizer.zero_grad()
    loss_of(model, rank.rank, 50).backward()
    optimizer.step()
    optimizer.synchronize()
    ends = list(all_parameters(model))
    loss_of(model, rank.rank, 51).backward()
    with pytest.raises(paramhub.MisuseError, match="not cleared after the last step"):
        optimizer.step()
        optimizer.synchronize()
    return ends


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_factors_of_a_device_pass_through_the_host(team: Team, transport: str) -> None:
    ends = team(staged, ranks=2, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1]
