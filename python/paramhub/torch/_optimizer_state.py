"""The optimizer state at the hub, with torch.optim's names."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch._exchange import Exchange
from paramhub.torch._tensors import memory_range

NAMES = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adagrad": ("sum",),
    "rmsprop": ("square_avg", "grad_avg", "momentum_buffer"),
    "adadelta": ("square_avg", "acc_delta"),
    "nadam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "lars": ("momentum_buffer",),
    "lamb": ("exp_avg", "exp_avg_sq"),
}
"""torch.optim's names of the hub's state tensors, in the order of the hub's. Some may be left out: see `_names`."""


EMA_DECAY = "ema_decay"
"""The hyperparameter with which hubs keep a moving average of each parameter, in the last slot."""
AVERAGE = "ema"
"""The average's name in a parameter's state."""


@dataclass
class State:
    """One parameter's state: the number of its updates, and its f32 state tensors, with the parameter's strides."""

    updates: int
    slots: list[torch.Tensor]
    average: torch.Tensor | None = None
    """The moving average of the parameter, if hubs keep one. It has the last slot at the hub, after those of the optimizer."""


def pull(job: _native.Job, exchanges: Sequence[Exchange], *, has_averages: bool) -> list[State]:
    """The state of all parameters, after this rank's last step."""
    states = [State(0, []) for _ in exchanges]
    for slot in range(job.state_slots):
        for state, (tensor, updates) in zip(states, _pull_slot(job, exchanges, slot), strict=True):
            state.slots.append(tensor)
            state.updates = updates
    for state in states if has_averages else ():
        state.average = state.slots.pop()
    return states


def pull_averages(job: _native.Job, exchanges: Sequence[Exchange]) -> list[torch.Tensor]:
    """The moving averages of the parameters, after this rank's last step. Before a parameter's first update its average is the
    parameter."""
    pulled = _pull_slot(job, exchanges, job.state_slots - 1)
    return [
        average if updates > 0 else average.copy_(exchange.parameter.detach())
        for exchange, (average, updates) in zip(exchanges, pulled, strict=True)
    ]


def _pull_slot(
    job: _native.Job, exchanges: Sequence[Exchange], slot: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """One slot of each parameter, and the number of the parameter's updates."""
    for exchange in exchanges:
        exchange.wait()
    numbers = [exchange.number for exchange in exchanges]
    tensors = [_empty(exchange) for exchange in exchanges]
    updates = job.pull_state(numbers, slot, [memory_range(tensor) for tensor in tensors], tensors)
    return zip(tensors, updates, strict=True)


def restore(job: _native.Job, exchanges: Sequence[Exchange], states: Sequence[State]) -> None:
    """Sends the initial state to the hub. Rank 0 calls it, before it sends the parameters."""
    numbers = [exchange.number for exchange in exchanges]
    updates = [state.updates for state in states]
    for slot in range(job.state_slots):
        is_last = slot == job.state_slots - 1
        tensors = [
            state.average
            if is_last and state.average is not None
            else state.slots[slot]
            if slot < len(state.slots)
            else _empty(exchange).zero_()
            for exchange, state in zip(exchanges, states, strict=True)
        ]
        ranges = [memory_range(tensor) for tensor in tensors]
        job.initialise_state(numbers, slot, ranges, updates, tensors).wait()


def as_torch_has_it(optimizer: str, state: State, group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's entry in ``state_dict()["state"]``; empty before the first update, as in torch."""
    names = _names(optimizer, len(state.slots), group)
    if state.updates == 0 or not (names or state.average is not None):
        return {}
    # Another group may need more state.
    entry: dict[str, Any] = dict(zip(names, state.slots, strict=False))
    if optimizer == "nadam":
        # A hub computes it from the number of updates.
        entry = {"mu_product": torch.tensor(_product_of_momenta(state.updates, group)), **entry}
    if state.average is not None:
        entry[AVERAGE] = state.average
    return entry if optimizer in ("sgd", "lars") else {"step": torch.tensor(float(state.updates)), **entry}


def from_torch(
    optimizer: str,
    entry: Mapping[str, Any],
    exchange: Exchange,
    group: Mapping[str, Any],
    *,
    has_averages: bool,
) -> State:
    """A parameter's state from its entry in ``state_dict()["state"]``, of HubOptimizer or of torch.optim's optimizer. ``group``
    is the saved group of the parameter. ``has_averages`` says whether the hub keeps averages from now on."""
    counts = ("step", "mu_product", AVERAGE)
    values = {name: value for name, value in entry.items() if value is not None and name not in counts}
    if not values and AVERAGE not in entry:
        return State(0, [])
    names = _names(optimizer, len(values), group, values)
    if set(values) != set(names):
        raise MisuseError(
            f"the state of {exchange.name!r} has {', '.join(map(repr, values))}, but optimizer {optimizer!r} of the hub keeps "
            f"{', '.join(map(repr, names))} here: it was saved by another optimizer, or with other options"
        )
    slots = []
    for name in names:
        if values[name].shape != exchange.parameter.shape:
            raise MisuseError(
                f"{name!r} of {exchange.name!r} has shape {list(values[name].shape)}, the parameter has "
                f"{list(exchange.parameter.shape)}: the state is another model's, or its parameters are in another order"
            )
        slots.append(_empty(exchange).copy_(values[name]))
    # torch does not count SGD's updates, and SGD only needs to know whether there was one.
    average = None
    if has_averages:
        # A state that was saved without an average goes on from the parameter.
        average = _empty(exchange).copy_(entry.get(AVERAGE, exchange.parameter.detach()))
    return State(int(entry.get("step", 1)), slots, average)


def _names(optimizer: str, slots: int, group: Mapping[str, Any], given: Container[str] = ()) -> list[str]:
    """The names of a parameter's state tensors, by number. ``slots`` counts those of an optimizer that hubs have registered.
    ``given`` are names that the state has although the group may need them no more."""
    needed = {
        "momentum_buffer": bool(group.get("momentum")),
        "max_exp_avg_sq": bool(group.get("amsgrad")),
        "grad_avg": bool(group.get("centered")),
    }
    known = NAMES.get(optimizer)
    if known is None:
        return [f"state_{slot}" for slot in range(slots)]
    return [name for name in known if needed.get(name, True) or name in given]


def _product_of_momenta(updates: int, group: Mapping[str, Any]) -> float:
    """The product of NAdam's momenta up to this update."""
    product = 1.0
    for number in range(1, updates + 1):
        product *= group["betas"][0] * (1.0 - 0.5 * 0.96 ** (number * group["momentum_decay"]))
        if product == 0.0:
            break
    return product


def _empty(exchange: Exchange) -> torch.Tensor:
    parameter = exchange.parameter
    return torch.empty_strided(parameter.size(), parameter.stride(), dtype=torch.float32)
