"""The optimizers that a hub runs, with torch.optim's names and definitions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from paramhub.errors import MisuseError


class Optimizer:
    """An optimizer by its name at the hub, and its hyperparameters.

    The built-in optimizers have classes of their own. Use this class for an optimizer that is registered at your hub. Its
    hyperparameters have the hub's names (``learning_rate``, ``momentum``, ``dampening``, ``nesterov``, ``weight_decay``,
    ``beta1``, ``beta2``, ``epsilon``, or up to eight names of the optimizer's own). The hub has defaults for those that are
    left out.
    """

    def __init__(self, name: str, /, **hyperparameters: float | bool) -> None:
        self.name = name
        self.hyperparameters = hyperparameters

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value!r}" for name, value in self.hyperparameters.items())
        return f"Optimizer({self.name!r}{', ' if numbers else ''}{numbers})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Optimizer):
            return NotImplemented
        return (self.name, self.hyperparameters) == (other.name, other.hyperparameters)

    __hash__ = None  # type: ignore[assignment]  # its hyperparameters may be changed

    def settings(self) -> dict[str, object]:
        """The optimizer in the form of the hub's settings."""
        return {"name": self.name, "hyperparameters": settings_of(self.hyperparameters) or None}


def settings_of(hyperparameters: Mapping[str, float | bool]) -> dict[str, object]:
    """Hyperparameters in the form of the hub's settings: those that the hub knows by name, all others under ``extra``."""
    known: dict[str, object] = {name: value for name, value in hyperparameters.items() if name in _HUB_NAMES}
    extra = {name: float(value) for name, value in hyperparameters.items() if name not in _HUB_NAMES}
    return {**known, "extra": extra} if extra else known


_HUB_NAMES = frozenset(
    ("learning_rate", "momentum", "dampening", "nesterov", "weight_decay", "beta1", "beta2", "epsilon")
)


class Mean(Optimizer):
    """No optimizer: workers receive the mean of their gradients."""

    def __init__(self) -> None:
        super().__init__("mean")


class Sum(Optimizer):
    """No optimizer: workers receive the sum of their gradients."""

    def __init__(self) -> None:
        super().__init__("sum")


class SGD(Optimizer):
    """torch.optim.SGD."""

    def __init__(
        self,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "sgd",
            learning_rate=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            **_asked(maximize=maximize),
        )


class Nesterov(SGD):
    """torch.optim.SGD with ``nesterov=True``."""

    def __init__(self, lr: float = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(lr, momentum=momentum, weight_decay=weight_decay, nesterov=True)


class Adam(Optimizer):
    """torch.optim.Adam."""

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "adam",
            learning_rate=lr,
            beta1=betas[0],
            beta2=betas[1],
            epsilon=eps,
            weight_decay=weight_decay,
            **_asked(amsgrad=amsgrad, maximize=maximize),
        )


class AdamW(Optimizer):
    """torch.optim.AdamW."""

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "adamw",
            learning_rate=lr,
            beta1=betas[0],
            beta2=betas[1],
            epsilon=eps,
            weight_decay=weight_decay,
            **_asked(amsgrad=amsgrad, maximize=maximize),
        )


class Adagrad(Optimizer):
    """torch.optim.Adagrad."""

    def __init__(
        self,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "adagrad",
            learning_rate=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator=initial_accumulator_value,
            epsilon=eps,
            **_asked(maximize=maximize),
        )


class RMSprop(Optimizer):
    """torch.optim.RMSprop."""

    def __init__(
        self,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "rmsprop",
            learning_rate=lr,
            alpha=alpha,
            epsilon=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
            **_asked(maximize=maximize),
        )


class Adadelta(Optimizer):
    """torch.optim.Adadelta."""

    def __init__(
        self,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "adadelta",
            learning_rate=lr,
            rho=rho,
            epsilon=eps,
            weight_decay=weight_decay,
            **_asked(maximize=maximize),
        )


class NAdam(Optimizer):
    """torch.optim.NAdam."""

    def __init__(
        self,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "nadam",
            learning_rate=lr,
            beta1=betas[0],
            beta2=betas[1],
            epsilon=eps,
            weight_decay=weight_decay,
            momentum_decay=momentum_decay,
            **_asked(decoupled=decoupled_weight_decay, maximize=maximize),
        )


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), with decoupled weight decay."""

    def __init__(
        self,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "lion",
            learning_rate=lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            **_asked(maximize=maximize),
        )


class LARS(Optimizer):
    """LARS (You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017): SGD with momentum whose rate each
    tensor scales by ``trust_coefficient`` times the ratio of the norms of its parameters and its gradient. Parameter groups with
    a ``trust_coefficient`` of 0, mostly biases and norms, are not scaled."""

    def __init__(
        self,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "lars",
            learning_rate=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            **_asked(maximize=maximize),
        )


class LAMB(Optimizer):
    """LAMB (You et al., "Large batch optimization for deep learning", 2020): Adam whose update each tensor scales by
    ``trust_coefficient`` times the ratio of the norms of its parameters and its update. Parameter groups with a
    ``trust_coefficient`` of 0, mostly biases and norms, are not scaled."""

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        trust_coefficient: float = 1.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            "lamb",
            learning_rate=lr,
            beta1=betas[0],
            beta2=betas[1],
            epsilon=eps,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            **_asked(maximize=maximize),
        )


def _asked(**options: bool) -> dict[str, bool]:
    """The options that are asked for. A hub has the others off, and their names take room in each job's settings."""
    return {name: True for name, is_asked in options.items() if is_asked}


BY_NAME: dict[str, type[Any]] = {
    "sgd": SGD, "adam": Adam, "adamw": AdamW, "adagrad": Adagrad, "rmsprop": RMSprop, "adadelta": Adadelta, "nadam": NAdam,
    "lion": Lion, "lars": LARS, "lamb": LAMB,
}  # fmt: skip
"""The optimizers with parameters that every hub has, by their names there."""

NEED_TENSOR_NORMS = frozenset(("lars", "lamb"))
"""Those whose updates need the norms of whole tensors, for which the hub waits for all gradients of a step."""


def named(name: str, /, **arguments: Any) -> Optimizer:
    """An optimizer of this module by its name, in any case, with its class's arguments; or one that is registered at your hub."""
    kinds = (*BY_NAME.values(), Nesterov, Mean, Sum)
    kind = {kind.__name__.lower(): kind for kind in kinds}.get(name.lower())
    if kind is None:
        return Optimizer(name, **arguments)
    taken = inspect.signature(kind).parameters
    if unknown := arguments.keys() - taken.keys():
        raise MisuseError(
            f"{kind.__name__} takes {', '.join(taken) or 'nothing'}, and not {', '.join(sorted(unknown))}"
        )
    made: Optimizer = kind(**arguments)
    return made
