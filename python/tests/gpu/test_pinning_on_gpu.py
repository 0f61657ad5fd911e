"""Host memory of a stage is pinned as long as the stage lives, and no longer."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from device import DEVICE, begin, loss_of, make
from team import Rank, Team
from training import difference, parameters_of
from workers import TIMEOUT, in_threads

import paramhub
from paramhub.torch import _pinning
from paramhub.torch._staging import Stage

ON_CUDA = pytest.mark.skipif(DEVICE.type != "cuda", reason="only CUDA pins memory")
SIZES = [1, 1000, 100_000, 3]


def staged(job: paramhub.Job, codec: str | None = None) -> Stage:
    begin()
    job.init({f"w{size}": torch.zeros(size) for size in SIZES}, paramhub.Sum(), codec=codec)
    shapes = [torch.Size([size]) for size in SIZES]
    dtypes = [torch.float32] * len(shapes)
    return Stage(job._running(), DEVICE, shapes, dtypes, is_encoded=codec is not None)


def exchange(stage: Stage, rank: int) -> None:
    gradients = [torch.full((size,), rank + 1.0, device=DEVICE) for size in SIZES]
    outs = [torch.empty_like(gradient) for gradient in gradients]
    stage.push_pull(list(range(len(SIZES))), gradients, outs).wait(TIMEOUT)
    assert all(bool((out == 3.0).all()) for out in outs)


@ON_CUDA
@pytest.mark.parametrize("codec", [None, "bf16"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_all_host_memory_is_pinned(
    hub: paramhub.Hub, transport: str, codec: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job, codec)
        # A registration that the device has refused would fail the next kernel.
        torch.ones(10, device=DEVICE)
        exchange(stage, job.rank)
        assert [tensor.is_pinned() for tensor in (*stage._gradients, *stage._parameters)] == [True] * 2 * len(
            SIZES
        )

    in_threads(hub, 2, work, transport=transport)
    assert "refuses" not in capfd.readouterr().err


@ON_CUDA
def test_the_arena_is_released_with_the_stage(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        stage = staged(job)
        exchange(stage, job.rank)
        kept = stage._parameters[2]
        assert kept.is_pinned()
        stage.close()
        del stage
        # A request that has just ended may still refer to the stage for a moment.
        deadline = time.monotonic() + TIMEOUT
        while kept.is_pinned() and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert not kept.is_pinned()

    in_threads(hub, 2, work, transport="shm")


@ON_CUDA
def test_a_refused_registration_fails_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    pinned = torch.zeros(10_000, pin_memory=True)
    assert _pinning.register([pinned], DEVICE) == []
    assert "refuses to register" in capfd.readouterr().err
    assert float(torch.ones(10, device=DEVICE).sum()) == 10.0
    unknown = torch.zeros(10_000)
    _pinning.release([(unknown.data_ptr(), 40_000)], [unknown], DEVICE, [])
    assert float(torch.ones(10, device=DEVICE).sum()) == 10.0


def opened_again(rank: Rank) -> list[bytes]:
    """Each of these jobs has an arena of its own, which may be mapped where one before it was. Returns the parameters at the end
    of each, which all ranks have alike."""
    import paramhub.torch

    begin()
    model = make()
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.05, momentum=0.9))
    ends = []
    for number in range(8):
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, 3 * number + step, rank.rank).backward()
            optimizer.step()
        optimizer.synchronize()
        found = parameters_of(model)
        if number % 2:
            optimizer.broadcast_parameters()
        else:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.synchronize()
        assert difference(parameters_of(model), found) == 0.0
        ends.append(b"".join(tensor.cpu().numpy().tobytes() for tensor in found))
        gc.collect()
    optimizer.close()
    return ends


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_job_that_is_opened_again_has_the_same_values(team: Team, transport: str) -> None:
    first, second = team(opened_again, ranks=2, env={"PARAMHUB_TRANSPORT": transport})
    assert first == second and len(set(first)) == 8
