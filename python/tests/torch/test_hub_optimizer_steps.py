"""Special steps: unused parameters, clipping, a rank that dies, compiled models, timelines."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
import torch
from hub_training import Net, Reference, all_parameters, batch, begin, compare, made
from team import Died, Rank, Team

import paramhub
import paramhub.torch as hub_torch
from paramhub.torch import HubOptimizer

SGD, ADAM = torch.optim.SGD, torch.optim.Adam


class Branches(torch.nn.Module):
    """A model of which each rank and step uses other branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(48, 16)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(16, 7) for _ in range(4))

    def forward(self, x: torch.Tensor, taken: list[int]) -> torch.Tensor:
        x = torch.tanh(self.stem(x.flatten(1)))
        return torch.stack([self.branches[branch](x) for branch in taken]).sum(0)


def taken(rank: int, step: int) -> list[int]:
    """All ranks use branch 0, one rank uses branch 1, every third step uses branch 2, and no rank uses the last one."""
    return [0] + [1] * (rank == 1) + [2] * (step % 3 == 0)


def loss_of_branches(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(inputs, taken(rank, step)), targets)


def unused(rank: Rank) -> list[bytes]:
    ends = []
    kinds: list[tuple[paramhub.Optimizer, Any, dict[str, Any]]] = [
        (
            paramhub.SGD(lr=0.05, momentum=0.9, weight_decay=0.1),
            SGD,
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
        ),
        (paramhub.Adam(lr=1e-3), ADAM, {"lr": 1e-3}),
    ]
    for mine, kind, options in kinds:
        model = begin(rank, Branches)
        optimizer = HubOptimizer(model, mine, find_unused_parameters=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        reference = Reference(model, rank.size, made(kind, options))
        theirs = torch.optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.95)
        # The learning rate changes more often than the hub stores changes.
        for step in range(80):
            optimizer.zero_grad()
            loss_of_branches(model, rank.rank, step).backward()
            optimizer.step()
            scheduler.step()
            if rank.rank == 0:
                reference.backward(step, loss=loss_of_branches)
                reference.optimizer.step()
                theirs.step()
                reference.check(model)
        assert model.branches[1].weight.grad is None or rank.rank == 1
        ends += all_parameters(model)
        # A step in which no rank has any gradient changes nothing.
        optimizer.zero_grad()
        optimizer.step()
        assert ends[-1] == list(all_parameters(model))[-1]
        optimizer.close()
    return ends


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_parameters_without_a_gradient(team: Team, transport: str) -> None:
    ends = team(unused, ranks=3, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1] == ends[2]


class Clipping:
    """Clips gradients before an optimizer's step."""

    def __init__(self, optimizer: torch.optim.Optimizer, norm: float) -> None:
        self.norms: list[float] = []
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def clip(*_: object) -> None:
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, norm)))

        optimizer.register_step_pre_hook(clip)


def clipped(rank: Rank, limit: float) -> list[bytes]:
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.AdamW(lr=1e-3), max_grad_norm=limit)
    assert optimizer.last_grad_norm is None
    clipping: list[Clipping] = []

    def make(m: torch.nn.Module) -> torch.optim.Optimizer:
        reference = torch.optim.AdamW(m.parameters(), lr=1e-3)
        clipping.append(Clipping(reference, limit))
        return reference

    compare(rank, model, optimizer, make)
    if rank.rank == 0:
        norms = clipping[0].norms
        assert abs(optimizer.last_grad_norm / norms[-1] - 1) < 1e-5
        assert max(norms) < limit or min(norms) > limit
    # No new value can arrive between backward and step(), but a gradient that was not sent may be changed.
    optimizer.zero_grad()
    with optimizer.no_sync():
        inputs, targets = batch(rank.rank, 0)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    model.out.weight.grad.mul_(0.5)
    optimizer.step()
    ends = [*all_parameters(model), str(optimizer.last_grad_norm).encode()]
    optimizer.close()
    return ends


def every_clipping(rank: Rank) -> list[bytes]:
    ends = [*clipped(rank, 0.05), *clipped(rank, 1e3)]
    model = begin(rank, Branches)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1), max_grad_norm=1.0, find_unused_parameters=True)
    loss_of_branches(model, rank.rank, 1).backward()
    with pytest.raises(paramhub.MisuseError, match=r"'stem.weight' was read between backward and step"):
        list(model.stem.parameters())
    with pytest.raises(paramhub.MisuseError, match=r"no rank has a gradient for 'branches.2.weight'"):
        optimizer.step()
    return ends


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_gradients_are_clipped_as_torch_does(team: Team, transport: str) -> None:
    ends = team(every_clipping, ranks=2, env={"PARAMHUB_TRANSPORT": transport})
    assert ends[0] == ends[1]


def dies(rank: Rank, while_waiting: bool) -> float:
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1))
    inputs, _ = batch(rank.rank, 0)
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()
    if rank.rank == 2:
        if not while_waiting:
            rank.await_mark("ready")
        os.kill(os.getpid(), signal.SIGKILL)
    rank.mark("ready")
    began = time.monotonic()
    with pytest.raises(paramhub.JobFailedError, match="rank 2 was lost") as failed:
        for _ in range(1000):
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert failed.value.culprit == 2
    with pytest.raises(paramhub.JobFailedError):
        list(model.parameters())
        # If the failure came before a gradient of the step was sent, parameters have the values of the last step. Then no
        # other is sent.
        model(inputs).sum().backward()
    return time.monotonic() - began


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_dies_is_named(team: Team, transport: str) -> None:
    ends = team(dies, transport == "shm", ranks=3, env={"PARAMHUB_TRANSPORT": transport}, dies=(2,))
    assert isinstance(ends[2], Died)


def compiled(rank: Rank, backend: str, way: str) -> list[bytes]:
    model = begin(rank)
    if way == "before":
        trained: Any = torch.compile(model, backend=backend)
        optimizer = HubOptimizer(trained, paramhub.SGD(lr=0.05, momentum=0.9))
    elif way == "after":
        optimizer = HubOptimizer(model, paramhub.SGD(lr=0.05, momentum=0.9))
        trained = torch.compile(model, backend=backend)
    else:
        # Parts of the model: one is compiled before, one in place after.
        hidden = model.hidden
        model.hidden = torch.compile(hidden, backend=backend)
        optimizer = HubOptimizer(model, paramhub.SGD(lr=0.05, momentum=0.9))
        model.conv.compile(backend=backend)
        trained = model
    assert not any("_orig_mod" in exchange.name for exchange in optimizer._exchanges)
    options = {"lr": 0.05, "momentum": 0.9}
    reference = Reference(model if way != "parts" else begin(rank), rank.size, made(SGD, options))
    if way == "parts":
        with torch.no_grad():
            for theirs, mine in zip(reference.model.parameters(), model.parameters(), strict=True):
                theirs.copy_(mine)
    for step in range(6):
        optimizer.zero_grad()
        inputs, targets = batch(rank.rank, step)
        loss = torch.nn.functional.cross_entropy(trained(inputs), targets)
        if rank.rank == 1:
            # This rank is late: without a wait the other rank's compiled code would read old values.
            time.sleep(0.05)
        loss.backward()
        optimizer.step()
        if rank.rank == 0:
            reference.step(step)
            reference.check(model, 1e-5)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4
    assert not torch._dynamo.utils.counters["graph_break"]
    return list(all_parameters(model))


@pytest.mark.parametrize("way", ["before", "after", "parts"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models(team: Team, backend: str, way: str) -> None:
    ends = team(compiled, backend, way, ranks=2)
    assert ends[0] == ends[1]


def scripted(rank: Rank) -> list[bytes]:
    """step() waits for a part whose forward pass calls no hooks."""
    hub_torch.init()
    torch.manual_seed(rank.rank)
    model = torch.nn.Sequential(
        torch.jit.trace(torch.nn.Linear(4, 4), torch.ones(1, 4)), torch.nn.Linear(4, 2)
    )
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        if rank.rank == 1:
            time.sleep(0.05)
        loss.backward()
        optimizer.step()
        assert all(exchange.handle is None for exchange in optimizer._exchanges[:2])
    return list(all_parameters(model))


def test_scripted_parts(team: Team) -> None:
    ends = team(scripted, ranks=2)
    assert ends[0] == ends[1]


def traced(rank: Rank) -> None:
    model = begin(rank)
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(rank.rank, step)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        if rank.rank == 1:
            time.sleep(0.05)
        loss.backward()
        optimizer.step()
    hub_torch.shutdown()


def test_a_timeline_shows_requests_in_backward_and_waits_in_forward(team: Team, tmp_path: Any) -> None:
    team(traced, ranks=2, env={"PARAMHUB_TRACE": str(tmp_path / "trace")})
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    mine = [event for event in events if event["pid"] == 0]
    spans = [event for event in mine if event["ph"] == "X"]
    requests = [event for event in mine if event["ph"] == "b"]
    named = {
        name: [span for span in spans if span["name"] == name] for name in ("forward", "backward", "step")
    }
    assert [len(found) for found in named.values()] == [3, 3, 3]
    names = {name for name, _ in Net().named_parameters()}
    for backward, forward in zip(named["backward"], named["forward"][1:], strict=False):
        assert {request["name"] for request in requests if within(request, backward)} == names
        # Rank 1 is late, so rank 0 waits for the first layer.
        waits = [span["name"] for span in spans if span["cat"] == "waits" and within(span, forward)]
        assert waits[0] == "scale" and set(waits) <= names


def within(event: dict[str, Any], span: dict[str, Any]) -> bool:
    return span["ts"] <= event["ts"] <= span["ts"] + span["dur"]
