"""HubOptimizer with embeddings of which the ranks exchange the rows, compared with torch.optim on one process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tcp_traffic import bytes_sent
from team import Died, Rank, Team
from torch import nn

import paramhub
import paramhub.torch

STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 8, sparse=True)
        self.bags = nn.EmbeddingBag(60, 8, mode="sum", sparse=True)
        self.last = nn.Linear(8, 3)

    def forward(self, numbers: torch.Tensor | None) -> torch.Tensor:
        hidden = self.last.weight.sum(0).unsqueeze(0)
        if numbers is not None:
            hidden = hidden + self.words(numbers).sum(1) + self.bags(numbers)
        return self.last(torch.tanh(hidden))


def make(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def numbers_of(step: int, rank: int) -> torch.Tensor | None:
    """The ranks look up different numbers of rows. In some steps one has none, or does not use the embeddings; in one all."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    numbers = torch.randint(0, 60, (2 + 3 * rank, 4), generator=generator)
    if step == 3 or (step == 1 and rank == 0):
        return None
    return numbers[:0] if step == 2 and rank == 1 else numbers


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(numbers_of(step, rank)).square().sum()


def hub_optimizer(model: Net, kind: str, **options: Any) -> paramhub.torch.HubOptimizer:
    if kind == "sgd":
        return paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.1), **options)
    return paramhub.torch.HubOptimizer(model, paramhub.Adam(lr=0.05), sparse_adam=True, **options)


def torchs(model: Net, kind: str) -> list[torch.optim.Optimizer]:
    rows = [model.words.weight, model.bags.weight]
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.1)]
    return [torch.optim.SparseAdam(rows, lr=0.05), torch.optim.Adam(model.last.parameters(), lr=0.05)]


def train_alone(
    model: Net, optimizers: list[torch.optim.Optimizer], size: int, steps: range, passes: int = 1
) -> None:
    for step in steps:
        found: list[list[torch.Tensor]] = [[] for _ in model.parameters()]
        for rank in range(size):
            model.zero_grad()
            for each in range(passes):
                loss_of(model, step * passes + each, rank).backward()
            for gradients, parameter in zip(found, model.parameters(), strict=True):
                gradients += [] if parameter.grad is None else [parameter.grad.clone()]
        for gradients, parameter in zip(found, model.parameters(), strict=True):
            parameter.grad = sum(gradients[1:], start=gradients[0]) / size if gradients else None
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()


def train(
    model: Net,
    optimizer: paramhub.torch.HubOptimizer,
    rank: int,
    steps: range,
    passes: int = 1,
    agree: bool = False,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        # The values of rank 0 hold for all ranks.
        optimizer.param_groups[0]["lr"] *= 0.9 if rank == 0 or agree else 0.5
        for each in range(passes):
            loss_of(model, step * passes + each, rank).backward()
        optimizer.step()
    optimizer.synchronize()


def check_same(model: nn.Module, expected: nn.Module) -> None:
    for own, its in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-5)


def train_and_compare(rank: Rank, kind: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for options in (
        {},
        {"find_unused_parameters": True},
        {"scheme": "factors"},
        {"backward_passes_per_step": 2},
    ):
        passes = options.get("backward_passes_per_step", 1)
        steps = range(STEPS // passes)
        # Only rank 0's values count.
        model, expected = make(3 + rank.rank), make()
        optimizer = hub_optimizer(model, kind, **options)
        train(model, optimizer, rank.rank, steps, passes)
        train_alone(expected, torchs(expected, kind), rank.size, steps, passes)
        check_same(model, expected)
        found += [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.close()
    return found


@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
def test_it_trains_as_one_process_does(team: Team, kind: str) -> None:
    first, *others = team(train_and_compare, kind, ranks=3)
    for other in others:
        assert all(torch.equal(own, its) for own, its in zip(first, other, strict=True))


def save_and_resume(rank: Rank, kind: str) -> None:
    model = make()
    optimizer = hub_optimizer(model, kind)
    train(model, optimizer, rank.rank, range(2), agree=True)
    saved = optimizer.state_dict()
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    assert ("exp_avg" in saved["state"].get(0, {})) == (kind != "sgd")
    train(model, optimizer, rank.rank, range(2, STEPS), agree=True)
    optimizer.close()

    resumed = make(9 + rank.rank)
    again = hub_optimizer(resumed, kind)
    train(resumed, again, rank.rank, range(1), agree=True)
    if rank.rank == 0:
        resumed.load_state_dict(weights)
    again.load_state_dict(saved)
    train(resumed, again, rank.rank, range(2, STEPS), agree=True)
    for own, its in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, its)
    # Another state of rank 1's makes no difference, for rank 0's holds.
    with torch.no_grad():
        resumed.words.weight.add_(rank.rank)
    again.broadcast_parameters()
    assert torch.equal(resumed.words.weight, model.words.weight)


@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
def test_a_resumed_run_goes_on_exactly(team: Team, kind: str) -> None:
    team(save_and_resume, kind, ranks=2)


def refusals(rank: Rank) -> None:
    def refuses(message: str, action: Callable[[], Any]) -> None:
        with pytest.raises(paramhub.MisuseError, match=message):
            action()

    hub, model = paramhub.torch.HubOptimizer, make()
    sgd = paramhub.SGD(lr=0.1)
    refuses(
        r"'words.weight'.*paramhub.SGD, not with 'adam'.*sparse_adam=True",
        lambda: hub(model, paramhub.Adam()),
    )
    refuses("with Adam and AdamW.*not with 'sgd'", lambda: hub(model, sgd, sparse_adam=True))
    refuses("not with 'adagrad'.*DistributedOptimizer", lambda: hub(model, paramhub.Adagrad()))
    refuses("momentum would change rows.*momentum=0", lambda: hub(model, paramhub.SGD(lr=0.1, momentum=0.9)))
    refuses("weight_decay would change rows", lambda: hub(model, paramhub.SGD(lr=0.1, weight_decay=0.1)))
    refuses("cannot be had with max_grad_norm: use sparse=False", lambda: hub(model, sgd, max_grad_norm=1.0))
    scaler = torch.amp.GradScaler("cpu")
    refuses("cannot be had with grad_scaler: use sparse=False", lambda: hub(model, sgd, grad_scaler=scaler))
    refuses("cannot be had with ema_decay", lambda: hub(model, sgd, ema_decay=0.9))
    refuses("all gradients of the model are sparse", lambda: hub(model.words, sgd))
    refuses("none of their parameters is trained", lambda: hub(model.last, paramhub.Adam(), sparse_adam=True))
    tied = make()
    tied.head = nn.Linear(8, 60, bias=False)
    tied.head.weight = tied.words.weight
    refuses("'head' has the parameter, too", lambda: hub(tied, sgd))

    groups = [
        {"params": [model.words.weight, model.bags.weight], "momentum": 0.0},
        {"params": model.last.parameters()},
    ]
    optimizer = hub(model, paramhub.SGD(lr=0.1, momentum=0.9), params=groups)
    refuses("another HubOptimizer already", lambda: hub(nn.Sequential(model.words, nn.Linear(8, 1)), sgd))
    train(model, optimizer, rank.rank, range(2))
    # A weight decay that comes later is refused before the rows leave, and the step can be made without it.
    loss_of(model, 2, rank.rank).backward()
    optimizer.param_groups[0]["momentum"] = 0.5
    refuses("momentum would change rows", optimizer.step)
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.step()
    optimizer.close()

    # Parameters that are trained later: a dense one is added, one with a sparse gradient is not.
    model = make()
    model.bags.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    optimizer = hub(model, sgd)
    train(model, optimizer, rank.rank, range(1))
    model.bags.requires_grad_(True)
    refuses("cannot add 'bags.weight'", lambda: optimizer.add_param_group({"params": [model.bags.weight]}))
    model.bags.requires_grad_(False)
    model.last.bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model.last.bias]})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, rank.rank, range(4, 5))
    same = [torch.equal(own, its) for own, its in zip(model.parameters(), before, strict=True)]
    assert same == [False, True, False, False], "all but the frozen one are trained"
    optimizer.close()

    # The functional form shows itself only in its gradient.
    plain = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    optimizer = hub(plain, sgd)
    rows = nn.functional.embedding(torch.tensor([1]), plain[0].weight, sparse=True)
    refuses("DistributedOptimizer and DDP over the backend", lambda: rows.sum().backward())
    optimizer.close()


def test_what_cannot_be_is_refused_with_a_reason(team: Team) -> None:
    team(refusals, ranks=1)


def refused_by_job(rank: Rank, option: str) -> str:
    with pytest.raises(paramhub.MisuseError) as error:
        hub_optimizer(make(), "sgd")
    return str(error.value)


@pytest.mark.parametrize(
    ("option", "value"), [("on_worker_loss", "rewind"), ("consistency", "async"), ("checkpoint_every", "5")]
)
def test_jobs_that_the_hub_alone_remembers_are_refused(
    team: Team, hub: paramhub.Hub, tmp_path: Any, option: str, value: str
) -> None:
    environment = {f"PARAMHUB_JOB_{option.upper()}": value, "PARAMHUB_RUN_ID": f"rows-{option}"}
    if option == "on_worker_loss":
        environment["PARAMHUB_URL"] = hub.url
    if option == "checkpoint_every":
        environment["PARAMHUB_JOB_CHECKPOINTS"] = str(tmp_path / "checkpoints")
    for message in team(refused_by_job, option, ranks=2, env=environment):
        assert f"init({option}=)" in message, message


def interrupted(rank: Rank) -> list[torch.Tensor]:
    """Rank 1's backward pass raises after a gradient has left, and training goes on."""
    model = make()
    optimizer = hub_optimizer(model, "sparse adam")

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no more memory")

    for step in (0, 4, 5):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank.rank)
        if step == 4 and rank.rank == 1:
            handle = model.words.weight.register_hook(fail)
            with pytest.raises(ValueError, match="no more memory"):
                loss.backward()
            handle.remove()
            continue
        loss.backward()
        optimizer.step()
    optimizer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_training_goes_on_after_an_exception(team: Team) -> None:
    first, second = team(interrupted, ranks=2)
    assert all(torch.equal(own, its) for own, its in zip(first, second, strict=True))


def interrupted_while_waiting(rank: Rank) -> list[torch.Tensor]:
    """Ctrl-C ends rank 0's wait for the rows of rank 1, and the step counts nevertheless."""
    model, expected = make(), make()
    optimizer = hub_optimizer(model, "sgd")
    for step in (0, 4):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9
        loss_of(model, step, rank.rank).backward()
        if step == 0 and rank.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            rank.mark("interrupted")
            continue
        if step == 0:
            rank.await_mark("interrupted")
        optimizer.step()
    optimizer.close()
    alone = torchs(expected, "sgd")
    for step in (0, 4):
        train_alone(expected, alone, rank.size, range(step, step + 1))
    check_same(model, expected)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_wait_for_rows_answers_ctrl_c(team: Team) -> None:
    first, second = team(interrupted_while_waiting, ranks=2)
    assert all(torch.equal(own, its) for own, its in zip(first, second, strict=True))


def modified(rank: Rank) -> list[torch.Tensor]:
    """A parameter that one rank has modified is noticed in each step, and all ranks have the same after a broadcast."""
    model = make()
    optimizer = hub_optimizer(model, "sgd")
    refusal = r"'words.weight' was modified by this process.*broadcast_parameters\(\).*max_norm"
    if rank.rank == 1:
        with torch.no_grad():
            model.words.weight.add_(0.5)
    for step in (0, 4):
        optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        if rank.rank == 0:
            # The other rank ends the step by zero_grad().
            optimizer.step()
            continue
        for _ in range(2):
            with pytest.raises(paramhub.MisuseError, match=refusal):
                optimizer.step()
    optimizer.zero_grad()
    optimizer.broadcast_parameters()
    loss_of(model, 5, rank.rank).backward()
    optimizer.step()
    optimizer.close()
    # Such an embedding changes the weights that it looks up.
    bounded = nn.Sequential(nn.Embedding(60, 8, max_norm=0.1, sparse=True), nn.Linear(8, 1))
    optimizer = paramhub.torch.HubOptimizer(bounded, paramhub.SGD(lr=0.1))
    bounded(torch.tensor([rank.rank])).sum().backward()
    with pytest.raises(paramhub.MisuseError, match=r"'0.weight' was modified by this process.*max_norm"):
        optimizer.step()
    optimizer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_parameters_that_a_rank_has_modified_are_noticed(team: Team) -> None:
    first, second = team(modified, ranks=2)
    assert all(torch.equal(own, its) for own, its in zip(first, second, strict=True))


def beside_another(rank: Rank) -> list[torch.Tensor]:
    """HubOptimizer for the dense parameters, and DistributedOptimizer for the rows, as the refusals propose."""
    model, expected = make(), make()
    rows = [model.words.weight, model.bags.weight]
    dense = paramhub.torch.HubOptimizer(
        model, paramhub.SGD(lr=0.1, momentum=0.9), params=model.last.parameters()
    )
    sparse = paramhub.torch.DistributedOptimizer(torch.optim.SparseAdam(rows, lr=0.05))
    alone: list[torch.optim.Optimizer] = [
        torch.optim.SparseAdam([expected.words.weight, expected.bags.weight], lr=0.05),
        torch.optim.SGD(expected.last.parameters(), lr=0.1, momentum=0.9),
    ]
    for step in (0, 4, 5):
        for optimizer in (dense, sparse):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.9
        loss_of(model, step, rank.rank).backward()
        for optimizer in (dense, sparse):
            optimizer.step()
        train_alone(expected, alone, rank.size, range(step, step + 1))
    dense.close()
    check_same(model, expected)
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_rows_go_beside_a_hub_optimizer(team: Team) -> None:
    first, second = team(beside_another, ranks=2)
    assert all(torch.equal(own, its) for own, its in zip(first, second, strict=True))


def count_bytes(rank: Rank) -> tuple[int, int]:
    """The bytes that a step sends, and those of the embedding."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(100_000, 64, sparse=True), nn.Linear(64, 1))
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.1))
    sent = []
    for step in range(STEPS):
        before = bytes_sent()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank.rank)
        model(torch.randint(0, 100_000, (128,), generator=generator)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        sent.append(bytes_sent() - before)
    optimizer.close()
    # A connection that ends takes its count with it, and some end soon after the optimizer was made.
    return sorted(sent)[STEPS // 2], model[0].weight.numel() * 4


def test_a_step_sends_rows_and_no_dense_gradient(team: Team) -> None:
    rows = 128 * (64 * 4 + 8)
    for sent, dense in team(count_bytes, ranks=2, env={"PARAMHUB_TRANSPORT": "tcp"}):
        assert 0.9 * rows < sent < 1.5 * rows < dense / 500, (sent, rows, dense)


def dying(rank: Rank) -> str:
    model = make()
    optimizer = hub_optimizer(model, "sgd")
    try:
        for step in range(1000):
            optimizer.zero_grad()
            loss_of(model, step, rank.rank).backward()
            if rank.rank == 1 and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
    except paramhub.JobFailedError as error:
        return str(error)
    raise AssertionError("nothing was noticed")


def test_a_dying_rank_fails_the_others(team: Team) -> None:
    results = team(dying, ranks=3, dies=[1])
    assert isinstance(results[1], Died)
    assert all("rank 1" in message for message in (results[0], results[2])), results
