"""Trainings on a GPU through the hub, compared with DDP over gloo on the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, begin, begin_collectives, group_differently, loss_of, make
from team import Rank, Team
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import STEPS, Net, OneHead, difference, parameters_of

import paramhub

TOLERANCE = 2e-5
"""Gradients are equal bit by bit at first, but updates are not: hubs round otherwise than the device."""
AUTOCAST_TOLERANCE = 5e-3
"""Under autocast the last bit of a parameter can decide how the parameter is rounded to bf16."""
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
MOMENTUM = {"lr": 0.05, "momentum": 0.9}
# With torch's default `eps` the last bit of a tiny gradient would decide on the sign of an update.
ADAM = {"lr": 2e-3, "eps": 1e-3}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **MOMENTUM, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAM)


SAME: list[tuple[Callable[[], paramhub.Optimizer], MakeOptimizer]] = [
    (lambda: paramhub.SGD(**MOMENTUM, weight_decay=1e-3), sgd),
    (lambda: paramhub.AdamW(**ADAM), adamw),
]


def train(
    rank: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    heads: bool = False,
    autocasts: bool = False,
) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        # In every third step all ranks use the same head, and the parameters of the other one have no gradient.
        head = ((step + rank.rank) % 2 if step % 3 else 0,) if heads else ()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocasts):
            loss = loss_of(model, step, rank.rank, *head)
        loss.backward()
        optimizer.step()


def by_ddp(
    rank: Rank,
    make_optimizer: MakeOptimizer,
    kind: type[Net] = OneHead,
    hook: bool = False,
    host_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    import paramhub.torch

    autocasts = options.pop("autocasts", False)
    model = make(kind)
    # Buckets so small that there are several, which DDP rebuilds after the first pass.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, **options)
    if hook:
        ddp.register_comm_hook(paramhub.torch.HubState(host_group=host_group), paramhub.torch.hub_hook)
    train(rank, ddp, make_optimizer(ddp.parameters()), heads=kind is Net, autocasts=autocasts)
    return parameters_of(model)


def through_hub_optimizer(rank: Rank) -> list[float]:
    import paramhub.torch

    begin()
    group_differently(rank.rank)
    dist.init_process_group("gloo")
    differences = []
    cases: list[tuple[type[Net], bool]] = [(OneHead, False), (OneHead, True), (Net, False)]
    for mine, theirs in SAME:
        for kind, autocasts in cases:
            model = make(kind)
            has_unused = kind is Net
            optimizer = paramhub.torch.HubOptimizer(model, mine(), find_unused_parameters=has_unused)
            assert optimizer._step.stage is not None
            train(rank, model, optimizer, heads=has_unused, autocasts=autocasts)
            optimizer.synchronize()
            expected = by_ddp(rank, theirs, kind, find_unused_parameters=has_unused, autocasts=autocasts)
            found = difference(parameters_of(model), expected)
            differences.append(found * TOLERANCE / AUTOCAST_TOLERANCE if autocasts else found)
            optimizer.close()
    return differences


def through_the_hook(rank: Rank) -> list[float]:
    begin()
    dist.init_process_group("gloo")
    options: list[dict[str, Any]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ]
    differences = [
        difference(by_ddp(rank, sgd, hook=True, **each), by_ddp(rank, sgd, **each)) for each in options
    ]
    unused = {"find_unused_parameters": True}
    differences.append(
        difference(by_ddp(rank, sgd, Net, hook=True, **unused), by_ddp(rank, sgd, Net, **unused))
    )
    # Ranks of a host sum among themselves first. Gloo does what NCCL does where each rank has a GPU.
    own, _ = dist.new_subgroups(group_size=rank.size)
    differences.append(difference(by_ddp(rank, sgd, hook=True, host_group=own), by_ddp(rank, sgd)))
    return differences


def through_distributed_optimizer(rank: Rank) -> list[float]:
    import paramhub.torch

    begin()
    group_differently(rank.rank)
    dist.init_process_group("gloo")
    differences = []
    for _, make_optimizer in SAME:
        model = make()
        optimizer = paramhub.torch.DistributedOptimizer(
            make_optimizer(model.parameters()), named_parameters=model.named_parameters()
        )
        assert optimizer._exchange._stage is not None
        train(rank, model, optimizer)
        differences.append(difference(parameters_of(model), by_ddp(rank, make_optimizer)))
    # Each rank uses another head, and contributes zeros for the one that it does not use.
    model = make(Net)
    optimizer = paramhub.torch.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    ddp = DistributedDataParallel(make(Net), find_unused_parameters=True)
    for trained, updates in ((model, optimizer), (ddp, sgd(ddp.parameters()))):
        for step in range(STEPS):
            updates.zero_grad()
            loss_of(trained, step, rank.rank, (step + rank.rank) % 2).backward()
            updates.step()
    differences.append(difference(parameters_of(model), parameters_of(ddp)))
    return differences


def by_fsdp(rank: Rank, gloo: dist.ProcessGroup) -> float:
    """How far the parameters of FSDP2 are from those of DDP over gloo."""

    def layers() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 10)).to(DEVICE)

    sharded, whole = layers(), layers()
    mesh = init_device_mesh(DEVICE.type, (rank.size,))
    fully_shard(sharded[1], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(rank, sharded, adamw(sharded.parameters()))
    ddp = DistributedDataParallel(whole, process_group=gloo)
    train(rank, ddp, adamw(ddp.parameters()))
    return difference([each.full_tensor() for each in sharded.parameters()], parameters_of(whole))


def through_the_backend(rank: Rank) -> list[float]:
    """DDP and FSDP2 over paramhub's backend, compared with DDP over a group of gloo's."""
    begin_collectives()
    gloo = dist.new_group(backend="gloo")
    differences = []
    cases: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]
    for options in cases:
        expected = by_ddp(rank, sgd, process_group=gloo, **options)
        differences.append(difference(by_ddp(rank, sgd, **options), expected))
    unused = {"find_unused_parameters": True}
    expected = by_ddp(rank, sgd, Net, process_group=gloo, **unused)
    differences.append(difference(by_ddp(rank, sgd, Net, **unused), expected))
    differences.append(by_fsdp(rank, gloo))
    dist.destroy_process_group()
    return differences


WAYS = [through_hub_optimizer, through_the_hook, through_distributed_optimizer, through_the_backend]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", WAYS)
def test_a_training_ends_as_with_ddp(team: Team, way: Callable[[Rank], list[float]], transport: str) -> None:
    for differences in team(way, ranks=2, env={"PARAMHUB_TRANSPORT": transport}):
        assert max(differences) < TOLERANCE, differences


def by_factors(rank: Rank) -> float:
    import paramhub.torch

    begin()
    ends = []
    for scheme in ("hub", "factors"):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10)).to(DEVICE)
        optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(**MOMENTUM), scheme=scheme)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank.rank))
            model(inputs.to(DEVICE)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        ends.append(parameters_of(model))
        if scheme == "factors":
            assert {found for found, _ in optimizer.schemes.values()} == {"factors"}, optimizer.schemes
        optimizer.close()
    return difference(*ends)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_layers_by_their_factors(team: Team, transport: str) -> None:
    assert max(team(by_factors, ranks=2, env={"PARAMHUB_TRANSPORT": transport})) < TOLERANCE


def travels_as(rank: Rank, codecs: list[str]) -> list[float]:
    """With another encoding gradients are converted into the arena, and the stage has them elsewhere."""
    import paramhub.torch

    begin()
    dist.init_process_group("gloo")
    expected = by_ddp(rank, sgd)
    differences = []
    for codec in codecs:
        model = make()
        optimizer = paramhub.torch.HubOptimizer(
            model, paramhub.SGD(**MOMENTUM, weight_decay=1e-3), codec=codec
        )
        train(rank, model, optimizer)
        optimizer.synchronize()
        differences.append(difference(parameters_of(model), expected))
        optimizer.close()
    return differences


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_codecs_round_what_travels(team: Team, transport: str) -> None:
    codecs = ["f16", "bf16"] + ["one-bit"] * (transport == "tcp")
    for differences in team(travels_as, codecs, ranks=2, env={"PARAMHUB_TRANSPORT": transport}):
        # The coarser a codec is, the farther is the end from the exact one.
        assert differences == sorted(differences), differences
        assert differences[1] > TOLERANCE and differences[1] < 0.05 and differences[-1] < 0.5, differences
