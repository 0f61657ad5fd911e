"""Runs a program that does not know the simulated devices: ``python simulated_device PROGRAM [ARGUMENT...]``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

# Python has put this folder there. The package is found in the one above.
sys.path[0] = str(Path(__file__).resolve().parents[1])
del sys.argv[0]

if __name__ == "__main__":
    import simulated_device

    simulated_device.load()
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
