"""The end of the processes that a soak has started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any

PATIENCE_S = 90
"""A hub takes up to 60 s to write its last checkpoints."""


def end_all(processes: Iterable[subprocess.Popen[Any]]) -> None:
    """Asks them to end, in this order, and waits until they have; those that take too long are killed."""
    processes = list(processes)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
