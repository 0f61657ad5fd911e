"""Measures the time of a key-value store's calls in Python, beside a copy of a value, and of a whole exchange.

    paramhub run -n 2 -- python bench/pytorch/kvstore.py --kvstore depcha

Every round pushes all keys, pulls all keys, and waits. Times are medians of rank 0's times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import paramhub.kvstore as kvs


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    with kvs.create(arguments.kvstore) as kv:
        keys = list(range(arguments.keys))
        values, outs, copies = ([torch.ones(arguments.elements) for _ in keys] for _ in range(3))
        kv.init(keys, values)
        seconds: dict[str, list[float]] = {"push": [], "pull": [], "copy": [], "exchange": []}
        for round in range(arguments.rounds + 2):
            kv.barrier()
            pushes = measure(lambda: [kv.push(key, value) for key, value in zip(keys, values, strict=True)])
            pulls = measure(lambda: [kv.pull(key, out) for key, out in zip(keys, outs, strict=True)])
            rest = measure(kv.wait)
            copying = measure(lambda: [to.copy_(value) for to, value in zip(copies, values, strict=True)])
            if round >= 2:
                each = (pushes / len(keys), pulls / len(keys), copying / len(keys), pushes + pulls + rest)
                for measured, time_ in zip(seconds.values(), each, strict=True):
                    measured.append(time_)
        if kv.rank == 0:
            push, pull, copy, exchange = (statistics.median(each) for each in seconds.values())
            print(f"{kv.type}, {kv.size} ranks, {len(keys)} keys of {4 * arguments.elements} bytes:")
            print(
                f"push {1e6 * push:.1f} us, pull {1e6 * pull:.1f} us, a copy of a value {1e6 * copy:.1f} us"
            )
            print(f"exchange of all {1e3 * exchange:.1f} ms")


def measure(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvstore", choices=["hub", "local", "funnel", "concom", "depcha"], default="depcha")
    parser.add_argument("--keys", type=int, default=161, help="as many as ResNet-50 has")
    parser.add_argument("--elements", type=int, default=160_000, help="f32 of each key")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
