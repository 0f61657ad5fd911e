"""Measures a step's exchange under PyTorch, without computation: DDP over gloo and the ways through the hub, in turns.

    torchrun --nproc-per-node 4 bench/pytorch/exchange.py --model resnet50
    PARAMHUB_TRANSPORT=tcp torchrun --nproc-per-node 4 bench/pytorch/exchange.py --model resnet50

Every row has a model of its own with the tensors of a list in models/. A backward pass returns gradients that exist
already, so that only the exchange is timed: from backward() until every rank has its result. A round runs every row once. A
row's time in a round is that of the slowest rank. Ratios are taken within rounds, and medians over rounds.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramhub
import paramhub.torch

MODELS = Path(__file__).resolve().parents[2] / "models"
RATE, MOMENTUM = 0.01, 0.9


class HandOut(torch.autograd.Function):
    """An operation whose backward pass returns gradients that exist already."""

    @staticmethod
    def forward(ctx, ready, *parameters):
        ctx.ready = ready
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        # No other reference may exist, or autograd would copy the gradients instead of taking them as `parameter.grad`.
        handed_out = (None, *ctx.ready)
        ctx.ready.clear()
        return handed_out


class Tensors(nn.Module):
    """A model that has only parameters and computes nothing."""

    def __init__(self, shapes: list, device: torch.device) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(shape, device=device) for shape in shapes)

    def forward(self, ready: list) -> torch.Tensor:
        return HandOut.apply(ready, *self.tensors)


class Row:
    """One way to exchange."""

    def __init__(self, shapes: list, gradients: list) -> None:
        self.model = Tensors(shapes, gradients[0].device)
        self.gradients = gradients
        self.train: nn.Module = self.model

    def prepare(self) -> None:
        self.model.zero_grad(set_to_none=True)
        # DDP writes the means into the gradients' memory, so each round needs copies.
        self.loss = self.train([gradient.clone() for gradient in self.gradients])

    def run(self) -> None:
        self.loss.backward()

    def check(self, rank: int, size: int) -> None:
        """Checks that each gradient is the mean of the ranks' gradients."""
        expected = sum(range(1, size + 1)) / size
        for parameter in self.model.parameters():
            if not torch.allclose(parameter.grad, torch.full_like(parameter, expected)):
                raise SystemExit(f"{type(self).__name__}: a gradient is not the mean of the ranks'")


class Gloo(Row):
    """DDP over gloo"""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.train = DistributedDataParallel(self.model)


class Hook(Row):
    """DDP with hub_hook"""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.train = DistributedDataParallel(self.model)
        self.train.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)


class HookViews(Row):
    """DDP with hub_hook and bucket views"""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.train = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.train.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)


class Backend(Row):
    """DDP on backend paramhub"""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.train = DistributedDataParallel(self.model, process_group=dist.new_group(backend="paramhub"))


class Nccl(Row):
    """DDP over NCCL, for ranks that have a GPU each"""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.train = DistributedDataParallel(self.model, process_group=dist.new_group(backend="nccl"))


class Distributed(Row):
    """DistributedOptimizer, no step"""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.optimizer = paramhub.torch.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=RATE), named_parameters=self.model.named_parameters()
        )

    def run(self) -> None:
        super().run()
        self.optimizer.synchronize()


class GlooStep(Gloo):
    """DDP over gloo and a local step"""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=True)
        self.steps = 0

    def run(self) -> None:
        super().run()
        self.optimizer.step()
        self.steps += 1

    def check(self, rank: int, size: int) -> None:
        # On a GPU this optimizer adds the momentum to the gradients themselves.
        check_parameters(self, size, self.steps)


class Hub(Row):
    """HubOptimizer, step and wait"""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.optimizer = paramhub.torch.HubOptimizer(
            self.model, optimizer=paramhub.Nesterov(lr=RATE, momentum=MOMENTUM)
        )
        self.steps = 0

    def run(self) -> None:
        super().run()
        self.optimizer.step()
        self.optimizer.synchronize()
        self.steps += 1

    def check(self, rank: int, size: int) -> None:
        check_parameters(self, size, self.steps)


def check_parameters(row: Row, size: int, steps: int) -> None:
    """Checks the parameters after all steps: the mean gradient is the same in each."""
    mean = sum(range(1, size + 1)) / size
    velocity = value = 0.0
    for _ in range(steps):
        velocity = MOMENTUM * velocity + mean
        value -= RATE * (mean + MOMENTUM * velocity)
    for parameter in row.model.parameters():
        if not torch.allclose(parameter, torch.full_like(parameter, value), rtol=1e-4):
            raise SystemExit(f"{type(row).__name__}: a parameter is not what the steps make of it")


ROWS = {
    "gloo": Gloo,
    "hook": Hook,
    "hook-views": HookViews,
    "backend": Backend,
    "nccl": Nccl,
    "distributed": Distributed,
    "gloo-step": GlooStep,
    "hub": Hub,
}
BASELINE = {"hub": "gloo-step"}


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    paramhub.torch.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = shapes_of(arguments.model)
    if arguments.scale > 1:
        shapes = [[-(-torch.Size(shape).numel() // arguments.scale)] for shape in shapes]
    times = measure(shapes, arguments.rows, device, arguments.rounds, arguments.warm_up)
    if rank == 0:
        report(arguments, shapes, size, times)
    dist.barrier()
    dist.destroy_process_group()
    paramhub.torch.shutdown()


def shapes_of(model: str) -> list:
    """The shapes of a list in models/."""
    return [tensor["shape"] for tensor in json.loads((MODELS / f"{model}.json").read_text())["tensors"]]


def measure(
    shapes: list, names: list[str], device: torch.device, rounds: int, warm_up: int, budget: float = math.inf
) -> dict[str, list[float]]:
    """The seconds of each round by row. After three rounds it ends early when rounds have taken more than ``budget`` seconds,
    which all ranks see alike."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gradients = [torch.full(shape, float(rank + 1), device=device) for shape in shapes]
    rows = {name: ROWS[name](shapes, gradients) for name in names}
    times: dict[str, list[float]] = {name: [] for name in rows}
    spent = 0.0
    for turn in range(warm_up + rounds):
        if turn >= warm_up + 3 and spent > budget:
            break
        for name, row in rows.items():
            row.prepare()
            await_device(device)
            dist.barrier()
            started = time.monotonic()
            row.run()
            await_device(device)
            taken = torch.tensor(time.monotonic() - started, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            spent += taken.item()
            if turn == 0:
                row.check(rank, size)
            if turn >= warm_up:
                times[name].append(taken.item())
    for row in rows.values():
        row.check(rank, size)
    return times


def await_device(device: torch.device) -> None:
    """Waits until the device has done what was submitted to it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def report(arguments: argparse.Namespace, shapes: list, size: int, times: dict) -> None:
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    transport = os.environ.get("PARAMHUB_TRANSPORT", "auto")
    print(
        f"{arguments.model}: {len(shapes)} tensors, {4 * elements / 1e6:.1f} MB, {size} ranks, transport {transport}, "
        f"torch {torch.__version__}, {arguments.rounds} rounds"
    )
    results = print_rows(ROWS, times, {name: BASELINE.get(name, "gloo") for name in times})
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"model": arguments.model, "ranks": size, "rows": results}, indent=1)
        )


def print_rows(rows: dict, times: dict[str, list[float]], baselines: dict[str, str]) -> dict:
    """Prints the times of each row, in milliseconds, and its ratio to its baseline where that was measured. Returns both."""
    results = {}
    for name, taken in times.items():
        baseline = times.get(baselines[name])
        ratios = [b / t for b, t in zip(baseline, taken, strict=True)] if baseline else []
        results[name] = {
            "median_s": statistics.median(taken),
            "min_s": min(taken),
            "ratio": statistics.median(ratios) if ratios else None,
            "rounds_s": taken,
        }
        median, low, high = (1e3 * seconds for seconds in (statistics.median(taken), min(taken), max(taken)))
        line = f"  {rows[name].__doc__:36} {median:8.1f} ms ({low:.1f} .. {high:.1f})"
        if ratios:
            line += f"   {statistics.median(ratios):5.2f} x {baselines[name]} ({min(ratios):.2f} .. {max(ratios):.2f})"
        print(line)
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet50", help="a list in models/")
    parser.add_argument("--scale", type=int, default=1, help="divides every tensor's elements")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rows", type=lambda text: text.split(","), help=",".join(ROWS))
    parser.add_argument("--device", default="cpu", help="the device of the tensors, which all ranks share")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.rows is None:
        # The backend takes tensors of the host only.
        arguments.rows = [name for name in ROWS if arguments.device == "cpu" or name != "backend"]
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"no row is called {unknown[0]}: there are {', '.join(ROWS)}")
    return arguments


if __name__ == "__main__":
    main()
