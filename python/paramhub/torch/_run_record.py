"""What a run keeps for the processes that its launcher starts in the place of those that ended: its name and its hub."""

from __future__ import annotations

import os
import re
import secrets

import torch.distributed as dist

from paramhub.errors import MisuseError
from paramhub.torch._rendezvous import has_agent_store

_NAME = re.compile(r"[A-Za-z0-9._-]{1,48}")


class RunRecord:
    """Texts that stay when all ranks are started again. They are in the store of torchrun's agent, which outlives the ranks;
    under other launchers nothing is kept."""

    def __init__(self, store: dist.Store, world: int) -> None:
        """``store`` is the one in which the ranks meet, and ``world`` the number of this world in its process."""
        # Worlds that follow one another in a process are not one run to be gone on with.
        self._suffix = f".{world}" if world > 1 else ""
        self._store: dist.Store | None = None
        if has_agent_store():
            # Prefixes tell one start of the ranks from another.
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            self._store = dist.PrefixStore(f"paramhub/run/{world}", store)

    @property
    def is_kept(self) -> bool:
        """Returns whether what is written here stays."""
        return self._store is not None

    def read(self, key: str) -> str | None:
        """The text that was written last, if there is one."""
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def write(self, key: str, text: str) -> None:
        if self._store is not None:
            self._store.set(key, text)

    def name(self, given: str | None, launcher: str) -> str | None:
        """The run's name, which stays when its processes are started again: the one that was given, else the launcher's; None if
        nothing says that a later process belongs to the same run. Rank 0 calls it."""
        for source, named in (
            ("run_id", given),
            ("PARAMHUB_RUN_ID", os.environ.get("PARAMHUB_RUN_ID", "").strip()),
        ):
            if named:
                if not _NAME.fullmatch(named):
                    raise MisuseError(
                        f"{source} is {named!r}: give 1 to 48 letters, digits, `.`, `_` and `-`"
                    )
                return named + self._suffix
        if launcher == "slurm" and (job := os.environ.get("SLURM_JOB_ID")):
            return f"slurm-{job}.{os.environ.get('SLURM_STEP_ID', '0')}{self._suffix}"
        # What was given to torchrun as --rdzv-id. It is `none` if nothing was, and random with --standalone.
        torchrun = os.environ.get("TORCHELASTIC_RUN_ID", "")
        if self.is_kept and torchrun != "none" and _NAME.fullmatch(torchrun):
            return torchrun + self._suffix
        if not self.is_kept:
            return None
        kept = self.read("name")
        if kept is None:
            kept = secrets.token_hex(8)
            self.write("name", kept)
        return kept
