"""Trains a small convolutional network on handwritten digits through a key-value store with MXNet's API.

    paramhub run -n 4 -- python examples/pytorch/kvstore_digits.py --kvstore depcha

A gradient is pushed as soon as backward has computed it and those of all later layers. After the last push all parameters are
pulled, and each layer's next forward pass waits for its own.
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
    # Ranks begin with different parameters; the store replaces them with rank 0's.
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
            # Every rank needs the same number of batches, or the others would wait for a gradient that never comes.
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
    """Pushes a model's gradients to a store and pulls its parameters from it."""

    def __init__(self, kv: kvs.KVStore, model: nn.Module, lr: float) -> None:
        self.kv = kv
        self.parameters = dict(model.named_parameters())
        # Backward computes the last layer's gradient first.
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
        # All ranks must call the store in the same order. Autograd guarantees no order, so early gradients wait here.
        self.ready.add(name)
        while self.pushed < len(self.order) and self.order[self.pushed] in self.ready:
            name = self.order[self.pushed]
            self.kv.push(name, self.parameters[name].grad)
            self.pushed += 1

    def step(self) -> None:
        # The store keeps pushed gradients alive until it has read them, and the next step has new ones.
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
