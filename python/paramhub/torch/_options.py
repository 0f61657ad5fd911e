"""The options of `paramhub.torch.init`."""

from __future__ import annotations

from dataclasses import dataclass

TIMEOUT_DEFAULT = 300.0
"""Seconds within which every rank must arrive. The scheduler takes time, and so does the import of torch."""


@dataclass(frozen=True)
class Options:
    """The options of one `init` call. `init` documents each of them."""

    transport: str | None = None
    reproducible: bool = False
    hub_cores: int | None = None
    timeout: float = TIMEOUT_DEFAULT
    dead_after: float = 30.0
    host_hub: bool | None = None
    deployment: str | None = None
    interfaces: str | None = None
    on_worker_loss: str | None = None
    linger: float | None = None
    rewind_every: int | None = None
    max_workers: int | None = None
    program_state_bytes: int | None = None
    checkpoints: str | None = None
    checkpoint_every: str | None = None
    replicas: int | None = None
    max_hubs: int | None = None
    hub_label: str | None = None
