"""Hosts of a run: their names and addresses, and which of them have hubs."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace

import torch.distributed as dist

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch._rank_assignment import RankAssignment
from paramhub.torch._rendezvous import allgather_json, store_address
from paramhub.torch._run_secret import own_sources


def locate_hosts(
    assignment: RankAssignment, store: dist.Store, timeout: float
) -> tuple[RankAssignment, list[int], list[str]]:
    """Returns the assignment completed with local rank and size, for each rank the first rank of its host, and the sources of
    the run's secret that all ranks are known to have.

    Unless the launcher says that all ranks are on one host, the ranks exchange the names of their hosts: not every launcher
    knows the hosts, and two launchers on one host count only their own ranks.
    """
    assignment = replace(assignment, master=assignment.master or store_address(store))
    if assignment.is_on_one_host:
        return assignment, [0] * assignment.size, []
    all_ranks = allgather_json(
        store,
        "hosts",
        [host_name(), own_sources()],
        assignment.rank,
        assignment.size,
        timeout,
        "can they all reach where the ranks meet?",
    )
    hosts = [host for host, _ in all_ranks]
    common = [source for source in own_sources() if all(source in known for _, known in all_ranks)]
    return assignment.among(hosts), [hosts.index(host) for host in hosts], common


def reachable_address(assignment: RankAssignment) -> str:
    """An address of this host that the other hosts reach: the one from which packets to the rendezvous leave."""
    if assignment.master is None:
        raise MisuseError(
            "a hub for other hosts needs to know how these reach this one: set MASTER_ADDR and MASTER_PORT to an address and a "
            "port of rank 0's host, or PARAMHUB_URL to a running hub"
        )
    host, port = assignment.master
    own = own_address_toward(host, port)
    if own is not None:
        return own
    raise MisuseError(
        f"MASTER_ADDR {host} leads to a loopback address, where other hosts cannot reach a hub: set it to a name or "
        "address of rank 0's host in the network, or set PARAMHUB_URL to a running hub"
    )


def host_name() -> str:
    """An identity of this host: processes with the same identity share a loopback interface."""
    named = os.environ.get("PARAMHUB_HOST", "").strip()
    return named or _native.host_identity() or socket.gethostname()


def choose_deployment(given: str | None, hosts: int) -> str:
    """The deployment: ``given``, else the value of ``PARAMHUB_DEPLOYMENT``, else ``cs`` for several hosts, so that no link
    carries more than the others."""
    deployment = given or os.environ.get("PARAMHUB_DEPLOYMENT", "").strip() or ("cs" if hosts > 1 else "cc")
    if deployment not in ("cc", "cs"):
        raise MisuseError(
            f"the deployment is cc (a hub on rank 0's host) or cs (one on every host), not {deployment}: hubs on hosts of "
            "their own are started with `paramhub hub` and named by PARAMHUB_URL"
        )
    return deployment


def own_address_toward(host: str, port: int) -> str | None:
    """The address of this host from which packets to another host leave; None if it is a loopback address."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            # This sends no packet: the system only looks up the route.
            probe.connect(address)
            own = str(probe.getsockname()[0])
            if not own.startswith("127.") and own != "::1":
                return own
    return None


def is_own_address(host: str) -> bool:
    """Returns whether ``host`` is this host: then packets to it have the same source and destination address."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(address)
                if probe.getsockname()[0] == address[0]:
                    return True
    return False


def with_port(address: str, port: int) -> str:
    """The address and port in the form that hubs accept."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
