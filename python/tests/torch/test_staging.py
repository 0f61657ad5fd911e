"""Copies of device tensors that fail. The device is the CPU, whose streams do nothing."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from workers import TIMEOUT, in_threads

import paramhub
from paramhub.torch._pinning import pages_of
from paramhub.torch._staged_exchanges import _end_threads
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._staging import Stage


class FailingEvent(torch.cpu.Event):
    def synchronize(self) -> None:
        raise RuntimeError("the device is lost")


def staged(job: paramhub.Job) -> tuple[Stage, torch.Tensor]:
    gradient = torch.ones(100)
    job.init({"w": gradient})
    return Stage(job._running(), gradient.device, [gradient.shape], [gradient.dtype]), gradient


def exchange(stage: Stage, gradient: torch.Tensor) -> StagedHandle:
    return stage.push_pull([0], [gradient], [gradient])


def test_a_handle_ends_if_the_copy_to_the_host_fails(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage, gradient = staged(job)
        streams = stage.streams._module
        stage.streams._module = SimpleNamespace(**{**vars(streams), "Event": FailingEvent})
        failed = exchange(stage, gradient)
        with pytest.raises(RuntimeError, match="the device is lost"):
            failed.wait(TIMEOUT)
        stage.streams._module = streams
        exchange(stage, gradient).wait(TIMEOUT)

    in_threads(hub, 1, work)


def test_a_handle_ends_if_the_copy_of_a_result_fails(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage, gradient = staged(job)
        failed = stage.push_pull([0], [gradient], [torch.empty(3)])
        with pytest.raises(RuntimeError, match="size of tensor"):
            failed.wait(TIMEOUT)
        assert failed.exception() is not None
        exchange(stage, gradient).wait(TIMEOUT)

    in_threads(hub, 1, work)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_fails_does_not_keep_later_requests_from_ending(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage, gradient = staged(job)
        may_fail, called = threading.Event(), threading.Event()

        def request() -> paramhub.Handle:
            may_fail.wait(TIMEOUT)
            raise RuntimeError("refused")

        def fails(handle: StagedHandle) -> None:
            raise ValueError

        failed = stage.exchange([], request, [])
        failed.add_done_callback(fails)
        failed.add_done_callback(lambda _: called.set())
        may_fail.set()
        assert called.wait(TIMEOUT)
        exchange(stage, gradient).wait(TIMEOUT)

    in_threads(hub, 1, work)


def test_the_thread_of_a_stage_ends_when_nothing_refers_to_the_stage(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage, gradient = staged(job)
        exchange(stage, gradient).wait(TIMEOUT)
        thread = stage._exchanges._thread
        assert thread is not None and thread.is_alive()
        del stage
        gc.collect()
        thread.join(TIMEOUT)
        assert not thread.is_alive()

    in_threads(hub, 1, work)


def test_the_thread_of_a_stage_ends_before_the_interpreter(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage, gradient = staged(job)
        exchange(stage, gradient).wait(TIMEOUT)
        _end_threads()
        assert stage._exchanges._thread is not None and not stage._exchanges._thread.is_alive()

    in_threads(hub, 1, work)


def test_a_page_is_pinned_once() -> None:
    assert pages_of([]) == [] and pages_of([(4096, 0)]) == []
    # Within a page, over its end, on the next one; in any order, and a long range around a short one.
    assert pages_of([(4100, 8)], 4096) == [(4096, 4096)]
    assert pages_of([(8190, 4)], 4096) == [(4096, 8192)]
    assert pages_of([(8200, 4), (4096, 4)], 4096) == [(4096, 8192)]
    assert pages_of([(4096, 20_000), (8192, 10)], 4096) == [(4096, 20_480)]
    # A page between them that neither needs is left out.
    assert pages_of([(4096, 4), (12_288, 4)], 4096) == [(4096, 4096), (12_288, 4096)]
