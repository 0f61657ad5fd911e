"""What `DistributedOptimizer` keeps and refuses, and its errors when a rank dies."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from team import Died, Rank, Team
from torch import nn
from training import loss_of, make


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def stays_itself(rank: Rank) -> None:
    """The optimizer keeps its class, state, groups, schedulers, hooks and closures."""
    import paramhub.torch

    model = make()
    groups = [
        {"params": list(model.convolution.parameters()), "lr": 0.1},
        {"params": [p for n, p in model.named_parameters() if not n.startswith("convolution")]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    momentum = optimizer.state[model.first.weight]["momentum_buffer"].clone()
    optimizer.zero_grad()
    same = optimizer
    optimizer = paramhub.torch.DistributedOptimizer(optimizer, model.named_parameters())
    assert optimizer is same and isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    assert torch.equal(optimizer.state[model.first.weight]["momentum_buffer"], momentum)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loss_of(model, 1, rank.rank).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        early.step()
        late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.zero_grad()
        optimizer.step()
        late.step()
    assert calls == ["before", "after"] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.0125]
    # Its saved state is that of the optimizer alone, and can be loaded again.
    saved = optimizer.state_dict()
    alone = torch.optim.SGD([{**group, "params": list(group["params"])} for group in optimizer.param_groups])
    alone.load_state_dict(saved)
    optimizer.load_state_dict(alone.state_dict())
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        loss = loss_of(model, 2, rank.rank)
        loss.backward()
        return loss

    calls.clear()
    before = model.first.weight.detach().clone()
    loss = optimizer.step(closure)
    assert loss.item() > 0 and not torch.equal(model.first.weight, before)
    assert calls == ["before", "after"]
    apart = paramhub.torch._initialization.world().allgather_text(
        "sum", repr(model.first.weight.sum().item())
    )
    assert len(set(apart)) == 1


def test_the_optimizer_stays_what_it_is(team: Team) -> None:
    team(stays_itself, ranks=2)


def misused(rank: Rank) -> dict[str, str]:
    import paramhub
    import paramhub.torch

    wrap = paramhub.torch.DistributedOptimizer
    messages: dict[str, str] = {}

    def refused(name: str, action: Callable[[], Any]) -> None:
        with pytest.raises(paramhub.MisuseError) as error:
            action()
        messages[name] = str(error.value)

    def disagrees() -> None:
        # The manager finds the difference and answers with an error.
        other = nn.Linear(2 + rank.rank, 1)
        with pytest.raises(paramhub.ParamhubError, match="disagree on key 0"):
            wrap(torch.optim.SGD(other.parameters(), lr=0.1), other.named_parameters())

    def fresh(**options: Any) -> tuple[nn.Module, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        return model, wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)

    inputs = torch.ones(1, 2)
    model, optimizer = fresh()
    model(inputs).sum().backward()
    refused("zero_grad", optimizer.zero_grad)
    refused("twice", lambda: model(inputs).sum().backward())

    model, optimizer = fresh()
    model(inputs).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    refused("clipped", optimizer.step)

    model, optimizer = fresh()
    model(inputs).sum().backward()
    model.zero_grad()
    refused("cleared", optimizer.step)

    model, optimizer = fresh()
    model(inputs).sum().backward()

    def skip() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    refused("skipped", skip)
    optimizer.step()
    refused("wrapped again", lambda: wrap(optimizer))
    refused("group", lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}))
    refused("shared", lambda: wrap(torch.optim.Adam(model.parameters()), model.named_parameters()))

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model[0].bias.requires_grad_(True)
    model(inputs).sum().backward()
    refused("thawed", optimizer.step)

    plain = nn.Linear(2, 2)
    named = list(plain.named_parameters())
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    refused("unnamed", lambda: wrap(sgd, named[:1]))
    refused("duplicate", lambda: wrap(sgd, [("w", named[0][1]), ("w", named[1][1])]))
    refused("no pairs", lambda: wrap(sgd, plain.parameters()))
    refused("passes", lambda: wrap(sgd, named, backward_passes_per_step=0))
    refused("op", lambda: wrap(sgd, named, op=paramhub.torch.Max))
    refused("adasum", lambda: wrap(sgd, named, op=paramhub.torch.Adasum))
    refused("predivide", lambda: wrap(sgd, named, op=paramhub.torch.Sum, gradient_predivide_factor=2.0))
    refused("groups", lambda: wrap(sgd, named, groups=0))
    refused("grouped twice", lambda: wrap(sgd, named, groups=[[named[0][1]], [named[0][1]]]))
    refused("no set", lambda: wrap(sgd, named, process_set=paramhub.torch.ProcessSet([0])))
    refused("compression", lambda: wrap(sgd, named, compression=object()))
    refused("lbfgs", lambda: wrap(torch.optim.LBFGS(plain.parameters()), named))
    double = nn.Linear(1, 1).double()
    refused("double", lambda: wrap(torch.optim.SGD(double.parameters(), lr=0.1), double.named_parameters()))
    disagrees()
    return messages


def test_misuse_is_refused_with_a_reason(team: Team) -> None:
    for messages in team(misused, ranks=2):
        expected = {
            "zero_grad": "gradients are being exchanged",
            "twice": "more than 1 backward passes since the last step",
            "clipped": "'0.weight', '0.bias', '1.weight', '1.bias': changed after the gradient had left",
            "cleared": "optimizer.synchronize() after backward",
            "skipped": "call optimizer.synchronize() first",
            "wrapped again": "DistributedOptimizer already",
            "group": "add groups before",
            "shared": "another DistributedOptimizer",
            "thawed": "'0.bias': did not require a gradient when",
            "unnamed": "lacks 1 of the optimizer's 2 parameters: [2] at 1 of group 0",
            "duplicate": "more than once: 'w'",
            "no pairs": "pass model.named_parameters()",
            "passes": "a number from 1, not 0",
            "op": "not by paramhub.torch.Max",
            "adasum": "not by paramhub.torch.Adasum",
            "predivide": "use op=Average",
            "groups": "a number from 1, or a list of lists of parameters, not 0",
            "grouped twice": "a parameter twice",
            "no set": "call paramhub.torch.add_process_set() on every rank before",
            "compression": "none, fp16, bf16, int8, one_bit and two_bit",
            "lbfgs": "LBFGS decides by the loss",
            "double": "'weight' has elements of torch.float64",
        }
        assert messages.keys() == expected.keys()
        for name, part in expected.items():
            assert part in messages[name], (name, messages[name])


def dying(rank: Rank, where: str) -> str:
    import paramhub
    import paramhub.torch

    model = make()
    optimizer = paramhub.torch.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    try:
        for step in range(100):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank.rank)
            if rank.rank == 1 and step == 3 and where == "backward":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            if rank.rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
    except paramhub.JobFailedError as error:
        assert error.culprit == 1
        return str(error)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("where", ["backward", "step"])
def test_a_dying_rank_fails_the_others(team: Team, where: str) -> None:
    results = team(dying, where, ranks=3, dies=[1])
    assert isinstance(results[1], Died)
    for message in (results[0], results[2]):
        assert "because of rank 1" in message and "rank 1 was lost: " in message
        assert "connection" in message.split("rank 1 was lost: ")[1]
