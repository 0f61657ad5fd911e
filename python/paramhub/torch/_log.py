"""Lines that paramhub prints for the user."""

from __future__ import annotations

import sys


def log(line: str) -> None:
    """Prints a line to standard error, with paramhub's prefix."""
    print(f"paramhub: {line}", file=sys.stderr, flush=True)
