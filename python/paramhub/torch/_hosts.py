"""Hosts of a run: their names and addresses, and which of them have hubs."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace

import torch.distributed as dist

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch._launched import Launched
from paramhub.torch._meeting import address_of, exchange_text


def located(place: Launched, store: dist.Store, timeout: float) -> tuple[Launched, list[int]]:
    """The place with what it lacks about this rank's host, and by rank the first rank of each one's host.

    Unless the launcher says that all ranks are on one host they tell one another where they are: not every launcher knows, and
    of two that were started on one host each knows of its own ranks alone.
    """
    place = replace(place, master=place.master or address_of(store))
    if place.is_on_one_host:
        return place, [0] * place.size
    hosts = exchange_text(
        store,
        "hosts",
        host_name(),
        place.rank,
        place.size,
        timeout,
        "can they all reach where the ranks meet?",
    )
    return place.among(hosts), [hosts.index(host) for host in hosts]


def reachable_address(place: Launched) -> str:
    """An address of this host that the other hosts reach: the one they meet at, or the one that leads there."""
    if place.master is None:
        raise MisuseError(
            "a hub for other hosts needs to know how these reach this one: set MASTER_ADDR and MASTER_PORT to an address and a "
            "port of rank 0's host, or PARAMHUB_URL to a running hub"
        )
    host, port = place.master
    own = own_address_toward(host, port)
    if own is not None:
        return own
    raise MisuseError(
        f"MASTER_ADDR {host} leads to a loopback address, where other hosts cannot reach a hub: set it to a name or "
        "address of rank 0's host in the network, or set PARAMHUB_URL to a running hub"
    )


def host_name() -> str:
    """What tells this host from the others of the run, and whose processes share a loopback interface."""
    named = os.environ.get("PARAMHUB_HOST", "").strip()
    return named or _native.host_identity() or socket.gethostname()


def deployment_of(given: str | None, hosts: int) -> str:
    """Which of so many hosts have hubs: as given, or as ``PARAMHUB_DEPLOYMENT`` says, or all of them, so that no link carries
    more than the others."""
    deployment = given or os.environ.get("PARAMHUB_DEPLOYMENT", "").strip() or ("cs" if hosts > 1 else "cc")
    if deployment not in ("cc", "cs"):
        raise MisuseError(
            f"the deployment is cc (a hub on rank 0's host) or cs (one on every host), not {deployment}: hubs on hosts of "
            "their own are started with `paramhub hub` and named by PARAMHUB_URL"
        )
    return deployment


def own_address_toward(host: str, port: int) -> str | None:
    """The address of this host from which packets to another one leave; None for loopback."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            # No packet leaves: the system only looks up the route.
            probe.connect(address)
            own = str(probe.getsockname()[0])
            if not own.startswith("127.") and own != "::1":
                return own
    return None


def is_own_address(host: str) -> bool:
    """Whether the host is this one: then packets to it leave from the address they go to."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(address)
                if probe.getsockname()[0] == address[0]:
                    return True
    return False


def with_port(address: str, port: int) -> str:
    """As hubs take addresses."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
