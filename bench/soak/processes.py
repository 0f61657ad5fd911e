"""Ends the processes that a soak test has started."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any

WAIT_TIMEOUT_S = 90
"""Seconds that a process may take to end. A hub takes up to 60 s to write its last checkpoints."""


def end_all(processes: Iterable[subprocess.Popen[Any]]) -> None:
    """Sends SIGTERM to the processes, in this order, and waits until they have ended. Kills those that take too long."""
    processes = list(processes)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(WAIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
