"""The gradients of a HubOptimizer's step: which have left, which are still to leave, and whether they are as they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramhub.errors import MisuseError
from paramhub.torch import _ddp_conflict
from paramhub.torch._exchange import Exchange, StepState
from paramhub.torch._schemes import Schemes
from paramhub.torch._unused_parameters import UsedParameters

NAMED_MAX = 5
"""The most parameters that an error names."""
AFTER_IT_LEFT = (
    "between backward and step(), when it had left. This step was made with it as it had left. Give HubOptimizer max_grad_norm "
    "instead of clipping (and max_grad_norm=0 to a trainer that clips by itself), give it grad_scaler instead of calling "
    "unscale_(), scale the loss instead of gradients, and call zero_grad() after step()"
)


class StepGradients:
    """The gradients of one optimizer's parameters in the step under way.

    ``frozen`` are the parameters that are not exchanged, with their names. ``holds_steps`` says that the hub waits for every
    gradient before it updates any parameter.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        step: StepState,
        schemes: Schemes,
        used_parameters: UsedParameters | None,
        frozen: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        holds_steps: bool,
    ) -> None:
        self._exchanges = exchanges
        self._step = step
        self._schemes = schemes
        self._used_parameters = used_parameters
        self._frozen = frozen
        self._holds_steps = holds_steps

    def send_remaining(self) -> None:
        """Sends gradients of passes without exchange, and gradients that user code set. Leaves out parameters for which no rank
        has a gradient."""
        used = None
        if self._used_parameters is not None:
            used = self._used_parameters.used_somewhere(
                [exchange.parameter.grad is not None for exchange in self._exchanges]
            )
            unused = [e.name for e, is_used in zip(self._exchanges, used, strict=True) if not is_used]
            if unused and self._holds_steps:
                raise MisuseError(
                    f"no rank has a gradient for {some(unused)}: max_grad_norm, grad_scaler, LARS and LAMB need all gradients. "
                    "Freeze what takes no part before HubOptimizer is made"
                )
        if self._step.left == self._step.total:
            return
        missing = [exchange for exchange in self._exchanges if not exchange.has_left]
        without = [exchange.name for exchange in missing if exchange.parameter.grad is None]
        if without and used is None:
            raise MisuseError(
                f"{len(without)} of {self._step.total} parameters have no gradient in step(): {some(without)}. Was "
                "backward() called? If parameters take no part, freeze them (requires_grad_(False)) before HubOptimizer is "
                "made, or give it find_unused_parameters=True if they do in some steps or on some ranks"
            )
        for exchange in missing:
            gradient = exchange.parameter.grad
            if gradient is not None:
                exchange.wait()
                exchange.leave(gradient)
            elif self._used_parameters is not None and used is not None and used[exchange.number]:
                exchange.wait()
                exchange.leave(self._used_parameters.zeros_for(exchange))
                exchange.gradient = None

    def check_unchanged(self) -> None:
        """Raises MisuseError if gradients or hyperparameters were changed after gradients were sent."""
        for exchange in self._exchanges:
            if (what := exchange.gradient_change) is not None:
                if _ddp_conflict.is_reduced_by_ddp(exchange.parameter):
                    raise _ddp_conflict.refusal(exchange.name)
                raise MisuseError(f"the gradient of {exchange.name!r} was {what} {AFTER_IT_LEFT}")
        changed = self._step.hyperparameters.changed() if self._step.has_begun else None
        if changed:
            raise MisuseError(
                f"param_groups' {', '.join(changed)} changed between backward and step(), when gradients had left: change "
                "them, or step a scheduler, after step() and before backward"
            )
        unfrozen = [name for name, parameter in self._frozen if parameter.grad is not None]
        if unfrozen:
            raise MisuseError(
                f"{some(unfrozen)}: frozen when HubOptimizer was made, and has a gradient now. Call add_param_group() on every "
                "rank after unfreezing parameters"
            )

    def complete_interrupted(self) -> None:
        """Sends zeros for the rest of a step that an exception has interrupted; gradients that were sent count. So other ranks,
        which may have no exception, do not wait for this rank, and all ranks make the same number of steps."""
        used = [True] * self._step.total
        if self._used_parameters is not None:
            used = self._used_parameters.used_somewhere([exchange.has_left for exchange in self._exchanges])
        for exchange in self._exchanges:
            # A hub that holds the step waits for every gradient, even for one that no rank has.
            is_awaited = used[exchange.number] or self._holds_steps
            if is_awaited and exchange.layer is None and not exchange.has_left:
                exchange.wait()
                exchange.leave_zeros()
        self._schemes.complete(used)
        self._step.hand_over()


def some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(map(repr, names[:NAMED_MAX])) + (f" and {more} more" if more > 0 else "")
