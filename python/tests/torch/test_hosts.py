"""Two hosts, each with two ranks: network namespaces, as `cargo xtask testbed` makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
NOT_PERMITTED = 3
HOSTS = ["r0w0", "r0w1"]
PROGRAM = """
import sys
import torch
import paramhub
import paramhub.torch as hub_torch
from paramhub.torch import HubOptimizer

hub_torch.init()
rank = hub_torch.rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
optimizer = HubOptimizer(model, paramhub.SGD(lr=0.05, momentum=0.9))
for step in range(3):
    optimizer.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(8, 200)).square().mean().backward()
    optimizer.step()
total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
mean = float(hub_torch.allreduce(torch.full((100_000,), float(rank)))[7])
sys.stdout.write(f"rank {rank} ends with {total!r} and {mean}\\n")
"""


def xtask(*words: str) -> list[str]:
    return ["cargo", "run", "--quiet", "--package", "xtask", "--", "testbed", *words]


@pytest.fixture
def hosts() -> Iterator[tuple[str, list[str]]]:
    """The testbed's name, and the hosts' addresses."""
    name = f"py{os.getpid()}"
    up = xtask("up", "--hold", "--name", name, "--racks", "1", "--workers", "2", "--rate", "1gbit")
    pipe = subprocess.PIPE
    with subprocess.Popen(up, cwd=REPOSITORY, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as holder:
        assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None
        if "is up" not in holder.stdout.readline():
            why = holder.stderr.read().strip()
            assert holder.wait() == NOT_PERMITTED, why
            pytest.skip(why)
        listed = subprocess.run(
            xtask("hosts", "--name", name), cwd=REPOSITORY, text=True, capture_output=True, check=True
        )
        addresses = dict(line.split(" ", 1) for line in listed.stdout.splitlines())
        yield name, [addresses[host] for host in HOSTS]
        # The testbed is held while this is open.
        holder.stdin.close()


@pytest.mark.parametrize("deployment", ["cc", "cs"])
def test_ranks_of_two_hosts_train_alike(
    hosts: tuple[str, list[str]], tmp_path: Path, deployment: str
) -> None:
    name, addresses = hosts
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PARAMHUB_")}
    environment |= {"PARAMHUB_DEPLOYMENT": deployment, "OMP_NUM_THREADS": "1"}
    meeting = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={addresses[0]}", "--master-port=29555"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting]
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"{name}-{host}", *torchrun, f"--node-rank={number}", str(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        for number, host in enumerate(HOSTS)
    ]
    try:
        said = "".join(process.communicate(timeout=150)[0] for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], said
    ends = [line.split(" ends with ")[1] for line in said.splitlines() if " ends with " in line]
    assert len(ends) == 4 and len(set(ends)) == 1 and ends[0].endswith("and 1.5"), said
    beside = {"cc": "below", "cs": "beside those of other hosts"}[deployment]
    assert f"rank 2 runs a hub for the ranks of its host, {beside}" in said, said
    assert "failed" not in said, said
