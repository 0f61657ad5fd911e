"""state_dict and load_state_dict: through the hub, to torch.optim and back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hub_training import Reference, all_parameters, begin, compare, loss_of, made
from team import Rank, Team
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import paramhub
from paramhub.torch import HubOptimizer

KINDS: list[tuple[paramhub.Optimizer, Any, dict[str, Any]]] = [
    (paramhub.SGD(lr=0.1), torch.optim.SGD, {"lr": 0.1}),
    (
        paramhub.Nesterov(lr=0.05, momentum=0.8),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "nesterov": True},
    ),
    (paramhub.Adam(lr=3e-3), torch.optim.Adam, {"lr": 3e-3}),
    (paramhub.AdamW(lr=3e-3), torch.optim.AdamW, {"lr": 3e-3}),
    (paramhub.Adam(lr=3e-3, amsgrad=True), torch.optim.Adam, {"lr": 3e-3, "amsgrad": True}),
    (paramhub.Adagrad(), torch.optim.Adagrad, {}),
    (
        paramhub.RMSprop(lr=1e-3, eps=1e-3, momentum=0.5, centered=True),
        torch.optim.RMSprop,
        {"lr": 1e-3, "eps": 1e-3, "momentum": 0.5, "centered": True},
    ),
    (
        paramhub.RMSprop(lr=1e-3, eps=1e-3, centered=True),
        torch.optim.RMSprop,
        {"lr": 1e-3, "eps": 1e-3, "centered": True},
    ),
    (paramhub.Adadelta(), torch.optim.Adadelta, {}),
    (
        paramhub.NAdam(lr=1e-3, momentum_decay=0.1, decoupled_weight_decay=True),
        torch.optim.NAdam,
        {"lr": 1e-3, "momentum_decay": 0.1, "decoupled_weight_decay": True},
    ),
]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank.rank, step).backward()
        optimizer.step()


def stored(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def round_trip(rank: Rank) -> list[bytes]:
    ends = []
    for mine, _, _ in KINDS:
        model = begin(rank)
        optimizer = HubOptimizer(model, mine)
        assert optimizer.state_dict()["state"] == {}
        train(model, optimizer, rank, range(5))
        optimizer.param_groups[0]["lr"] *= 0.5
        saved = stored({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, rank, range(5, 10))
        expected = list(all_parameters(model))
        optimizer.close()

        # A run that continues from the state is bit-equal. Only rank 0 needs the values.
        resumed = begin(rank)
        optimizer = HubOptimizer(resumed, mine)
        train(resumed, optimizer, rank, range(2))
        if rank.rank == 0:
            resumed.load_state_dict(saved["model"])
        else:
            saved["optimizer"]["state"] = {}
        optimizer.load_state_dict(saved["optimizer"])
        train(resumed, optimizer, rank, range(5, 10))
        assert list(all_parameters(resumed)) == expected
        ends += expected

        # Parameters are changed by hand, and the state stays.
        if rank.rank == 0:
            with torch.no_grad():
                resumed.hidden.bias.zero_()
        before = optimizer.state_dict()
        optimizer.broadcast_parameters()
        assert resumed.hidden.bias.abs().max() == 0
        after = optimizer.state_dict()
        assert same(before["state"], after["state"]) and before["param_groups"] == after["param_groups"]
        optimizer.close()
    return ends


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[name], theirs[name]) for name in mine)
    return mine == theirs


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_resumed_run_goes_on_as_it_would_have(team: Team, transport: str) -> None:
    ends = team(round_trip, ranks=2, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1]


def frozen_first(model: torch.nn.Module) -> torch.nn.Module:
    model.conv.requires_grad_(False)
    # torch 2.7's GroupNorm crashes in backward where its input is in channels_last and needs no gradient.
    model.norm.requires_grad_(False)
    return model


def exchanged_with_torch(rank: Rank) -> None:
    for mine, kind, options in KINDS:
        model = frozen_first(begin(rank))
        optimizer = HubOptimizer(model, mine)
        reference = compare(rank, model, optimizer, made(kind, options), steps=4)
        # torch.optim continues from the hub's state,
        ahead = Reference(model, rank.size, made(kind, options))
        ahead.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        # and the hub from torch's. Parameters that differed by a bit are equal from here on.
        reference.model.load_state_dict(model.state_dict())
        reference.optimizer.load_state_dict(copy.deepcopy(ahead.optimizer.state_dict()))
        train(model, optimizer, rank, range(4, 8))
        if rank.rank == 0:
            for step in range(4, 8):
                ahead.step(step)
                reference.step(step)
            ahead.check(model)
        back = frozen_first(begin(rank))
        back.load_state_dict(reference.model.state_dict())
        again = HubOptimizer(back, mine)
        again.load_state_dict(reference.optimizer.state_dict())
        train(back, again, rank, range(8, 12))
        if rank.rank == 0:
            for step in range(8, 12):
                reference.step(step)
            reference.check(back)
        optimizer.close()
        again.close()


def test_state_is_torchs(team: Team) -> None:
    team(exchanged_with_torch, ranks=2)


def checkpointed(rank: Rank) -> None:
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.AdamW(lr=3e-3))
    train(model, optimizer, rank, range(3))
    optimizer.zero_grad()
    before = list(all_parameters(model))
    states = copy.deepcopy(get_state_dict(model, optimizer))
    assert before == list(all_parameters(model))
    assert float(states[1]["state"]["conv.weight"]["step"]) == 3
    train(model, optimizer, rank, range(3, 5))
    expected = list(all_parameters(model))
    optimizer.zero_grad()
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    # set_state_dict loads the model last.
    optimizer.broadcast_parameters()
    train(model, optimizer, rank, range(3, 5))
    assert expected == list(all_parameters(model))


def test_torchs_checkpoints_take_it_as_any_optimizer(team: Team) -> None:
    team(checkpointed, ranks=2)


def wrong(rank: Rank) -> None:
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.Adam())
    train(model, optimizer, rank, range(1))
    saved = optimizer.state_dict()
    group = saved["param_groups"][0]

    def refuses(pattern: str, state: dict[str, Any], changed: dict[str, Any]) -> None:
        loaded = {"state": state, "param_groups": [{**group, **changed}]}
        with pytest.raises(paramhub.MisuseError, match=pattern):
            optimizer.load_state_dict(loaded)

    refuses(
        "lacks 'momentum_buffer'|'momentum_buffer'.*saved by another",
        {0: {"momentum_buffer": torch.ones(3)}},
        {},
    )
    refuses("exp_avg.*shape .3., the parameter has", {0: {**saved["state"][0], "exp_avg": torch.ones(3)}}, {})
    refuses("has 2 parameters.*here.*10", {}, {"params": [0, 1]})
    refuses("asks for amsgrad", {}, {"amsgrad": True})
    del group["betas"]
    refuses("lacks 'betas'", {}, {})
    # Nothing has changed.
    before = list(all_parameters(model))
    train(model, optimizer, rank, range(1, 2))
    assert before != list(all_parameters(model))
    assert float(optimizer.state_dict()["state"][0]["step"]) == 2


def test_state_that_does_not_fit_is_refused(team: Team) -> None:
    team(wrong, ranks=1)
