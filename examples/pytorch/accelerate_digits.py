"""Trains a small convolutional network on handwritten digits with Hugging Face Accelerate, on paramhub's backend.

    pip install accelerate
    torchrun --nproc-per-node 4 examples/pytorch/accelerate_digits.py

If PARAMHUB_URL names no hub, rank 0 runs one. On several hosts each host has one.
"""

import argparse
import struct
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paramhub.torch  # noqa: F401 - torch 2.14 and later find the backend without this import

DATA = Path(__file__).resolve().parents[2] / "data" / "digits"


def main() -> None:
    arguments = parse()
    accelerator = accelerate()
    set_seed(arguments.seed)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    train = DataLoader(read("train"), batch_size=arguments.batch, shuffle=True)
    test = DataLoader(read("test"), batch_size=256)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in range(arguments.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(
            f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy(accelerator, model, test):.3f}"
        )
    accelerator.end_training()


def accelerate() -> Accelerator:
    """Accelerate on paramhub's backend, which exchanges host tensors."""
    # Accelerate uses an existing process group. By itself it can make only gloo's or MPI's on the CPU.
    dist.init_process_group("paramhub")
    return Accelerator(cpu=True)


@torch.no_grad()
def accuracy(accelerator: Accelerator, model: nn.Module, test: DataLoader) -> float:
    model.eval()
    right = [
        accelerator.gather_for_metrics(model(images).argmax(1) == labels).float() for images, labels in test
    ]
    return torch.cat(right).mean().item()


def read(part: str) -> TensorDataset:
    """Images from 0 to 1 as [count, 1, 8, 8], and their labels, from IDX files."""
    prefix = {"train": "train", "test": "t10k"}[part]
    raw = (DATA / f"{prefix}-images-idx3-ubyte").read_bytes()
    count, height, width = struct.unpack(">3I", raw[4:16])
    pixels = torch.frombuffer(bytearray(raw[16:]), dtype=torch.uint8)
    images = pixels.view(count, 1, height, width).float() / 16
    raw = (DATA / f"{prefix}-labels-idx1-ubyte").read_bytes()
    return TensorDataset(images, torch.frombuffer(bytearray(raw[8:]), dtype=torch.uint8).long())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="images of each rank a step")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
