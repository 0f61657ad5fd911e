"""`hub_hook` compared with DDP's own allreduce over gloo."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from team import Died, Rank, Team
from torch.nn.parallel import DistributedDataParallel
from training import STEPS, Net, OneHead, difference, loss_of, make, parameters_of

TOLERANCE = 1e-6


def train(
    rank: Rank, options: dict[str, Any], state: Any = None, kind: type[Net] = OneHead
) -> list[torch.Tensor]:
    """The parameters after training with DDP, with the hook if there is a state for it."""
    import paramhub.torch

    model = make(kind)
    # Buckets so small that there are several, which DDP rebuilds after the first pass.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, **options)
    if state is not None:
        ddp.register_comm_hook(state, paramhub.torch.hub_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        arguments = ((step + rank.rank) % 2 if step % 3 else 0,) if kind is Net else ()
        optimizer.zero_grad()
        loss_of(ddp, step, rank.rank, *arguments).backward()
        optimizer.step()
    return parameters_of(model)


OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
]
UNUSED = [
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


def compare(rank: Rank) -> list[float]:
    import paramhub.torch

    dist.init_process_group("gloo")
    differences = []
    for options in OPTIONS:
        expected = train(rank, options)
        differences.append(difference(train(rank, options, paramhub.torch.HubState()), expected))
    for options in UNUSED:
        expected = train(rank, options, kind=Net)
        differences.append(difference(train(rank, options, paramhub.torch.HubState(), Net), expected))
    return differences


def compare_hosts(rank: Rank, hosts: list[list[int]]) -> list[float]:
    """Ranks of a host sum among themselves first."""
    import paramhub.torch

    dist.init_process_group("gloo")
    own, _ = dist.new_subgroups_by_enumeration(hosts)
    differences = []
    for options in [*OPTIONS, *UNUSED]:
        kind = Net if options in UNUSED else OneHead
        state = paramhub.torch.HubState(host_group=own)
        differences.append(difference(train(rank, options, state, kind), train(rank, options, kind=kind)))
        assert (state._host_sums._buckets is not None) == (rank.rank in [host[0] for host in hosts])
    return differences


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 2, 3], [1]], [[0, 1, 2, 3]]])
def test_ranks_of_a_host_sum_among_themselves_first(team: Team, hosts: list[list[int]]) -> None:
    for differences in team(compare_hosts, hosts, ranks=4):
        assert max(differences) < TOLERANCE, differences


def refuses_hosts(rank: Rank) -> list[str]:
    import paramhub.torch

    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    alone = [dist.new_group([each]) for each in range(3)]
    # Rank 1 gives a group whose other rank does not give it.
    ddp = DistributedDataParallel(make())
    state = paramhub.torch.HubState(host_group=pairs[1] if rank.rank == 1 else alone[rank.rank])
    ddp.register_comm_hook(state, paramhub.torch.hub_hook)
    messages = []
    with pytest.raises(Exception) as refused:
        loss_of(ddp, 0, rank.rank).backward()
    messages.append(str(refused.value))
    rows = DistributedDataParallel(torch.nn.Embedding(5, 2, sparse=True))
    rows.register_comm_hook(paramhub.torch.HubState(host_group=alone[rank.rank]), paramhub.torch.hub_hook)
    with pytest.raises(Exception) as refused:
        rows(torch.tensor([1])).sum().backward()
    messages.append(str(refused.value))
    return messages


def test_wrong_hosts_and_sparse_gradients_are_refused(team: Team) -> None:
    for hosts, rows in team(refuses_hosts, ranks=3):
        assert "the host_group of rank 1 has ranks [1, 2]: each of the model's ranks, [0, 1, 2]" in hosts
        assert "has the sparse gradient of an embedding" in rows


def loses_a_rank_of_a_host(rank: Rank, dying: int) -> str:
    import paramhub.torch

    dist.init_process_group("gloo")
    own, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    ddp = DistributedDataParallel(make())
    ddp.register_comm_hook(paramhub.torch.HubState(host_group=own), paramhub.torch.hub_hook)
    loss_of(ddp, 0, rank.rank).backward()
    if rank.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as failed:
        for step in range(1000):
            loss_of(ddp, step, rank.rank).backward()
    return str(failed.value)


@pytest.mark.parametrize("dying", [2, 3])
def test_a_rank_of_a_host_that_dies_ends_all(team: Team, dying: int) -> None:
    """The leader of a host, and another of its ranks."""
    messages = team(loses_a_rank_of_a_host, dying, ranks=4, dies=[dying])
    assert isinstance(messages.pop(dying), Died)
    assert all(messages)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_hook_averages_as_ddp_does(team: Team, transport: str) -> None:
    for differences in team(compare, env={"PARAMHUB_TRANSPORT": transport}):
        assert len(differences) == len(OPTIONS) + len(UNUSED)
        assert max(differences) < TOLERANCE, differences


def staged(rank: Rank) -> list[float]:
    """Tensors are staged as a device's tensors are; the device is the CPU."""
    from paramhub.torch import _buckets

    _buckets.needs_stage = lambda device: True
    return compare(rank)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_hook_averages_by_way_of_a_stage(team: Team, transport: str) -> None:
    for differences in team(staged, ranks=2, env={"PARAMHUB_TRANSPORT": transport}):
        assert len(differences) == len(OPTIONS) + len(UNUSED)
        assert max(differences) < TOLERANCE, differences


def reproduce(rank: Rank) -> list[bytes]:
    import paramhub.torch

    dist.init_process_group("gloo")
    paramhub.torch.init(reproducible=True)
    # Higher ranks are late.
    time.sleep(0.01 * rank.rank)
    return [tensor.numpy().tobytes() for tensor in train(rank, {}, paramhub.torch.HubState())]


def test_reproducible_runs_are_bit_equal(team: Team) -> None:
    first, second = team(reproduce), team(reproduce, env={"PARAMHUB_TRANSPORT": "tcp"})
    assert all(rank == first[0] for rank in first + second)


def travels_as_bf16(rank: Rank) -> tuple[float, float]:
    import paramhub.torch

    dist.init_process_group("gloo")
    expected = train(rank, {})
    exact = difference(train(rank, {}, paramhub.torch.HubState()), expected)
    return exact, difference(train(rank, {}, paramhub.torch.HubState(codec="bf16")), expected)


def test_a_codec_rounds_what_travels(team: Team) -> None:
    for exact, rounded in team(travels_as_bf16, ranks=2):
        assert exact < TOLERANCE < rounded < 0.05


def travels_in_bits(rank: Rank) -> list[float]:
    import paramhub.torch

    dist.init_process_group("gloo")
    expected = train(rank, {})
    states = [paramhub.torch.HubState(codec=codec) for codec in ("one-bit", "two-bit", "int8")]
    return [difference(train(rank, {}, state), expected) for state in states]


def test_matrices_in_one_and_two_bits_stay_near_the_exact_ones(team: Team) -> None:
    results = team(travels_in_bits, ranks=2)
    assert results[0] == results[1]
    assert all(TOLERANCE < off < 0.5 for off in results[0]), results


def two_models_and_a_pair(rank: Rank) -> list[float]:
    """Two DDP instances whose passes alternate, and one over a subset of the ranks, each with a process group of its own."""
    import paramhub.torch

    dist.init_process_group("gloo")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank.rank // 2]
    models = [make(), make()]
    both = [DistributedDataParallel(model) for model in models]
    for ddp in both:
        ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    paired = DistributedDataParallel(make(), process_group=mine)
    paired.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    given = DistributedDataParallel(make(), process_group=mine)
    given.register_comm_hook(paramhub.torch.HubState(process_group=mine, ddp=given), paramhub.torch.hub_hook)
    gradients: list[list[torch.Tensor]] = []
    for step in range(3):
        for ddp in (*both, paired, given):
            ddp.zero_grad()
            loss_of(ddp, step, rank.rank).backward()
        gradients = [[p.grad.clone() for p in ddp.parameters()] for ddp in (*both, paired, given)]
    results = []
    for found, group in zip(gradients, (None, None, mine, mine), strict=True):
        ddp = DistributedDataParallel(make(), process_group=group)
        loss_of(ddp, 2, rank.rank).backward()
        results.append(difference(found, [p.grad for p in ddp.parameters()]))
    return results


def test_several_instances_and_process_groups(team: Team) -> None:
    for differences in team(two_models_and_a_pair):
        assert max(differences) < TOLERANCE, differences


def uneven(rank: Rank, hosts: list[list[int]] | None) -> float:
    """Ranks with fewer batches take part in the other ranks' passes, outside of a backward pass of their own."""
    import paramhub.torch

    def run(hooked: bool) -> list[torch.Tensor]:
        model = make()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        if hooked:
            own = dist.new_subgroups_by_enumeration(hosts)[0] if hosts else None
            ddp.register_comm_hook(paramhub.torch.HubState(host_group=own), paramhub.torch.hub_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with ddp.join():
            for step in range(3 + rank.rank):
                optimizer.zero_grad()
                loss_of(ddp, step, rank.rank).backward()
                optimizer.step()
        return parameters_of(model)

    dist.init_process_group("gloo")
    return difference(run(True), run(False))


@pytest.mark.parametrize("hosts", [None, [[0, 1], [2, 3]]])
def test_join_with_uneven_inputs(team: Team, hosts: list[list[int]] | None) -> None:
    assert max(team(uneven, hosts, ranks=4 if hosts else 2)) < TOLERANCE


def orders(rank: Rank) -> list[tuple[int, list[bool]]]:
    """After each pass, how often the job was opened again, and which buckets' means are read in place."""
    import paramhub.torch

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(make(), bucket_cap_mb=0.02)
    state = paramhub.torch.HubState()
    ddp.register_comm_hook(state, paramhub.torch.hub_hook)
    seen = []
    for step in range(4):
        loss_of(ddp, step, rank.rank).backward()
        buckets = state._buckets
        seen.append(
            (buckets._reorderings, [layout.shared is not None for layout in buckets._layouts.values()])
        )
    return seen


def test_rebuilt_buckets_are_neighbours_in_a_new_job(team: Team) -> None:
    for seen in team(orders, ranks=2):
        assert seen == [(0, [True]), (0, [True, False, False]), (1, [True, True]), (1, [True, True])]
    for seen in team(orders, ranks=2, env={"PARAMHUB_TRANSPORT": "tcp"}):
        assert seen[-1] == (1, [False, False])


def wrapped(rank: Rank) -> float:
    """A hook that calls `hub_hook` and changes the mean in place."""
    import paramhub.torch

    dist.init_process_group("gloo")

    def doubled(state: Any, bucket: dist.GradBucket) -> Any:
        return paramhub.torch.hub_hook(state, bucket).then(lambda future: future.value().mul_(2))

    doubled.__annotations__ = {}
    ddp = DistributedDataParallel(make(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(paramhub.torch.HubState(), doubled)
    plain = DistributedDataParallel(make())
    differences = []
    # Three passes: after the first DDP rebuilds its buckets, and after the second their keys may be neighbours in the job.
    for step in range(3):
        for model in (ddp, plain):
            model.zero_grad()
            loss_of(model, step, rank.rank).backward()
        expected = [2 * parameter.grad for parameter in plain.parameters()]
        differences.append(difference([parameter.grad for parameter in ddp.parameters()], expected))
    return max(differences)


def test_a_hook_around_it_may_change_the_mean_in_place(team: Team) -> None:
    assert max(team(wrapped, ranks=2)) < TOLERANCE


def accumulates(rank: Rank) -> float:
    import paramhub.torch

    def run(hooked: bool) -> list[torch.Tensor]:
        ddp = DistributedDataParallel(make())
        if hooked:
            ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
        with ddp.no_sync():
            loss_of(ddp, 0, rank.rank).backward()
        loss_of(ddp, 1, rank.rank).backward()
        return [p.grad for p in ddp.parameters()]

    dist.init_process_group("gloo")
    return difference(run(True), run(False))


def test_no_sync_accumulates(team: Team) -> None:
    assert max(team(accumulates, ranks=2)) < TOLERANCE


def refused(rank: Rank) -> dict[str, str]:
    import paramhub
    import paramhub.torch

    dist.init_process_group("gloo")

    def message(state: Any, ddp: DistributedDataParallel, *inputs: Any) -> str:
        ddp.register_comm_hook(state, paramhub.torch.hub_hook)
        with pytest.raises(paramhub.MisuseError) as error:
            ddp(*inputs).sum().backward()
        return str(error.value)

    messages = {}
    double = DistributedDataParallel(torch.nn.Linear(2, 2).double())
    messages["double"] = message(paramhub.torch.HubState(), double, torch.ones(1, 2, dtype=torch.float64))
    shared = paramhub.torch.HubState()
    first, second = (DistributedDataParallel(torch.nn.Linear(2, 2)) for _ in range(2))
    first.register_comm_hook(shared, paramhub.torch.hub_hook)
    first(torch.ones(1, 2)).sum().backward()
    messages["shared"] = message(shared, second, torch.ones(1, 2))
    return messages


def test_unsupported_uses_are_refused_with_a_reason(team: Team) -> None:
    for messages in team(refused, ranks=1):
        assert "'weight' has elements of torch.float64" in messages["double"]
        assert "several DistributedDataParallel" in messages["shared"]


def dying(rank: Rank, options: dict[str, Any], passes: int) -> tuple[str, str]:
    """The survivors' errors when rank 1 dies after ``passes`` complete passes, with its job open."""
    import paramhub.torch

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(make(), **options)
    state = paramhub.torch.HubState()

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank.rank == 1 and step == passes:
            if state._buckets is None:
                state._open()
            os.kill(os.getpid(), signal.SIGKILL)
        return paramhub.torch.hub_hook(state, bucket)

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    ddp.register_comm_hook(state, hook)
    for step in range(passes + 1):
        try:
            loss_of(ddp, step, rank.rank).backward()
        except Exception as error:
            return type(error).__name__, str(error)
    raise AssertionError("the pass ended without the dead rank")


@pytest.mark.parametrize(
    ("options", "passes", "kind"),
    [({}, 0, "JobFailedError"), ({}, 3, "JobFailedError"), ({"static_graph": True}, 0, "RuntimeError")],
)
def test_a_dying_rank_fails_the_others_passes(
    team: Team, options: dict[str, Any], passes: int, kind: str
) -> None:
    results = team(dying, options, passes, ranks=3, dies=[1])
    assert isinstance(results[1], Died)
    for name, message in (results[0], results[2]):
        # The end of its connection shows the loss at once, not its silence.
        assert "rank 1 was lost: " in message
        # In the first pass a rank may still be opening the job. Then the hook itself raises, and the exception
        # keeps its type, which it would lose in DDP's future. It may say that a stream was refused.
        assert name == kind or (passes == 0 and name == "JobFailedError")
        assert "because of rank 1" in message or (passes == 0 and "refused the stream" in message)
        assert "connection" in message.split("rank 1 was lost: ")[1]


def found_without_a_search(rank: Rank) -> list[bool]:
    """Returns whether each pass found its DDP instance without a search through the objects of the process."""
    import paramhub.torch
    import paramhub.torch.ddp

    def search() -> None:
        raise AssertionError("the heap was searched")

    assert callable(paramhub.torch.ddp.ddp_instances), "the search has another name: this test guards nothing"
    paramhub.torch.ddp.ddp_instances = search
    dist.init_process_group("gloo")
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    left = []
    for compiled in (False, True):
        ddp = DistributedDataParallel(make())
        state = paramhub.torch.HubState()
        ddp.register_comm_hook(state, paramhub.torch.hub_hook)
        # Another module's pass comes first.
        make()(torch.zeros(1, 1, 8, 8))
        left.append(len(hooks) == 1)
        loss_of(torch.compile(ddp, backend="eager") if compiled else ddp, 0, rank.rank).backward()
        left.append(len(hooks) == 0 and state._ddp() is ddp)
    dropped = paramhub.torch.HubState()
    del dropped
    make()(torch.zeros(1, 1, 8, 8))
    return [*left, len(hooks) == 0]


def test_the_first_pass_does_not_search_all_objects(team: Team) -> None:
    assert all(all(found) for found in team(found_without_a_search, ranks=2))


def pickled(rank: Rank) -> tuple[dict[str, Any], float]:
    import paramhub.torch

    dist.init_process_group("gloo")
    state = paramhub.torch.HubState(codec="bf16")
    train(rank, {}, state)
    copy = pickle.loads(pickle.dumps(state))
    again = paramhub.torch.HubState(codec="bf16")
    return copy.state_dict(), difference(train(rank, {}, copy), train(rank, {}, again))


def test_a_state_can_be_pickled_and_goes_on(team: Team) -> None:
    for state, apart in team(pickled, ranks=2):
        assert state == {"codec": "bf16", "in_place": False, "parameters": {}}
        assert apart == 0.0


def interrupted(rank: Rank) -> bool:
    """Returns whether Ctrl-C ends a backward pass that waits for another rank."""
    import paramhub.torch

    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(make())
    ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    # DDP's second forward pass waits for all ranks over gloo, to rebuild its buckets.
    for step in range(2):
        loss_of(ddp, step, rank.rank).backward()
    if rank.rank == 1:
        rank.await_mark("interrupted")
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loss = loss_of(ddp, 2, rank.rank)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    rank.mark("interrupted")
    return True


def test_ctrl_c_ends_a_pass_that_waits(team: Team) -> None:
    assert team(interrupted, ranks=2) == [True, False]
