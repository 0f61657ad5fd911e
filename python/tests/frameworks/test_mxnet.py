"""MXNet's stores of paramhub.mxnet, in real ranks, against MXNet itself in one process. MXNet has an environment of its own,
because it needs an old NumPy; `cargo xtask test --full` makes it."""

from __future__ import annotations

import importlib.util
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import PARAMHUB, PYTHON, Ended
from team import Died, Rank, Team
from workers import new_job

import paramhub

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mxnet") is None,
    reason="MXNet is not installed: it has an environment of its own, with NumPy before 1.24",
)

RANKS = 2
BATCH = 8
STEPS = 12
SEED = 17
TOLERANCE = 2e-6
"""The largest difference between parameters below 1 that the same updates have made. Each update rounds once more."""


def open_store(ticket: paramhub.JobTicket, name: str = "paramhub") -> Any:
    import mxnet as mx

    import paramhub.mxnet  # noqa: F401

    os.environ |= {"PARAMHUB_URL": ticket.url, "PARAMHUB_JOB": ticket.job, "PARAMHUB_SECRET": ticket.secret}
    return mx.kv.create(name)


def network(multiplies: bool = False) -> Any:
    """A network, of which some parameters have multipliers of their own if it ``multiplies``."""
    import mxnet as mx
    from mxnet.gluon import nn

    mx.random.seed(SEED)
    net = nn.Sequential()
    net.add(nn.Dense(32, activation="relu", in_units=20), nn.Dense(5, in_units=32))
    net.initialize(mx.init.Xavier())
    if multiplies:
        for layer in net:
            layer.bias.wd_mult = 0.0
        net[0].weight.lr_mult = 0.5
        net[1].bias.lr_mult = 2.0
    return net


def train(net: Any, trainer: Any, ranks: range, steps: range = range(STEPS)) -> None:
    """Trains on the points of these ranks, with gradients that are means over all ranks' points."""
    import mxnet as mx
    from mxnet import autograd, gluon

    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    random = numpy.random.RandomState(SEED)
    points = random.randn(STEPS, RANKS, BATCH, 20).astype("f4")
    labels = random.randint(0, 5, (STEPS, RANKS, BATCH))
    for step in steps:
        own = slice(ranks.start, ranks.stop)
        with autograd.record():
            loss = loss_of(
                net(mx.nd.array(points[step, own].reshape(-1, 20))), mx.nd.array(labels[step, own].ravel())
            )
        loss.backward()
        trainer.step(RANKS * BATCH)


def check_equal(net: Any, reference: Any) -> None:
    start = network()
    for own, expected, first in zip(
        *(each.collect_params().values() for each in (net, reference, start)), strict=True
    ):
        numpy.testing.assert_allclose(own.data().asnumpy(), expected.data().asnumpy(), rtol=0, atol=TOLERANCE)
        assert (own.data() - first.data()).abs().max().asscalar() > 100 * TOLERANCE


def trained_alone(optimizer: str, arguments: dict[str, Any], *, multiplies: bool = False) -> tuple[Any, Any]:
    """A network that MXNet alone trains on all ranks' points, and its trainer."""
    from mxnet import gluon

    net = network(multiplies)
    trainer = gluon.Trainer(net.collect_params(), optimizer, arguments, kvstore=None)
    train(net, trainer, range(RANKS))
    return net, trainer


def falling(rate: float) -> Any:
    import mxnet as mx

    return mx.lr_scheduler.FactorScheduler(3, 0.7, base_lr=rate)


OPTIMIZERS: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "SGD": lambda: ("sgd", {"learning_rate": 0.1, "wd": 1e-2}),
    "SGD, a rate that falls": lambda: (
        "sgd",
        {"learning_rate": 0.1, "wd": 1e-2, "lr_scheduler": falling(0.1)},
    ),
    "momentum, a rate that falls": lambda: (
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-2, "lr_scheduler": falling(0.1)},
    ),
    "NAG, a rate that falls": lambda: (
        "nag",
        {"learning_rate": 0.1, "momentum": 0.9, "lr_scheduler": falling(0.1)},
    ),
    # With this epsilon it matters where epsilon is added.
    "Adam": lambda: ("adam", {"learning_rate": 0.01, "wd": 1e-2, "epsilon": 1e-3}),
    "AdaGrad": lambda: ("adagrad", {"learning_rate": 0.1, "eps": 1e-3}),
    "AdaDelta": lambda: ("adadelta", {}),
    "RMSProp, a rate that falls": lambda: (
        "rmsprop",
        {"learning_rate": 0.01, "wd": 1e-2, "epsilon": 1e-3, "lr_scheduler": falling(0.01)},
    ),
    "SGD, multipliers": lambda: (
        "sgd",
        {"learning_rate": 0.1, "wd": 1e-2, "lr_scheduler": falling(0.1)},
    ),
    "momentum, multipliers": lambda: (
        "sgd",
        {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-2, "lr_scheduler": falling(0.1)},
    ),
    "Adam, multipliers": lambda: (
        "adam",
        {"learning_rate": 0.01, "wd": 1e-2, "epsilon": 1e-3, "lr_scheduler": falling(0.01)},
    ),
    "RMSProp, multipliers": lambda: ("rmsprop", {"learning_rate": 0.01, "wd": 1e-2, "epsilon": 1e-3}),
    "AdaGrad, multipliers": lambda: ("adagrad", {"learning_rate": 0.1, "eps": 1e-3}),
}


def has_multipliers(case: str) -> bool:
    return case.endswith("multipliers")


def arrays_of(state: Any) -> list[numpy.ndarray]:
    if state is None:
        return []
    return [array.asnumpy() for array in (state if isinstance(state, tuple) else [state])]


def optimizers(rank: Rank, tickets: dict[str, paramhub.JobTicket]) -> None:
    from mxnet import gluon

    for case, ticket in tickets.items():
        print(case)
        store = open_store(ticket)
        name, arguments = OPTIMIZERS[case]()
        net = network(has_multipliers(case))
        trainer = gluon.Trainer(net.collect_params(), name, arguments, kvstore=store)
        train(net, trainer, range(rank.rank, rank.rank + 1))
        assert trainer._update_on_kvstore
        trainer.save_states(f"{case}-{rank.rank}")
        reference, alone = trained_alone(*OPTIMIZERS[case](), multiplies=has_multipliers(case))
        check_equal(net, reference)
        assert trainer.learning_rate == alone.learning_rate
        alone.save_states(f"{case}-alone-{rank.rank}")
        with open(f"{case}-{rank.rank}", "rb") as own, open(f"{case}-alone-{rank.rank}", "rb") as theirs:
            (states, saved), (expected, saved_alone) = pickle.load(own), pickle.load(theirs)
        assert states.keys() == expected.keys()
        assert saved._index_update_count == saved_alone._index_update_count
        for key in expected:
            for one, other in zip(arrays_of(states[key]), arrays_of(expected[key]), strict=True):
                numpy.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * max(abs(other).max(), 1e-9))
        store.leave()


def test_the_hub_runs_optimizers_as_mxnet_does(hub: paramhub.Hub, team: Team) -> None:
    team(optimizers, {case: new_job(hub, RANKS) for case in OPTIMIZERS}, ranks=RANKS, timeout=300)


def trainers(rank: Rank, tickets: dict[str, paramhub.JobTicket]) -> None:
    from mxnet import gluon

    arguments = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-2}
    reference, _ = trained_alone("sgd", arguments)
    for case, ticket in tickets.items():
        print(case)
        name, _, updates = case.partition(", ")
        store = open_store(ticket, name)
        assert store.rank == rank.rank and store.num_workers == RANKS and store.type == f"dist_sync_{name}"
        net = network()
        if rank.rank > 0:
            net[0].weight.set_data(net[0].weight.data() * 3)
        trainer = gluon.Trainer(
            net.collect_params(), "sgd", arguments, kvstore=store, update_on_kvstore=updates == ""
        )
        # The trainer's first step would do this, after the first gradients: each rank gets rank 0's parameters.
        trainer._check_and_rescale_grad(1 / (RANKS * BATCH))
        trainer._init_kvstore()
        trainer._init_params()
        train(net, trainer, range(rank.rank, rank.rank + 1))
        check_equal(net, reference)
        store.leave()


def test_trainers_of_ranks_train_as_one_process_does(hub: paramhub.Hub, team: Team) -> None:
    kinds = ["paramhub", "paramhub_depcha", "paramhub_concom", "paramhub_funnel"]
    cases = [*kinds, "paramhub, in each rank"]
    tickets = {case: new_job(hub, RANKS, **({"hubs": 0} if case in kinds[1:] else {})) for case in cases}
    team(trainers, tickets, ranks=RANKS, timeout=300)


CONTINUED = [
    "Adam",
    "momentum, a rate that falls",
    "AdaGrad",
    "RMSProp, a rate that falls",
    "Adam, multipliers",
]


def continued(rank: Rank, tickets: dict[str, list[paramhub.JobTicket]]) -> None:
    from mxnet import gluon

    for case, (first, second) in tickets.items():
        print(case)
        for half, ticket in ((range(5), first), (range(5, STEPS), second)):
            store = open_store(ticket)
            net = network(has_multipliers(case))
            trainer = gluon.Trainer(net.collect_params(), *OPTIMIZERS[case](), kvstore=store)
            if half.start > 0:
                net.load_parameters(f"{case}-parameters")
                trainer.load_states(f"{case}-states")
            train(net, trainer, range(rank.rank, rank.rank + 1), half)
            store._barrier()
            if half.start == 0 and rank.rank == 0:
                net.save_parameters(f"{case}-parameters")
                trainer.save_states(f"{case}-states")
            store._barrier()
            store.leave()
        check_equal(net, trained_alone(*OPTIMIZERS[case](), multiplies=has_multipliers(case))[0])


def test_a_run_goes_on_from_saved_states(hub: paramhub.Hub, team: Team) -> None:
    tickets = {case: [new_job(hub, RANKS) for _ in range(2)] for case in CONTINUED}
    team(continued, tickets, ranks=RANKS, timeout=300)


def fitted(kvstore: str | None, ranks: range) -> dict[str, numpy.ndarray]:
    """The parameters of a module that is trained on the points of these ranks."""
    import mxnet as mx

    layers = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16, name="hidden")
    layers = mx.sym.FullyConnected(mx.sym.tanh(layers), num_hidden=5, name="out")
    random = numpy.random.RandomState(SEED)
    shapes = {"hidden_weight": (16, 20), "hidden_bias": (16,), "out_weight": (5, 16), "out_bias": (5,)}
    start = {name: mx.nd.array(random.randn(*shape) / 4) for name, shape in shapes.items()}
    own = slice(ranks.start, ranks.stop)
    points = random.randn(STEPS, RANKS, BATCH, 20)[:, own].reshape(-1, 20)
    labels = random.randint(0, 5, (STEPS, RANKS, BATCH))[:, own].ravel()
    module = mx.mod.Module(mx.sym.SoftmaxOutput(layers, name="softmax"))
    module.fit(
        mx.io.NDArrayIter(points, labels, len(ranks) * BATCH, label_name="softmax_label"),
        kvstore=kvstore,
        # Module sets the wd_mult of biases to 0.
        optimizer_params={"learning_rate": 0.5, "momentum": 0.9, "wd": 1e-2},
        arg_params=start,
        num_epoch=2,
    )
    found = {name: array.asnumpy() for name, array in module.get_params()[0].items()}
    assert all(abs(found[name] - array.asnumpy()).max() > 100 * TOLERANCE for name, array in start.items())
    return found


def fits(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import paramhub.mxnet  # noqa: F401

    os.environ |= {"PARAMHUB_URL": ticket.url, "PARAMHUB_JOB": ticket.job, "PARAMHUB_SECRET": ticket.secret}
    found = fitted("paramhub", range(rank.rank, rank.rank + 1))
    for name, expected in fitted(None, range(RANKS)).items():
        numpy.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5)


def test_a_module_trains_as_in_one_process(hub: paramhub.Hub, team: Team) -> None:
    team(fits, new_job(hub, RANKS), ranks=RANKS)


def values(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import mxnet as mx

    kv = open_store(ticket, "dist_sync_paramhub")
    one = float(rank.rank + 1)
    a, b, c = mx.nd.ones((2, 3)) * one, mx.nd.ones(4, dtype="float16") * one, mx.nd.ones(5)
    kv.init(["a", 7], [a, b])
    kv.broadcast("c", c * one, out=c)
    out = mx.nd.zeros((2, 3))
    kv.pull("a", out=out)
    assert (out.asnumpy() == 1).all() and (c.asnumpy() == 1).all(), "rank 0's values"
    devices = [mx.nd.ones((2, 3), ctx=mx.cpu(device)) * one * (device + 1) for device in range(2)]
    outs = [mx.nd.zeros((2, 3), ctx=mx.cpu(device)) for device in range(2)]
    for _ in range(3):
        kv.push(["a", 7], [devices, b])
        kv.pull(["a", 7], out=[outs, b])
        # The engine knows that the outs are under way.
        assert all((each * 2).asnumpy().min() == 18 for each in outs)
        assert b.dtype == numpy.float16
        b[:] = one
    kv.pushpull("c", c * one)
    kv.pushpull("a", devices)
    assert all((each.asnumpy() == 9).all() for each in devices), "in place"
    # Two parts of an array are written at the same time.
    both = mx.nd.zeros((4, 3))
    kv.pushpull("a", both[0:2] + one, out=both[2:4])
    assert (both.asnumpy() == [[0.0] * 3] * 2 + [[3.0] * 3] * 2).all()
    kv._barrier()


def test_keys_values_and_devices_come_in_lists(hub: paramhub.Hub, team: Team) -> None:
    team(values, new_job(hub, RANKS), ranks=RANKS)


def changing(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import mxnet as mx

    kv = open_store(ticket)
    kv.init([0, 1], [mx.nd.ones(3), mx.nd.ones(3)])
    optimizer = mx.optimizer.SGD(learning_rate=0.5)
    optimizer.set_lr_mult({1: 4.0})
    kv.set_optimizer(optimizer)
    out, expected = mx.nd.zeros(3), 1.0
    for step in range(6):
        if step in (2, 4):
            optimizer.set_learning_rate(optimizer.lr / 2)
        if step in (3, 5):
            optimizer.rescale_grad /= 2
        kv.pushpull(1, mx.nd.ones(3), out=out)
        expected -= RANKS * 4 * optimizer.lr * optimizer.rescale_grad
        assert (out.asnumpy() == expected).all(), step
    kv.pull(0, out=out)
    assert (out.asnumpy() == 1).all()


def test_numbers_change_although_the_first_parameter_is_frozen(hub: paramhub.Hub, team: Team) -> None:
    team(changing, new_job(hub, RANKS), ranks=RANKS)


def asynchronous(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import mxnet as mx

    kv = open_store(ticket, "paramhub_async")
    assert kv.type == "dist_async_paramhub"
    kv.init("w", mx.nd.zeros(3))
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, rescale_grad=0.5))
    out = mx.nd.zeros(3)
    # Rank 0 pushes more often, and waits for nobody.
    for _ in range(5 if rank.rank == 0 else 2):
        kv.pushpull("w", mx.nd.ones(3), out=out)
        out.wait_to_read()
    kv._barrier()
    kv.pushpull("w", mx.nd.zeros(3), out=out)
    assert (out.asnumpy() == -0.25 * 7).all(), out


def test_asynchronous_ranks_push_for_themselves(hub: paramhub.Hub, team: Team) -> None:
    team(asynchronous, new_job(hub, RANKS), ranks=RANKS)


def refusals(rank: Rank, tickets: dict[str, paramhub.JobTicket]) -> None:
    import mxnet as mx

    kv = open_store(tickets["synchronous"])
    kv.init(["w", "v"], [mx.nd.ones((2, 2)), mx.nd.ones(3)])
    sparse = mx.nd.ones((2, 2)).tostype("row_sparse")
    made = mx.optimizer.create
    calls: dict[str, Callable[[], object]] = {
        "key 'w': arrays of storage type `row_sparse` are not exchanged": lambda: kv.push("w", sparse),
        "rows alone are not exchanged": lambda: kv.row_sparse_pull("w", out=sparse, row_ids=mx.nd.array([0])),
        "arrays of float32 and float16 are exchanged, not of float64": lambda: kv.init(
            "d", mx.nd.ones(2, dtype="float64")
        ),
        "an NDArray is exchanged, not a ndarray": lambda: kv.push("w", numpy.ones((2, 2), "f4")),
        "an NDArray is exchanged, not a NoneType": lambda: kv.pull("w"),
        "key 'x': it has no value yet": lambda: kv.push("x", mx.nd.ones(2)),
        r"key 'w': its value has the shape \(2, 2\) in float32, but one of \(3,\)": lambda: kv.push(
            "w", mx.nd.ones(3)
        ),
        "gradients are not compressed as": lambda: kv.set_gradient_compression({"type": "2bit"}),
        "a hub runs no Python updater": lambda: kv._set_updater(print),
        "there is no optimizer": lambda: kv.save_optimizer_states("states"),
        "takes an mx.optimizer.Optimizer, not 'sgd'": lambda: kv.set_optimizer("sgd"),
        "SGD cannot run at the hub: clip_gradient": lambda: kv.set_optimizer(made("sgd", clip_gradient=1.0)),
        "RMSProp cannot run at the hub: with centered": lambda: kv.set_optimizer(
            made("rmsprop", centered=True)
        ),
        "Nadam cannot run at the hub: a hub has no optimizer": lambda: kv.set_optimizer(made("nadam")),
        "AdaGrad cannot run at the hub: its wd": lambda: kv.set_optimizer(made("adagrad", wd=0.1)),
        "NAG cannot run at the hub: its momentum takes wd": lambda: kv.set_optimizer(
            made("nag", momentum=0.9, wd=0.1)
        ),
    }
    for message, call in calls.items():
        with pytest.raises(paramhub.MisuseError, match=message):
            call()
    with pytest.raises(ValueError, match="unknown capability"):
        kv.is_capable("sparse")
    assert kv.is_capable("optimizer")
    optimizer = made("sgd", wd=0.1, param_idx2name={0: "w", 1: "v"})
    optimizer.set_wd_mult({"w": 1.0})
    kv.set_optimizer(optimizer)
    kv.push("w", mx.nd.ones((2, 2)))
    optimizer.set_learning_rate(0.5)
    with pytest.raises(paramhub.MisuseError, match=r"key 'v' needs learning_rate 0.5 .* keys of update 1"):
        kv.push("v", mx.nd.ones(3))
    optimizer.set_wd_mult({"v": 3.0})
    with pytest.raises(paramhub.MisuseError, match="lr_mult or wd_mult of key 'v' has changed"):
        kv.push("v", mx.nd.ones(3))
    with pytest.raises(paramhub.MisuseError, match="the optimizer is chosen before the first push"):
        kv.set_optimizer(optimizer)
    with pytest.raises(paramhub.MisuseError, match="loaded before the first push"):
        kv.load_optimizer_states("states")
    kv.leave()
    kv = open_store(tickets["begun"])
    kv.init(["w", "half"], [mx.nd.ones(3), mx.nd.ones(3, dtype="float16")])
    optimizer = made("sgd", momentum=0.9, param_idx2name={"w": "w", "half": "half"})
    kv.set_optimizer(optimizer)
    with pytest.raises(
        paramhub.MisuseError, match="key 'half': the states of float16 parameters are not saved"
    ):
        kv.save_optimizer_states("states")
    # The optimizer has begun at the hub, although nothing was pushed.
    for call in (lambda: kv.load_optimizer_states("states"), lambda: kv.set_optimizer(optimizer)):
        with pytest.raises(paramhub.MisuseError, match="before save_optimizer_states, which has"):
            call()
    kv.push(["w", "half"], [mx.nd.ones(3), mx.nd.ones(3, dtype="float16")])
    optimizer.set_learning_rate(optimizer.lr / 2)
    kv.push("w", mx.nd.ones(3))
    with pytest.raises(
        paramhub.MisuseError, match=r"key 'half': .* of float16 and would be multiplied by 0\.5"
    ):
        kv.push("half", mx.nd.ones(3, dtype="float16"))
    kv.leave()
    kv = open_store(tickets["asynchronous"], "paramhub_async")
    for optimizer in (made("adam"), made("sgd", lr_scheduler=falling(0.1))):
        with pytest.raises(paramhub.MisuseError, match="follow the count of updates"):
            kv.set_optimizer(optimizer)
    kv.leave()


def test_what_is_not_equal_is_refused(hub: paramhub.Hub, team: Team) -> None:
    team(refusals, {name: new_job(hub, 1) for name in ("synchronous", "begun", "asynchronous")}, ranks=1)


def loses_a_rank(rank: Rank, ticket: paramhub.JobTicket) -> str:
    import mxnet as mx

    kv = open_store(ticket)
    kv.init("w", mx.nd.zeros(3))
    out = mx.nd.zeros(3)
    kv.pushpull("w", mx.nd.ones(3), out=out)
    out.wait_to_read()
    kv._barrier()
    if rank.rank == 1:
        os._exit(3)
    with pytest.raises(paramhub.JobFailedError) as failed:
        kv.pushpull("w", mx.nd.ones(3), out=out)
        out.wait_to_read()
        kv.push("w", out)
    return str(failed.value)


def test_a_lost_rank_is_named_by_the_next_call(hub: paramhub.Hub, team: Team) -> None:
    message, died = team(loses_a_rank, new_job(hub, RANKS), ranks=RANKS, dies=[1])
    assert "rank 1" in message, message
    assert died == Died(3)


def forks(rank: Rank, ticket: paramhub.JobTicket) -> None:
    import mxnet as mx

    kv = open_store(ticket)
    kv.init("w", mx.nd.zeros(3))
    out = mx.nd.zeros(3)
    if rank.rank == 1:
        rank.await_mark("pushed")
        # The other rank should be in its fork by then.
        time.sleep(0.5)
    kv.pushpull("w", mx.nd.ones(3), out=out)
    if rank.rank == 0:
        rank.mark("pushed")
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (out.asnumpy() == RANKS).all()
    # The engine goes on in the parent.
    kv.pushpull("w", mx.nd.ones(3) * 2, out=out)
    assert (out.asnumpy() == 2 * RANKS).all()


def test_a_process_forks_while_an_exchange_is_under_way(hub: paramhub.Hub, team: Team) -> None:
    team(forks, new_job(hub, RANKS), ranks=RANKS)


NEVER_ANSWERED = """
import atexit, os, pathlib, time

ended = pathlib.Path(os.environ["TEST_ENDED"])
# It runs after paramhub.mxnet has waited for the engine.
atexit.register(ended.touch)

import mxnet as mx
import paramhub.kvstore, paramhub.mxnet

paramhub.kvstore.EXIT_TIMEOUT = 0.2
store = mx.kv.create("paramhub")
store.init("w", mx.nd.zeros(3))
out = mx.nd.zeros(3)
store.pushpull("w", mx.nd.ones(3), out=out)
out.wait_to_read()
if store.rank == 1:
    while not ended.exists():
        time.sleep(0.01)
    os._exit(0)
store.pushpull("w", mx.nd.ones(3), out=out)
"""


def test_a_program_ends_although_an_exchange_does_not(
    hub: paramhub.Hub, launch: Callable[..., Ended], tmp_path: Path
) -> None:
    run = (*PARAMHUB, "run", "-n", "2", "--hub", hub.url, "--", PYTHON, "-c", NEVER_ANSWERED)
    code, output = launch(*run, env={"TEST_ENDED": str(tmp_path / "ended")})
    assert "could not be left" in output, (code, output)


PROGRAM = """
import mxnet as mx
from mxnet import autograd, gluon
import paramhub.mxnet

x = gluon.Parameter("x", shape=(10, 1))
x.initialize(ctx=mx.cpu(), init="ones")
trainer = gluon.Trainer([x], "sgd", {"learning_rate": 1.0}, kvstore="paramhub")
with autograd.record():
    loss = (x.data() * 2).sum()
loss.backward()
trainer.step(1)
assert (x.data().asnumpy() == -3).all(), x.data()
print("reached", x.data().asnumpy()[0, 0])
"""


def test_a_trainer_with_one_device_uses_the_store_that_it_names(
    hub: paramhub.Hub, launch: Callable[..., Ended]
) -> None:
    code, output = launch(*PARAMHUB, "run", "-n", "2", "--hub", hub.url, "--", PYTHON, "-c", PROGRAM)
    assert code == 0 and output.count("reached -3.0") == 2, output
    code, output = launch(*PARAMHUB, "jobs", "list", "--hub", hub.url)
    assert code == 0 and "finished" in output, output
