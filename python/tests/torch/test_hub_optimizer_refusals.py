"""HubOptimizer's refusals, and the advice in their messages."""

from __future__ import annotations

import copy
import gc
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from team import Rank, Team

import paramhub
import paramhub.torch
from paramhub.torch import HubOptimizer

Linear = torch.nn.Linear


def make(model: torch.nn.Module | None = None, **options: object) -> tuple[torch.nn.Module, HubOptimizer]:
    model = model if model is not None else torch.nn.Sequential(Linear(4, 3), Linear(3, 2))
    return model, HubOptimizer(model, paramhub.SGD(lr=0.1, momentum=0.9), **options)


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def refuses(pattern: str, act: Callable[[], object], kind: type[Exception] = paramhub.MisuseError) -> None:
    with pytest.raises(kind) as refused:
        act()
    assert re.search(pattern, str(refused.value), re.DOTALL), str(refused.value)


def construction(rank: Rank) -> None:
    net = torch.nn.Sequential
    refuses(
        "runs, such as paramhub.SGD.*DistributedOptimizer",
        lambda: HubOptimizer(Linear(2, 2), paramhub.Mean()),
    )
    refuses("no shape yet: run the lazy", lambda: make(torch.nn.LazyLinear(3)))
    refuses("float64, which hubs do not sum", lambda: make(Linear(2, 2, dtype=torch.float64)))
    refuses("'weight' has no values", lambda: make(Linear(2, 2, device="meta")))
    refuses("number from 1, not 0", lambda: make(backward_passes_per_step=0))
    refuses("is none of the model's", lambda: make(Linear(2, 2), params=Linear(2, 2).parameters()))
    refuses("no tensor to exchange", lambda: make(Linear(2, 2).requires_grad_(False)))
    refuses("nesterov", lambda: HubOptimizer(Linear(2, 2), paramhub.SGD(lr=1.0, nesterov=True)), Exception)

    shared = net(Linear(2, 2), Linear(2, 2))
    shared[1].weight = torch.nn.Parameter(shared[0].weight.data)
    refuses("'0.weight' and '1.weight' share memory", lambda: make(shared))

    model, optimizer = make()
    refuses("exchanged by another HubOptimizer.*close", lambda: make(model))
    others = torch.nn.Parameter(torch.ones(1))
    refuses("none of the model's", lambda: optimizer.add_param_group({"params": [others]}))
    trained = optimizer.param_groups[0]["params"][0]
    refuses(
        "more than one parameter group", lambda: optimizer.add_param_group({"params": trained}), ValueError
    )
    assert len(optimizer.param_groups) == 1
    refuses("save optimizer.state_dict", lambda: pickle.dumps(optimizer))
    refuses("save optimizer.state_dict", lambda: copy.deepcopy(optimizer))
    optimizer.close()
    again = make(model)
    # An optimizer without references releases its parameters.
    del again
    gc.collect()
    make(model)


def pass_arguments_of_other_optimizers(rank: Rank) -> None:
    model = Linear(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, nesterov=True)
    call = r"HubOptimizer\(model, paramhub.SGD\(lr=0.3, momentum=0.9, nesterov=True\)\)"
    refuses(
        f"takes an optimizer that the hub runs, not a SGD: {call}",
        lambda: HubOptimizer(model, sgd),
        TypeError,
    )
    refuses(
        f"takes the model itself, not a SGD: {call}.*DistributedOptimizer",
        lambda: HubOptimizer(sgd),
        TypeError,
    )
    adam = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    refuses(r"paramhub.Adam\(lr=0.01, betas=\(0.8, 0.9\)\)", lambda: HubOptimizer(model, adam), TypeError)
    refuses(
        r"the model itself, not a generator: HubOptimizer\(model, optimizer\).*params=",
        lambda: HubOptimizer(model.parameters(), paramhub.SGD(lr=0.1)),
        TypeError,
    )
    refuses("not a list: HubOptimizer", lambda: HubOptimizer([model.weight], paramhub.SGD()), TypeError)
    refuses("hub runs, not the class SGD: Hub", lambda: HubOptimizer(model, paramhub.SGD), TypeError)
    refuses("hub runs, not nothing: Hub", lambda: HubOptimizer(model), TypeError)
    assert not paramhub.torch.is_initialized()


def a_step(rank: Rank) -> None:
    model, optimizer = make()
    weight = model[0].weight
    refuses("4 of 4 parameters have no gradient.*'0.weight'.*find_unused_parameters", optimizer.step)

    backward(model)
    refuses("second gradient of '1.bias'.*backward_passes_per_step.*no_sync", lambda: backward(model))
    refuses("between backward and step", optimizer.zero_grad)
    refuses("between backward and step", optimizer.state_dict)
    refuses("between backward and step", optimizer.close)

    model, optimizer = make()
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    refuses("gradient of '0.weight' was modified.*max_grad_norm.*grad_scaler", optimizer.step)

    model, optimizer = make()
    backward(model)
    model[1].weight.grad = model[1].weight.grad * 2
    refuses("gradient of '1.weight' was replaced", optimizer.step)

    model, optimizer = make()
    backward(model)
    model.zero_grad()
    refuses("gradient of '0.weight' was replaced", optimizer.step)

    model, optimizer = make()
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.05
    refuses("lr changed between backward and step", optimizer.step)

    model, optimizer = make()
    optimizer.param_groups[0]["amsgrad"] = True
    refuses("asks for amsgrad, which the optimizer was made without", lambda: backward(model))

    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    refuses("give HubOptimizer grad_scaler=scaler", lambda: scaler.step(optimizer))

    model, optimizer = make()
    graph = model(torch.ones(2, 4)).sum()
    graph.backward(retain_graph=True)
    optimizer.step()
    # The graph has saved the old parameters.
    refuses("modified by an inplace operation", graph.backward, RuntimeError)
    assert weight.grad is not None


def changes(rank: Rank) -> None:
    model, optimizer = make()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    refuses("'1.bias' was modified.*broadcast_parameters.*load_state_dict", lambda: backward(model))
    optimizer.broadcast_parameters()
    backward(model)
    optimizer.step()

    model, optimizer = make()
    with torch.no_grad():
        model[0].bias.clamp_(-0.01, 0.01)
    refuses("'0.bias' was modified", lambda: backward(model))

    model, optimizer = make()
    model.to(torch.bfloat16)
    refuses("'1.(weight|bias)' was moved", lambda: model(torch.ones(2, 4).bfloat16()).sum().backward())

    model, optimizer = make()
    model[1].requires_grad_(False)
    backward(model)
    refuses("2 of 4 parameters have no gradient.*'1.weight'", optimizer.step)

    model = torch.nn.Sequential(Linear(4, 3), Linear(3, 2))
    model[0].requires_grad_(False)
    model, optimizer = make(model)
    model[0].requires_grad_(True)
    backward(model)
    refuses("'0.weight', '0.bias': frozen when HubOptimizer was made", optimizer.step)


def kinds_of_gradients(rank: Rank) -> None:
    # An embedding with max_norm changes its weights in the forward pass.
    bounded, optimizer = make(torch.nn.Embedding(5, 3, max_norm=0.1))
    refuses("was modified.*max_norm", lambda: bounded(torch.tensor([1])).sum().backward())

    # Reentrant checkpointing of two parts with one layer, whose gradient comes from two graphs.
    layer = Linear(4, 4)
    model, optimizer = make(torch.nn.Sequential(layer, torch.nn.ReLU(), layer))

    def checkpointed(use_reentrant: bool) -> None:
        inputs = torch.ones(2, 4, requires_grad=True)
        for module in model:
            inputs = torch.utils.checkpoint.checkpoint(module, inputs, use_reentrant=use_reentrant)
        inputs.sum().backward()

    checkpointed(use_reentrant=False)
    optimizer.step()
    optimizer.zero_grad()
    refuses("second gradient of '0.*use_reentrant=False", lambda: checkpointed(use_reentrant=True))

    # A parameter that is used without its module.
    layer = Linear(4, 2)
    weight = layer.weight
    model, optimizer = make(layer)
    (torch.ones(2, 4) @ weight.t() + layer.bias).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    refuses(
        "'weight' was used while.*synchronize",
        lambda: (torch.ones(2, 4) @ weight.t() + layer.bias).sum().backward(),
    )

    # A detached use of a parameter comes after its gradient was sent.
    model, optimizer = make(Linear(4, 4, bias=False))
    inputs = torch.ones(2, 4, requires_grad=True)
    detached = torch.nn.functional.linear(inputs, model.weight.detach())
    refuses(
        "modified by an inplace operation",
        lambda: (model(torch.ones(2, 4)) * 1 + detached).sum().backward(),
        RuntimeError,
    )


def test_arguments_that_cannot_work_are_refused(team: Team) -> None:
    team(construction, ranks=1)


def test_arguments_of_other_optimizers_are_type_errors(team: Team) -> None:
    team(pass_arguments_of_other_optimizers, ranks=1)


def test_steps_out_of_order(team: Team) -> None:
    team(a_step, ranks=1)


def test_parameters_changed_by_others(team: Team) -> None:
    team(changes, ranks=1)


def test_gradients_of_other_kinds(team: Team) -> None:
    team(kinds_of_gradients, ranks=1)
