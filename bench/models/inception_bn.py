"""BN-Inception (Ioffe and Szegedy, 2015) for 1,000 classes, after MXNet's example `inception-bn`.

There, convolutions have biases beside their batch normalisations, and pooling without padding rounds down. The modules are
in the order in which MXNet lists a network's arguments, which is the order of its keys: the branches of a block one after
the other.
"""

from __future__ import annotations

import torch
from torch import nn


class Convolution(nn.Module):
    """A convolution with its normalisation."""

    def __init__(self, channels: int, filters: int, size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, size, stride, padding)
        self.bn = nn.BatchNorm2d(filters)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.bn(self.conv(images)))


class Block(nn.Module):
    """Parallel branches, whose outputs are concatenated."""

    def __init__(self, branches: dict[str, nn.Module], *, filters: int) -> None:
        super().__init__()
        self.filters = filters
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(images) for branch in self.children()], dim=1)


def chain(**modules: nn.Module) -> nn.Sequential:
    """Modules one after the other, by name."""
    whole = nn.Sequential()
    for name, module in modules.items():
        whole.add_module(name, module)
    return whole


def narrow(channels: int, filters: list[int], pool: nn.Module) -> Block:
    """A block that keeps the area. Filters: 1x1; before and of the 3x3; before and of the two 3x3; after the pooling."""
    one, before, three, before_double, double, projected = filters
    branches = {
        "1x1": Convolution(channels, one, 1),
        "3x3": chain(reduce=Convolution(channels, before, 1), last=Convolution(before, three, 3, padding=1)),
        "double_3x3": chain(
            reduce=Convolution(channels, before_double, 1),
            first=Convolution(before_double, double, 3, padding=1),
            last=Convolution(double, double, 3, padding=1),
        ),
        "proj": chain(pool=pool, last=Convolution(channels, projected, 1)),
    }
    return Block(branches, filters=one + three + double + projected)


def halving(channels: int, filters: list[int]) -> Block:
    """A block that halves the sides. Filters: before and of the 3x3; before and of the two 3x3."""
    before, three, before_double, double = filters
    branches = {
        "3x3": chain(
            reduce=Convolution(channels, before, 1), last=Convolution(before, three, 3, stride=2, padding=1)
        ),
        "double_3x3": chain(
            reduce=Convolution(channels, before_double, 1),
            first=Convolution(before_double, double, 3, padding=1),
            last=Convolution(double, double, 3, stride=2, padding=1),
        ),
        "pool": nn.MaxPool2d(3, 2, padding=1),
    }
    return Block(branches, filters=channels + three + double)


def inception_bn() -> nn.Module:
    """The network for images of 224 x 224."""
    average, largest = nn.AvgPool2d(3, 1, padding=1), nn.MaxPool2d(3, 1, padding=1)
    net = chain(
        conv1=Convolution(3, 64, 7, stride=2, padding=3),
        pool1=nn.MaxPool2d(3, 2),
        conv2_red=Convolution(64, 64, 1),
        conv2=Convolution(64, 192, 3, padding=1),
        pool2=nn.MaxPool2d(3, 2),
    )
    channels = 192
    for name, filters, pool in [
        ("3a", [64, 64, 64, 64, 96, 32], average),
        ("3b", [64, 64, 96, 64, 96, 64], average),
        ("3c", [128, 160, 64, 96], None),
        ("4a", [224, 64, 96, 96, 128, 128], average),
        ("4b", [192, 96, 128, 96, 128, 128], average),
        ("4c", [160, 128, 160, 128, 160, 128], average),
        ("4d", [96, 128, 192, 160, 192, 128], average),
        ("4e", [128, 192, 192, 256], None),
        ("5a", [352, 192, 320, 160, 224, 128], average),
        ("5b", [352, 192, 320, 192, 224, 128], largest),
    ]:
        block = halving(channels, filters) if pool is None else narrow(channels, filters, pool)
        net.add_module(f"inception{name}", block)
        channels = block.filters
    net.add_module("pool", nn.AvgPool2d(7))
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc", nn.Linear(channels, 1000))
    return net
