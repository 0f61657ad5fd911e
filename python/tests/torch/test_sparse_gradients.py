"""`DistributedOptimizer` with the sparse gradients of embeddings, compared with torch's optimizers on one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tcp_traffic import bytes_sent
from team import Died, Rank, Team
from torch import nn

STEPS = 4
Batches = Callable[[int, int], torch.Tensor | None]
"""The numbers that a rank looks up in a step, by step and rank; None if it uses the embedding in no way."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(60, 8, sparse=True)
        self.bags = nn.EmbeddingBag(60, 8, mode="sum", sparse=True)
        self.last = nn.Linear(8, 3)

    def forward(self, numbers: torch.Tensor | None) -> torch.Tensor:
        hidden = self.last.weight.sum(0).unsqueeze(0)
        if numbers is not None:
            hidden = hidden + self.words(numbers).sum(1) + self.bags(numbers)
        return self.last(torch.tanh(hidden))


def some(step: int, rank: int) -> torch.Tensor:
    """The ranks look up different numbers of rows, and some rows several times."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 60, (2 + 3 * rank, 4), generator=generator)


def on_one_rank(step: int, rank: int) -> torch.Tensor | None:
    """No rank in the first step, then one rank after the other, which has no row at all in the last step."""
    if step == 0 or step % 2 != rank % 2:
        return None
    return some(step, rank)[: 0 if step == STEPS - 1 else None]


def optimizers_of(model: Net, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    rows = [model.words.weight, model.bags.weight]
    return [torch.optim.SparseAdam(rows, lr=0.05), torch.optim.Adam(model.last.parameters(), lr=0.05)]


def gradient(model: nn.Module, batches: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The gradients of several passes, added up."""
    for parameter in model.parameters():
        parameter.grad = None
    for numbers in batches:
        model(numbers).square().sum().backward()
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def train_alone(kind: str, batches: Batches, size: int, passes: int, divisor: int) -> list[torch.Tensor]:
    model = Net()
    optimizers = optimizers_of(model, kind)
    has_come: set[int] = set()
    for step in range(STEPS):
        each_rank = [
            gradient(model, [batches(step * passes + each, rank) for each in range(passes)])
            for rank in range(size)
        ]
        for number, parameter in enumerate(model.parameters()):
            found = [gradients[number] for gradients in each_rank if gradients[number] is not None]
            # SparseAdam has sparse gradients only, so theirs need not come to be known.
            if found or number in has_come or kind != "sgd":
                has_come.add(number)
                rows = torch.zeros_like(parameter).to_sparse(1) if number < 2 else torch.zeros_like(parameter)
                parameter.grad = sum(found, start=rows) / divisor  # type: ignore[assignment]
            else:
                # No rank knows yet of what kind this gradient is.
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(
    rank: Rank, kind: str, batches: Batches, passes: int = 1, op: str = "Average", **options: Any
) -> list[torch.Tensor]:
    import paramhub.torch as hvd

    hvd.init()
    model = Net()
    wrapped = [
        hvd.DistributedOptimizer(each, op=getattr(hvd, op), backward_passes_per_step=passes, **options)
        for each in optimizers_of(model, kind)
    ]
    for step in range(STEPS):
        for each in wrapped:
            each.zero_grad()
        for number in range(passes):
            model(batches(step * passes + number, rank.rank)).square().sum().backward()
        for each in wrapped:
            each.step()
        if step > 0:
            for embedding in (model.words, model.bags):
                assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
    expected = train_alone(kind, batches, rank.size, passes, rank.size if op == "Average" else 1)
    found = [parameter.detach() for parameter in model.parameters()]
    for own, its in zip(found, expected, strict=True):
        torch.testing.assert_close(own, its, rtol=1e-4, atol=1e-5)
    return found


def same_everywhere(results: list[list[torch.Tensor]]) -> None:
    for other in results[1:]:
        assert all(torch.equal(own, its) for own, its in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
@pytest.mark.parametrize("batches", [some, on_one_rank])
def test_it_trains_as_one_process_does(team: Team, kind: str, batches: Batches) -> None:
    same_everywhere(team(train, kind, batches, ranks=3))


def with_options(rank: Rank) -> list[torch.Tensor]:
    train(rank, "sgd", some, 2)
    train(rank, "sparse adam", on_one_rank, 2, "Sum")
    train(rank, "sgd", some, gradient_predivide_factor=2.0)
    return train(rank, "sparse adam", some)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_options_of_horovod(team: Team, transport: str) -> None:
    same_everywhere(team(with_options, ranks=2, env={"PARAMHUB_TRANSPORT": transport}))


def other_gradients(rank: Rank) -> None:
    """Gradients that are sparse on one rank only, or in other dimensions, or come from no module."""
    import paramhub.torch as hvd

    hvd.init()
    tied, gathered, half = (nn.Parameter(torch.ones(6, 2)) for _ in range(3))
    half.data = half.data.bfloat16()
    vector = nn.Parameter(torch.ones(4))
    named = [("tied", tied), ("gathered", gathered), ("half", half), ("vector", vector)]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named, compression=hvd.Compression.fp16)
    for step in range(3):
        optimizer.zero_grad()
        own = torch.tensor([rank.rank, rank.rank + 1])
        loss = nn.functional.embedding(own, tied, sparse=True).sum()
        if (step + rank.rank) % 2:
            loss = loss + tied[5].sum()
        places = own[:1].expand(1, 2)
        loss = loss + torch.gather(gathered, 0, places, sparse_grad=True).sum()
        loss = loss + nn.functional.embedding(own, half, sparse=True).sum().float()
        loss = loss + torch.gather(vector, 0, own, sparse_grad=True).sum()
        loss.backward()
        optimizer.synchronize()
        tails = [0.5, 1.0, 0.5, 0.0, 0.0]
        assert tied.grad.to_dense().tolist() == [[each] * 2 for each in [*tails[:3], 0.0, 0.0, 0.5]], step
        assert gathered.grad.is_sparse
        assert gathered.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
        assert half.grad.is_sparse and half.grad.to_dense()[:, 1].tolist() == [*tails, 0.0]
        assert vector.grad.to_dense().tolist() == tails[:4]
    # Frozen meanwhile: it takes part, and is left alone.
    optimizer.zero_grad()
    gathered.requires_grad_(rank.rank == 1)
    gathered_rows = torch.gather(gathered, 0, torch.full((1, 2), rank.rank), sparse_grad=True).sum()
    (gathered_rows + tied.sum() + vector.sum() + half.sum()).backward()
    optimizer.step()
    if rank.rank == 1:
        assert gathered.grad.to_dense()[:, 0].tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    else:
        assert gathered.grad is None


def test_gradients_of_other_kinds(team: Team) -> None:
    team(other_gradients, ranks=2)


def misuse(rank: Rank) -> None:
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    model = nn.Embedding(5, 2, sparse=True)
    numbers = torch.tensor([rank.rank])

    def fresh() -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    optimizer = fresh()
    model(numbers).sum().backward()
    with pytest.raises(paramhub.MisuseError, match="gradients are being exchanged"):
        optimizer.zero_grad()
    with pytest.raises(paramhub.MisuseError, match="in more than 1 backward passes"):
        model(numbers).sum().backward()
    with (
        pytest.raises(paramhub.MisuseError, match=r"call optimizer.synchronize\(\) first"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    with pytest.raises(paramhub.MisuseError, match="backward_passes_per_step changed while"):
        optimizer.set_backward_passes_per_step(2)
    with pytest.raises(paramhub.MisuseError, match="between backward and step"):
        hvd.join()
    del optimizer

    optimizer = fresh()
    model.zero_grad()
    model(numbers).sum().backward()
    model.weight.grad.mul_(2.0)
    with pytest.raises(
        paramhub.MisuseError, match=r"'allreduce.noname.0.0': changed after the gradient had left"
    ):
        optimizer.step()
    # As the message says.
    optimizer.zero_grad()
    model(numbers).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]
    model.weight.grad.mul_(2.0)
    before = model.weight.detach().clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = (before - model.weight.detach())[:, 0]
    torch.testing.assert_close(moved, torch.tensor([0.1, 0.1, 0.0, 0.0, 0.0]))
    # Gradients that follow a synchronize() without a step are exchanged, too.
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.synchronize()
    model(numbers).sum().backward()
    optimizer.step()
    assert model.weight.grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_misuse_is_refused_with_a_reason(team: Team) -> None:
    team(misuse, ranks=2)


def run_out_of_data(rank: Rank, kind: str) -> list[torch.Tensor]:
    """Rank r has r batches more than rank 0, which joins before any gradient of the embeddings has come."""
    import paramhub.torch as hvd

    hvd.init()
    model = Net()
    wrapped = [hvd.DistributedOptimizer(each) for each in optimizers_of(model, kind)]
    for step in range(1 + rank.rank):
        for each in wrapped:
            each.zero_grad()
        model(some(step, rank.rank) if step else None).square().sum().backward()
        alone = [None if each.grad is None else each.grad.clone().to_dense() for each in model.parameters()]
        for each in wrapped:
            each.step()
        if step == rank.size - 1:
            # The others gave nothing, and the mean is still that of all ranks.
            for parameter, own in zip(model.parameters(), alone, strict=True):
                assert parameter.grad is not None and own is not None
                torch.testing.assert_close(parameter.grad.to_dense(), own / rank.size)
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), last)
    # All go on together.
    for each in wrapped:
        each.zero_grad()
    model(some(9, rank.rank)).square().sum().backward()
    for each in wrapped:
        each.step()
    return [parameter.grad.to_dense() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
def test_ranks_that_have_joined_serve_the_others(team: Team, kind: str) -> None:
    same_everywhere(team(run_out_of_data, kind, ranks=3))


def in_process_sets(rank: Rank) -> None:
    import paramhub.torch as hvd

    hvd.init()
    later = hvd.add_process_set([1, 2])
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=later)
    for _ in range(2):
        optimizer.zero_grad()
        if rank.rank < 2:
            model(torch.tensor([rank.rank])).sum().backward()
        optimizer.step()
        found = model.weight.grad.to_dense()[:, 0].tolist()
        assert found == ([1.0, 0.0, 0.0, 0.0, 0.0] if rank.rank == 0 else [0.0, 0.5, 0.0, 0.0, 0.0])


def test_a_process_set_exchanges_among_its_ranks(team: Team) -> None:
    team(in_process_sets, ranks=3)


def count_bytes(rank: Rank, kind: str) -> tuple[int, int]:
    """The bytes that a step sends, and those of the dense gradient."""
    import paramhub.torch as hvd

    hvd.init()
    model = nn.Embedding(100_000, 64, sparse=True)
    optimizer: Any = (torch.optim.SGD if kind == "sgd" else torch.optim.SparseAdam)(
        model.parameters(), lr=0.1
    )
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.barrier()
    sent = []
    for step in range(STEPS):
        before = bytes_sent()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank.rank)
        model(torch.randint(0, 100_000, (128,), generator=generator)).sum().backward()
        optimizer.step()
        sent.append(bytes_sent() - before)
    hvd.barrier()
    # The first step connects the ranks. A connection that ends takes its count with it.
    return sorted(sent)[STEPS // 2], model.weight.numel() * 4


@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
def test_a_step_sends_rows_and_no_dense_gradient(team: Team, kind: str) -> None:
    for sent, dense in team(count_bytes, kind, ranks=2, env={"PARAMHUB_TRANSPORT": "tcp"}):
        rows = 128 * (64 * 4 + 8)
        assert 0.9 * rows < sent < 1.5 * rows < dense / 500, (sent, rows, dense)


def dying(rank: Rank, kind: str) -> str:
    import paramhub
    import paramhub.torch as hvd

    hvd.init()
    model = nn.Embedding(5, 2, sparse=True)
    optimizer: Any = (torch.optim.SGD if kind == "sgd" else torch.optim.SparseAdam)(
        model.parameters(), lr=0.1
    )
    optimizer = hvd.DistributedOptimizer(optimizer)
    try:
        for step in range(1000):
            optimizer.zero_grad()
            model(torch.tensor([rank.rank])).sum().backward()
            if rank.rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
    except paramhub.JobFailedError as error:
        assert error.culprit == 1
        return str(error)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("kind", ["sgd", "sparse adam"])
def test_a_dying_rank_fails_the_others(team: Team, kind: str) -> None:
    results = team(dying, kind, ranks=3, dies=[1])
    assert isinstance(results[1], Died)
    assert all("rank 1" in message for message in (results[0], results[2])), results
