"""Measures under torchrun on several hosts without any settings: exchange.py or steps.py on hosts of the testbed.

    python bench/pytorch/hosts.py --hosts 4
    python bench/pytorch/hosts.py --hosts 8 --rounds 9 --rows gloo,hook
    python bench/pytorch/hosts.py --program steps.py --compute 0.6

Needs root, for the testbed's network namespaces (docs/rack.md), and cargo. torchrun starts one rank on each host, with this
Python's torch and paramhub. All other options are passed to the program.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TESTBED = ["cargo", "xtask", "testbed"]
NAME = "torchrun"
PORT = "29555"
END_TIMEOUT_S = 60
DEFAULTS = {
    "exchange.py": ["--model", "resnet18", "--rounds", "7", "--rows", "gloo,hook,gloo-step,hub"],
    "steps.py": ["--model", "resnet18", "--rounds", "5", "--compute", "0.6"],
}
"""The options of each program where none are given."""


def main() -> int:
    options, rest = parse()
    ranks: list[subprocess.Popen[str]] = []
    with testbed(options.hosts, options.rate) as addresses:
        try:
            for rank in range(options.hosts):
                ranks.append(start(rank, options.hosts, addresses["r0w0"], options.program, rest))
            return max(rank.wait() for rank in ranks)
        finally:
            for rank in ranks:
                rank.terminate()
            for rank in ranks:
                rank.wait(END_TIMEOUT_S)


@contextlib.contextmanager
def testbed(hosts: int, rate: str) -> Iterator[dict[str, str]]:
    """Hosts r0w0, r0w1 and so on behind one switch. Yields their addresses by their names."""
    up = ["up", "--racks", "1", "--workers", str(hosts), "--rate", rate, "--hold"]
    # The testbed ends when its standard input is closed, and so at any end of this process.
    held = subprocess.Popen(
        [*TESTBED, *up, "--congestion", "reno", "--name", NAME],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert held.stdout is not None and held.stdin is not None
    print(held.stdout.readline(), end="", flush=True)
    try:
        if held.poll() is not None:
            sys.exit(held.returncode)
        yield dict(line.split() for line in testbed_says("hosts").splitlines())
    finally:
        held.stdin.close()
        held.wait(END_TIMEOUT_S)


def start(rank: int, hosts: int, first: str, program: str, rest: list[str]) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    torchrun += ["--nnodes", str(hosts), "--node-rank", str(rank)]
    torchrun += ["--master-addr", first, "--master-port", PORT]
    measured = [str(REPOSITORY / "bench/pytorch" / program), *rest]
    # gloo cannot look up names of these hosts, so it needs the interface.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0"}
    command = [*TESTBED, "exec", f"r0w{rank}", "--name", NAME, "--", *torchrun, *measured]
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True)


def testbed_says(*arguments: str) -> str:
    command = [*TESTBED, *arguments, "--name", NAME]
    return subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="500mbit", help="of each host's link, each way")
    parser.add_argument("--program", choices=list(DEFAULTS), default="exchange.py", help="which is measured")
    options, rest = parser.parse_known_args()
    return options, rest or DEFAULTS[options.program]


if __name__ == "__main__":
    sys.exit(main())
