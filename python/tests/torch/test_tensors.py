"""torch's tensors in the core package, which gets them through DLPack."""

from __future__ import annotations

import gc
import threading

import numpy
import pytest
import torch
from workers import TIMEOUT, in_threads, new_job

import paramhub

TRANSPORTS = ["tcp", "shm"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_of_every_type_are_exchanged_in_place(
    hub: paramhub.Hub, transport: str, dtype: torch.dtype
) -> None:
    def work(job: paramhub.Job) -> torch.Tensor:
        gradient = torch.full((17, 1000), 1.0 + job.rank, dtype=dtype)
        out = torch.empty_like(gradient)
        address = out.data_ptr()
        job.init({"w": gradient})
        job.push_pull("w", gradient, out=out).wait(TIMEOUT)
        assert out.data_ptr() == address
        return out

    for out in in_threads(hub, 2, work, transport=transport):
        assert out.dtype == dtype
        assert torch.equal(out, torch.full_like(out, 1.5))


def test_bf16_sums_are_those_of_f32_rounded_once(hub: paramhub.Hub) -> None:
    def gradient(rank: int) -> torch.Tensor:
        return torch.randn(10_000, generator=torch.Generator().manual_seed(rank)).bfloat16()

    def work(job: paramhub.Job) -> torch.Tensor:
        mine = gradient(job.rank)
        job.init({"w": mine}, optimizer=paramhub.Sum(), reproducible=True)
        job.push_pull("w", mine, out=mine).wait(TIMEOUT)
        return mine

    expected = (gradient(0).float() + gradient(1).float() + gradient(2).float()).bfloat16()
    for out in in_threads(hub, 3, work):
        assert torch.equal(out, expected)


OPTIMIZERS = {
    "sgd": (paramhub.SGD(lr=0.1, momentum=0.9, weight_decay=0.01), "SGD", {"momentum": 0.9}),
    "nesterov": (paramhub.Nesterov(lr=0.1, weight_decay=0.01), "SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": (paramhub.Adam(lr=0.1, weight_decay=0.01), "Adam", {}),
    "adamw": (paramhub.AdamW(lr=0.1, weight_decay=0.01), "AdamW", {}),
}


@pytest.mark.parametrize("optimizers", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_hubs_optimizers_are_torchs(
    hub: paramhub.Hub, optimizers: tuple[paramhub.Optimizer, str, dict[str, object]]
) -> None:
    ours, name, options = optimizers
    steps = 10

    def gradients(step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(3000, generator=generator) for _ in range(2)]

    def work(job: paramhub.Job) -> torch.Tensor:
        weight = torch.linspace(-1, 1, 3000)
        job.init({"w": weight}, optimizer=ours)
        for step in range(steps):
            job.push_pull("w", gradients(step)[job.rank], out=weight).wait(TIMEOUT)
        return weight

    weight = torch.nn.Parameter(torch.linspace(-1, 1, 3000))
    theirs = getattr(torch.optim, name)([weight], lr=0.1, weight_decay=0.01, **options)
    for step in range(steps):
        weight.grad = torch.stack(gradients(step)).mean(0)
        theirs.step()
    for out in in_threads(hub, 2, work):
        torch.testing.assert_close(out, weight.detach(), rtol=1e-5, atol=1e-6)


BAD = {
    "transposed": (lambda: torch.zeros(3, 2).t(), "not contiguous"),
    "strided": (lambda: torch.zeros(2, 6)[:, ::2], "not contiguous"),
    "double": (lambda: torch.zeros(2, 3, dtype=torch.float64), "use f32, f16 or bf16"),
    "integers": (lambda: torch.zeros(2, 3, dtype=torch.int32), "use f32, f16 or bf16"),
    "complex": (lambda: torch.zeros(1, 3, dtype=torch.complex64), "use f32, f16 or bf16"),
    "too few": (lambda: torch.zeros(2, 2), "24 bytes of f32, but one of 16 bytes of f32"),
    "as many bytes": (
        lambda: torch.zeros(12, dtype=torch.bfloat16),
        "24 bytes of f32, but one of 24 bytes of bf16",
    ),
    "a parameter": (lambda: torch.nn.Parameter(torch.zeros(2, 3)), "lends no memory.*detach"),
    "sparse": (lambda: torch.zeros(2, 3).to_sparse(), "lends no memory"),
    "on a device": (lambda: torch.zeros(2, 3, device="meta"), "lends no memory|device"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_tensors_that_do_not_fit_are_refused(hub: paramhub.Hub, bad: tuple[object, str]) -> None:
    make, reason = bad
    with paramhub.connect(*new_job(hub, 1), 0) as job:
        job.init({"w": torch.zeros(2, 3)})
        with pytest.raises(paramhub.MisuseError, match=reason):
            job.push("w", make())
        job.push("w", torch.zeros(2, 3)).wait(TIMEOUT)


def test_a_conjugate_or_negative_view_is_refused_or_right(hub: paramhub.Hub) -> None:
    """torch has lazy signs: the memory of such a tensor does not have its values."""
    view = torch.ones(4, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    with paramhub.connect(*new_job(hub, 1), 0) as job:
        job.init({"w": torch.zeros(4)})
        with pytest.raises(paramhub.MisuseError):
            job.push("w", view)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_memory_of_the_jobs_is_seen_by_libraries_without_a_copy(hub: paramhub.Hub, library: str) -> None:
    look = torch.from_dlpack if library == "torch" else numpy.from_dlpack

    def work(job: paramhub.Job) -> list[float]:
        job.init({"w": torch.zeros(30, 1000)}, optimizer=paramhub.SGD(lr=1.0))
        lent, received = job.gradient_tensor("w"), job.parameter_tensor("w")
        gradient, weight = look(lent), look(received)
        assert tuple(gradient.shape) == (30, 1000)
        seen = []
        for _ in range(3):
            gradient[:] = 1.0
            job.push_pull("w", lent, out=received).wait(TIMEOUT)
            assert float(weight.min()) == float(weight.max())
            seen.append(float(weight[29, 999]))
        del lent, received
        gc.collect()
        assert float(gradient.sum()) == 30_000.0
        return seen

    assert in_threads(hub, 2, work, transport="shm") == [[-1.0, -2.0, -3.0]] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_memory_of_the_jobs_has_the_tensors_type(hub: paramhub.Hub, dtype: torch.dtype) -> None:
    def work(job: paramhub.Job) -> None:
        job.init({"w": torch.zeros(5, dtype=dtype)})
        gradient = torch.from_dlpack(job.gradient_tensor("w"))
        assert gradient.dtype == dtype
        gradient.fill_(2.0)
        out = torch.empty(5, dtype=dtype)
        job.push_pull("w", gradient, out=out).wait(TIMEOUT)
        assert torch.equal(out, gradient)

    in_threads(hub, 1, work, transport="shm")


def test_many_looks_at_one_memory_are_given_back(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        job.init({"w": torch.zeros(100)})
        for _ in range(10):
            lent = job.gradient_tensor("w")
            looks = [
                torch.from_dlpack(lent),
                numpy.from_dlpack(lent),
                lent.__dlpack__(),
                lent.__dlpack__(max_version=(1, 0)),
            ]
            assert len(looks) == 4
            del lent, looks

    in_threads(hub, 1, work, transport="shm")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_are_kept_by_their_requests(hub: paramhub.Hub, transport: str) -> None:
    """Temporary tensors are dropped while their exchange is under way, and another thread collects garbage all the time."""
    steps, elements = 30, 40_000
    ends = threading.Event()

    def collect() -> None:
        while not ends.is_set():
            gc.collect()
            # These would reuse memory that was freed too early.
            torch.full((elements,), -1e9)

    def work(job: paramhub.Job) -> None:
        # A key takes one request at a time, and the test does not wait for all, so each step has its own keys.
        names = [[f"{step}-{i}" for i in range(3)] for step in range(steps)]
        job.init({name: torch.zeros(elements) for step in names for name in step}, optimizer=paramhub.Sum())
        for step in range(steps):
            for name in names[step][:2]:
                job.push_pull(name, torch.full((elements,), float(step)), out=torch.empty(elements))
            out = torch.empty(elements)
            job.push_pull(names[step][2], torch.full((elements,), float(step)), out=out).wait(TIMEOUT)
            assert torch.equal(out, torch.full((elements,), 2.0 * step)), step

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        in_threads(hub, 2, work, transport=transport)
    finally:
        ends.set()
        collector.join()
