"""An optimizer's numbers: torch's names in parameter groups, the hub's in its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paramhub.errors import MisuseError
from paramhub.optimizers import SGD, Adam, AdamW, Optimizer, settings_of

TORCH_NAMES = {"learning_rate": "lr", "epsilon": "eps"}
"""torch's names of the hub's numbers, where they differ. Adam's ``beta1`` and ``beta2`` are ``betas``."""
HUB_NAMES = {theirs: ours for ours, theirs in TORCH_NAMES.items()}
UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "capturable")
"""Options of torch.optim that hubs do not have."""


def defaults(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's numbers by torch's names, as torch.optim.Optimizer.defaults has them."""
    if optimizer.name in ("mean", "sum"):
        raise MisuseError(
            f"HubOptimizer needs an optimizer that the hub runs, such as paramhub.SGD(lr=0.1), not {optimizer!r}: to have "
            "the optimizer on each rank use paramhub.torch.DistributedOptimizer"
        )
    known = {"sgd": SGD, "adam": Adam, "adamw": AdamW}.get(optimizer.name)
    numbers: dict[str, Any] = dict(known().hyperparameters) if known else {"learning_rate": 1e-3}
    if known and optimizer.hyperparameters:
        # As at the hub: where some are given, what is left out is the same for all optimizers.
        numbers["weight_decay"] = 0.0
    numbers.update(optimizer.hyperparameters)
    named = {TORCH_NAMES.get(name, name): value for name, value in numbers.items()}
    if "beta1" in named and "beta2" in named:
        named["betas"] = (named.pop("beta1"), named.pop("beta2"))
    return named


def of_group(group: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, float | bool]:
    """A parameter group's numbers by the hub's names. ``names`` are those that count: `defaults`'s."""
    for option in UNSUPPORTED:
        if group.get(option):
            raise MisuseError(f"a parameter group asks for {option}, which hubs do not have")
    numbers: dict[str, float | bool] = {}
    for name in names:
        value = group[name]
        if name == "betas":
            numbers["beta1"], numbers["beta2"] = float(value[0]), float(value[1])
        elif name == "nesterov":
            numbers[name] = bool(value)
        else:
            numbers[HUB_NAMES.get(name, name)] = float(value)
    return numbers


def as_json(numbers: dict[str, float | bool]) -> str:
    """Numbers as the hub reads them."""
    return json.dumps(settings_of(numbers))
