"""One rank of measure.py, which starts it: exchanges of models' gradients on a GPU, and how much of them computation hides."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramhub
import paramhub.torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pytorch"))
import exchange

ROWS = ["gloo", "hook", "backend", "distributed", "gloo-step", "hub"]
STEPS = 6
"""Steps in a row that one round of the overlap makes, so that an exchange may also be hidden behind the next forward pass."""
Step = Callable[[torch.Tensor], object]


class Layers(nn.Sequential):
    """Layers with as many weights as the exchange of a large model has, in which a batch's size sets the time of a step."""

    def __init__(self, width: int, device: torch.device) -> None:
        torch.manual_seed(1)
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)))
        self.to(device)


def computes(width: int, device: torch.device) -> Step:
    """Computation alone."""
    model = Layers(width, device)

    def step(batch: torch.Tensor) -> None:
        model.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()

    return step


def by_gloo(width: int, device: torch.device, hook: bool = False) -> Step:
    model = DistributedDataParallel(Layers(width, device))
    if hook:
        model.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def by_hub(width: int, device: torch.device) -> Step:
    model = Layers(width, device)
    optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=1e-3, momentum=0.9))

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def timed(step: Step, batch: torch.Tensor) -> float:
    """Seconds of a step at the slowest rank, over several steps in a row."""
    exchange.await_device(batch.device)
    dist.barrier()
    started = time.monotonic()
    for _ in range(STEPS):
        step(batch)
    exchange.await_device(batch.device)
    taken = torch.tensor((time.monotonic() - started) / STEPS, dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def overlap(arguments: argparse.Namespace, device: torch.device) -> dict[str, object]:
    """Step times with computation alone, with the exchange alone (a batch of one sample), and with both."""
    width = arguments.width
    ways = {
        "computation": computes(width, device),
        "gloo-step": by_gloo(width, device),
        "hook": by_gloo(width, device, hook=True),
        "hub": by_hub(width, device),
    }
    one = torch.randn(1, width, device=device)
    for step in ways.values():
        timed(step, one)
    # A batch with which computation takes about as long as the exchange through the hub.
    samples, goal = 64, timed(ways["hub"], one)
    while samples < 1 << 20 and timed(ways["computation"], torch.randn(samples, width, device=device)) < goal:
        samples *= 2
    batch = torch.randn(samples, width, device=device)
    rounds: dict[str, list[float]] = {"computation": []}
    for name in list(ways)[1:]:
        rounds[name], rounds[f"{name} alone"] = [], []
    for turn in range(arguments.rounds + 1):
        for name, step in ways.items():
            found = {name: timed(step, batch)}
            if name != "computation":
                found[f"{name} alone"] = timed(step, one)
            if turn > 0:
                for each, seconds in found.items():
                    rounds[each].append(seconds)
    return {"megabytes": 8 * (width * width + width) * 4 / 1e6, "samples": samples, "rounds_s": rounds}


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    rows = list(ROWS)
    if device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        rows.append("nccl")
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    paramhub.torch.init()
    found: dict[str, object] = {"exchange": {}}
    for model in arguments.models:
        shapes = exchange.shapes_of(model)
        times = exchange.measure(shapes, rows, device, arguments.rounds, warm_up=2, budget=arguments.budget)
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        found["exchange"][model] = {
            "tensors": len(shapes),
            "megabytes": 4 * elements / 1e6,
            "rounds_s": times,
        }
    if arguments.overlap:
        found["overlap"] = overlap(arguments, device)
    if dist.get_rank() == 0:
        arguments.result.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    paramhub.torch.shutdown()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--models", type=lambda text: text.split(","), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--budget", type=float, required=True, help="seconds of a model's rounds")
    parser.add_argument(
        "--width", type=int, required=True, help="of the layers with which overlap is measured"
    )
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--result", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
