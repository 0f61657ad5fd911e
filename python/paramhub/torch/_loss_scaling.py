"""GradScaler with HubOptimizer: all ranks agree on the steps that are left out because a scaled gradient overflowed."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch._world import World

UNSCALED = (
    "unscale_() was called, but the gradients had left for the hub, which unscales them: leave unscale_() out, and give "
    "HubOptimizer max_grad_norm instead of clip_grad_norm_(). No rank makes this step"
)
ANOTHER = (
    "step() was called by another GradScaler than the one that HubOptimizer was given as grad_scaler: use that one. No rank "
    "makes this step"
)


class LossScaling:
    """Ends the steps of a HubOptimizer whose loss a GradScaler scales.

    The hub holds each step until rank 0 knows the norm of the mean gradient. If that is not finite, the gradient of some rank has
    overflowed, and rank 0 has the hub leave the step out. Otherwise the hub divides the mean gradient by the scale. All ranks
    see the same norm and tell their scalers the same, so their scales stay equal.
    """

    def __init__(self, scaler: torch.amp.GradScaler, max_grad_norm: float | None) -> None:
        if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
            raise MisuseError(f"max_grad_norm is to be a finite number above 0, not {max_grad_norm!r}")
        self._scaler = scaler
        self._max_grad_norm = max_grad_norm
        self._scale = 1.0
        self.has_skipped = False
        """Whether the newest step was left out."""

    @staticmethod
    def of(scaler: torch.amp.GradScaler | None, max_grad_norm: float | None) -> LossScaling | None:
        """Returns the scaling that the arguments of a HubOptimizer ask for; None without a scaler or if it is disabled."""
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise MisuseError(f"grad_scaler is to be a torch.amp.GradScaler, not {scaler!r}")
        return LossScaling(scaler, max_grad_norm) if scaler is not None and scaler.is_enabled() else None

    def share(self, world: World) -> None:
        """Gives rank 0's state of the scaler to all ranks. Collective."""
        states = world.allgather_text(world.label("grad-scaler"), json.dumps(self._scaler.state_dict()))
        self._scaler.load_state_dict(json.loads(states[0]))

    def refusal(self, optimizer: torch.optim.Optimizer) -> MisuseError | None:
        """Returns the error if the gradients of the step were unscaled by the caller, or if another scaler makes the step."""
        if not hasattr(optimizer, "grad_scale"):
            # step() was called without a scaler, which is as good.
            return None
        if id(optimizer) not in self._scaler._per_optimizer_states:
            refusal = MisuseError(ANOTHER)
        elif optimizer.grad_scale is None:
            refusal = MisuseError(UNSCALED)
        else:
            return None
        # A scaler removes these after step() only if that returns, and would multiply the next scale by what it finds here.
        del optimizer.grad_scale, optimizer.found_inf
        return refusal

    def end_step(
        self, optimizer: torch.optim.Optimizer, job: _native.Job, step: int, rank: int, *, is_refused: bool
    ) -> None:
        """Waits for the norm of the mean gradient of ``step``, for which this rank has sent all its gradients. Rank 0 then ends
        the step at the hub. The scaler knows afterwards whether any rank's gradients overflowed."""
        self._scale = self._scaler.get_scale()
        norm = job.gradient_norm(step)
        has_overflowed = self.has_skipped = not math.isfinite(norm)
        if rank == 0:
            job.release(step, None if has_overflowed or is_refused else self._factor(norm / self._scale))
        # The scaler has looked at this rank's gradients alone. It has no public way to be told of the others'.
        found: dict[Any, torch.Tensor] = self._scaler._per_optimizer_states[id(optimizer)][
            "found_inf_per_device"
        ]
        if not found:
            found[torch.device("cpu")] = torch.zeros(())
        for tensor in found.values():
            tensor.fill_(float(has_overflowed))

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The scaler of the loss."""
        return self._scaler

    def update(self) -> None:
        """Has the scaler end the step, as the other ranks have theirs end it."""
        self._scaler.update()

    def unscaled(self, norm: float) -> float:
        """The norm of the gradients of the newest step without their scale."""
        return norm / self._scale

    def _factor(self, norm: float) -> float:
        """The factor that the mean gradient takes, whose norm without the scale is ``norm``."""
        clip = 1.0 if self._max_grad_norm is None else min(1.0, self._max_grad_norm / (norm + 1e-6))
        return clip / self._scale
