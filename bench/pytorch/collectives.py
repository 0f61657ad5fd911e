"""Compares the ways of an allreduce under torch.distributed: through the hub, over the mesh, and gloo.

    torchrun --nproc-per-node 4 bench/pytorch/collectives.py [--transport tcp] [--dtype bfloat16] [--device cuda:0]

Rounds of the three are interleaved, so that a disturbance affects all of them. Times are medians of the slowest rank. The
columns are those of nccl-tests: busbw is the rate at which a ring would move its bytes over each link in that time.
`HUB_BYTES_MIN` and `SHARED_MEMORY_FIRST` in python/paramhub/torch/_hub_sums.py come from these measurements.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from exchange import await_device

import paramhub.torch
from paramhub.torch import _hub_sums


def main() -> None:
    arguments = parse()
    if arguments.transport:
        os.environ["PARAMHUB_TRANSPORT"] = arguments.transport
    torch.set_num_threads(1)
    paramhub.torch.init()
    dist.init_process_group("paramhub")
    gloo = dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device(arguments.device)
    ways = {"hub": (0, None), "mesh": (1 << 60, None), "gloo": (0, gloo)}
    if rank == 0:
        print(f"allreduce of {arguments.dtype}, {size} ranks, {arguments.rounds} rounds")
        print(f"{'bytes':>10}" + "".join(f"{way + ' us':>12}{'busbw GB/s':>12}" for way in ways))
    nbytes = arguments.min_bytes
    dtype = getattr(torch, arguments.dtype)
    while nbytes <= arguments.max_bytes:
        tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for round in range(arguments.rounds + 2):
            for way, (least, group) in ways.items():
                _hub_sums.HUB_BYTES_MIN = least
                _hub_sums.SHARED_MEMORY_FIRST = False
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                await_device(device)
                if round >= 2:
                    seconds[way].append(time.perf_counter() - began)
        medians = torch.tensor([statistics.median(each) for each in seconds.values()], dtype=torch.float64)
        dist.all_reduce(medians, dist.ReduceOp.MAX, group=gloo)
        if rank == 0:
            columns = [
                f"{1e6 * each:12.0f}{nbytes * 2 * (size - 1) / size / each / 1e9:12.3f}"
                for each in medians.tolist()
            ]
            print(f"{nbytes:>10}" + "".join(columns), flush=True)
        nbytes *= 4
    dist.destroy_process_group()
    paramhub.torch.shutdown()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=["auto", "tcp", "shm"], help="between ranks and hub")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument(
        "--device", default="cpu", help="of the tensors, such as cuda:0, which all ranks share"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--min-bytes", type=int, default=1 << 10)
    parser.add_argument("--max-bytes", type=int, default=64 << 20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
