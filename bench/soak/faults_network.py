"""The network of a run whose workers and hubs are on hosts of their own, made of namespaces. It needs root.

Manager and launcher are in one namespace, each hub and each worker is in another one, and a router between them passes their
packets on. What the router drops nobody hears of, as when a switch fails: neither end gets an error. The kernel lets root reset
single connections, as a firewall does that has forgotten them.
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

    def __init__(self, workers: int, hubs: int) -> None:
        self.prefix = f"paramhub-{os.getpid()}-{next(NUMBERS)}"
        self.address = address(0)
        """Of manager and launcher."""
        self.made: list[str] = []
        ends = [*(f"worker{rank}" for rank in range(workers)), *(f"hub{number}" for number in range(hubs))]
        self.address_of = {end: address(1 + number) for number, end in enumerate(ends)}
        """The addresses of the hosts of workers and hubs."""
        self.dropped: dict[str, list[list[str]]] = {}
        """What the router drops, by the host that it befalls."""
        try:
            self._make(["servers", *ends])
        except BaseException:
            self.close()
            raise

    def _make(self, ends: list[str]) -> None:
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

    def cut(self, rank: int, hubs: dict[int, int], at_hub: bool) -> int:
        """Resets a worker's connections to these hubs, of which the ports are given. Returns how many there were."""
        worker, count = f"worker{rank}", 0
        for number, port in hubs.items():
            hub = f"hub{number}"
            near, far, side = (hub, worker, "sport") if at_hub else (worker, hub, "dport")
            count += reset(self.inside(near), self.address_of[far], side, port)
        return count

    def partition(self, end: str, way: str, other: str | None = None) -> None:
        """Drops packets of a host until it is healed: those to it, those from it, or both; with ``other`` only those between
        the two."""
        own = self.address_of[end]
        drops = []
        if other is not None:
            there = self.address_of[other]
            pairs = {"to": [(there, own)], "from": [(own, there)], "both": [(there, own), (own, there)]}[way]
            drops = [["rule", "from", a, "to", b, "preference", PREFERENCE, "blackhole"] for a, b in pairs]
        elif way in ("both", "to"):
            drops.append(["route", "blackhole", f"{own}/32"])
        if other is None and way in ("both", "from"):
            drops.append(["rule", "from", own, "preference", PREFERENCE, "blackhole"])
        for what, *rule in drops:
            run("ip", "-n", self.name("router"), what, "add", *rule)
        self.dropped[end] = drops

    def heal(self, end: str) -> None:
        for what, *rule in self.dropped.pop(end, []):
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
        Network(1, 1).close()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            if not reset([], "127.0.0.1", "dport", server.getsockname()[1]):
                return "this kernel does not let `ss -K` reset connections"
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip() or str(error)
    except OSError as error:
        return str(error)
    return None
