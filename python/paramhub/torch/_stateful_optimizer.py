"""The state of a HubOptimizer, as torch.optim's optimizers save and load it, and the moving averages of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch import _hyperparameters, _optimizer_state
from paramhub.torch._base_optimizer import BaseOptimizer

if TYPE_CHECKING:
    from paramhub.torch._exchange import Exchange, StepState
    from paramhub.torch._rows import Rows
    from paramhub.torch._world import World


class StatefulOptimizer(BaseOptimizer):
    """An optimizer whose state is at the hub, but for that of rows, which each rank has."""

    _world: World
    _step: StepState
    _exchanges: list[Exchange]
    _rows: Rows | None
    _kind: str
    """The optimizer's name at the hub."""
    _names: dict[str, Any]
    """Its hyperparameters, by torch's names."""
    _resumed_step: int | None

    def state_dict(self) -> dict[str, Any]:
        """The hub's state after this rank's last step, in the form of torch.optim's optimizer of this kind, which can load it.
        Any rank may call it, between steps."""
        self._refuse_within_step("state_dict()")
        states = _optimizer_state.pull(self._step.job, self._exchanges, has_averages=self._has_averages)
        state_of = {id(e.parameter): state for e, state in zip(self._exchanges, states, strict=True)}
        saved = super().state_dict()
        saved["state"] = {}
        for index, (group, parameter) in enumerate(self._with_groups()):
            if id(parameter) in state_of:
                entry = _optimizer_state.as_torch_has_it(self._kind, state_of[id(parameter)], group)
                if entry:
                    saved["state"][index] = entry
            elif self._rows is not None and (entry := self._rows.state_of(parameter)):
                saved["state"][index] = entry
        return saved

    def ema_parameters(self) -> dict[str, torch.Tensor]:
        """With ``ema_decay``, the moving averages after this rank's last step, by the parameters' names, in float32. To evaluate
        with them, load them into a copy of the model: ``model.load_state_dict(averages, strict=False)``. Any rank may call it,
        between steps."""
        self._refuse_within_step("ema_parameters()")
        if not self._has_averages:
            raise MisuseError("the hub keeps no averages: give HubOptimizer ema_decay, such as 0.999")
        averages = _optimizer_state.pull_averages(self._step.job, self._exchanges)
        return {exchange.name: average for exchange, average in zip(self._exchanges, averages, strict=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a saved state of a HubOptimizer, or of torch.optim's optimizer of this kind, and from the model's
        present parameters: load the model first. Collective; all ranks continue from rank 0's state and parameters. If an
        earlier start of the ranks has called it, too, they continue from what the hubs hold of that (see `resumed_step`)."""
        self._refuse_within_step("load_state_dict()")
        state_dict = self._with_own_average(state_dict)
        for group, saved in zip_longest(
            self.param_groups, state_dict["param_groups"], fillvalue={"params": ()}
        ):
            if len(group["params"]) != len(saved["params"]):
                raise MisuseError(
                    f"a saved group has {len(saved['params'])} parameters, and its counterpart here {len(group['params'])}: the "
                    "state is another model's, or was grouped otherwise"
                )
            _hyperparameters.group_hyperparameters(saved, self._names)
            _hyperparameters.check_decay(self._kind, saved, self._names)
        of = {id(exchange.parameter): exchange for exchange in self._exchanges}
        states = [_optimizer_state.State(0, []) for _ in self._exchanges]
        saved = [(at, group) for group in state_dict["param_groups"] for at in group["params"]]
        for (at, group), parameter in zip(saved, self._all(), strict=True):
            entry, exchange = state_dict["state"].get(at), of.get(id(parameter))
            if entry and exchange is not None:
                states[exchange.number] = _optimizer_state.from_torch(
                    self._kind, entry, exchange, group, has_averages=self._has_averages
                )
        if self._rows is not None:
            entries = [state_dict["state"].get(at) for at, _ in saved]
            self._rows.load(dict(zip(map(id, self._all()), entries, strict=True)))
        super().load_state_dict({**state_dict, "state": {}})
        self._resumed_step = None
        self._reopen_job(states)
        if self._rows is not None:
            self._rows.broadcast(with_state=True)

    def _with_own_average(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The saved state, in which groups have this optimizer's ``ema_decay`` if the state was saved without one, and none if
        this optimizer has none."""
        name = _optimizer_state.EMA_DECAY
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, own in zip(groups, self.param_groups, strict=False):
            if not self._has_averages:
                group.pop(name, None)
            else:
                group.setdefault(name, own[name])
        return {**state_dict, "param_groups": groups}

    def broadcast_parameters(self) -> None:
        """Gives rank 0's parameters to the hub and to every rank; the optimizer's state stays. Collective. Call it after code
        has changed parameters: ``model.load_state_dict()``, a new initialisation, and the like."""
        self._refuse_within_step("broadcast_parameters()")
        self._reopen_job(self._pull_states())
        if self._rows is not None:
            self._rows.broadcast(with_state=False)

    def _pull_states(self) -> Sequence[_optimizer_state.State] | None:
        """The optimizer's state, from which rank 0 opens the next job; None on other ranks."""
        if self._world.rank != 0:
            return None
        return _optimizer_state.pull(self._step.job, self._exchanges, has_averages=self._has_averages)

    def _reopen_job(self, states: Sequence[_optimizer_state.State] | None) -> None:
        """Closes the job and opens another one, whose state is ``states``."""
        raise NotImplementedError

    def _refuse_within_step(self, what: str) -> None:
        """Raises MisuseError if gradients of a step have left that has not ended."""
        raise NotImplementedError

    @property
    def _has_averages(self) -> bool:
        """Returns whether the hub keeps moving averages."""
        return _optimizer_state.EMA_DECAY in self._names

    def _all(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for _, parameter in self._with_groups())

    def _with_groups(self) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
        """All parameters with their groups, frozen ones too, in the order of torch.optim's numbers."""
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])
