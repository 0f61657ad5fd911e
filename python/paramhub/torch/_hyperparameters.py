"""An optimizer's hyperparameters: with torch's names in parameter groups, with the hub's names in its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paramhub.errors import MisuseError
from paramhub.optimizers import BY_NAME, Optimizer, settings_of

if TYPE_CHECKING:
    from paramhub import _native
    from paramhub.torch._exchange import Exchange

TORCH_NAMES = {
    "learning_rate": "lr",
    "epsilon": "eps",
    "initial_accumulator": "initial_accumulator_value",
    "decoupled": "decoupled_weight_decay",
}
"""torch's names of the hub's hyperparameters, where they differ. torch has Adam's ``beta1`` and ``beta2`` as ``betas``."""
HUB_NAMES = {theirs: ours for ours, theirs in TORCH_NAMES.items()}
DECOUPLED = "decoupled_weight_decay"
SWITCHES = ("nesterov", "amsgrad", "maximize", "centered", DECOUPLED)
"""Hyperparameters that are on or off."""
UNSUPPORTED = ("differentiable", "capturable")
"""Options of torch.optim that hubs do not have."""


def defaults(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's hyperparameters by torch's names, in the form of torch.optim.Optimizer.defaults."""
    if optimizer.name in ("mean", "sum"):
        raise MisuseError(
            f"HubOptimizer needs an optimizer that the hub runs, such as paramhub.SGD(lr=0.1), not {optimizer!r}: to have "
            "the optimizer on each rank use paramhub.torch.DistributedOptimizer"
        )
    known = BY_NAME.get(optimizer.name)
    numbers: dict[str, Any] = dict(known().hyperparameters) if known else {"learning_rate": 1e-3}
    if known and optimizer.hyperparameters:
        # The hub does the same: if some hyperparameters are given, the others have the same defaults for all optimizers.
        numbers["weight_decay"] = 0.0
    numbers.update(optimizer.hyperparameters)
    named = {TORCH_NAMES.get(name, name): value for name, value in numbers.items()}
    if "beta1" in named and "beta2" in named:
        named["betas"] = (named.pop("beta1"), named.pop("beta2"))
    return named


def group_hyperparameters(group: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, float | bool]:
    """A parameter group's hyperparameters by the hub's names. ``names`` selects them: the result of `defaults`."""
    for option in UNSUPPORTED:
        if group.get(option):
            raise MisuseError(f"a parameter group asks for {option}, which hubs do not have")
    for option in SWITCHES:
        # Groups of torch's AdamW have `decoupled_weight_decay`, too: see `check_decay`.
        if option != DECOUPLED and group.get(option) and option not in names:
            raise MisuseError(f"a parameter group asks for {option}, which the optimizer was made without")
    if "ema_decay" in group and "ema_decay" not in names:
        raise MisuseError("a parameter group asks for ema_decay: give it to HubOptimizer, for all groups")
    numbers: dict[str, float | bool] = {}
    for name in names:
        if name not in group:
            raise MisuseError(f"a parameter group lacks {name!r}: it has {', '.join(map(repr, group))}")
        value = group[name]
        if name == "betas":
            numbers["beta1"], numbers["beta2"] = float(value[0]), float(value[1])
        elif name in SWITCHES:
            numbers[HUB_NAMES.get(name, name)] = bool(value)
        else:
            numbers[HUB_NAMES.get(name, name)] = float(value)
    return numbers


def check_decay(kind: str, group: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    """Refuses a saved group whose optimizer has decayed weights by themselves, if the hub's of this kind does not."""
    if group.get(DECOUPLED) and DECOUPLED not in names and kind != "adamw":
        raise MisuseError(
            f"the saved state is that of an optimizer with {DECOUPLED}, and the hub's {kind} was made without"
        )


def as_json(numbers: dict[str, float | bool]) -> str:
    """Hyperparameters in the JSON form that the hub reads."""
    return json.dumps(settings_of(numbers))


class HyperparameterSync:
    """Sends changed hyperparameters of the parameter groups to the hub, with the first step of each group that uses them.

    Rank 0 does so. In a job that goes on without lost ranks all do, since rank 0 may be lost; of changes that differ the hub
    takes those of the rank that has been there for longest.
    """

    def __init__(
        self,
        job: _native.Job,
        groups: Sequence[Mapping[str, Any]],
        names: Mapping[str, Any],
        members: Sequence[Sequence[Exchange]],
        may_lag: bool,
    ) -> None:
        """``members`` are each group's parameters. With ``may_lag`` some may have made fewer steps than others."""
        self._job = job
        self._groups = groups
        self._names = names
        self._members = members
        self._may_lag = may_lag
        # A job that resumes from a checkpoint has the checkpoint's hyperparameters, not those of its settings.
        resumes = job.resumed_step is not None
        self._sent = [{} if resumes else group_hyperparameters(group, names) for group in groups]

    def begin_step(self) -> None:
        """Called before a step's first gradient is sent. The groups' values apply from this step on."""
        for number, group in enumerate(self._groups):
            numbers = group_hyperparameters(group, self._names)
            if numbers == self._sent[number]:
                continue
            self._sent[number] = numbers
            sends = self._job.rank == 0 or self._job.loses_workers
            if sends and self._members[number]:
                self._job.set_hyperparameters(self._first_step(number), as_json(numbers), number)

    def _first_step(self, number: int) -> int:
        """The first of the group's steps that uses new hyperparameters.

        A parameter that was left out of steps has made fewer steps, and the hub counts the steps of each. New hyperparameters
        apply from the smallest count on, so that no parameter's next step uses older ones. They must not change steps under
        way, so this waits for those.
        """
        members = self._members[number]
        if not self._may_lag:
            return members[0].next_step()
        steps = [exchange.next_step() for exchange in members]
        if min(steps) < max(steps):
            for exchange in members:
                exchange.wait()
        return min(steps)

    def changed(self) -> list[str]:
        """torch's names of hyperparameters that have changed since this step's gradients were sent."""
        found = []
        for group, sent in zip(self._groups, self._sent, strict=True):
            numbers = group_hyperparameters(group, self._names)
            found += [TORCH_NAMES.get(name, name) for name, value in numbers.items() if value != sent[name]]
        return found
