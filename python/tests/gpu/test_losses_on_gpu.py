"""The ends of ranks that train on a GPU when another rank ends: `bench/pytorch/ends.py` with models on the device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device import DEVICE
from launching import PYTHON, Launcher

PROGRAM = Path(__file__).resolve().parents[3] / "bench" / "pytorch" / "ends.py"
WAYS = ("optimizer", "hook", "distributed")
DEATHS = ("raised", "killed")
RANK_1 = re.compile(r"\b(rank|worker|ranks( \d+,)*) 1\b")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    """The end of every survivor in every case."""
    launcher = Launcher(tmp_path_factory.mktemp("ends"))
    chosen = [f"--way={way}" for way in WAYS] + [f"--death={death}" for death in DEATHS]
    try:
        code, output = launcher.launch(
            PYTHON, PROGRAM, "--json", f"--device={DEVICE}", "--limit=30", *chosen, timeout=240
        )
        assert code == 0, output
        found = re.search(r"^\[\{.*\}\]$", output, re.MULTILINE)
        assert found is not None, output
        yield json.loads(found[0])
    finally:
        launcher.end()


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("way", WAYS)
def test_survivors_raise_what_names_the_rank_that_ended(
    rows: list[dict[str, Any]], way: str, death: str
) -> None:
    mine = [row for row in rows if (row["way"], row["death"]) == (way, death)]
    assert [row["rank"] for row in mine] == [0, 2]
    for row in mine:
        print({name: value for name, value in row.items() if name != "message"})
        # The rank did not crash, not even when it took its device down, and did not hang until it was killed.
        assert row["code"] == 1, row
        assert row["message"].startswith("JobFailedError: "), row
        assert RANK_1.search(row["message"]), row
