"""The information book: the properties of the cluster, the model and its schemes that every rank can read."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
from workers import in_threads

import paramhub

TENSORS = {"conv": (8, 9), "fc6.weight": (512, 256), "fc6.bias": (512,)}
LAYERS: dict[str, dict[str, Any]] = {
    "conv": {"tensors": ["conv"]},
    "fc6": {"tensors": ["fc6.weight", "fc6.bias"], "samples": 4},
}


def init(job: paramhub.Job, layers: dict[str, dict[str, Any]], **settings: Any) -> paramhub.Job:
    tensors = {name: numpy.zeros(shape, "f4") for name, shape in TENSORS.items()}
    return job.init(tensors, layers=layers, **settings)


def test_every_rank_reads_the_same(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> tuple[dict[str, Any], str]:
        init(job, LAYERS, scheme="auto")
        return job.query(), job.best_scheme("fc6")

    results = in_threads(hub, 3, work, peers=True)
    assert all(result == results[0] for result in results)
    book, best = results[0]
    # The plan counts each rank as a machine, and the hub is on one of these.
    assert book["roster"]["place"] == "beside-workers"
    workers = book["roster"]["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1, 2]
    addresses = [worker["address"] for worker in workers]
    assert len(set(addresses)) == 3 and all(address.startswith("127.0.0.1:") for address in addresses)
    assert best == "factors"


def test_properties_are_asked_by_name(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> dict[str, Any]:
        init(job, LAYERS, scheme="auto")
        with pytest.raises(paramhub.MisuseError, match="no layer `fc9`"):
            job.best_scheme("fc9")
        with pytest.raises(paramhub.MisuseError, match="no property `batch`"):
            job.query("batch")
        return job.query("layers", "layers.fc6.samples", "layers.conv.why", "hubs")

    for found in in_threads(hub, 2, work, peers=True):
        assert found["layers"] == ["conv", "fc6"]
        assert found["layers.fc6.samples"] == 4
        assert found["layers.conv.why"] == "no_factors"
        assert found["hubs"][0]["is_beside_worker"] is True


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"fc": {"tensors": ["fc6.bias"], "samples": 4}}, "a fully connected layer's is its weight"),
        ({"fc": {"tensors": ["fc7.weight"]}}, "which the job does not have"),
        ({"fc": {"samples": 4}}, "give it its tensors"),
        ({"conv": {"tensors": ["conv"], "scheme": "factors"}}, "has no factors"),
        ({"conv": {"tensors": ["conv"], "scheme": "ps"}}, "unknown scheme `ps`"),
    ],
)
def test_layers_that_cannot_be_are_refused(
    hub: paramhub.Hub, layers: dict[str, dict[str, Any]], message: str
) -> None:
    def work(job: paramhub.Job) -> None:
        with pytest.raises(paramhub.MisuseError, match=message):
            init(job, layers)

    in_threads(hub, 1, work, peers=True)
