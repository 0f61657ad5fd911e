"""Two hosts, each with two ranks: network namespaces that `cargo xtask testbed` makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BY_ALL_HUBS = """
import sys
import torch
import paramhub
import paramhub.torch as hub_torch
from paramhub.torch import HubOptimizer

WAYS = {"one-bit": {"codec": "one-bit"}, "factored": {"scheme": "factors"}}
hub_torch.init()
rank = hub_torch.rank()
for way, options in WAYS.items():
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    optimizer = HubOptimizer(model, paramhub.SGD(lr=0.05), **options)
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(100 * step + rank)
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
    total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
    sys.stdout.write(f"rank {rank} {way}: {total!r}\\n")
    optimizer.close()
"""
BY_SCHEME = """
import sys
import torch
import paramhub
import paramhub.torch as hub_torch

hub_torch.init()
rank = hub_torch.rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(512, 512))
optimizer = hub_torch.HubOptimizer(model, paramhub.SGD(lr=0.05), scheme="auto")
for step in range(3):
    optimizer.zero_grad()
    torch.manual_seed(100 * step + rank)
    model(torch.randn(2, 512)).square().mean().backward()
    optimizer.step()
total = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
sys.stdout.write(f"rank {rank} ends with {total!r} by {optimizer.schemes['0'][0]}\\n")
"""
DIES = """
import os, signal, sys
import torch
import paramhub
import paramhub.torch as hub_torch

hub_torch.init()
model = torch.nn.Linear(200, 300)
optimizer = hub_torch.HubOptimizer(model, paramhub.SGD(lr=0.05))
try:
    for step in range(10_000):
        optimizer.zero_grad()
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
        if step == 10 and hub_torch.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except paramhub.JobFailedError as error:
    sys.stdout.write(f"failed: {error}\\n")
"""
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
        # The testbed ends when this is closed.
        holder.stdin.close()


def train(
    hosts: tuple[str, list[str]], folder: Path, text: str, variables: dict[str, str], to_a_host: int = 2
) -> str:
    """Runs the program under torchrun on both hosts, whose ranks must end well. Returns their output."""
    address = hosts[1][0]
    meeting = [
        "--nnodes=2",
        f"--nproc-per-node={to_a_host}",
        f"--master-addr={address}",
        "--master-port=29555",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meeting]
    starts = [[*torchrun, f"--node-rank={number}"] for number in range(2)]
    codes, output = run(hosts, folder, text, starts, variables)
    assert codes == [0, 0], output
    # torchrun's own agents may say that one of them left the store first.
    said = [line for line in output.splitlines() if line.startswith("paramhub")]
    assert not any("failed" in line for line in said), output
    return output


def run(
    hosts: tuple[str, list[str]],
    folder: Path,
    text: str,
    starts: list[list[str]],
    variables: dict[str, str],
) -> tuple[list[int], str]:
    """Runs the program on both hosts. Returns the exit codes of the launchers, and the output of all ranks."""
    program = folder / "program.py"
    program.write_text(text)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PARAMHUB_")}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    started = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"{hosts[0]}-{host}", *start, str(program)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        for host, start in zip(HOSTS, starts, strict=True)
    ]
    try:
        output = "".join(process.communicate(timeout=150)[0] for process in started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [process.returncode for process in started], output


@pytest.mark.parametrize("deployment", ["", "cc"])
def test_ranks_of_two_hosts_train_alike(
    hosts: tuple[str, list[str]], tmp_path: Path, deployment: str
) -> None:
    output = train(hosts, tmp_path, PROGRAM, {"PARAMHUB_DEPLOYMENT": deployment} if deployment else {})
    ends = [line.split(" ends with ")[1] for line in output.splitlines() if " ends with " in line]
    assert len(ends) == 4 and len(set(ends)) == 1 and ends[0].endswith("and 1.5"), output
    # Every host has a hub by default.
    hubs = "rank 0 runs the hub for all 2 hosts" if deployment == "cc" else "each of the 2 hosts has a hub"
    assert f"no PARAMHUB_URL is set, so {hubs}" in output, output
    beside = "below" if deployment == "cc" else "beside those of other hosts"
    assert f"rank 2 runs a hub for the ranks of its host, {beside}" in output, output


def test_settings_that_hosts_sums_cannot_serve_are_summed_for_all_ranks(
    hosts: tuple[str, list[str]], tmp_path: Path
) -> None:
    output = train(hosts, tmp_path, BY_ALL_HUBS, {})
    for way in ("one-bit", "factored"):
        ends = [line.split(f" {way}: ")[1] for line in output.splitlines() if f" {way}: " in line]
        assert len(ends) == 4 and len(set(ends)) == 1, (way, output)
    assert "each of the 2 hosts has a hub" in output, output


def test_layers_may_go_by_their_factors_with_a_rank_on_each_host(
    hosts: tuple[str, list[str]], tmp_path: Path
) -> None:
    output = train(hosts, tmp_path, BY_SCHEME, {}, to_a_host=1)
    assert "each of the 2 hosts has a hub" in output, output
    ends = [line.split(" ends with ")[1] for line in output.splitlines() if " ends with " in line]
    assert len(ends) == 2 and len(set(ends)) == 1 and ends[0].endswith(" by factors"), output


def test_the_end_of_a_hosts_hub_names_the_rank_that_had_it(
    hosts: tuple[str, list[str]], tmp_path: Path
) -> None:
    # This does not run under torchrun, which would wait for torchrun on the other host.
    meeting = [f"MASTER_ADDR={hosts[1][0]}", "MASTER_PORT=29555", "WORLD_SIZE=2"]
    starts = [["env", *meeting, f"RANK={rank}", sys.executable] for rank in range(2)]
    codes, output = run(hosts, tmp_path, DIES, starts, {})
    assert codes == [0, -signal.SIGKILL], output
    failures = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert len(failures) == 1 and "/host-of-rank-1 " in failures[0] and "was lost" in failures[0], output
    assert output.count(failures[0].removeprefix("failed: ")) == 1, output
