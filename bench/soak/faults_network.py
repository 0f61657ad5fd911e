"""The network of a run whose workers are on hosts of their own, made of namespaces. It needs root.

Manager, hubs and launcher are in one namespace, each worker is in another one, and a router between them passes their packets
on. What the router drops nobody hears of, as when a switch fails: neither end gets an error. The kernel lets root reset single
connections, as a firewall does that has forgotten them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess

PREFERENCE = "100"
"""The preference of the router's rules that drop packets, above that of the main table."""
NUMBERS = itertools.count()


class Network:
    """The namespaces of one run. Their addresses are in no other namespace, so that runs side by side may have the same."""

    def __init__(self, workers: int) -> None:
        self.prefix = f"paramhub-{os.getpid()}-{next(NUMBERS)}"
        self.address = address(0)
        """Of manager and hubs."""
        self.made: list[str] = []
        self.dropped: dict[int, list[list[str]]] = {}
        try:
            self._make(workers)
        except BaseException:
            self.close()
            raise

    def _make(self, workers: int) -> None:
        ends = ["servers", *(f"worker{rank}" for rank in range(workers))]
        for end in ("router", *ends):
            run("ip", "netns", "add", self.name(end))
            self.made.append(end)
            run("ip", "-n", self.name(end), "link", "set", "lo", "up")
        router = ["ip", "-n", self.name("router")]
        for number, end in enumerate(ends):
            # The limit of an interface's name is 15 characters.
            run(*router, "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", self.name(end))
            run(*router, "address", "add", f"{gateway(number)}/30", "dev", end)
            run(*router, "link", "set", end, "up")
            run("ip", "-n", self.name(end), "address", "add", f"{address(number)}/30", "dev", "eth0")
            run("ip", "-n", self.name(end), "link", "set", "eth0", "up")
            run("ip", "-n", self.name(end), "route", "add", "default", "via", gateway(number))
        # Each namespace has settings of its own.
        run(*self.inside("router"), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def name(self, end: str) -> str:
        return f"{self.prefix}-{end}"

    def inside(self, end: str) -> list[str]:
        """The beginning of a command that runs in a namespace. The process stays the same."""
        return ["nsenter", f"--net=/run/netns/{self.name(end)}"]

    def inside_own(self) -> list[str]:
        """The beginning of a worker's command, which runs in the namespace of its rank."""
        enter = f'exec nsenter --net="/run/netns/{self.prefix}-worker$RANK" "$@"'
        return ["sh", "-c", enter, "sh"]

    def cut(self, rank: int, ports: list[int], at_hub: bool) -> int:
        """Resets a worker's connections to these ports of the hubs. Returns how many there were."""
        near, far = ("servers", address(1 + rank)) if at_hub else (f"worker{rank}", self.address)
        side = "sport" if at_hub else "dport"
        return sum(reset(self.inside(near), far, side, port) for port in ports)

    def partition(self, rank: int, way: str) -> None:
        """Drops a worker's packets until it is healed: those to it, those from it, or both."""
        own = address(1 + rank)
        drops = []
        if way in ("both", "to"):
            drops.append(["route", "blackhole", f"{own}/32"])
        if way in ("both", "from"):
            drops.append(["rule", "from", own, "preference", PREFERENCE, "blackhole"])
        for what, *rule in drops:
            run("ip", "-n", self.name("router"), what, "add", *rule)
        self.dropped[rank] = drops

    def heal(self, rank: int) -> None:
        for what, *rule in self.dropped.pop(rank, []):
            run("ip", "-n", self.name("router"), what, "del", *rule)

    def close(self) -> None:
        """Removes the namespaces. Interfaces, addresses and rules go with them."""
        for end in self.made:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", self.name(end))
        self.made.clear()


def address(number: int) -> str:
    return f"10.77.{number}.2"


def gateway(number: int) -> str:
    return f"10.77.{number}.1"


def reset(inside: list[str], far: str, side: str, port: int) -> int:
    """Resets the connections to an address whose port on this side is given. Returns how many there were."""
    choice = ["state", "established", "dst", far, side, "=", f":{port}"]
    # The program writes a line for each. It fails if one of them has ended meanwhile.
    command = [*inside, "ss", "-H", "-t", "-n", "-K", *choice]
    return len(subprocess.run(command, check=False, capture_output=True, text=True).stdout.splitlines())


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def cannot() -> str | None:
    """The reason why this machine permits no such network. None if it does."""
    if os.geteuid() != 0:
        return "only root may make namespaces"
    try:
        Network(1).close()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            if not reset([], "127.0.0.1", "dport", server.getsockname()[1]):
                return "this kernel does not let `ss -K` reset connections"
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip() or str(error)
    except OSError as error:
        return str(error)
    return None
