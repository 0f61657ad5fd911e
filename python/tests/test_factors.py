"""Layers that workers exchange as factors, over real connections between ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy
import pytest
from workers import in_threads

import paramhub

OUTPUTS, INPUTS, SAMPLES, STEPS = 96, 320, 4, 6
LAYERS: dict[str, dict[str, Any]] = {
    "fc": {"tensors": ["fc.weight", "fc.bias"], "samples": SAMPLES, "scheme": "factors"},
    "last": {"tensors": ["last.weight"], "samples": SAMPLES, "scheme": "factors"},
}


def tensors(seed: int) -> dict[str, Any]:
    generator = numpy.random.default_rng(seed)
    shapes = {
        "norm": (9,),
        "fc.weight": (OUTPUTS, INPUTS),
        "fc.bias": (OUTPUTS,),
        "last.weight": (3, OUTPUTS),
    }
    return {name: generator.standard_normal(shape, "f4") for name, shape in shapes.items()}


def factors(rank: int, step: int, samples: int) -> tuple[Any, Any]:
    generator = numpy.random.default_rng(100 * step + rank)
    return generator.standard_normal((samples, INPUTS), "f4"), generator.standard_normal(
        (samples, OUTPUTS), "f4"
    )


def train(job: paramhub.Job, optimizer: paramhub.Optimizer, layers: Any = LAYERS) -> dict[str, Any]:
    """Trains with factors, or with gradients if there are no layers. Ranks have different numbers of samples, and rank 1 has
    none in some steps."""
    held = tensors(job.rank)
    job.init(held, optimizer, layers=layers, reproducible=True)
    for step in range(STEPS):
        if step == 3 and job.rank == 0:
            job.set_hyperparameters(step, learning_rate=0.01)
        inputs, gradients = factors(job.rank, step, (SAMPLES - job.rank) * (step != 4 or job.rank != 1))
        handles = [job.push_pull("norm", numpy.full(9, job.rank, "f4"), held["norm"])]
        if layers:
            handles.append(job.push_factors("fc", inputs, gradients, held["fc.weight"], held["fc.bias"]))
            handles.append(job.push_factors("last", gradients, gradients[:, :3].copy(), held["last.weight"]))
        else:
            dense = {
                "fc.weight": gradients.T @ inputs,
                "fc.bias": gradients.sum(0),
                "last.weight": gradients[:, :3].T @ gradients,
            }
            handles += [job.push_pull(name, dense[name], held[name]) for name in dense]
        for handle in handles:
            handle.wait(60)
    return {**held, "bytes": job.statistics()}


@pytest.mark.parametrize(
    "optimizer",
    [
        paramhub.SGD(lr=0.1),
        paramhub.Nesterov(lr=0.05, momentum=0.9, weight_decay=0.01),
        paramhub.AdamW(lr=0.02, eps=1e-6),
    ],
    ids=["sgd", "nesterov", "adamw"],
)
def test_factors_make_what_dense_gradients_make(hub: paramhub.Hub, optimizer: paramhub.Optimizer) -> None:
    by_factors = in_threads(hub, 3, lambda job: train(job, optimizer), peers=True)
    dense = in_threads(hub, 3, lambda job: train(job, optimizer, None))
    for name in tensors(0):
        assert all((rank[name] == by_factors[0][name]).all() for rank in by_factors), name
        assert numpy.abs(by_factors[0][name] - dense[0][name]).max() < 1e-5, name
    sent, before = by_factors[0]["bytes"], dense[0]["bytes"]
    assert before["factor_bytes_sent"] == 0
    # Two peers, and a header each.
    least = 2 * STEPS * 4 * SAMPLES * (INPUTS + OUTPUTS + OUTPUTS + 3)
    assert least < sent["factor_bytes_sent"] < 1.2 * least
    assert sent["bytes_sent"] > sent["factor_bytes_sent"] and sent["rebuilding_s"] > 0


def test_the_mean_gradient_comes_without_an_optimizer(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> Any:
        weight = numpy.zeros((OUTPUTS, INPUTS), "f4")
        job.init({"fc": weight}, layers={"fc": {"tensors": ["fc"], "samples": 1, "scheme": "factors"}})
        ones = numpy.ones((1, INPUTS), "f4")
        job.push_factors("fc", ones, numpy.full((1, OUTPUTS), job.rank, "f4"), weight).wait(60)
        return weight

    for weight in in_threads(hub, 2, work, peers=True):
        assert (weight == 0.5).all()


def test_halves_travel_as_halves(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> Any:
        weight = numpy.ones((OUTPUTS, INPUTS), "f2")
        layers = {"fc": {"tensors": ["fc"], "samples": 2}}
        job.init({"fc": weight}, paramhub.SGD(lr=0.5), layers=layers, scheme="factors")
        assert job.best_scheme("fc") == "factors"
        halves = numpy.full((2, INPUTS), 0.5, "f2"), numpy.full((2, OUTPUTS), 0.5, "f2")

        async def push() -> None:
            await job.push_factors("fc", *halves, weight)

        asyncio.run(push())
        return weight, job.statistics()["factor_bytes_sent"]

    for weight, sent in in_threads(hub, 2, work, peers=True):
        assert (weight == 0.75).all()
        assert sent < 0.8 * 4 * 2 * (INPUTS + OUTPUTS)


def test_factors_that_do_not_fit_are_refused(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        held = tensors(job.rank)
        job.init(held, paramhub.SGD(lr=0.1), layers=LAYERS)
        inputs, gradients = factors(0, 0, SAMPLES + 1)
        weight = held["fc.weight"]
        refused = [
            (
                "takes 4 samples a step at most, not 5",
                lambda: job.push_factors("fc", inputs, gradients, weight),
            ),
            (
                "no layer 'fc7' goes by factors; those that do are 'fc', 'last'",
                lambda: job.push_factors("fc7", inputs, gradients, weight),
            ),
            (r"inputs of \[samples, 320\]", lambda: job.push_factors("fc", gradients, inputs, weight)),
            ("in f32, but", lambda: job.push_factors("fc", inputs.astype("f2"), gradients, weight)),
            ("takes rows of", lambda: job.push_factors("fc", inputs[:2], gradients[:1], weight)),
            (
                "has no bias",
                lambda: job.push_factors(
                    "last", inputs[:, :96].copy(), gradients[:, :3].copy(), held["last.weight"], weight
                ),
            ),
            ("`fc.weight` goes by factors", lambda: job.push_pull("fc.weight", weight, weight)),
        ]
        if job.rank != 0:
            refused.append(("only rank 0", lambda: job.set_hyperparameters(0, learning_rate=1.0)))
        for message, call in refused:
            with pytest.raises(paramhub.MisuseError, match=message):
                call()
        # The job goes on.
        assert job.next_step("fc.weight") == 0
        job.push_factors("fc", inputs[:1], gradients[:1], weight, held["fc.bias"]).wait(60)
        assert job.next_step("fc.bias") == 1

    in_threads(hub, 2, work, peers=True)


def test_workers_that_do_not_listen_learn_how_to(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        with pytest.raises(paramhub.MisuseError, match="it sends no factors to hubs"):
            job.init(tensors(job.rank), layers=LAYERS, scheme="factors-to-hub")
        with pytest.raises(paramhub.MisuseError, match=r"connect\(peers=True\)"):
            job.init(tensors(0), paramhub.SGD(), layers=LAYERS)

    in_threads(hub, 1, work)


def test_a_rank_that_leaves_ends_the_waits_of_the_others(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        held = tensors(job.rank)
        job.init(held, paramhub.SGD(lr=0.1), layers=LAYERS)
        if job.rank == 1:
            return
        inputs, gradients = factors(0, 0, 1)
        handle = job.push_factors("fc", inputs, gradients, held["fc.weight"])
        with pytest.raises(paramhub.JobFailedError) as caught:
            handle.wait(60)
        assert caught.value.culprit == 1
        job._native = None

    in_threads(hub, 2, work, peers=True)
