"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest
from device import DEVICE, is_there


@pytest.fixture(autouse=True)
def _device_is_there() -> None:
    if not is_there():
        pytest.skip(f"torch finds no device {DEVICE}")
