"""The numbers of an exchange through a hub in this process."""

from __future__ import annotations

import array
import gc
import time

import numpy
import pytest
from workers import TIMEOUT, in_threads, new_job

import paramhub

TRANSPORTS = ["tcp", "shm"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_come_back_as_their_mean(hub: paramhub.Hub, transport: str) -> None:
    shapes = {"a": (3, 5), "b": (70_000,), "c": (), "d": (1,)}

    def work(job: paramhub.Job) -> dict[str, dict[str, numpy.ndarray]]:
        gradients = {
            name: numpy.random.default_rng([job.rank, number]).normal(size=shape).astype("f4").reshape(shape)
            for number, (name, shape) in enumerate(shapes.items())
        }
        job.init(gradients)
        assert job.shares_memory == (transport == "shm")
        out = {name: numpy.full_like(gradient, numpy.nan) for name, gradient in gradients.items()}
        handles = [job.push_pull(name, gradients[name], out[name]) for name in shapes]
        for handle in handles:
            handle.wait(TIMEOUT)
        return {"out": out, "in": gradients}

    results = in_threads(hub, 3, work, transport=transport)
    for name in shapes:
        expected = sum(result["in"][name].astype("f8") for result in results) / 3
        for result in results:
            assert numpy.allclose(result["out"][name], expected, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_tensors_are_exchanged_by_one_request_or_none(hub: paramhub.Hub, transport: str) -> None:
    def work(job: paramhub.Job) -> list[numpy.ndarray]:
        gradients = [numpy.full(elements, job.rank + elements, "f4") for elements in (1, 256, 70_000)]
        outs = [numpy.zeros_like(gradients[0]), numpy.zeros_like(gradients[1]), gradients[2]]
        names = [f"w{number}" for number in range(3)]
        job.init(dict(zip(names, gradients, strict=True)))
        with pytest.raises(paramhub.MisuseError, match="tensor 'w1' has 1024 bytes"):
            job.push_pull_many([("w0", gradients[0], outs[0]), ("w1", gradients[0], outs[1])])
        with pytest.raises(paramhub.MisuseError, match="w1"):
            job.push_pull_many([("w0", gradients[0], outs[0]), *[("w1", gradients[1], outs[1])] * 2])
        assert [job.next_step(name) for name in names] == [0, 0, 0]
        job.push_pull_many(zip(names, gradients, outs, strict=True)).wait(TIMEOUT)
        job.push_pull_many([]).wait(TIMEOUT)
        return outs

    for outs in in_threads(hub, 2, work, transport=transport):
        for out in outs:
            assert (out == len(out) + 0.5).all()


def test_ranks_get_equal_bits(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> bytes:
        gradient = numpy.random.default_rng(job.rank).normal(size=50_000).astype("f4")
        job.init({"w": gradient}, optimizer=paramhub.Sum())
        job.push_pull("w", gradient, gradient).wait(TIMEOUT)
        return gradient.tobytes()

    assert len(set(in_threads(hub, 4, work))) == 1


def test_reproducible_sums_are_those_of_rank_order(hub: paramhub.Hub) -> None:
    def gradient(rank: int) -> numpy.ndarray:
        # The magnitudes differ so much that another order of adding has another result.
        random = numpy.random.default_rng(rank)
        return (random.normal(size=20_000) * 10.0 ** random.integers(-6, 6, 20_000)).astype("f4")

    def work(job: paramhub.Job) -> list[bytes]:
        mine = gradient(job.rank)
        job.init({"w": mine}, optimizer=paramhub.Sum(), reproducible=True)
        results = []
        for step in range(3):
            # The ranks arrive in another order in every step.
            time.sleep(0.02 * ((job.rank + step) % job.workers))
            out = numpy.empty_like(mine)
            job.push_pull("w", mine, out).wait(TIMEOUT)
            results.append(out.tobytes())
        return results

    in_order = ((gradient(0) + gradient(1)) + gradient(2)) + gradient(3)
    backwards = ((gradient(3) + gradient(2)) + gradient(1)) + gradient(0)
    assert in_order.tobytes() != backwards.tobytes(), "the numbers are the same in either order"
    for transport in TRANSPORTS:
        results = in_threads(hub, 4, work, transport=transport)
        assert {bits for rank in results for bits in rank} == {in_order.tobytes()}, transport


def test_parameters_start_as_rank_0s_and_follow_the_optimizer(hub: paramhub.Hub) -> None:
    lr, momentum, decay = 0.1, 0.9, 0.01

    def work(job: paramhub.Job) -> list[numpy.ndarray]:
        weight = numpy.full(1000, 1.0 + job.rank, "f4")
        gradient = numpy.full(1000, 2.0 * job.rank, "f4")
        job.init({"w": weight}, optimizer=paramhub.SGD(lr, momentum, weight_decay=decay))
        seen = [weight.copy()]
        for _ in range(4):
            job.push_pull("w", gradient, out=weight).wait(TIMEOUT)
            seen.append(weight.copy())
        return seen

    weight, velocity, expected = 1.0, None, [1.0]
    for _ in range(4):
        gradient = 1.0 + decay * weight  # the mean of 0 and 2, and the decay
        velocity = gradient if velocity is None else momentum * velocity + gradient
        weight -= lr * velocity
        expected.append(weight)
    for seen in in_threads(hub, 2, work):
        assert numpy.allclose(numpy.stack(seen), numpy.array(expected)[:, None], rtol=1e-6)


def test_hyperparameters_change_from_their_step_on(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> list[float]:
        weight, gradient = numpy.zeros(10, "f4"), numpy.ones(10, "f4")
        job.init({"w": weight}, optimizer=paramhub.SGD(lr=1.0))
        seen = []
        for step in range(5):
            if job.rank == 1 and step == 1:
                job.set_hyperparameters(3, learning_rate=0.25)
            assert job.next_step("w") == step
            job.push_pull("w", gradient, out=weight).wait(TIMEOUT)
            seen.append(float(weight[0]))
        return seen

    assert in_threads(hub, 2, work) == [[-1.0, -2.0, -3.0, -3.25, -3.5]] * 2


def test_hyperparameters_that_cannot_be_change_nothing(hub: paramhub.Hub) -> None:
    optimizer = paramhub.SGD(lr=1.0)

    def work(job: paramhub.Job) -> float:
        weight, gradient = numpy.zeros(10, "f4"), numpy.ones(10, "f4")
        job.init({"w": weight}, optimizer=optimizer)
        for wrong in (float("nan"), float("inf"), "much"):
            with pytest.raises(paramhub.MisuseError):
                job.set_hyperparameters(0, momentum=wrong)
        job.set_hyperparameters(0, learning_rate=0.5)
        job.push_pull("w", gradient, out=weight).wait(TIMEOUT)
        return float(weight[0])

    assert in_threads(hub, 1, work) == [-0.5]
    # The job has not changed the caller's optimizer, which may be used for another job.
    assert optimizer == paramhub.SGD(lr=1.0)


def test_push_and_pull_alone(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> float:
        weight, gradient = numpy.zeros(100_000, "f4"), numpy.full(100_000, 1.0 + job.rank, "f4")
        job.init([("w", weight)], optimizer=paramhub.SGD(lr=1.0))
        job.push("w", gradient).wait(TIMEOUT)
        job.pull("w", weight).wait(TIMEOUT)
        assert weight.min() == weight.max()
        return float(weight[0])

    assert in_threads(hub, 2, work) == [-1.5, -1.5]


def test_asynchronous_ranks_do_not_wait(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> float:
        weight, gradient = numpy.zeros(100, "f4"), numpy.ones(100, "f4")
        job.init({"w": weight}, optimizer=paramhub.SGD(lr=1.0), consistency="asynchronous")
        for _ in range(5 if job.rank == 0 else 0):
            job.push_pull("w", gradient, out=weight).wait(TIMEOUT)
        return float(weight[0])

    assert in_threads(hub, 2, work)[0] == -5.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_f16_gradients_are_summed_in_f32(hub: paramhub.Hub, transport: str) -> None:
    def work(job: paramhub.Job) -> float:
        # 2048 + 1 is 2048 in f16: only a wider sum keeps the ones of three ranks.
        gradient = numpy.full(5000, 2048.0 if job.rank == 0 else 1.0, "f2")
        job.init({"w": gradient}, optimizer=paramhub.Sum())
        job.push_pull("w", gradient, gradient).wait(TIMEOUT)
        assert gradient.min() == gradient.max()
        return float(gradient[0])

    assert (
        in_threads(hub, 4, work, transport=transport) == [2052.0] * 4
    )  # the f16 next to 2051, on the even side


def test_codec_halves_what_travels(hub: paramhub.Hub) -> None:
    def sent(codec: str | None) -> float:
        def work(job: paramhub.Job) -> float:
            gradient = numpy.ones(100_000, "f4")
            job.init({"w": gradient}, codec=codec)
            job.push_pull("w", gradient, gradient).wait(TIMEOUT)
            assert (gradient == 1.0).all()
            return job.statistics()["bytes_sent"]

        return in_threads(hub, 1, work, transport="tcp")[0]

    assert 400_000 <= sent(None) < 410_000
    assert 200_000 <= sent("f16") < 210_000


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_quantised_tensors_travel_small_both_ways_and_add_up(hub: paramhub.Hub, transport: str) -> None:
    def work(job: paramhub.Job) -> tuple[numpy.ndarray, float]:
        matrix = numpy.linspace(-1.0, 2.0, 256 * 256, dtype="f4").reshape(256, 256)
        bias = numpy.arange(256, dtype="f4")
        named = numpy.arange(4096, dtype="f4")
        job.init({"w": matrix, "b": bias, "named": named}, codec="one-bit", codecs={"named": "two-bit"})
        total = numpy.zeros_like(matrix)
        out = numpy.empty_like(matrix)
        before = job.statistics()
        for _ in range(100):
            job.push_pull("w", matrix, out).wait(TIMEOUT)
            total += out
        after = job.statistics()
        # Through shared memory there are no bytes to save.
        for way in ("bytes_sent", "bytes_received") if transport == "tcp" else ():
            assert (after[way] - before[way]) * 30 < 100 * (matrix.nbytes + 8 * 16), way
        received = numpy.empty_like(bias)
        job.push_pull("b", bias, received).wait(TIMEOUT)
        assert (received == bias).all()
        job.push_pull("named", named, named).wait(TIMEOUT)
        assert len(numpy.unique(named[:1024])) == 4
        return total, float(numpy.abs(total / 100 - matrix).max())

    first, second = in_threads(hub, 2, work, transport=transport)
    assert (first[0] == second[0]).all()
    assert first[1] < 0.1


def test_a_gradient_that_one_bit_cannot_carry_is_named(hub: paramhub.Hub) -> None:
    reason = r"`w` with a NaN.*two-bit cannot carry"
    with (
        pytest.raises(paramhub.JobFailedError, match=reason),
        paramhub.connect(*new_job(hub, 1), 0, transport="tcp") as job,
    ):
        job.init({"w": numpy.zeros((4, 4), "f4")}, codec="two-bit")
        gradient = numpy.full((4, 4), numpy.inf, "f4")
        job.push_pull("w", gradient, gradient).wait(TIMEOUT)


def test_codecs_are_of_tensors_that_are_there(hub: paramhub.Hub) -> None:
    reason = r"codecs names \['x'\]"
    with paramhub.connect(*new_job(hub, 1), 0) as job, pytest.raises(paramhub.MisuseError, match=reason):
        job.init({"w": numpy.zeros((4, 4), "f4")}, codecs={"x": "one-bit"})


def test_any_memory_of_floats_is_exchanged(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        floats = array.array("f", [1.0, 2.0, 3.0])
        halves = memoryview(numpy.array([4.0, 5.0], "f2"))
        part = numpy.arange(10, dtype="f4")
        job.init({"floats": floats, "halves": halves, "part": part[2:7]})
        job.push_pull("floats", floats, floats).wait(TIMEOUT)
        job.push_pull("halves", halves, halves).wait(TIMEOUT)
        assert floats.tolist() == [1.0, 2.0, 3.0]
        assert numpy.asarray(halves).tolist() == [4.0, 5.0]
        job.push_pull("part", numpy.full(5, 9.0, "f4"), part[2:7]).wait(TIMEOUT)
        assert part.tolist() == [0.0, 1.0, *[9.0] * 5, 7.0, 8.0, 9.0]

    in_threads(hub, 1, work)


def test_memory_of_the_jobs_is_exchanged_where_it_lies(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> tuple[float, bool]:
        weight = numpy.zeros((4, 2500), "f4")
        job.init({"w": weight}, optimizer=paramhub.SGD(lr=1.0))
        lent, received = job.gradient_tensor("w"), job.parameter_tensor("w")
        assert (lent.shape, lent.dtype, lent.nbytes) == ([4, 2500], "f32", 40_000)
        gradient, parameters = numpy.from_dlpack(lent), numpy.from_dlpack(received)
        assert gradient.shape == parameters.shape == (4, 2500)
        assert gradient.__array_interface__["data"][0] == lent.address
        for _ in range(3):
            gradient[:] = 1.0 + job.rank
            job.push_pull("w", lent, out=received).wait(TIMEOUT)
        # The job's own memory may be passed as a `Tensor` and as an array.
        job.push_pull("w", gradient, out=parameters).wait(TIMEOUT)
        return float(parameters[3, 2499]), bool((parameters == parameters[0, 0]).all())

    for transport in TRANSPORTS:
        assert in_threads(hub, 2, work, transport=transport) == [(-6.0, True)] * 2


def test_one_memory_for_a_gradient_is_given_out_at_a_time(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> None:
        job.init({"w": numpy.zeros(100, "f4")})
        lent = job.gradient_tensor("w")
        array = numpy.from_dlpack(lent)
        with pytest.raises(paramhub.MisuseError, match=r"`w`.*given out already"):
            job.gradient_tensor("w")
        del lent
        with pytest.raises(paramhub.MisuseError, match=r"`w`.*given out already"):
            job.gradient_tensor("w")
        array[:] = 7.0
        view = array[10:20]
        del array
        gc.collect()
        assert view.sum() == 70.0
        del view
        job.gradient_tensor("w")

    in_threads(hub, 1, work, transport="shm")


def test_memory_of_the_jobs_outlives_it(hub: paramhub.Hub) -> None:
    kept = []

    def work(job: paramhub.Job) -> None:
        job.init({"w": numpy.zeros(100_000, "f4")})
        array = numpy.from_dlpack(job.gradient_tensor("w"))
        array[:] = 3.0
        kept.append(array)

    in_threads(hub, 1, work, transport="shm")
    gc.collect()
    assert kept[0].sum() == 300_000.0
    kept[0][:] = 4.0
    assert kept[0].sum() == 400_000.0


def test_statistics_count(hub: paramhub.Hub) -> None:
    def work(job: paramhub.Job) -> dict[str, float]:
        gradient = numpy.ones(10_000, "f4")
        job.init({"w": gradient})
        before = job.statistics()
        for _ in range(3):
            job.push_pull("w", gradient, gradient).wait(TIMEOUT)
        after = job.statistics()
        return {name: after[name] - before[name] for name in after}

    for counted in in_threads(hub, 2, work):
        assert counted["requests"] == 3
        assert counted["bytes_sent"] >= 3 * 40_000
        assert counted["bytes_received"] >= 3 * 40_000
        assert counted["in_flight_s"] > 0
