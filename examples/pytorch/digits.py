"""Trains a small convolutional network on handwritten digits, with any of the ways to use paramhub.

    torchrun --nproc-per-node 4 examples/pytorch/digits.py --way optimizer

`hook` and `optimizer` differ from an ordinary script in two lines. If PARAMHUB_URL names no hub, rank 0 runs one. On
several hosts each host has one.
"""

import argparse
import struct
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paramhub
import paramhub.torch

DATA = Path(__file__).resolve().parents[2] / "data" / "digits"


def main() -> None:
    arguments = parse()
    torch.manual_seed(arguments.seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    train, optimizer = WAYS[arguments.way](model)

    paramhub.torch.init()
    rank, size = paramhub.torch.rank(), paramhub.torch.size()
    images, labels = read("train")
    for epoch in range(arguments.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        # Every rank needs the same number of batches, or the others would wait for a gradient that never comes.
        mine = order[: len(order) // size * size][rank::size]
        for batch in mine[: len(mine) // arguments.batch * arguments.batch].split(arguments.batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(train(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy(model):.3f}", flush=True)
    # Every rank reads its parameters once more, so that those of the last step have arrived at every rank.
    reached = accuracy(model)
    if dist.is_initialized():
        dist.destroy_process_group()
    paramhub.torch.shutdown()
    if rank == 0:
        print(f"way {arguments.way}: test accuracy {reached:.4f} with {size} ranks")


def through_hub_optimizer(model: nn.Module):
    """HubOptimizer: the hub sums gradients and runs the optimizer."""
    optimizer = paramhub.torch.HubOptimizer(model, optimizer=paramhub.Nesterov(lr=0.05, momentum=0.9))
    return model, optimizer


def by_schemes(model: nn.Module):
    """HubOptimizer that exchanges Linears as factors where these have fewer numbers than the gradient."""
    optimizer = paramhub.Nesterov(lr=0.05, momentum=0.9)
    return model, paramhub.torch.HubOptimizer(model, optimizer, scheme="auto")


def through_hook(model: nn.Module):
    """DDP with its gradients averaged by the hub."""
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    return ddp, local_optimizer(model)


def through_backend(model: nn.Module):
    """DDP on paramhub's backend."""
    dist.init_process_group("paramhub")
    return DistributedDataParallel(model), local_optimizer(model)


def through_distributed_optimizer(model: nn.Module):
    """Horovod's DistributedOptimizer: the hub averages gradients, and each rank runs torch's optimizer."""
    paramhub.torch.init()
    optimizer = paramhub.torch.DistributedOptimizer(
        local_optimizer(model), named_parameters=model.named_parameters()
    )
    paramhub.torch.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer


def local_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


WAYS = {
    "optimizer": through_hub_optimizer,
    "schemes": by_schemes,
    "hook": through_hook,
    "backend": through_backend,
    "distributed": through_distributed_optimizer,
}


def read(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images from 0 to 1 as [count, 1, 8, 8], and their labels, from IDX files."""
    prefix = {"train": "train", "test": "t10k"}[part]
    raw = (DATA / f"{prefix}-images-idx3-ubyte").read_bytes()
    count, height, width = struct.unpack(">3I", raw[4:16])
    pixels = torch.frombuffer(bytearray(raw[16:]), dtype=torch.uint8)
    images = pixels.view(count, 1, height, width).float() / 16
    raw = (DATA / f"{prefix}-labels-idx1-ubyte").read_bytes()
    return images, torch.frombuffer(bytearray(raw[8:]), dtype=torch.uint8).long()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    images, labels = read("test")
    return (model(images).argmax(1) == labels).float().mean().item()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=sorted(WAYS), default="optimizer")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="images of each rank a step")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
