"""The options of `paramhub.torch.init`."""

from __future__ import annotations

from dataclasses import dataclass, field

from paramhub.torch._job_options import DEAD_AFTER_DEFAULT, JobOptions

TIMEOUT_DEFAULT = 300.0
"""Seconds within which every rank must arrive. The scheduler takes time, and so does the import of torch."""


@dataclass(frozen=True)
class Options:
    """The options of one `init` call. `init` documents each of them."""

    transport: str | None = None
    reproducible: bool = False
    hub_cores: int | None = None
    timeout: float = TIMEOUT_DEFAULT
    dead_after: float = DEAD_AFTER_DEFAULT
    host_hub: bool | None = None
    deployment: str | None = None
    interfaces: str | None = None
    checkpoints: str | None = None
    run_id: str | None = None
    job: JobOptions = field(default_factory=JobOptions)
    """What the run asks of its jobs, as given to `init`; what the environment adds is in `HubAccess.job`."""
