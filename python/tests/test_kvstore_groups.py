"""Groups of keys with hyperparameters of their own in key-value stores, against the same updates in NumPy."""

from __future__ import annotations

import numpy
import pytest
from stores import KINDS, open_store
from team import Rank, Team
from workers import TIMEOUT, new_job

import paramhub
import paramhub.kvstore as kvs

SHAPES = {"w": (300, 40), "bias": (40,), 3: (5,)}
STEPS = 5


def groups(rank: Rank, ticket: paramhub.JobTicket, kind: str) -> None:
    with open_store(rank, ticket, kind) as kv:
        parameters: dict[kvs.Key, numpy.ndarray] = {
            key: numpy.ones(shape, "f4") for key, shape in SHAPES.items()
        }
        kv.init(list(SHAPES), list(parameters.values()))
        kv.set_optimizer(paramhub.SGD(lr=0.25, weight_decay=0.5))
        assert kv.add_group(["bias"], weight_decay=0.0) == 1
        assert kv.add_group(3, learning_rate=0.125) == 2
        expected = {key: numpy.ones(shape, "f4") for key, shape in SHAPES.items()}
        rates = {"w": 0.25, "bias": 0.25, 3: 0.125}
        for step in range(STEPS):
            if step == 2:
                # The other numbers of the group, and the other groups, stay.
                kv.set_hyperparameters(group=1, learning_rate=0.5)
                rates["bias"] = 0.5
            if step == 3:
                kv.set_hyperparameters(learning_rate=0.0625)
                rates["w"] = 0.0625
            for key, out in parameters.items():
                kv.pushpull(key, numpy.full(SHAPES[key], float(kv.rank), "f4"), out=out)
                decay = 0.0 if key == "bias" else 0.5
                expected[key] -= rates[key] * ((kv.num_workers - 1) / 2 + decay * expected[key])
            kv.wait(timeout=TIMEOUT)
        for key, values in expected.items():
            numpy.testing.assert_allclose(parameters[key], values, rtol=1e-6)
        for call in (lambda: kv.add_group("w", learning_rate=1.0), lambda: kv.set_optimizer("sgd", lr=1.0)):
            with pytest.raises(paramhub.MisuseError, match="the optimizer is chosen before the first push"):
                call()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_keys_has_numbers_of_its_own(hub: paramhub.Hub, team: Team, kind: str) -> None:
    team(groups, new_job(hub, 2), kind, ranks=2)


def test_groups_that_cannot_be_are_refused() -> None:
    with kvs.create("local") as kv:
        kv.init("w", numpy.ones(3, "f4"))
        with pytest.raises(paramhub.MisuseError, match="there is no optimizer, choose one"):
            kv.add_group("w", learning_rate=1.0)
        kv.set_optimizer(paramhub.SGD(lr=0.5))
        with pytest.raises(paramhub.MisuseError, match="key 'v': it has no value yet"):
            kv.add_group("v", learning_rate=1.0)
        with pytest.raises(paramhub.MisuseError, match="there is no group 1 of keys: there are 1"):
            kv.set_hyperparameters(group=1, learning_rate=1.0)
        with pytest.raises(paramhub.MisuseError, match="hyperparameters cannot be used"):
            kv.add_group("w", learning_rate=float("nan"))
        # A refused group is none, and another optimizer has none.
        assert kv.add_group("w", learning_rate=1.0) == 1
        kv.set_optimizer(paramhub.SGD(lr=0.25))
        out = numpy.ones(3, "f4")
        kv.pushpull("w", numpy.ones(3, "f4"), out=out).wait(TIMEOUT)
        assert (out == 0.75).all()
