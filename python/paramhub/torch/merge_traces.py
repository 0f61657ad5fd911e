"""``python -m paramhub.torch.merge_traces DIR`` merges the ranks' traces ``DIR/rank-N.json`` into one,
``DIR/trace.json``, and prints its path. Copy the traces of several hosts into DIR before."""

from __future__ import annotations

import sys

from paramhub.errors import MisuseError
from paramhub.torch.trace import merge


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m paramhub.torch.merge_traces DIR", file=sys.stderr)
        return 2
    try:
        print(merge(arguments[0]))
    except (MisuseError, OSError) as error:
        print(f"paramhub: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
