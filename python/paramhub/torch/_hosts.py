"""Hosts of a run: their names and addresses, and which of them have hubs."""

from __future__ import annotations

import contextlib
import os
import socket

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch._launched import Launched


def reachable_address(place: Launched) -> str:
    """An address of this host that the other hosts reach: the one they meet at, or the one that leads there."""
    if place.master is None:
        raise MisuseError("a hub for other hosts needs MASTER_ADDR, or set PARAMHUB_URL to a running hub")
    host, port = place.master
    own = own_address_toward(host, port)
    if own is not None:
        return own
    raise MisuseError(
        f"MASTER_ADDR {host} leads to a loopback address, where other hosts cannot reach a hub: set it to a name or "
        "address of rank 0's host in the network, or set PARAMHUB_URL to a running hub"
    )


def host_name() -> str:
    """What tells this host from the others of the run."""
    return os.environ.get("PARAMHUB_HOST", "").strip() or _native.host_identity()


def deployment_of(given: str | None) -> str:
    """Which hosts have hubs: as given, or as ``PARAMHUB_DEPLOYMENT`` says."""
    deployment = given or os.environ.get("PARAMHUB_DEPLOYMENT", "").strip() or "cc"
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
