"""What a run asks of its jobs at the hubs: as arguments of `init`, or as variables of the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from paramhub._hub import truth_value
from paramhub.errors import MisuseError

PROGRAM_STATE_BYTES = 4 << 20
"""The most bytes of a rank's program state, if no other number is named."""
LINGER_DEFAULT = 300.0
"""Seconds for which a job waits for its ranks, if no other number is named."""
DEAD_AFTER_DEFAULT = 30.0
"""Seconds for which a rank may be silent, if no other number is named."""


@dataclass(frozen=True)
class JobOptions:
    """The options of a run's jobs, which `paramhub.torch.init` documents. None leaves one to its default.

    The variable of an option is ``PARAMHUB_JOB_`` and its name in capitals. Rank 0's options hold for all ranks.
    """

    hubs: int | None = None
    max_hubs: int | None = None
    hub_label: str | None = None
    weight: int | None = None
    replicas: int | None = None
    reduction: str | None = None
    encrypt: bool | None = None
    on_interface_down: str | None = None
    redial_grace: float | None = None
    progress_timeout: float | None = None
    codec: str | None = None
    consistency: str | None = None
    optimize_at: str | None = None
    between_sites: str | None = None
    stragglers: str | None = None
    checkpoint_every: str | None = None
    resume: str | None = None
    on_worker_loss: str | None = None
    linger: float | None = None
    rewind_every: int | None = None
    max_workers: int | None = None
    program_state_bytes: int | None = None

    def with_environment(self) -> JobOptions:
        """These options, and those of the environment where these have none."""
        found = {}
        for field in fields(self):
            text = os.environ.get(variable(field.name), "").strip()
            if text and getattr(self, field.name) is None:
                found[field.name] = _read(field.name, text)
        return replace(self, **found)

    @property
    def outlives_ranks(self) -> bool:
        """Returns whether the jobs of optimizers stay at the hub when ranks are lost."""
        return self.on_worker_loss not in (None, "fail")

    @property
    def leaves_out_late(self) -> bool:
        """Returns whether the steps of jobs of optimizers end without what is late."""
        return self.stragglers not in (None, "wait")

    @property
    def needs_one_site(self) -> bool:
        """Returns whether the jobs of optimizers cannot be had if a hub of each host sums first, which would end with its ranks,
        and has no folder for checkpoints."""
        is_late = self.leaves_out_late and self.reduction not in ("tree", "sharded")
        goes_on = self.on_interface_down == "continue"
        keeps = self.checkpoint_every is not None or self.resume not in (None, "never")
        return self.outlives_ranks or bool(self.replicas) or is_late or goes_on or keeps

    def check(self) -> None:
        """Raises MisuseError for a value that is wrong wherever the run's hubs are. The connection manager checks the others."""
        if self.on_worker_loss not in (None, "fail", "continue", "rewind"):
            raise MisuseError(
                f"on_worker_loss is `fail`, `continue` or `rewind`, not {self.on_worker_loss!r}"
            )
        if self.max_workers is not None and self.on_worker_loss != "rewind":
            raise MisuseError(
                f"max_workers is {self.max_workers}, but on_worker_loss is `{self.on_worker_loss or 'fail'}`: a launcher can "
                'start more or fewer ranks with "rewind"'
            )
        self.consistency_setting()

    def consistency_setting(self) -> str | dict[str, int] | None:
        """The consistency as a setting of a job; None if it is the default."""
        text = self.consistency or "sync"
        kind, _, steps = text.partition(":")
        if kind == "staleness" and steps.isascii() and steps.isdigit():
            return {"bounded_staleness": int(steps)}
        if text not in ("sync", "async"):
            raise MisuseError(f"consistency is `sync`, `async` or `staleness:STEPS`, not {text!r}")
        return "asynchronous" if text == "async" else None

    def of_every_job(self) -> dict[str, Any]:
        """The arguments of `create_job` that concern every job."""
        asked = {
            "hubs": self.hubs,
            "max_hubs": self.max_hubs,
            "hub_label": self.hub_label,
            "weight": self.weight,
            "replicas": self.replicas or None,
            "encrypt": self.encrypt,
            "on_interface_down": self.on_interface_down,
            "redial_grace": self.redial_grace,
            "progress_timeout": self.progress_timeout,
        }
        return {name: value for name, value in asked.items() if value is not None}

    def of_gradients_job(self, reduction: str) -> dict[str, Any]:
        """The arguments of `create_job` that concern only jobs of gradients. ``reduction`` is that of the job: without hubs of
        racks or hosts no sums cross between them, which is refused only if the run itself asks for both."""
        crosses = reduction != "flat" or self.reduction == "flat"
        return {"between_sites": self.between_sites} if self.between_sites and crosses else {}

    def of_optimizers_job(self, ranks: int) -> dict[str, Any]:
        """The arguments of `create_job` that concern only jobs whose parameters are at the hub. ``ranks`` is their number of
        ranks."""
        asked: dict[str, Any] = {
            "stragglers": self.stragglers,
            "optimize_at": self.optimize_at.replace("-", "_") if self.optimize_at else None,
            "checkpoint_every": self.checkpoint_every,
            "resume": None if self.resume == "never" else self.resume,
        }
        if self.outlives_ranks:
            asked |= {"on_worker_loss": self.on_worker_loss, "linger": self.linger}
        if self.on_worker_loss == "rewind":
            asked["rewind_every"] = self.rewind_every
            asked["max_workers"] = self.max_workers
            asked["program_state_bytes"] = self.program_state_bytes or PROGRAM_STATE_BYTES
        elif self.on_worker_loss == "continue":
            # All ranks are started again together, and meet in other groups, too, so none goes on without the others.
            asked["min_workers"] = ranks
        return {name: value for name, value in asked.items() if value is not None}


def variable(name: str) -> str:
    """The variable of the environment that stands for an option."""
    return f"PARAMHUB_JOB_{name.upper()}"


def number(given: float | None, name: str, default: float) -> float:
    """Seconds: ``given``, else those in the variable of the option ``name``, else ``default``."""
    text = os.environ.get(variable(name), "").strip()
    if given is not None or not text:
        return default if given is None else given
    return _float(text, variable(name))


def _read(name: str, text: str) -> Any:
    return _READERS.get(name, _text)(text, variable(name))


def _text(text: str, _variable: str) -> str:
    return text


def _float(text: str, variable: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise MisuseError(f"{variable} is {text!r}: a number of seconds") from None


def _integer(text: str, variable: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise MisuseError(f"{variable} is {text!r}: a whole number")
    return int(text)


def _boolean(text: str, variable: str) -> bool:
    return truth_value(text, variable)


_READERS: dict[str, Callable[[str, str], Any]] = {
    "hubs": _integer,
    "max_hubs": _integer,
    "weight": _integer,
    "replicas": _integer,
    "encrypt": _boolean,
    "redial_grace": _float,
    "progress_timeout": _float,
    "linger": _float,
    "rewind_every": _integer,
    "max_workers": _integer,
    "program_state_bytes": _integer,
}
