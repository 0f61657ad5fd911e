"""Measures whole training steps under PyTorch with a given time of computation: DDP over gloo and the ways through the hub.

    torchrun --nproc-per-node 4 bench/pytorch/steps.py --model resnet18 --compute 0.1
    python bench/pytorch/hosts.py --program steps.py --hosts 4 --model resnet18 --compute 0.6

The tensors of a list in models/ are the parameters of layers that follow each other. A layer computes by sleeping, as a
process sleeps whose GPU computes: a third of its time in the forward pass and two thirds in the backward pass, which then makes
its gradient. All layers take the same time. A round has every row make a number of steps in a row and then wait for the last
parameters. A row's time in a round is that of the slowest rank by the number of steps. Ratios are taken within rounds, and
medians over rounds.
"""

import argparse
import json
import time
from pathlib import Path

import exchange
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramhub
import paramhub.torch


class Compute(torch.autograd.Function):
    """A layer's computation."""

    @staticmethod
    def forward(ctx, inputs, layer, parameter):
        ctx.layer = layer
        time.sleep(layer.forward_s)
        return inputs.clone()

    @staticmethod
    def backward(ctx, outputs):
        time.sleep(ctx.layer.backward_s)
        return outputs, None, ctx.layer.gradient.clone()


class Layer(nn.Module):
    """A layer with one parameter."""

    def __init__(self, gradient: torch.Tensor, seconds: float) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros_like(gradient))
        self.gradient = gradient
        self.forward_s, self.backward_s = seconds / 3, seconds * 2 / 3

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Compute.apply(inputs, self, self.parameter)


class Ddp:
    """DDP over gloo and a local step"""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.train = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=exchange.RATE, momentum=exchange.MOMENTUM, nesterov=True
        )

    def step(self) -> None:
        self.train(torch.zeros((), requires_grad=True)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def await_parameters(self) -> None:
        """Waits until the parameters of the last step are there."""


class Hook(Ddp):
    """DDP with hub_hook and a local step"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.train.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)


class Hub(Ddp):
    """HubOptimizer"""

    def __init__(self, model: nn.Module) -> None:
        self.model = self.train = model
        self.optimizer = paramhub.torch.HubOptimizer(
            model, optimizer=paramhub.Nesterov(lr=exchange.RATE, momentum=exchange.MOMENTUM)
        )

    def await_parameters(self) -> None:
        self.optimizer.synchronize()


ROWS = {"gloo": Ddp, "hook": Hook, "hub": Hub}


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    paramhub.torch.init()
    times = measure(arguments)
    if dist.get_rank() == 0:
        report(arguments, times)
    dist.barrier()
    dist.destroy_process_group()
    paramhub.torch.shutdown()


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """The seconds of a step in each round by row."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = exchange.shapes_of(arguments.model)
    gradients = [torch.full(shape, float(rank + 1)) for shape in shapes]
    seconds = arguments.compute / len(gradients)
    rows = {
        name: ROWS[name](nn.Sequential(*(Layer(gradient, seconds) for gradient in gradients)))
        for name in arguments.rows
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(arguments.warm_up + arguments.rounds):
        for name, row in rows.items():
            dist.barrier()
            started = time.monotonic()
            for _ in range(arguments.steps):
                row.step()
            row.await_parameters()
            taken = torch.tensor(time.monotonic() - started, dtype=torch.float64) / arguments.steps
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if turn >= arguments.warm_up:
                times[name].append(taken.item())
    for row in rows.values():
        exchange.check_parameters(row, size, (arguments.warm_up + arguments.rounds) * arguments.steps)
    return times


def report(arguments: argparse.Namespace, times: dict[str, list[float]]) -> None:
    print(
        f"{arguments.model}: {dist.get_world_size()} ranks, {1e3 * arguments.compute:.0f} ms of computation a step, "
        f"torch {torch.__version__}, {arguments.rounds} rounds of {arguments.steps} steps"
    )
    results = exchange.print_rows(ROWS, times, dict.fromkeys(times, arguments.rows[0]))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"model": arguments.model, "ranks": dist.get_world_size(), "rows": results}, indent=1)
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet18", help="a list in models/")
    parser.add_argument("--compute", type=float, default=0.6, help="seconds of a step's computation")
    parser.add_argument("--steps", type=int, default=4, help="of a row in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"no row is called {unknown[0]}: there are {', '.join(ROWS)}")
    return arguments


if __name__ == "__main__":
    main()
