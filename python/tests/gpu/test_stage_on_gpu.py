"""The order of a stage's copies and the memory that they use. Two ranks are threads of the tests' process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from device import DEVICE, STREAMS, begin, keep_busy
from workers import TIMEOUT, in_threads

import paramhub
from paramhub.torch._staging import Stage

LARGE = 24_000_000 if DEVICE.type == "cuda" else 100_000
"""Elements of a tensor whose copy between host and device takes milliseconds, in which the device could fill it often. The
simulated device takes as long for any tensor."""
SMALL = 1000
"""Elements of a tensor that is exchanged in a group with others."""
SUM = 3.0
"""The sum of the ranks' gradients, which are 1 and 2."""


def staged(job: paramhub.Job, *elements: int) -> Stage:
    begin()
    tensors = {f"w{number}": torch.zeros(count) for number, count in enumerate(elements)}
    job.init(tensors, paramhub.Sum())
    shapes = [tensor.shape for tensor in tensors.values()]
    return Stage(job._running(), DEVICE, shapes, [torch.float32] * len(shapes))


def all_are(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def on_the_device(value: float) -> torch.Tensor:
    return torch.full((LARGE,), value, device=DEVICE)


def overwrite_free_memory() -> list[torch.Tensor]:
    """Lets the device fill memory that the allocator has free, in blocks of a large tensor's size."""
    return [on_the_device(-1.0) for _ in range(4)]


def a_gradient_that_is_not_there_yet(job: paramhub.Job) -> None:
    stage = staged(job, LARGE)
    side = STREAMS.Stream()
    with STREAMS.stream(side):
        gradient, out = on_the_device(0.0), on_the_device(0.0)
        keep_busy()
        gradient += job.rank + 1
        stage.push_pull([0], [gradient], [out]).wait(TIMEOUT)
        # The host has waited for the exchange, but not for the copy of its result.
        seen = out.clone()
    STREAMS.synchronize()
    assert all_are(seen, SUM)


def a_gradient_that_is_freed_at_once(job: paramhub.Job) -> None:
    stage = staged(job, LARGE)
    out = on_the_device(0.0)
    for _ in range(5):
        gradient = on_the_device(float(job.rank + 1))
        handle = stage.push_pull([0], [gradient], [out])
        del gradient
        blocks = overwrite_free_memory()
        handle.wait(TIMEOUT)
        assert all_are(out, SUM)
        del blocks


def a_gradient_that_is_overwritten_later(job: paramhub.Job) -> None:
    stage = staged(job, LARGE)
    gradient, out = on_the_device(float(job.rank + 1)), on_the_device(0.0)
    handle = stage.push_pull([0], [gradient], [out])
    # By the rules of the stage the caller keeps a gradient as it is until the exchange has ended.
    handle.wait(TIMEOUT)
    gradient.fill_(-1.0)
    assert all_are(out, SUM)


def a_result_that_no_code_waits_for(job: paramhub.Job) -> None:
    stage = staged(job, LARGE)
    gradient = on_the_device(float(job.rank + 1))
    for _ in range(5):
        out = on_the_device(0.0)
        handle = stage.push_pull([0], [gradient], [out])
        del out
        assert handle._ended.wait(TIMEOUT)
        del handle
        # The copy of the result may be under way still, into memory that nothing refers to.
        blocks = overwrite_free_memory()
        STREAMS.synchronize()
        assert all(all_are(block, -1.0) for block in blocks)
        del blocks


def a_result_on_another_stream(job: paramhub.Job) -> None:
    stage = staged(job, LARGE)
    gradient, out = on_the_device(float(job.rank + 1)), on_the_device(0.0)
    handle = stage.push_pull([0], [gradient], [out])
    assert handle._ended.wait(TIMEOUT)
    side = STREAMS.Stream()
    with STREAMS.stream(side):
        handle.wait(TIMEOUT)
        seen = out.clone()
    STREAMS.synchronize()
    assert all_are(seen, SUM)


def two_keys_in_one_request(job: paramhub.Job) -> None:
    stage = staged(job, LARGE, 1)
    gradients = [on_the_device(float(job.rank + 1)), torch.ones(1, device=DEVICE)]
    outs = [torch.empty_like(gradient) for gradient in gradients]
    stage.push_pull([0, 1], gradients, outs).wait(TIMEOUT)
    assert all_are(outs[0], SUM) and all_are(outs[1], 2.0)


def a_group_that_is_handed_over_on_another_stream(job: paramhub.Job) -> None:
    stage = staged(job, SMALL, SMALL)
    gradients = [torch.zeros(SMALL, device=DEVICE) for _ in range(2)]
    side = STREAMS.Stream()
    side.wait_stream(STREAMS.current_stream())
    with STREAMS.stream(side):
        keep_busy()
        for gradient in gradients:
            gradient += job.rank + 1
        handles = [stage.collect(key, gradient, gradient) for key, gradient in enumerate(gradients)]
    # This has the group handed over, and orders only this stream after the results.
    handles[1].wait(TIMEOUT)
    seen = [gradient.clone() for gradient in gradients]
    STREAMS.synchronize()
    assert handles[0] is handles[1] and all(all_are(tensor, SUM) for tensor in seen)


def gradients_on_two_streams(job: paramhub.Job) -> None:
    stage = staged(job, SMALL, SMALL, SMALL)
    gradients = [torch.zeros(SMALL, device=DEVICE) for _ in range(3)]
    side, handles = STREAMS.Stream(), []
    side.wait_stream(STREAMS.current_stream())
    for key in (0, 1, 2):
        with STREAMS.stream(side if key == 1 else STREAMS.current_stream()):
            # The side stream is busy longest, so that its gradient comes after all work on the other one.
            for _ in range(4 if key == 1 else 1):
                keep_busy()
            gradients[key] += job.rank + 1
            handles.append(stage.collect(key, gradients[key], gradients[key]))
    for handle in handles:
        handle.wait(TIMEOUT)
    assert all(all_are(gradient, SUM) for gradient in gradients)


def groups_whose_gradients_are_freed_at_once(job: paramhub.Job) -> None:
    """Each group has many gradients in the allocator's small blocks, which it gives out again as soon as they are free."""
    count = 200
    stage = staged(job, *[SMALL] * count)
    for _ in range(5):
        outs = [torch.zeros(SMALL, device=DEVICE) for _ in range(count)]
        keep_busy()
        handles = []
        for key, out in enumerate(outs):
            handles.append(stage.collect(key, torch.full((SMALL,), job.rank + 1.0, device=DEVICE), out))
        stage.hand_over()
        blocks = [torch.full((SMALL,), -1.0, device=DEVICE) for _ in range(4 * count)]
        for handle in handles:
            handle.wait(TIMEOUT)
        assert all(all_are(out, SUM) for out in outs)
        del blocks


def results_of_a_group_that_no_code_waits_for(job: paramhub.Job) -> None:
    stage = staged(job, LARGE, SMALL)
    gradients = [on_the_device(float(job.rank + 1)), torch.ones(SMALL, device=DEVICE)]
    for _ in range(3):
        outs = [torch.empty_like(gradient) for gradient in gradients]
        handles = [stage.collect(key, gradients[key], outs[key]) for key in (1, 0)]
        stage.hand_over()
        del outs
        assert all(handle._ended.wait(TIMEOUT) for handle in handles)
        del handles
        blocks = [*overwrite_free_memory(), *(torch.full((SMALL,), -1.0, device=DEVICE) for _ in range(50))]
        STREAMS.synchronize()
        assert all(all_are(block, -1.0) for block in blocks)
        del blocks


CASES = [
    a_gradient_that_is_not_there_yet,
    a_gradient_that_is_freed_at_once,
    a_gradient_that_is_overwritten_later,
    a_result_that_no_code_waits_for,
    a_result_on_another_stream,
    two_keys_in_one_request,
    a_group_that_is_handed_over_on_another_stream,
    gradients_on_two_streams,
    groups_whose_gradients_are_freed_at_once,
    results_of_a_group_that_no_code_waits_for,
]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("case", CASES)
def test_copies_are_ordered(hub: paramhub.Hub, case: Callable[[paramhub.Job], None], transport: str) -> None:
    in_threads(hub, 2, case, transport=transport)


def test_a_callback_finds_the_result_on_its_stream(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job, LARGE)
        gradient, out = on_the_device(float(job.rank + 1)), on_the_device(0.0)
        seen: list[torch.Tensor] = []
        handle = stage.push_pull([0], [gradient], [out])
        handle.add_done_callback(lambda _: seen.append(out.clone()))
        handle.wait(TIMEOUT)
        handle.add_done_callback(lambda _: seen.append(out.clone()))
        while len(seen) < 2:
            time.sleep(0.001)
        STREAMS.synchronize()
        assert all(all_are(tensor, SUM) for tensor in seen)

    in_threads(hub, 2, work)
