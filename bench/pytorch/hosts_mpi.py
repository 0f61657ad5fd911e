"""Measures Open MPI's allreduce of a model's tensors on several hosts of the testbed, beside what hosts.py measures there.

    python bench/pytorch/hosts_mpi.py --hosts 2 --model resnet18

Needs root, cargo, mpirun and mpicc. The ranks run bench/peers/allreduce.c: in place or into a second buffer, one tensor after
the other or all as one. A time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from hosts import END_TIMEOUT_S, NAME, REPOSITORY, TESTBED, testbed

ARRIVAL_TIMEOUT_S = 60


def main() -> int:
    options = parse()
    tensors = [
        math.prod(tensor["shape"]) for tensor in json.loads(model_path(options.model).read_text())["tensors"]
    ]
    with testbed(options.hosts, options.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        addresses = {f"r0w{rank}": hosts[f"r0w{rank}"] for rank in range(options.hosts)}
        program, line = Path(folder, "allreduce"), Path(folder, "line")
        subprocess.run(["mpicc", "-O2", "-o", program, REPOSITORY / "bench/peers/allreduce.c"], check=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(line))
            listener.listen(options.hosts)
            listener.settimeout(ARRIVAL_TIMEOUT_S)
            mpirun = start(addresses, write_agent(Path(folder), addresses), program, line)
            try:
                ranks = [arrival(listener) for _ in addresses]
                for what, lengths in (
                    ("one tensor after the other", tensors),
                    ("one buffer", [sum(tensors)]),
                ):
                    for form in ("in-place", "second"):
                        turns = [turn(ranks, form, lengths) for _ in range(options.rounds + 1)][1:]
                        print(
                            f"  Open MPI, {what}, {form:10} {statistics.median(turns) * 1e3:8.1f} ms "
                            f"({min(turns) * 1e3:.1f} .. {max(turns) * 1e3:.1f})",
                            flush=True,
                        )
                for rank in ranks:
                    rank.close()
                return mpirun.wait(END_TIMEOUT_S)
            finally:
                mpirun.kill()
                mpirun.wait(END_TIMEOUT_S)


def write_agent(folder: Path, addresses: dict[str, str]) -> Path:
    """The program by which mpirun starts its daemon on another host: ``AGENT ADDRESS COMMAND...``."""
    cases = "\n".join(
        f'{address}) exec {shlex.join([*TESTBED, "exec", name, "--name", NAME])} -- sh -c "$*" ;;'
        for name, address in addresses.items()
    )
    agent = folder / "agent"
    agent.write_text(f"#!/bin/sh\naddress=$1\nshift\ncd {REPOSITORY}\ncase $address in\n{cases}\nesac\n")
    agent.chmod(0o755)
    return agent


def start(addresses: dict[str, str], agent: Path, program: Path, line: Path) -> subprocess.Popen[bytes]:
    mpirun = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(len(addresses))]
    mpirun += ["--host", ",".join(addresses.values()), "--mca", "plm_rsh_agent", str(agent)]
    mpirun += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
    mpirun += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
    mpirun += ["-x", "MESH_BENCH_SOCKET", str(program)]
    command = [*TESTBED, "exec", "r0w0", "--name", NAME, "--", *mpirun]
    return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"MESH_BENCH_SOCKET": str(line)})


def arrival(listener: socket.socket) -> TextIO:
    connection, _ = listener.accept()
    with connection:
        rank = connection.makefile("rw")
    rank.readline()
    return rank


def turn(ranks: list[TextIO], form: str, lengths: list[int]) -> float:
    """Seconds of the slowest rank."""
    for rank in ranks:
        rank.write(" ".join([form, "1", *map(str, lengths)]) + "\n")
        rank.flush()
    answers = [rank.readline().split() for rank in ranks]
    if any(answer[1:] != ["right"] for answer in answers):
        sys.exit(f"a rank has died, or its sum is wrong: {answers}")
    return max(float(seconds) for seconds, _ in answers)


def model_path(model: str) -> Path:
    return REPOSITORY / "models" / f"{model}.json"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="500mbit", help="of each host's link, each way")
    parser.add_argument("--model", default="resnet18", help="a list in models/")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
