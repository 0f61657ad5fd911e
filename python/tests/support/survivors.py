"""The ends of the ranks that survive another one, as `bench/pytorch/ends.py` finds them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from launching import PYTHON, Launcher

PROGRAM = Path(__file__).resolve().parents[3] / "bench" / "pytorch" / "ends.py"
SIMULATED_DEVICE = Path(__file__).with_name("simulated_device")
RANK_1 = re.compile(r"\b(rank|worker|ranks( \d+,)*) 1\b")


def find_ends(directory: Path, *arguments: str, timeout: float) -> list[dict[str, Any]]:
    """The end of every survivor in every case. One program runs all cases, so that torch is imported once."""
    launcher = Launcher(directory)
    # The program loads no device. This one may be loaded before the ranks are forked, because its threads start later.
    loader = [SIMULATED_DEVICE] if any("=simulated" in argument for argument in arguments) else []
    try:
        code, output = launcher.launch(PYTHON, *loader, PROGRAM, "--json", *arguments, timeout=timeout)
        assert code == 0, output
        found = re.search(r"^\[\{.*\}\]$", output, re.MULTILINE)
        assert found is not None, output
        ends: list[dict[str, Any]] = json.loads(found[0])
        return ends
    finally:
        launcher.end()


def check_ends(ends: list[dict[str, Any]], way: str, death: str) -> None:
    """Checks that in this case the ranks 0 and 2 have raised what names rank 1."""
    mine = [row for row in ends if (row["way"], row["death"]) == (way, death)]
    assert [row["rank"] for row in mine] == [0, 2]
    for row in mine:
        print({name: value for name, value in row.items() if name != "message"})
        # The rank did not crash, not even when it took its device down, and did not hang until it was killed.
        assert row["code"] == 1, row
        assert row["message"].startswith("JobFailedError: "), row
        assert RANK_1.search(row["message"]), row
