"""MXNet's optimizers as a hub runs them.

MXNet's optimizers update by ``rescale_grad`` times the *sum* of the ranks' gradients, a hub's by the *mean*. Here
``factor`` is ``rescale_grad`` times the number of ranks, so that MXNet's gradient is the mean times the factor. The factor is
not multiplied into gradients: hyperparameters are divided and multiplied by it instead. What cannot be expressed by them, such as
a ``rescale_grad`` that changes later, scales a gradient before it is pushed. Keys with equal multipliers are a group at the hub.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mxnet as mx
import numpy

from paramhub.errors import MisuseError

Numbers = dict[str, float | bool]


class Update(NamedTuple):
    """One update of a group's keys: the hub's hyperparameters, and the scale of the pushed gradient."""

    numbers: Numbers
    scale: float


class _Terms(NamedTuple):
    """The terms of one update, after MXNet's rules for counts, schedulers and multipliers."""

    rate: float
    """The learning rate without the group's multiplier."""
    multiplier: float
    """The group's multiplier of the learning rate."""
    decay: float
    """The weight decay with the group's multiplier."""
    count: int
    """The number of this update of its keys, from 1."""


class Group:
    """Keys with equal multipliers, which have the same hyperparameters at the hub."""

    def __init__(self, rate: float, decay: float) -> None:
        self.rate_multiplier = rate
        self.decay_multiplier = decay
        self.keys: list[Any] = []
        self.numbers: Numbers = {}


class HubOptimizer:
    """An optimizer of MXNet and its form at the hub. It reads the optimizer's numbers at each push, so that changes take effect.

    ``workers`` is the number of ranks whose gradients are in an update, None where each push is an update. Raises MisuseError if
    a hub's optimizers cannot make the same updates.
    """

    def __init__(self, optimizer: mx.optimizer.Optimizer, workers: int | None) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            raise MisuseError(f"set_optimizer takes an mx.optimizer.Optimizer, not {optimizer!r}")
        self.optimizer = optimizer
        self._workers = workers or 1
        self._is_asynchronous = workers is None
        self._kind = type(optimizer).__name__
        if type(optimizer) not in _KINDS:
            known = ", ".join(sorted(kind.__name__ for kind in _KINDS))
            raise self._refusal(
                f"a hub has no optimizer that makes the same updates (those that have one: {known})"
            )
        self.name, self._numbers_of = _KINDS[type(optimizer)]
        if optimizer.clip_gradient:
            raise self._refusal(
                "clip_gradient clips each element of the ranks' sum, which a hub cannot do before an update"
            )
        if optimizer.begin_num_update and self.name == "adam":
            raise self._refusal("begin_num_update is not 0, and a hub counts Adam's updates from 1")
        if optimizer.wd and self._kind in ("AdaGrad", "AdaDelta"):
            raise self._refusal(
                "its wd decays weights by itself, and a hub's adds to the gradient: set wd to 0"
            )
        if optimizer.wd and self._kind == "NAG" and optimizer.momentum:
            # MXNet writes the weights before it reads them for the momentum's decay.
            raise self._refusal(
                "its momentum takes wd times the updated weights, a hub's those before: set wd to 0"
            )
        if self.name == "rmsprop" and (optimizer.centered or optimizer.clip_weights):
            raise self._refusal(
                "with centered its momentum has learning rates of earlier steps in it, and with clip_weights it clips weights"
            )
        if getattr(optimizer, "momentum", 0.0) < 0:
            raise self._refusal("its momentum is negative")
        if self._is_asynchronous and (optimizer.lr_scheduler is not None or self.name == "adam"):
            raise self._refusal(
                "its numbers follow the count of updates, which no rank of an asynchronous store knows: leave lr_scheduler "
                "out and choose another optimizer than Adam"
            )
        self.has_begun = False
        self._factor = 1.0
        self._first_rate = 1.0
        self._step = 0
        self._is_under_way = False
        self._groups: list[Group] = []
        self._group_of: dict[Any, Group] = {}

    def begin(self, keys: list[Any]) -> list[Group]:
        """The groups of the keys, with the numbers of the first update."""
        self.has_begun = True
        factor = self._factor_now()
        self._factor = factor if factor > 0 and self.name != "adadelta" else 1.0
        scheduler = self.optimizer.lr_scheduler
        self._first_rate = (scheduler.base_lr if scheduler is not None else self.optimizer.lr) or 1.0
        counts = [*self.optimizer._index_update_count.values(), self.optimizer.begin_num_update]
        self._step = max(counts) + 1
        rate = scheduler(self._step) if scheduler is not None else self.optimizer.lr
        groups: dict[tuple[float, float], Group] = {}
        for key in keys:
            multipliers = self._multipliers(key)
            self._group_of[key] = groups.setdefault(multipliers, Group(*multipliers))
            self._group_of[key].keys.append(key)
        self._groups = list(groups.values())
        for group in self._groups:
            group.numbers = self._update_of(group, rate, self._step).numbers
        return self._groups

    def next(self, key: Any) -> tuple[float, list[tuple[int, Numbers]]]:
        """Counts an update of a key, as MXNet's optimizers do. Returns the scale of its gradient, and the hyperparameters that
        have changed since the last update, each with the number of its group. The first key of a step changes all groups.

        Raises MisuseError if keys of a group need different hyperparameters in the same step.
        """
        optimizer = self.optimizer
        optimizer._update_count(key)
        count = optimizer._index_update_count[key]
        scheduler = optimizer.lr_scheduler
        rate = scheduler(optimizer.num_update) if scheduler is not None else optimizer.lr
        its = self._group_of[key]
        if self._multipliers(key) != (its.rate_multiplier, its.decay_multiplier):
            raise self._refusal(
                f"lr_mult or wd_mult of key {key!r} has changed since the first push, when its hyperparameters were chosen"
            )
        changes = []
        for number, group in enumerate(self._groups):
            numbers = self._update_of(group, rate, count).numbers
            changed = {name: value for name, value in numbers.items() if group.numbers[name] != value}
            if changed:
                changes.append((number, changed))
        if changes and self._is_asynchronous and self._is_under_way:
            raise self._refusal(
                "its numbers have changed, and an asynchronous store has no step from which the change would hold"
            )
        if changes and count <= self._step and self._is_under_way:
            had, changed = self._groups[changes[0][0]].numbers, changes[0][1]
            names = ", ".join(f"{name} {had[name]:g}" for name in changed)
            wanted = ", ".join(f"{name} {value:g}" for name, value in changed.items())
            raise self._refusal(
                f"key {key!r} needs {wanted} in its update {count}, and keys of update {self._step} have {names}, but a store's "
                "keys all are pushed equally often"
            )
        self._step, self._is_under_way = max(count, self._step), True
        for number, changed in changes:
            self._groups[number].numbers |= changed
        return self._update_of(its, rate, count).scale * self._factor_now() / self._factor, changes

    def _update_of(self, group: Group, rate: float, count: int) -> Update:
        terms = _Terms(rate, group.rate_multiplier, self.optimizer.wd * group.decay_multiplier, count)
        return self._numbers_of(self, terms)

    def _multipliers(self, key: Any) -> tuple[float, float]:
        """A key's multipliers of the learning rate and of the weight decay, by MXNet's rules (Optimizer._get_lrs, _get_wds)."""
        optimizer = self.optimizer
        if key in optimizer.param_dict:
            parameter = optimizer.param_dict[key]
            return parameter.lr_mult, parameter.wd_mult
        rates, decays = (
            table[key] if key in table else table.get(optimizer.idx2name.get(key), 1.0)
            for table in (optimizer.lr_mult, optimizer.wd_mult)
        )
        return rates, decays

    def to_mxnet(self, slots: list[bytes], shape: tuple[int, ...]) -> Any:
        """A key's state at the hub in the form of MXNet's updater."""
        arrays = []
        for slot, (scale, shift) in zip(slots, self._state_terms(), strict=True):
            values = numpy.frombuffer(slot, "f4").reshape(shape)
            arrays.append(mx.nd.array(values * numpy.float32(scale) + numpy.float32(shift)))
        if self.name in ("adam", "adadelta", "rmsprop"):
            return tuple(arrays)
        return arrays[0] if arrays else None

    def from_mxnet(self, key: Any, state: Any) -> tuple[list[bytes], int]:
        """A key's state at the hub, from that of MXNet's updater, and the number of updates that the state has had."""
        arrays = [] if state is None else list(state) if isinstance(state, (tuple, list)) else [state]
        terms = self._state_terms()
        if len(arrays) != len(terms) or not all(isinstance(array, mx.nd.NDArray) for array in arrays):
            raise self._refusal(f"the loaded state of key {key!r} is not that of an {self._kind} in float32")
        slots = []
        for array, (scale, shift) in zip(arrays, terms, strict=True):
            slots.append(
                ((array.asnumpy().astype("f4") - numpy.float32(shift)) / numpy.float32(scale)).tobytes()
            )
        count = self.optimizer._index_update_count.get(key, 0)
        # Other optimizers than Adam do not use the count, but at a hub the first update begins the state anew.
        return slots, count if self.name == "adam" else max(count, 1)

    def _state_terms(self) -> list[tuple[float, float]]:
        """For each slot the numbers that make MXNet's state of the hub's: a factor, and what is then added."""
        optimizer: Any = self.optimizer
        if self.name == "sgd":
            # MXNet's momentum is the next change of the weights.
            has_momentum = getattr(optimizer, "momentum", 0.0) != 0
            return [(-self._first_rate * self._factor, 0.0)] if has_momentum else []
        if self.name == "adam":
            return [(self._factor, 0.0), (self._factor**2, 0.0)]
        if self.name == "adagrad":
            return [(self._factor**2, -optimizer.float_stable_eps)]
        if self.name == "rmsprop":
            return [(self._factor**2, 0.0)]
        return [(1.0, 0.0), (1.0, 0.0)]

    def _factor_now(self) -> float:
        return float(self.optimizer.rescale_grad) * self._workers

    def _refusal(self, reason: str) -> MisuseError:
        return MisuseError(
            f"MXNet's {self._kind} cannot run at the hub: {reason}. With `update_on_kvstore=False` each rank runs it on the sum "
            "of the gradients."
        )

    def _sgd(self, terms: _Terms) -> Update:
        optimizer: Any = self.optimizer
        momentum = optimizer.momentum
        # MXNet multiplies each gradient by the learning rate of its own step and adds that to the momentum, torch and a hub
        # multiply the momentum by the newest learning rate. So with momentum the hub keeps the first rate, and gradients and
        # the decay are scaled.
        if momentum:
            rate = self._first_rate
            scale = terms.multiplier * (terms.rate / rate if rate else 1.0)
        else:
            rate, scale = terms.rate * terms.multiplier, 1.0
        numbers: Numbers = {
            "learning_rate": rate * self._factor,
            "momentum": momentum,
            "weight_decay": scale * terms.decay / self._factor,
            "nesterov": isinstance(optimizer, mx.optimizer.NAG) and momentum > 0,
        }
        return Update(numbers, scale)

    def _adam(self, terms: _Terms) -> Update:
        optimizer: Any = self.optimizer
        # MXNet adds epsilon to the root of the second moment before its bias is corrected, a hub after.
        corrected = math.sqrt(1.0 - optimizer.beta2**terms.count)
        numbers: Numbers = {
            "learning_rate": terms.rate * terms.multiplier,
            "beta1": optimizer.beta1,
            "beta2": optimizer.beta2,
            "epsilon": optimizer.epsilon / (self._factor * corrected),
            "weight_decay": terms.decay / self._factor,
        }
        return Update(numbers, 1.0)

    def _adagrad(self, terms: _Terms) -> Update:
        optimizer: Any = self.optimizer
        # MXNet adds epsilon under the root, which is the same as a sum of squares that begins with epsilon.
        begin = optimizer.float_stable_eps / self._factor**2
        rate = terms.rate * terms.multiplier
        return Update({"learning_rate": rate, "initial_accumulator": begin, "epsilon": 0.0}, 1.0)

    def _adadelta(self, _: _Terms) -> Update:
        optimizer: Any = self.optimizer
        # MXNet's has no learning rate.
        return Update({"learning_rate": 1.0, "rho": optimizer.rho, "epsilon": optimizer.epsilon}, 1.0)

    def _rmsprop(self, terms: _Terms) -> Update:
        optimizer: Any = self.optimizer
        numbers: Numbers = {
            "learning_rate": terms.rate * terms.multiplier,
            "alpha": optimizer.gamma1,
            "epsilon": optimizer.epsilon / self._factor**2,
            "epsilon_in_root": True,
            "weight_decay": terms.decay / self._factor,
        }
        return Update(numbers, 1.0)

    def _test(self, _: _Terms) -> Update:
        return Update({"learning_rate": self._factor, "maximize": True}, 1.0)


_optimizers = mx.optimizer
_KINDS = {
    _optimizers.SGD: ("sgd", HubOptimizer._sgd),
    _optimizers.ccSGD: ("sgd", HubOptimizer._sgd),
    _optimizers.NAG: ("sgd", HubOptimizer._sgd),
    _optimizers.Adam: ("adam", HubOptimizer._adam),
    _optimizers.AdaGrad: ("adagrad", HubOptimizer._adagrad),
    _optimizers.AdaDelta: ("adadelta", HubOptimizer._adadelta),
    _optimizers.RMSProp: ("rmsprop", HubOptimizer._rmsprop),
    _optimizers.Test: ("sgd", HubOptimizer._test),
}
