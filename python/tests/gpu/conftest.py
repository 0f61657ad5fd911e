"""Leaves the tests of this folder out where there is no GPU."""

from __future__ import annotations

import pytest
from device import DEVICE, is_there


def pytest_pycollect_makemodule() -> None:
    if not is_there():
        pytest.skip(f"torch finds no device {DEVICE}: python/tests/gpu is left out", allow_module_level=True)
