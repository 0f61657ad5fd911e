"""Trains a small convolutional network on handwritten digits through a key-value store, under MXNet's names.

    paramhub run -n 4 -- python examples/pytorch/kvstore_digits.py --kvstore depcha

A gradient is pushed as soon as backward has made it and those of the layers behind it. What follows from all of them is pulled
into the parameters, and each layer's next forward pass waits for its own.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import accuracy, read
from torch import nn

import paramhub
import paramhub.kvstore as kvs


def main() -> None:
    arguments = parse()
    # Ranks begin with different parameters, which the store makes rank 0's.
    with kvs.create(arguments.kvstore) as kv:
        torch.manual_seed(arguments.seed + kv.rank)
        torch.set_num_threads(1)
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
        exchange = Exchange(kv, model, arguments.lr)
        images, labels = read("train")
        for epoch in range(arguments.epochs):
            if epoch == arguments.epochs // 2:
                kv.set_hyperparameters(learning_rate=arguments.lr / 2)
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
            # Every rank the same number of batches of the same size, or a step would wait for a gradient that never comes.
            mine = order[: len(order) // kv.size * kv.size][kv.rank :: kv.size]
            for batch in mine[: len(mine) // arguments.batch * arguments.batch].split(arguments.batch):
                model.zero_grad()
                loss = F.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                exchange.step()
            if kv.rank == 0:
                print(
                    f"epoch {epoch}: loss {loss.item():.3f}, test accuracy {accuracy(model):.3f}", flush=True
                )
        if kv.rank == 0:
            print(f"store {kv.type}: test accuracy {accuracy(model):.4f} with {kv.size} ranks")
        kv.wait()


class Exchange:
    """Gradients of a model go to a store, and parameters come from it."""

    def __init__(self, kv: kvs.KVStore, model: nn.Module, lr: float) -> None:
        self.kv = kv
        self.parameters = dict(model.named_parameters())
        # The last layer's gradient is there first.
        self.order = list(reversed(self.parameters))
        self.ready: set[str] = set()
        self.pushed = 0
        data = {name: parameter.data for name, parameter in self.parameters.items()}
        kv.broadcast(list(data), list(data.values()), out=list(data.values())).wait()
        kv.set_optimizer(paramhub.Nesterov(lr=lr, momentum=0.9))
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.push(name))
        for prefix, module in model.named_modules():
            names = [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
            module.register_forward_pre_hook(lambda *_, names=names: kv.wait(names))

    def push(self, name: str) -> None:
        # All ranks call the store in one order, and autograd promises none: what is ready too early waits.
        self.ready.add(name)
        while self.pushed < len(self.order) and self.order[self.pushed] in self.ready:
            name = self.order[self.pushed]
            self.kv.push(name, self.parameters[name].grad)
            self.pushed += 1

    def step(self) -> None:
        # Pushed gradients are kept until they have been read: the next step has others.
        for name in self.order:
            self.kv.pull(name, out=self.parameters[name].data)
        self.ready.clear()
        self.pushed = 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kvstore", choices=["hub", "local", "funnel", "concom", "depcha"], default="depcha")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16, help="images of each rank a step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
