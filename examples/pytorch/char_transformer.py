"""Trains a character-level transformer of about a million parameters with the hub as its optimizer.

    torchrun --nproc-per-node 4 examples/pytorch/char_transformer.py

Gradients are sent as bf16, which halves their bytes; the hub sums them in f32 and keeps f32 parameters. A learning-rate
scheduler of torch sets the hub's learning rate, and the hub clips gradients by their global norm.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paramhub
import paramhub.torch

TEXT = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
CONTEXT = 64


class Transformer(nn.Module):
    def __init__(self, characters: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        # Tied: one tensor, one key at the hub.
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) + self.position
        hidden = self.layers(hidden, mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def main() -> None:
    arguments = parse()
    torch.manual_seed(arguments.seed)
    text = arguments.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    number = {letter: index for index, letter in enumerate(letters)}
    tokens = torch.tensor([number[letter] for letter in text])

    paramhub.torch.init()
    rank, size = paramhub.torch.rank(), paramhub.torch.size()
    model = Transformer(len(letters), arguments.width, arguments.layers, heads=4)
    optimizer = paramhub.torch.HubOptimizer(
        model, optimizer=paramhub.AdamW(lr=arguments.lr), codec="bf16", max_grad_norm=1.0
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, arguments.lr, total_steps=arguments.steps)
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(f"{parameters} parameters, {len(tokens)} characters, {len(letters)} of them different")

    generator = torch.Generator().manual_seed(arguments.seed + rank)
    started = time.monotonic()
    first = mean = None
    for step in range(arguments.steps):
        places = torch.randint(len(tokens) - CONTEXT - 1, (arguments.batch,), generator=generator)
        windows = torch.stack([tokens[place : place + CONTEXT + 1] for place in places])
        optimizer.zero_grad()
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        first = first if first is not None else loss.item()
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
        if rank == 0 and (step + 1) % max(1, arguments.steps // 10) == 0:
            speed = (step + 1) * arguments.batch * CONTEXT * size / (time.monotonic() - started)
            print(f"step {step + 1}: loss {mean:.3f}, {speed:.0f} characters/s", flush=True)
    optimizer.synchronize()
    if rank == 0:
        guess = math.log(len(letters))
        print(f"loss {first:.3f} at first, {mean:.3f} at last; a guess has {guess:.3f}")
    paramhub.torch.shutdown()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="what to learn [default: docs/protocol.md]")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="windows of each rank a step")
    parser.add_argument("--width", type=int, default=144)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
