"""Embeddings of which ranks exchange the rows of a step, and which each rank updates itself.

Parameters of `torch.nn.Embedding` and `torch.nn.EmbeddingBag` with ``sparse=True`` are no part of a HubOptimizer's job. In
``step()`` each rank sends the others the rows of its gradient. All get the same mean, bit by bit, and make the update that
torch.optim's optimizer makes of it, with rank 0's hyperparameters. So the parameters and their state stay equal.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from paramhub.errors import JobFailedError, MisuseError
from paramhub.torch._job_options import JobOptions
from paramhub.torch._shutdown import FailureState
from paramhub.torch._sparse_gradients import SparseSum
from paramhub.torch._work import Work
from paramhub.torch._world import World

ELSEWHERE = (
    "Or leave it out of HubOptimizer's params, and give it to paramhub.torch.DistributedOptimizer with torch.optim.SparseAdam "
    "or SGD, which exchanges rows, too"
)
_Named = list[tuple[str, torch.nn.Parameter]]
KEPT = ("exp_avg", "exp_avg_sq")
"""The tensors of SparseAdam's state."""


def divided(model: torch.nn.Module, named: _Named) -> tuple[_Named, _Named]:
    """The parameters whose gradients are dense, and those of embeddings with ``sparse=True``."""
    sparse = {id(module.weight) for module in model.modules() if _is_sparse(module)}
    return (
        [(name, parameter) for name, parameter in named if id(parameter) not in sparse],
        [(name, parameter) for name, parameter in named if id(parameter) in sparse],
    )


def check(model: torch.nn.Module, named: _Named, kind: str, sparse_adam: bool) -> None:
    """Raises MisuseError if the rows of these parameters cannot be exchanged, or not beside the hub's optimizer ``kind``."""
    others = {
        id(parameter): name
        for name, module in model.named_modules()
        if not _is_sparse(module)
        for parameter in dict.values(module._parameters)
    }
    for name, parameter in named:
        if id(parameter) in others:
            raise MisuseError(
                f"{_what(name)}, but {others[id(parameter)]!r} has the parameter, too: use sparse=False"
            )
        if sparse_adam != (kind in ("adam", "adamw")) or kind not in ("sgd", "adam", "adamw"):
            known = (
                "with Adam and AdamW, whose lr, betas and eps it takes"
                if sparse_adam
                else "with paramhub.SGD"
            )
            raise MisuseError(
                f"{_what(name)}: its rows are updated {known}, not with {kind!r}. HubOptimizer(sparse_adam=True) updates them "
                f"as torch.optim.SparseAdam does, beside Adam or AdamW. {ELSEWHERE}; or use sparse=False"
            )


def check_features(name: str, features: Mapping[str, bool], options: JobOptions) -> None:
    """Raises MisuseError for what cannot be had with rows. ``features`` are the arguments of the HubOptimizer, and whether they
    are given; ``options`` are those of its job."""
    asked = [argument for argument, is_asked in features.items() if is_asked]
    asked += [f"init({argument}=)" for argument in _job_features(options)]
    if asked:
        raise MisuseError(
            f"{_what(name)}, so its rows go from rank to rank, and the hub does not have them. This cannot be had with "
            f"{' and '.join(asked)}: use sparse=False, or leave that out"
        )


def _is_sparse(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse


def _what(name: str) -> str:
    return f"the gradient of {name!r} is sparse (sparse=True in its module)"


def _job_features(options: JobOptions) -> Iterable[str]:
    if options.consistency not in (None, "sync"):
        yield "consistency"
    if options.leaves_out_late:
        yield "stragglers"
    if options.on_worker_loss not in (None, "fail"):
        yield "on_worker_loss"
    if options.checkpoint_every is not None:
        yield "checkpoint_every"
    if options.resume not in (None, "never"):
        yield "resume"


class Rows:
    """The embeddings of one HubOptimizer. After it is made, all ranks call `broadcast`."""

    def __init__(
        self,
        world: World,
        named: _Named,
        failures: FailureState,
        *,
        sparse_adam: bool,
    ) -> None:
        for name, parameter in named:
            if _updated.get(id(parameter)) is not None:
                raise MisuseError(
                    f"{name!r} is exchanged by another HubOptimizer already: close() that one first"
                )
        self.names = {id(parameter): name for name, parameter in named}
        self._parameters = [parameter for _, parameter in named]
        self._failures = failures
        self._world = world
        kind = torch.optim.SparseAdam if sparse_adam else torch.optim.SGD
        # The hyperparameters are set before each step.
        self._optimizer: torch.optim.Optimizer = kind(
            [{"params": [each]} for each in self._parameters], lr=1.0
        )
        self._sparse_adam = sparse_adam
        self._sums: list[SparseSum] | None = None
        self._numbers: list[tuple[Work, torch.Tensor]] = []
        """For each parameter the hyperparameters of the step under way, as they come from rank 0."""
        self._versions: list[int | None] = [None] * len(self._parameters)
        """The version that each parameter has if this process has not modified it since all ranks had the same."""
        _updated.update(dict.fromkeys(self.names, self))

    def check_hyperparameters(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raises MisuseError for hyperparameters with which an update would change other rows."""
        for group in groups:
            names = [self.names[id(each)] for each in group["params"] if id(each) in self.names]
            for option in () if self._sparse_adam else ("momentum", "weight_decay"):
                if names and group.get(option):
                    raise MisuseError(
                        f"the gradient of {names[0]!r} is sparse, and {option} would change rows that a step has not used: put "
                        f"the parameter into a group with {option}=0 (params=), or use sparse=False. {ELSEWHERE}"
                    )

    @torch.no_grad()
    def step(self, groups: Sequence[Mapping[str, Any]], *, contributes: bool = True) -> None:
        """Exchanges the rows of this step's gradients, and updates them. Without ``contributes`` this rank has none. If it was
        interrupted, a second call goes on with the same exchange."""
        if self._sums is None:
            self.check_hyperparameters(groups)
            if contributes:
                self._check_unmodified()
            self._begin(groups, contributes)
        assert self._sums is not None
        is_same = self._is_unmodified()
        try:
            means = [each.wait() for each in self._sums]
            for work, _ in self._numbers:
                work.wait()
        except JobFailedError as error:
            self._failures.note_raised(error)
            raise
        self._sums = None
        own = [parameter.grad for parameter in self._parameters]
        for parameter, mean, (_, numbers), group in zip(
            self._parameters, means, self._numbers, self._optimizer.param_groups, strict=True
        ):
            # A parameter that no rank has used stays as it is, and so does its state.
            parameter.grad = mean if mean._nnz() > 0 else None
            lr, first, second, epsilon, maximize = numbers.tolist()
            group.update(lr=lr, maximize=bool(maximize))
            if self._sparse_adam:
                group.update(betas=(first, second), eps=epsilon)
        try:
            self._optimizer.step()
        finally:
            for parameter, gradient in zip(self._parameters, own, strict=True):
                parameter.grad = gradient
        self._versions = [
            parameter._version if same else None
            for parameter, same in zip(self._parameters, is_same, strict=True)
        ]

    def _is_unmodified(self) -> list[bool]:
        return [
            parameter._version == version
            for parameter, version in zip(self._parameters, self._versions, strict=True)
        ]

    def _check_unmodified(self) -> None:
        """Raises MisuseError if this process has modified a parameter, which then differs from that of other ranks."""
        for parameter, is_same in zip(self._parameters, self._is_unmodified(), strict=True):
            if not is_same:
                raise MisuseError(
                    f"{self.names[id(parameter)]!r} was modified by this process, but all ranks are to have the same: call "
                    "optimizer.zero_grad() and optimizer.broadcast_parameters() on every rank after such changes "
                    "(load_state_dict(), an initialisation), and leave out what changes parameters in every step (max_norm of an "
                    "embedding, clamping)"
                )

    def _begin(self, groups: Sequence[Mapping[str, Any]], contributes: bool) -> None:
        of = {id(parameter): group for group in groups for parameter in group["params"]}
        each_numbers = [_numbers(of[id(parameter)]) for parameter in self._parameters]
        group = self._world.group()
        try:
            self._numbers = [(group.broadcast(each, 0, timeout=math.inf), each) for each in each_numbers]
            self._sums = [
                SparseSum(parameter, parameter.grad if contributes else None, group, group.size)
                for parameter in self._parameters
            ]
        except JobFailedError as error:
            self._failures.note_raised(error)
            raise

    @torch.no_grad()
    def broadcast(self, *, with_state: bool) -> None:
        """Gives every rank rank 0's parameters, and if asked for their state."""
        for parameter in self._parameters:
            self._receive(parameter)
            if with_state and self._sparse_adam:
                state = self._optimizer.state[parameter]
                step = torch.tensor(int(state.get("step", 0)))
                self._receive(step)
                if int(step) == 0:
                    state.clear()
                    continue
                state["step"] = int(step)
                for name in KEPT:
                    state.setdefault(name, torch.zeros_like(parameter))
                    self._receive(state[name])
        self._versions = [parameter._version for parameter in self._parameters]

    def _receive(self, tensor: torch.Tensor) -> None:
        host = tensor.detach().cpu()
        self._world.group().broadcast(host, 0, timeout=math.inf).wait()
        if host.device != tensor.device:
            tensor.copy_(host)

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """A copy of a parameter's state, as torch.optim's optimizer has it; empty before the first update."""
        state = self._optimizer.state.get(parameter, {})
        return {
            name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in state.items()
        }

    def load(self, saved: Mapping[int, Mapping[str, Any] | None]) -> None:
        """Sets the state of each parameter, by its id, to a saved one. `broadcast` then gives all ranks rank 0's."""
        for parameter in self._parameters:
            entry = saved.get(id(parameter)) or {}
            state = self._optimizer.state[parameter]
            state.clear()
            if not entry:
                continue
            name = self.names[id(parameter)]
            if not self._sparse_adam or any(each not in entry for each in ("step", *KEPT)):
                raise MisuseError(
                    f"the state of {name!r} has {', '.join(map(repr, entry))}, but its rows are updated as "
                    f"torch.optim.{type(self._optimizer).__name__} does: it was saved by another optimizer"
                )
            state["step"] = int(entry["step"])
            for each in KEPT:
                if entry[each].shape != parameter.shape:
                    raise MisuseError(
                        f"{each!r} of {name!r} has shape {list(entry[each].shape)}, the parameter has {list(parameter.shape)}: "
                        "the state is another model's, or its parameters are in another order"
                    )
                state[each] = torch.empty_like(parameter).copy_(entry[each])

    def close(self) -> None:
        """Lets other optimizers have the parameters."""
        for at in self.names:
            _updated.pop(at, None)


_updated: weakref.WeakValueDictionary[int, Rows] = weakref.WeakValueDictionary()
"""What updates each parameter, by the parameter's id. It keeps the parameter alive, and so the id."""


def _numbers(group: Mapping[str, Any]) -> torch.Tensor:
    """A group's hyperparameters: the learning rate, SparseAdam's betas and epsilon, and whether the loss is maximised."""
    betas = group.get("betas", (0.0, 0.0))
    values = [group["lr"], *betas, group.get("eps", 0.0), group.get("maximize", False)]
    return torch.tensor([float(each) for each in values], dtype=torch.float64)
