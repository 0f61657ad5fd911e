"""Groups of gradients that a stage exchanges together. The device is the CPU, whose streams do nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from team import Rank, Team
from workers import TIMEOUT, in_threads

import paramhub
from paramhub.torch import _staging
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._staging import Stage

ELEMENTS = 100
SUM = 3.0
"""The sum of the ranks' gradients, which are 1 and 2."""


class FailingEvent(torch.cpu.Event):
    def synchronize(self) -> None:
        raise RuntimeError("the device is lost")


class RefusedEvent(torch.cpu.Event):
    def record(self, stream: torch.cpu.Stream | None = None) -> None:
        raise RuntimeError("the device is lost")


def staged(job: paramhub.Job, keys: int = 3) -> Stage:
    job.init({f"w{key}": torch.zeros(ELEMENTS) for key in range(keys)}, paramhub.Sum())
    return Stage(job._running(), torch.device("cpu"), [torch.Size([ELEMENTS])] * keys, [torch.float32] * keys)


class Collected:
    """Gradients that were collected in the order of these keys."""

    def __init__(self, job: paramhub.Job, stage: Stage, keys: list[int]) -> None:
        gradients = {key: torch.full((ELEMENTS,), job.rank + 1.0) for key in keys}
        self.outs = {key: torch.zeros(ELEMENTS) for key in keys}
        self.handles = {key: stage.collect(key, gradients[key], self.outs[key]) for key in keys}

    def has(self, key: int, value: float) -> bool:
        return bool((self.outs[key] == value).all())


def has_ended(handle: StagedHandle) -> bool:
    """Returns whether the handle ends, without a question to it, which would have its group handed over."""
    return handle._ended.wait(TIMEOUT)


def test_small_gradients_are_one_request_and_large_ones_go_at_once(
    hub: paramhub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_staging, "GROUP_BYTES", 2 * 4 * ELEMENTS)

    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        requests: list[list[int]] = []
        native = stage._job

        def push_pull(keys: list[int], *others: object) -> paramhub.Handle:
            requests.append(keys)
            return native.push_pull(keys, *others)

        stage._job = SimpleNamespace(push_pull=push_pull)
        collected = Collected(job, stage, [2, 0, 1])
        assert has_ended(collected.handles[2]) and has_ended(collected.handles[0])
        # The last one waits for others.
        assert requests == [[2, 0]] and collected.handles[1].is_collecting
        collected.handles[1].wait(TIMEOUT)
        assert requests == [[2, 0], [1]]
        assert all(collected.has(key, 1.0) for key in range(3))

    in_threads(hub, 1, work)


ASKS: list[Callable[[StagedHandle], object]] = [
    lambda handle: handle.wait(TIMEOUT),
    lambda handle: handle.done(),
    lambda handle: handle.exception(),
    lambda handle: handle.await_submission(),
    lambda handle: handle.add_done_callback(lambda _: None),
]


@pytest.mark.parametrize("ask", ASKS)
def test_a_caller_that_asks_for_the_end_has_the_group_handed_over(
    hub: paramhub.Hub, ask: Callable[[StagedHandle], object]
) -> None:
    def work(job: paramhub.Job) -> None:
        collected = Collected(job, staged(job), [0, 1])
        assert not collected.handles[0]._submitted.is_set()
        ask(collected.handles[1])
        assert has_ended(collected.handles[0]) and collected.has(0, 1.0) and collected.has(1, 1.0)
        assert collected.handles[0].finished_ns >= collected.handles[0].submitted_ns > 0

    in_threads(hub, 1, work)


def test_a_group_counts_as_a_step_when_it_is_submitted(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        collected = Collected(job, stage, [0, 1])
        assert stage._job.next_step(0) == 0
        collected.handles[1].await_submission()
        assert [stage._job.next_step(key) for key in range(3)] == [1, 1, 0]

    in_threads(hub, 1, work)


def test_the_end_of_backward_hands_over(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        weights = [torch.ones(ELEMENTS, requires_grad=True) for _ in range(3)]
        handles: list[StagedHandle] = []
        for key, weight in enumerate(weights):
            weight.register_post_accumulate_grad_hook(
                lambda held, key=key: handles.append(stage.collect(key, held.grad, held.grad))
            )

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: object, gradient: torch.Tensor) -> None:
                raise RuntimeError("this pass fails")

        # The first weight's gradient is complete before the pass fails.
        with pytest.raises(RuntimeError, match="this pass fails"):
            (Fails.apply(weights[1] * 1.0) + weights[0]).sum().backward()
        left = len(handles)
        weights[2].sum().backward()
        assert len(handles) == left + 1 and all(has_ended(handle) for handle in handles)

    in_threads(hub, 1, work)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_groups_differ_between_ranks(hub: paramhub.Hub, transport: str, first: int) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        for _ in range(5):
            if job.rank == 0:
                collected = [Collected(job, stage, [0, 1, 2])]
            else:
                collected = [Collected(job, stage, [2, 1])]
                stage.hand_over()
                collected.append(Collected(job, stage, [0]))
            handles = {key: handle for part in collected for key, handle in part.handles.items()}
            # This rank waits for a group when the others are not handed over yet, and another rank may wait for those.
            for key in (first, 0, 1, 2):
                handles[key].wait(TIMEOUT)
            assert all(part.has(key, SUM) for part in collected for key in part.outs)

    in_threads(hub, 2, work, transport=transport)


def test_a_group_ends_with_the_last_of_its_exchanges(hub: paramhub.Hub) -> None:
    asked = threading.Event()

    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        if job.rank == 0:
            collected = Collected(job, stage, [0, 1])
            stage.hand_over()
            collected.handles[0].await_submission()
            # The other rank has not sent the second gradient, although it may have the sum of the first.
            assert not collected.handles[0].done() and not collected.handles[1].done()
            assert collected.has(0, 0.0) and collected.has(1, 0.0)
            asked.set()
            collected.handles[0].wait(TIMEOUT)
            assert collected.has(0, SUM) and collected.has(1, SUM)
        else:
            alone = Collected(job, stage, [0])
            alone.handles[0].wait(TIMEOUT)
            assert asked.wait(TIMEOUT)
            Collected(job, stage, [1]).handles[1].wait(TIMEOUT)

    in_threads(hub, 2, work)


@pytest.mark.parametrize("event", [FailingEvent, RefusedEvent])
def test_a_failure_reaches_each_handle_of_the_group(hub: paramhub.Hub, event: type[torch.cpu.Event]) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        streams = stage.streams._module
        stage.streams._module = SimpleNamespace(**{**vars(streams), "Event": event})
        failed = Collected(job, stage, [0, 1])
        for handle in failed.handles.values():
            with pytest.raises(RuntimeError, match="the device is lost"):
                handle.wait(TIMEOUT)
            assert handle.done() and handle.exception() is not None
            handle.await_submission()
        stage.streams._module = streams
        later = Collected(job, stage, [0, 1])
        later.handles[0].wait(TIMEOUT)
        assert later.has(0, 1.0) and later.has(1, 1.0)

    in_threads(hub, 1, work)


def test_a_group_ends_if_the_stage_is_closed_before(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        collected = Collected(job, stage, [0, 1])
        stage.close()
        for handle in collected.handles.values():
            with pytest.raises(paramhub.MisuseError, match="closed before"):
                handle.wait(TIMEOUT)
            handle.await_submission()

    in_threads(hub, 1, work)


def test_what_a_closed_stage_is_given_ends(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        stage.close()
        for handle in Collected(job, stage, [0, 1]).handles.values():
            with pytest.raises(paramhub.MisuseError, match="closed before"):
                handle.wait(TIMEOUT)

    in_threads(hub, 1, work)


def by_hub_optimizer(rank: Rank) -> list[bool]:
    """Whether the exchanges end of each way in which gradients leave, although the program does nothing more."""
    import paramhub.torch
    from paramhub.torch import HubOptimizer

    HubOptimizer._stages_all = True
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.1))
    inputs, found = torch.ones(2, 5), []

    def all_end() -> bool:
        return all(e.handle is not None and has_ended(e.handle) for e in optimizer._exchanges)

    model(inputs).sum().backward()
    found.append(all_end())
    optimizer.step()
    optimizer.zero_grad()
    with optimizer.no_sync():
        model(inputs).sum().backward()
    optimizer.step()
    found.append(all_end())
    optimizer.zero_grad()
    # One gradient has left when the pass fails, and zeros leave for the others.
    refusing = model[0].weight.register_hook(lambda _: 1 / 0)
    try:
        model(inputs).sum().backward()
    except ZeroDivisionError:
        refusing.remove()
    found.append(optimizer._step.was_interrupted)
    optimizer.zero_grad()
    found.append(all_end())
    optimizer.close()
    return found


def by_distributed_optimizer(rank: Rank) -> list[bool]:
    import paramhub.torch
    from paramhub.torch import _gradients

    _gradients.needs_stage = lambda device: True
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 3))
    optimizer = paramhub.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    model(torch.ones(2, 5)).sum().backward()
    gradients = optimizer._exchange._gradients
    found = [gradient.handle is not None and has_ended(gradient.handle) for gradient in gradients]
    optimizer.step()
    return found


@pytest.mark.parametrize("way", [by_hub_optimizer, by_distributed_optimizer])
def test_nothing_is_held_back(team: Team, way: Callable[[Rank], list[bool]]) -> None:
    assert team(way, ranks=2) == [[True] * 4] * 2
