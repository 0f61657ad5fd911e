"""The ``paramhub`` command: the program that cargo builds, without the trainer and most benchmarks."""

from __future__ import annotations

import signal
import sys

from paramhub import _native


def main() -> int:
    # Python's own handler runs only between Python instructions, and here there are none: the program is native code.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.main(["paramhub", *sys.argv[1:]], [sys.executable, "-m", "paramhub"])


if __name__ == "__main__":
    sys.exit(main())
