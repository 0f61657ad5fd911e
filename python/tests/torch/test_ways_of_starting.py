"""All ways of starting ranks and all uses of paramhub: ranks get the weights that DDP over gloo gives, or are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launching import PYTHON, Ended
from team import LAUNCHERS, PLACES, Rank, Team, free_port
from torch.nn.parallel import DistributedDataParallel

import paramhub
import paramhub.torch as hub_torch
from paramhub import MisuseError
from paramhub.torch import HubOptimizer, HubState, hub_hook

STEPS = 4
SGD = {"lr": 0.1, "momentum": 0.9}


class Start:
    """A way of starting ranks: each rank's variables, and its arguments of init_process_group."""

    def __init__(
        self,
        variables: Mapping[str, str],
        arguments: Callable[[Rank, int], dict[str, Any]],
        *,
        begins: bool,
    ) -> None:
        self._variables = variables
        self._arguments = arguments
        self.begins = begins
        """True if the process group is always initialised, and not only for uses that need it."""

    def set_variables(self, rank: Rank, port: int) -> None:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS) or name in PLACES]:
            del os.environ[name]
        for name, value in self._variables.items():
            os.environ[name] = value.format(rank=rank.rank, size=rank.size, port=port)

    def initialise(self, rank: Rank, port: int, backend: str) -> None:
        dist.init_process_group(backend, **self._arguments(rank, port))


def place(rank: Rank) -> dict[str, Any]:
    return {"rank": rank.rank, "world_size": rank.size}


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
TORCHRUN = {
    "RANK": "{rank}",
    "WORLD_SIZE": "{size}",
    "LOCAL_RANK": "{rank}",
    "LOCAL_WORLD_SIZE": "{size}",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "{rank}",
    "SLURM_NTASKS": "{size}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "{size}",
    "SLURM_STEP_NODELIST": "localhost",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "{size}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
}


def by_store(rank: Rank, port: int) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", port, rank.size, rank.rank == 0, wait_for_workers=False)
    return {**place(rank), "store": store}


def by_file(rank: Rank, port: int) -> dict[str, Any]:
    return {**place(rank), "init_method": f"file://{rank.folder}/meeting-{port}"}


def by_tcp(rank: Rank, port: int) -> dict[str, Any]:
    return {**place(rank), "init_method": f"tcp://127.0.0.1:{port}"}


STARTS = {
    "torchrun": Start({**TORCHRUN, **MASTER}, lambda rank, port: {}, begins=False),
    "torchrun, then init_process_group": Start({**TORCHRUN, **MASTER}, lambda rank, port: {}, begins=True),
    "RANK and WORLD_SIZE alone": Start(
        {"RANK": "{rank}", "WORLD_SIZE": "{size}", **MASTER}, lambda rank, port: {}, begins=False
    ),
    "rank by argument, MASTER_ADDR by variable": Start(MASTER, lambda rank, port: place(rank), begins=True),
    "tcp://": Start({}, by_tcp, begins=True),
    "file://": Start({}, by_file, begins=True),
    "a store": Start({}, by_store, begins=True),
    "Slurm": Start({**SLURM, **MASTER}, lambda rank, port: place(rank), begins=False),
    "Slurm, then init_process_group": Start(SLURM, by_tcp, begins=True),
    "Open MPI": Start({**OPEN_MPI, **MASTER}, lambda rank, port: place(rank), begins=False),
    "Open MPI, then init_process_group": Start(OPEN_MPI, by_tcp, begins=True),
    "MPICH": Start(
        {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}", **MASTER}, lambda rank, port: place(rank), begins=False
    ),
}


def model_of(rank: int) -> torch.nn.Module:
    """A model with different parameters on each rank; all ranks must get rank 0's."""
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))


def train(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(STEPS):
        source = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=source)).square().mean().backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def use_hub_optimizer(rank: int) -> torch.Tensor:
    model = model_of(rank)
    optimizer = HubOptimizer(model, paramhub.SGD(**SGD))
    train(rank, model, optimizer)
    return weights(model)


def use_ddp(rank: int, hook: bool) -> torch.Tensor:
    model = model_of(rank)
    ddp = DistributedDataParallel(model)
    if hook:
        ddp.register_comm_hook(HubState(), hub_hook)
    train(rank, ddp, torch.optim.SGD(ddp.parameters(), **SGD))
    return weights(model)


def use_hook(rank: int) -> torch.Tensor:
    return use_ddp(rank, hook=True)


def use_backend(rank: int) -> torch.Tensor:
    return use_ddp(rank, hook=False)


def use_distributed_optimizer(rank: int) -> torch.Tensor:
    model = model_of(rank)
    hub_torch.init()
    optimizer = hub_torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), **SGD), named_parameters=model.named_parameters()
    )
    hub_torch.broadcast_parameters(model.state_dict(), root_rank=0)
    train(rank, model, optimizer)
    return weights(model)


USES = {
    "HubOptimizer": use_hub_optimizer,
    "hook": use_hook,
    "DistributedOptimizer": use_distributed_optimizer,
    "backend": use_backend,
}


def begin(rank: Rank, name: str, ports: dict[str, int]) -> dict[str, tuple[bytes, float]]:
    """The weights after each use, and their difference from those of DDP over gloo."""
    dist.init_process_group("gloo", init_method=f"file://{rank.folder}/gloo", **place(rank))
    expected = use_ddp(rank.rank, hook=False)
    dist.destroy_process_group()
    start, found = STARTS[name], {}
    for use, port in ports.items():
        start.set_variables(rank, port)
        if start.begins or use in ("hook", "backend"):
            start.initialise(rank, port, "paramhub" if use == "backend" else "gloo")
        reached = USES[use](rank.rank)
        assert (hub_torch.rank(), hub_torch.size()) == (rank.rank, rank.size)
        assert (hub_torch.local_rank(), hub_torch.local_size()) == (rank.rank, rank.size)
        if dist.is_initialized():
            dist.destroy_process_group()
        hub_torch.shutdown()
        found[use] = (reached.numpy().tobytes(), float((reached - expected).abs().max()))
    return found


@pytest.mark.parametrize("name", STARTS)
def test_ranks_train_together_however_they_are_started(team: Team, name: str) -> None:
    one, other = team(begin, name, {use: free_port() for use in USES}, ranks=2)
    for use in USES:
        assert one[use] == other[use], use
        assert one[use][1] < 1e-6, (use, one[use][1])


def be_refused(rank: Rank, use: str, variables: dict[str, str], words: list[str]) -> None:
    """The process group has two ranks, and the variables disagree with it."""
    Start(variables, by_file, begins=True).set_variables(rank, 0)
    dist.init_process_group("gloo", **by_file(rank, 0))
    with pytest.raises(MisuseError) as refused:
        USES[use](rank.rank)
    missing = [word for word in words if word not in str(refused.value)]
    assert not missing, refused.value
    dist.destroy_process_group()


FOUR = {"RANK": "{rank}", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("use", ["HubOptimizer", "hook", "DistributedOptimizer"])
def test_variables_and_process_group_that_disagree_are_refused(team: Team, use: str) -> None:
    mended = "paramhub.torch.init(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())"
    team(be_refused, use, FOUR, ["of 2 for torch.distributed", "of 4 for paramhub", mended], ranks=2)


def test_slurms_batch_step_and_a_process_group_of_its_own_disagree(team: Team) -> None:
    """A batch script has the variables of one task of many, however many processes it starts."""
    variables = {**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    team(be_refused, "HubOptimizer", variables, ["rank 0 of 8", "SLURM_NTASKS", "unset"], ranks=2)


def print_rank(rank: Rank) -> None:
    Start(SLURM | {"SLURM_NTASKS": "8"}, by_file, begins=True).set_variables(rank, 0)
    dist.init_process_group("gloo", **by_file(rank, 0))
    hub_torch.init(rank=dist.get_rank(), size=dist.get_world_size())
    use_hub_optimizer(rank.rank)
    assert hub_torch.size() == hub_torch.local_size() == 2
    dist.destroy_process_group()


def test_arguments_that_agree_with_the_process_group_overrule_variables(team: Team) -> None:
    team(print_rank, ranks=2)


def be_alone_first(rank: Rank, use: str) -> None:
    Start({}, by_file, begins=True).set_variables(rank, 0)
    model = model_of(rank.rank)
    if use == "HubOptimizer":
        optimizer = HubOptimizer(model, paramhub.SGD(**SGD))
    else:
        optimizer = hub_torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), **SGD))
    dist.init_process_group("gloo", **by_file(rank, 0))
    for step in (lambda: train(rank.rank, model, optimizer), lambda: HubOptimizer(model, paramhub.SGD(lr=1))):
        with pytest.raises(MisuseError, match="call init_process_group before") as refused:
            step()
        assert f"rank {rank.rank} of 2" in str(refused.value) and "rank 0 of 1" in str(refused.value)
    # The other rank may still be connecting, which fails when this one goes away.
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("use", ["HubOptimizer", "DistributedOptimizer"])
def test_a_process_group_that_comes_after_the_optimizer_is_refused(team: Team, use: str) -> None:
    team(be_alone_first, use, ranks=2)


def be_one_of_unknown(rank: Rank, variables: dict[str, str], words: list[str]) -> None:
    Start(variables, by_file, begins=False).set_variables(rank, 0)
    with pytest.raises(MisuseError) as refused:
        use_hub_optimizer(rank.rank)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (OPEN_MPI, ["mpirun -x MASTER_ADDR", "init_process_group"]),
        ({"WORLD_SIZE": "2", **MASTER}, ["WORLD_SIZE is 2", "set RANK"]),
    ],
)
def test_ranks_that_cannot_find_one_another_are_refused(
    team: Team, variables: dict[str, str], words: list[str]
) -> None:
    team(be_one_of_unknown, variables, words, ranks=2)


def train_in_pairs(rank: Rank) -> bytes:
    """Four ranks train in two separate pairs."""
    dist.init_process_group("gloo")
    pair, within = divmod(rank.rank, 2)
    store = dist.PrefixStore(f"pair-{pair}", dist.distributed_c10d._get_default_store())
    hub_torch.init(rank=within, size=2, store=store)
    found = use_hub_optimizer(rank.rank)
    dist.destroy_process_group()
    return found.numpy().tobytes()


def test_ranks_with_a_store_of_their_own_may_be_others_than_the_process_groups(team: Team) -> None:
    found = team(train_in_pairs, ranks=4)
    assert found[0] == found[1] != found[2] == found[3]


SPAWNED = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
import paramhub, paramhub.torch

def model_of(rank):
    torch.manual_seed(rank)
    return torch.nn.Linear(50, 4)

def train(rank, model, optimizer):
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()

def work(rank, size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=size)
    by_ddp = DistributedDataParallel(model_of(rank))
    train(rank, by_ddp, torch.optim.SGD(by_ddp.parameters(), lr=0.1))
    by_hub = model_of(rank)
    optimizer = paramhub.torch.HubOptimizer(by_hub, paramhub.SGD(lr=0.1))
    train(rank, by_hub, optimizer)
    optimizer.synchronize()
    by_hook = DistributedDataParallel(model_of(rank))
    by_hook.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    train(rank, by_hook, torch.optim.SGD(by_hook.parameters(), lr=0.1))
    for other in (by_hub, by_hook.module):
        assert torch.allclose(other.weight, by_ddp.module.weight, atol=1e-6)
    sys.stdout.write(f"rank {rank} has {by_hub.weight.double().sum().item()!r}\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""


def test_spawned_ranks_of_the_ddp_tutorial_do_not_drift_apart(
    launch: Callable[..., Ended], tmp_path: Path
) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(SPAWNED)
    # Three processes that import torch at the same time are slow on a busy machine.
    code, output = launch(PYTHON, script, str(free_port()), timeout=400)
    assert code == 0, output
    sums = {line.split(" has ")[1] for line in output.splitlines() if " has " in line}
    assert len(sums) == 1 and output.count(" has ") == 2, output
    assert "2 ranks, 1 host, by torch.distributed" in output
