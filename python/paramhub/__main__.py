"""The ``paramhub`` command: the same program that cargo builds."""

from __future__ import annotations

import signal
import sys

from paramhub import _native


def main() -> int:
    # Python's own handler would note Ctrl-C and wait for Python code to go on, of which there is none.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.main(["paramhub", *sys.argv[1:]], [sys.executable, "-m", "paramhub"])


if __name__ == "__main__":
    sys.exit(main())
