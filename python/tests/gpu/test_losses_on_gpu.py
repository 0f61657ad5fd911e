"""The ends of ranks that train on a GPU when another rank ends: `bench/pytorch/ends.py` with models on the device."""

from __future__ import annotations

from typing import Any

import pytest
from device import DEVICE
from survivors import check_ends, find_ends

WAYS = ("optimizer", "hook", "distributed")
DEATHS = ("raised", "killed")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    chosen = [f"--way={way}" for way in WAYS] + [f"--death={death}" for death in DEATHS]
    return find_ends(
        tmp_path_factory.mktemp("ends"), f"--device={DEVICE}", "--limit=30", *chosen, timeout=240
    )


@pytest.mark.parametrize("death", DEATHS)
@pytest.mark.parametrize("way", WAYS)
def test_survivors_raise_what_names_the_rank_that_ended(
    ends: list[dict[str, Any]], way: str, death: str
) -> None:
    check_ends(ends, way, death)
