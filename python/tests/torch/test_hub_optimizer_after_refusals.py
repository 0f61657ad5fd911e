"""HubOptimizer, its parameters and the other ranks after an exception between backward and step."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from team import Rank, Team
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer
from paramhub.torch._parameter_hooks import is_exchanged

LR = 0.1


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def optimizer_of(model: nn.Module, **options: Any) -> HubOptimizer:
    return HubOptimizer(model, paramhub.SGD(lr=LR), **options)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: nn.Sequential, step: int, rank: int, *, raises: bool = False) -> None:
    """A backward pass. With ``raises`` it raises when the last layer's gradients are complete and the first layer's are not."""
    hidden = model[0](batch(step, rank))
    if raises:
        hidden.register_hook(_raise)
    model[2](model[1](hidden)).square().sum().backward()


def _raise(gradient: torch.Tensor) -> None:
    raise RuntimeError("out of memory, say")


def gradients(model: nn.Sequential, step: int, rank: int) -> list[torch.Tensor]:
    """The gradients of a local copy, by parameter."""
    model.zero_grad()
    backward(model, step, rank)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def update(model: nn.Sequential, mean: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), mean, strict=True):
            parameter.sub_(LR * gradient)


def mean_of(reference: nn.Sequential, step: int, size: int) -> list[torch.Tensor]:
    each = [gradients(reference, step, rank) for rank in range(size)]
    return [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]


def check_equal(model: nn.Module, reference: nn.Module) -> None:
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(own.detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def is_clipped(rank: Rank) -> None:
    model, reference = network(), network()
    optimizer = optimizer_of(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step, rank.rank)
        update(reference, mean_of(reference, step, rank.size))
        if step == 1 and rank.rank == 0:
            # The other rank does not notice it.
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with pytest.raises(
                paramhub.MisuseError, match=r"modified between.*This step was made with it as it had left.*"
            ):
                optimizer.step()
        else:
            optimizer.step()
        check_equal(model, reference)
    optimizer.state_dict()
    optimizer.close()


def test_a_refused_step_is_made_and_training_goes_on(team: Team) -> None:
    team(is_clipped, ranks=2)


def backward_raises(rank: Rank) -> None:
    model, reference = network(), network()
    optimizer = optimizer_of(model)
    for step in range(3):
        optimizer.zero_grad()
        mean = mean_of(reference, step, rank.size)
        if step == 1:
            # Rank 0's gradient of the first layer was not sent, so zeros replace it.
            mean[:2] = [gradient / rank.size for gradient in gradients(reference, step, 1)[:2]]
        update(reference, mean)
        if step == 1 and rank.rank == 0:
            with pytest.raises(RuntimeError, match="out of memory"):
                backward(model, step, 0, raises=True)
            with pytest.raises(
                paramhub.MisuseError, match=r"exception that has cut a step.*zero_grad\(\) first"
            ):
                optimizer.state_dict()
            optimizer.zero_grad()
        else:
            backward(model, step, rank.rank)
            optimizer.step()
        check_equal(model, reference)


def test_zero_grad_ends_a_step_whose_backward_pass_has_raised(team: Team) -> None:
    team(backward_raises, ranks=2)


WAYS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.5},
    "unused": {"find_unused_parameters": True},
    "factors": {"scheme": "factors"},
    "two passes": {"backward_passes_per_step": 2},
    "waiting": {"overlap_forward": False},
}


def in_each_way(rank: Rank) -> dict[str, list[torch.Tensor]]:
    results = {}
    for way, options in WAYS.items():
        model = network()
        optimizer = optimizer_of(model, **options)
        passes = options.get("backward_passes_per_step", 1)
        # Different ranks raise: one in the first step, the other in a later one.
        for step, raising in enumerate([1, None, 0, None]):
            optimizer.zero_grad()
            for each in range(passes):
                raises = raising == rank.rank and each == passes - 1
                if raises:
                    with pytest.raises(RuntimeError, match="out of memory"):
                        backward(model, step, rank.rank, raises=True)
                else:
                    backward(model, step, rank.rank)
            if raising == rank.rank:
                optimizer.zero_grad()
            else:
                optimizer.step()
        optimizer.synchronize()
        if way == "factors":
            assert {scheme for scheme, _ in optimizer.schemes.values()} == {"factors"}
        results[way] = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.close()
    return results


def test_ranks_agree_after_a_step_that_was_cut_short_in_every_way(team: Team) -> None:
    first, second = team(in_each_way, ranks=2)
    for way, parameters in first.items():
        for own, other in zip(parameters, second[way], strict=True):
            assert torch.equal(own, other), way
            assert own.isfinite().all(), way


def step_lacks_gradients(rank: Rank) -> None:
    model = network()
    optimizer = optimizer_of(model)
    model[2](torch.ones(2, 5)).sum().backward()
    with pytest.raises(paramhub.MisuseError, match="2 of 4 parameters have no gradient"):
        optimizer.step()
    optimizer.zero_grad()
    # An abandoned first pass of several is not counted.
    other = network()
    passes = optimizer_of(other, backward_passes_per_step=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        backward(other, 0, 0, raises=True)
    passes.zero_grad()
    for each in (optimizer, passes):
        for step in range(4):
            backward(model if each is optimizer else other, step, 0)
            if each is optimizer or step % 2:
                each.step()
                each.zero_grad()
        each.close()
        each.close()


def test_a_step_without_all_gradients_can_be_given_up(team: Team) -> None:
    team(step_lacks_gradients, ranks=1)


def closes(rank: Rank) -> None:
    model = network()
    optimizer = optimizer_of(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        backward(model, 0, rank.rank, raises=True)
    optimizer.close()
    assert not is_exchanged(model[0].weight)
    optimizer = optimizer_of(model)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, rank.rank)
        optimizer.step()
    optimizer.zero_grad()

    if rank.rank == 1:
        os._exit(3)
    with pytest.raises(paramhub.JobFailedError, match="rank 1"):
        for step in range(2, 1000):
            backward(model, step, 0)
            optimizer.step()
            optimizer.synchronize()
            optimizer.zero_grad()
    with pytest.raises(paramhub.JobFailedError, match="rank 1"):
        optimizer.close()
    assert not is_exchanged(model[0].weight)
    optimizer.close()
    backward(model, 1, 0)
    paramhub.torch.shutdown(abandon=True)


def test_close_frees_the_model_whatever_has_happened(team: Team) -> None:
    team(closes, ranks=2, dies=[1])


def within_ddp(rank: Rank) -> None:
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.size)
    model = network()
    optimizer = optimizer_of(model)
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        ddp(torch.ones(2, 4))
    with pytest.raises(paramhub.MisuseError) as refused:
        ddp(torch.ones(2, 4))
    message = str(refused.value)
    for part in ("'0.weight'", "DistributedDataParallel", "hub_hook", "Trainer", "docs/pytorch.md"):
        assert part in message, message
    assert "max_grad_norm" not in message
    # No gradient was sent. DDP wrote to the parameters when it was made.
    with pytest.raises(
        paramhub.MisuseError, match=r"within DistributedDataParallel.*broadcast_parameters\(\)"
    ):
        backward(model, 0, rank.rank)
    optimizer.broadcast_parameters()
    optimizer.zero_grad()
    backward(model, 0, rank.rank)
    optimizer.step()
    optimizer.close()

    # A DDP instance that ignores these parameters does no harm.
    both = nn.Sequential(network(), nn.Linear(3, 2))
    optimizer = optimizer_of(both[0])
    names = {f"0.{name}" for name, _ in both[0].named_parameters()}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, names)
    ddp = DistributedDataParallel(both)
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.close()

    dist.destroy_process_group()


def test_ddp_around_the_model_is_named_as_what_it_is(team: Team) -> None:
    team(within_ddp, ranks=2)
