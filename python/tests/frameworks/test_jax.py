"""paramhub.jax in real ranks, with optax and Flax, against one process that has the whole batch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from launching import PARAMHUB, PYTHON, Ended
from team import Died, Rank, Team
from workers import new_job

import paramhub

MISSING = [name for name in ("jax", "optax", "flax") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

RANKS = 2
BATCH = 16
STEPS = 8
SEED = 23


def join(rank: Rank, ticket: paramhub.JobTicket) -> Any:
    import paramhub.jax

    paramhub.jax.init(ticket.url, ticket.job, ticket.secret, rank.rank)
    assert (paramhub.jax.rank(), paramhub.jax.size()) == (rank.rank, rank.size)
    return paramhub.jax


def images() -> tuple[numpy.ndarray, numpy.ndarray]:
    """Noisy images of ten digits, for all steps."""
    random = numpy.random.default_rng(SEED)
    digits = random.normal(size=(10, 28, 28, 1))
    labels = random.integers(0, 10, (STEPS, RANKS * BATCH))
    noise = random.normal(size=(*labels.shape, 28, 28, 1))
    return (digits[labels] + 0.3 * noise).astype("f4"), labels


class Training:
    """Flax's example of MNIST: a convolution, a dense layer, and momentum."""

    def __init__(self, seed: int, before: Any = None) -> None:
        import jax
        import optax
        from flax import linen

        class Network(linen.Module):
            @linen.compact
            def __call__(self, x: Any) -> Any:
                x = linen.avg_pool(linen.relu(linen.Conv(8, (3, 3))(x)), (2, 2), strides=(2, 2))
                return linen.Dense(10)(x.reshape(len(x), -1))

        network = Network()
        self.parameters = network.init(jax.random.key(seed), numpy.zeros((1, 28, 28, 1), "f4"))
        self.optimizer = optax.sgd(0.05, momentum=0.9)
        if before is not None:
            self.optimizer = optax.chain(before, self.optimizer)

        def loss_of(parameters: Any, x: Any, labels: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(
                network.apply(parameters, x), labels
            ).mean()

        self.gradients_of = jax.jit(jax.value_and_grad(loss_of))

    def run(self, part: slice) -> list[float]:
        import optax

        state, losses = self.optimizer.init(self.parameters), []
        for x, labels in zip(*images(), strict=True):
            loss, gradients = self.gradients_of(self.parameters, x[part], labels[part])
            updates, state = self.optimizer.update(gradients, state, self.parameters)
            self.parameters = optax.apply_updates(self.parameters, updates)
            losses.append(float(loss))
        return losses


def trains(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import jax

    hub = join(rank, ticket)
    own = Training(rank.rank, hub.average_gradients())
    own.parameters = hub.broadcast(own.parameters)
    losses = own.run(slice(rank.rank * BATCH, (rank.rank + 1) * BATCH))
    alone = Training(0)
    start = alone.parameters
    alone_losses = alone.run(slice(None))
    assert alone_losses[-1] < alone_losses[0] / 2 and losses[-1] < losses[0] / 2
    for mine, expected, first in zip(
        *map(jax.tree_util.tree_leaves, (own.parameters, alone.parameters, start)), strict=True
    ):
        numpy.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
        assert abs(expected - first).max() > 1e-3


def test_ranks_train_as_one_process_with_the_whole_batch_does(hub: paramhub.Hub, team: Team) -> None:
    team(trains, new_job(hub, RANKS), ranks=RANKS, timeout=300)


def means(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import jax
    import jax.numpy as jnp

    hub = join(rank, ticket)
    one = rank.rank + 1
    tree = {
        "f32": jnp.full((700, 1000), float(one)),
        "bf16": [jnp.full(5, one, jnp.bfloat16), jnp.full((2, 3), 2 * one, jnp.bfloat16)],
        "numpy": (numpy.full(3, one, "f2"), numpy.float32(one)),
        "scalar": jnp.float32(one),
        "empty": jnp.zeros((0, 4)),
        "part": None,
    }
    found = hub.mean(tree)
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(tree)
    for got, given in zip(*map(jax.tree_util.tree_leaves, (found, tree)), strict=True):
        assert type(got) is type(given) and got.dtype == given.dtype and got.shape == given.shape
        assert (numpy.asarray(got, "f4") == numpy.asarray(given, "f4") * 2 / one).all()
    assert (numpy.asarray(tree["f32"]) == one).all(), "what is passed does not change"
    # NumPy's order of the elements does not matter.
    matrix = numpy.asfortranarray(numpy.arange(6, dtype="f4").reshape(2, 3)) * one
    assert (hub.mean(matrix) == numpy.arange(6).reshape(2, 3) * 2).all()
    assert hub.mean({}) == {}


def placements(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import jax
    import jax.numpy as jnp

    hub = join(rank, ticket)
    first, second = jax.devices()
    with jax.default_device(second):
        free = jnp.ones(3)
    keys = jax.random.key(1)
    tree = {"free": free, "fixed": jax.device_put(jnp.ones(3), second), "default": jnp.ones(3)}
    for found in (
        hub.mean(tree),
        hub.broadcast({**tree, "key": keys, "fixed key": jax.device_put(keys, second)}),
    ):
        assert found["fixed"].committed and not found["free"].committed and not found["default"].committed
        assert found["fixed"].devices() == found["free"].devices() == {second}
        assert found["default"].devices() == {first}
        # JAX refuses to compute with arrays that are committed to different devices.
        assert (found["fixed"] + found["default"]).devices() == {second}
    assert found["fixed key"].committed and not found["key"].committed


def test_only_committed_arrays_are_committed_afterwards(hub: paramhub.Hub, team: Team) -> None:
    two_devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    team(placements, new_job(hub, RANKS), ranks=RANKS, env=two_devices)


def test_means_keep_the_tree_and_the_types(hub: paramhub.Hub, team: Team) -> None:
    team(means, new_job(hub, 3), ranks=3)


def broadcasts(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import jax
    import jax.numpy as jnp

    hub = join(rank, ticket)

    def values(of: int) -> dict[str, Any]:
        random = numpy.random.default_rng([SEED, of])
        return {
            "any bits": jnp.asarray(random.integers(0, 2**32, 5001, "u4").view("f4")),
            "bf16": jnp.asarray(random.normal(size=7), jnp.bfloat16),
            "odd": random.integers(-128, 127, 5, "i1"),
            "f64": random.normal(size=3),
            "bool": jnp.asarray([of == 0, of == 1]),
            "count": jnp.int32(of),
            "key": jax.random.key(of),
        }

    found, expected = hub.broadcast(values(rank.rank)), values(0)
    assert (jax.random.key_data(found.pop("key")) == jax.random.key_data(expected.pop("key"))).all()
    for name, value in expected.items():
        assert type(found[name]) is type(value) and found[name].dtype == value.dtype, name
        assert numpy.asarray(found[name]).tobytes() == numpy.asarray(value).tobytes(), name


def test_a_broadcast_moves_every_bit_of_any_type(hub: paramhub.Hub, team: Team) -> None:
    team(broadcasts, new_job(hub, 3), ranks=3)


def refusals(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import jax
    import jax.numpy as jnp

    import paramhub.jax

    with pytest.raises(paramhub.MisuseError, match=r"call paramhub\.jax\.init\(\) first"):
        paramhub.jax.mean(jnp.ones(2))
    hub = join(rank, ticket)
    transformation = hub.average_gradients()
    state = transformation.init(jnp.ones(2))
    calls: dict[str, Callable[[], object]] = {
        r"the leaf \['w'\] is traced by a transformation of JAX": lambda: jax.jit(hub.mean)(
            {"w": jnp.ones(2)}
        ),
        r"the leaf itself is traced .* outside of it": lambda: jax.jit(transformation.update)(
            jnp.ones(2), state
        ),
        r"paramhub\.jax\.broadcast: the leaf itself is traced": lambda: jax.grad(hub.broadcast)(1.0),
        r"the leaf \['n'\] is of int32, but means are of": lambda: hub.mean({"n": jnp.arange(3)}),
        r"the leaf \[1\] is of float64, but means are of": lambda: hub.mean([jnp.ones(1), numpy.ones(2)]),
        r"the leaf itself is a float and no array: pass jax\.numpy\.asarray": lambda: hub.mean(1.0),
    }
    for message, call in calls.items():
        with pytest.raises(paramhub.MisuseError, match=message):
            call()
    hub.mean(jnp.ones(2))
    # One rank has another shape.
    with pytest.raises(
        paramhub.MisuseError, match=rf"rank {rank.rank}: the ranks differ in what they exchange"
    ):
        hub.mean({"w": jnp.ones(2 + rank.rank)})
    # The ranks have filled different slots, so that no later mean can be right.
    for call in (hub.mean, hub.broadcast):
        with pytest.raises(paramhub.ParamhubError, match="the ranks differ in what they exchange"):
            call(jnp.ones(2))


def test_what_cannot_be_exchanged_is_refused(hub: paramhub.Hub, team: Team) -> None:
    team(refusals, new_job(hub, RANKS), ranks=RANKS)


def loses_a_rank(rank: Rank, ticket: paramhub.JobTicket) -> str:
    import jax.numpy as jnp

    hub = join(rank, ticket)
    hub.mean(jnp.ones(2))
    if rank.rank == 1:
        os._exit(3)
    with pytest.raises(paramhub.JobFailedError) as failed:
        hub.mean(jnp.ones(2))
    return str(failed.value)


def test_a_lost_rank_is_named(hub: paramhub.Hub, team: Team) -> None:
    message, died = team(loses_a_rank, new_job(hub, RANKS), ranks=RANKS, dies=[1])
    assert "rank 1" in message, message
    assert died == Died(3)


PROGRAM = """
import jax.numpy, paramhub.jax
paramhub.jax.init()
print("reached", paramhub.jax.mean(jax.numpy.ones(2) * paramhub.jax.rank()))
"""


@pytest.mark.parametrize(
    ("end", "code", "state"),
    [("", 0, "finished"), ("raise SystemExit(0)", 0, "finished"), ("1 / 0", 1, "ZeroDivisionError")],
)
def test_a_program_leaves_its_job_at_its_end(
    hub: paramhub.Hub, launch: Callable[..., Ended], end: str, code: int, state: str
) -> None:
    ran = launch(*PARAMHUB, "run", "-n", "2", "--hub", hub.url, "--", PYTHON, "-c", PROGRAM + end)
    assert ran.code == code and ran.output.count("reached [0.5 0.5]") == 2, ran.output
    listed = launch(*PARAMHUB, "jobs", "list", "--hub", hub.url)
    assert listed.code == 0 and state in listed.output, listed.output
