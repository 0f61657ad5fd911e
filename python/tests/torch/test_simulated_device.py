"""The simulated device itself: its streams, events, memory and operators. Each process that uses it is a team's rank."""

from __future__ import annotations

import copy
import re
import shutil
import time
from typing import Any

import pytest
import torch
from team import Rank, Team
from torch import nn
from training import loss_of, make

PAUSE = 0.3
"""Seconds for which a stream is kept busy, much longer than the host takes for what it does meanwhile."""
ELEMENTS = 1000
TORCH = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
FIRST_TORCH = (2, 15)
"""The interface of devices of others changes from version to version."""


def load() -> Any:
    import simulated_device

    simulated_device.load()
    return torch.get_device_module("simulated")


def device() -> torch.device:
    return torch.device("simulated:0")


def all_are(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def tasks_of_a_stream_run_in_order() -> None:
    streams = load()
    tensor = torch.zeros(ELEMENTS, device=device())
    streams.synchronize()
    began = time.monotonic()
    streams._sleep(PAUSE)
    tensor += 1
    tensor *= 3
    tensor.sub_(1)
    assert time.monotonic() - began < PAUSE and not streams.current_stream().query()
    # This copy waits for the stream.
    assert all_are(tensor.cpu(), 2.0) and time.monotonic() - began >= PAUSE


def an_event_orders_two_streams() -> None:
    streams = load()
    tensor, own, side = torch.zeros(ELEMENTS, device=device()), streams.current_stream(), streams.Stream()
    streams.synchronize()
    streams._sleep(PAUSE)
    tensor += 1
    event = streams.Event()
    # A wait for an event that was not recorded does nothing.
    assert event.query()
    event.wait(side)
    with streams.stream(side):
        too_early = tensor.clone()
    event.record(own)
    event.wait(side)
    with streams.stream(side):
        in_time = tensor.clone()
    assert not event.query()
    event.synchronize()
    assert event.query()
    streams.synchronize()
    assert all_are(too_early, 0.0) and all_are(in_time, 1.0)


def an_event_is_its_last_record() -> None:
    streams = load()
    event, side = streams.Event(), streams.Stream()
    event.record(side)
    streams._sleep(PAUSE)
    event.record(streams.current_stream())
    side.synchronize()
    assert not event.query()
    event.synchronize()
    assert streams.current_stream().query()


def copies_that_are_not_waited_for_are_seen_stale() -> None:
    streams = load()
    host, tensor = torch.zeros(ELEMENTS), torch.ones(ELEMENTS, device=device())
    host.copy_(tensor, non_blocking=True)
    assert all_are(host, 0.0)
    streams.synchronize()
    assert all_are(host, 1.0)
    # The copy keeps what it reads, although nothing else does.
    tensor.copy_(torch.full((ELEMENTS,), 2.0), non_blocking=True)
    with streams.stream(streams.Stream()):
        stale = tensor.cpu()
    assert all_are(stale, 1.0) and all_are(tensor, 2.0)
    # Copies that block wait by themselves.
    assert all_are(host.copy_(tensor), 2.0)


def freed_memory_is_reused_at_once_on_its_stream() -> None:
    streams = load()
    side, out = streams.Stream(), torch.zeros(ELEMENTS, device=device())
    tensor = torch.ones(ELEMENTS, device=device())
    address = tensor.data_ptr()
    streams.synchronize()
    with streams.stream(side):
        streams._sleep(PAUSE)
        out.copy_(tensor)
    del tensor
    with streams.stream(side):
        assert torch.empty(ELEMENTS, device=device()).data_ptr() != address
    new = torch.empty(ELEMENTS, device=device())
    assert new.data_ptr() == address and bool(new.isnan().all())
    side.synchronize()
    # The copy on the other stream has read memory that was not its own any more.
    assert bool(out.isnan().all())


def recorded_memory_is_reused_when_the_other_stream_is_ready() -> None:
    streams = load()
    side, out = streams.Stream(), torch.zeros(ELEMENTS, device=device())
    tensor = torch.ones(ELEMENTS, device=device())
    address = tensor.data_ptr()
    streams.synchronize()
    with streams.stream(side):
        streams._sleep(PAUSE)
        out.copy_(tensor)
    tensor.record_stream(side)
    del tensor
    assert torch.empty(ELEMENTS, device=device()).data_ptr() != address
    side.synchronize()
    assert all_are(out, 1.0)
    blocks = [torch.empty(ELEMENTS, device=device()) for _ in range(2)]
    assert address in [block.data_ptr() for block in blocks]


def many_tensors_are_copied_in_one_call() -> None:
    streams = load()
    sources = [torch.full((size,), float(size), device=device()) for size in (1, 3, ELEMENTS)]
    on_host = [torch.zeros(source.shape) for source in sources]
    torch._foreach_copy_(on_host, sources, non_blocking=True)
    assert all(all_are(tensor, 0.0) for tensor in on_host)
    streams.synchronize()
    assert all(all_are(tensor, len(tensor)) for tensor in on_host)
    back = [torch.zeros_like(source) for source in sources]
    torch._foreach_copy_(back, on_host, non_blocking=True)
    assert all(torch.equal(tensor, source) for tensor, source in zip(back, sources, strict=True))


def tensors_move_between_devices() -> None:
    streams = load()
    tensor = torch.zeros(ELEMENTS, device=device())
    streams._sleep(PAUSE)
    tensor += 1
    moved = tensor.to("simulated:1")
    assert moved.device.index == 1 and all_are(moved, 1.0)
    with pytest.raises(RuntimeError, match="to be on the same device"):
        moved + tensor
    with streams.device(1):
        assert streams.current_device() == 1 and torch.ones(1, device="simulated").device.index == 1


def operators_have_the_hosts_results() -> None:
    load()
    source = torch.Generator().manual_seed(1)
    host = torch.randn(6, 8, generator=source)
    tensor = host.to(device())
    for operator in (
        lambda it: it.T[1:4, ::2] + it[:3, 0],
        lambda it: it[it > 0],
        lambda it: torch.stack([it, 2 * it]).sum((0, 2)),
        lambda it: it.unfold(1, 3, 2).mean(-1),
        lambda it: it.to(torch.bfloat16).float().sort(1).values,
        lambda it: torch.cat([it, it.new_ones(1, 8)]).cumsum(0),
        lambda it: torch.add(it, 1, out=it.new_empty(0)),
        lambda it: it.index_add(0, torch.tensor([0, 3], device=it.device), it.new_ones(2, 8)),
        lambda it: nn.functional.layer_norm(it, (8,)),
        lambda it: torch.linalg.norm(it, dim=1),
    ):
        torch.testing.assert_close(operator(tensor).cpu(), operator(host))
    with pytest.raises(RuntimeError, match="size of tensor"):
        tensor + tensor.T
    torch.manual_seed(3)
    drawn = torch.rand(4, device=device()).cpu()
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))


def an_error_of_a_task_is_raised_later() -> None:
    streams = load()
    tensor = torch.zeros(3, device=device())
    seen = tensor[torch.tensor([5], device=device())]
    with pytest.raises(
        RuntimeError, match="a task of a simulated device has failed: index 5 is out of bounds"
    ):
        seen.cpu()
    with pytest.raises(RuntimeError, match="a task of a simulated device has failed"):
        streams.synchronize()


def a_model_is_trained_as_on_the_host() -> None:
    streams = load()
    on_host = make()
    models = [on_host, copy.deepcopy(on_host).to(device())]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            if model is on_host:
                loss_of(model, step, 0).backward()
                optimizer.step()
            else:
                # The backward pass uses the stream of the forward pass.
                side = streams.Stream()
                side.wait_stream(streams.current_stream())
                with streams.stream(side):
                    streams._sleep(PAUSE / 10)
                    loss_of(lambda images, model=model: model(images.to(device())).cpu(), step, 0).backward()
                    optimizer.step()
                streams.current_stream().wait_stream(side)
    for expected, found in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach())


def sparse_gradients_have_the_hosts_values() -> None:
    load()
    words = nn.Embedding(20, 4, sparse=True)
    on_device = copy.deepcopy(words).to(device())
    numbers = torch.tensor([3, 5, 3])
    for step in range(2):
        for model in (words, on_device):
            if step == 0:
                model.weight.grad = None
            # The second gradient is added to the first one.
            model(numbers.to(model.weight.device)).square().sum().backward()
    assert words.weight.grad is not None and on_device.weight.grad is not None
    found = on_device.weight.grad.coalesce()
    assert found.is_sparse and found.device == device()
    torch.testing.assert_close(found.cpu(), words.weight.grad.coalesce())


def autocast_computes_with_short_numbers() -> None:
    load()
    torch.manual_seed(2)
    layer, inputs = nn.Linear(8, 4).to(device()), torch.randn(3, 8, device=device())
    with torch.autocast("simulated", torch.bfloat16):
        found = layer(inputs)
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16 and layer.weight.grad is not None
    torch.testing.assert_close(found.float(), layer(inputs), rtol=0.02, atol=0.02)


CASES = [
    tasks_of_a_stream_run_in_order,
    an_event_orders_two_streams,
    an_event_is_its_last_record,
    copies_that_are_not_waited_for_are_seen_stale,
    freed_memory_is_reused_at_once_on_its_stream,
    recorded_memory_is_reused_when_the_other_stream_is_ready,
    many_tensors_are_copied_in_one_call,
    tensors_move_between_devices,
    operators_have_the_hosts_results,
    an_error_of_a_task_is_raised_later,
    a_model_is_trained_as_on_the_host,
    sparse_gradients_have_the_hosts_values,
    autocast_computes_with_short_numbers,
]


def in_a_rank(_: Rank, case: str) -> None:
    globals()[case]()


@pytest.mark.skipif(TORCH < FIRST_TORCH, reason="the simulated device is written for a later torch")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the simulated device is built with g++")
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_the_device(team: Team, case: str) -> None:
    # The build is part of the first test that runs.
    team(in_a_rank, case, ranks=1, timeout=600, env={"SIMULATED_COPY_DELAY_MS": str(1000 * PAUSE)})
