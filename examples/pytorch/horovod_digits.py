"""Trains a small network on handwritten digits with a script for Horovod, of which only the import was changed.

torchrun --nproc-per-node 4 examples/pytorch/horovod_digits.py
"""

import argparse

import torch
import torch.nn.functional as F
from digits import read
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paramhub.torch as hvd  # was: import horovod.torch as hvd


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 3, padding=1)
        self.hidden = nn.Linear(16 * 4 * 4, 64)
        self.classes = nn.Linear(64, 10)

    def forward(self, images):
        pooled = F.max_pool2d(F.relu(self.convolution(images)), 2)
        return self.classes(F.relu(self.hidden(pooled.flatten(1))))


def loader_of(part, batch, shuffle):
    data = TensorDataset(*read(part))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle)
    return DataLoader(data, batch_size=batch, sampler=sampler), sampler


def average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test(model, loader):
    model.eval()
    loss, right, seen = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in loader:
            scores = model(images)
            loss += F.cross_entropy(scores, labels, reduction="sum").item()
            right += (scores.argmax(1) == labels).sum().item()
            seen += len(labels)
    return average(loss / seen, "loss"), average(right / seen, "accuracy")


def main():
    arguments = parse()
    hvd.init()
    # Ranks begin with different parameters, which broadcast_parameters makes the same.
    torch.manual_seed(arguments.seed + hvd.rank())
    torch.set_num_threads(1)
    model = Net()
    train_loader, train_sampler = loader_of("train", arguments.batch, shuffle=True)
    test_loader, _ = loader_of("test", 100, shuffle=False)

    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )

    for epoch in range(arguments.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for images, labels in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        loss, accuracy = test(model, test_loader)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
    hvd.shutdown()


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="images of each rank a step")
    parser.add_argument("--lr", type=float, default=0.02, help="of one rank; it grows with their number")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as f16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
