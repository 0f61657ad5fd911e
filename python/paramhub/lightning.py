"""Lightning with HubOptimizer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import lightning.pytorch
from lightning.pytorch.strategies import DDPStrategy

from paramhub.errors import MisuseError, ParamhubError
from paramhub.torch import HubOptimizer
from paramhub.torch._trained_models import optimizers_of

_of_earlier_fits: weakref.WeakSet[HubOptimizer] = weakref.WeakSet()


class HubStrategy(DDPStrategy):
    """Lightning's DDP strategy for modules whose ``configure_optimizers`` returns a `HubOptimizer`, or several.

    The module is not wrapped: its gradients leave for the hub during backward. ``Trainer(accumulate_grad_batches=)`` holds them
    back. Instead of ``Trainer(gradient_clip_val=)`` give HubOptimizer ``max_grad_norm``. The optimizers stay open after ``fit``,
    so that a checkpoint can be saved, until another ``fit`` of the module makes its own.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self._ddp_kwargs or self._ddp_comm_hook is not None:
            given = [*self._ddp_kwargs, *(["ddp_comm_hook"] if self._ddp_comm_hook is not None else [])]
            raise MisuseError(
                f"HubStrategy has no DistributedDataParallel, to which {given} belong: give HubOptimizer options of its own, "
                "such as find_unused_parameters"
            )

    def configure_ddp(self) -> None:
        pass

    def setup_optimizers(self, trainer: lightning.pytorch.Trainer) -> None:
        if trainer.gradient_clip_val:
            raise MisuseError(
                "gradients leave for the hub before Lightning would clip them: leave gradient_clip_val out of the Trainer, and "
                f"give HubOptimizer max_grad_norm={trainer.gradient_clip_val}"
            )
        for former in optimizers_of(self.lightning_module.parameters()):
            if former in _of_earlier_fits:
                former.close()
        super().setup_optimizers(trainer)
        others = [type(each).__name__ for each in self.optimizers if not isinstance(each, HubOptimizer)]
        if others:
            raise MisuseError(
                f"HubStrategy averages no gradients itself, and configure_optimizers() has returned {others}: return "
                'HubOptimizers, or choose strategy="ddp"'
            )
        _of_earlier_fits.update(self.optimizers)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as held_back:
            for optimizer in self.optimizers:
                held_back.enter_context(optimizer.no_sync())
            yield

    def on_exception(self, exception: BaseException) -> None:
        # What follows reads parameters, and a step that was cut short must end before.
        for optimizer in self.optimizers:
            if isinstance(optimizer, HubOptimizer):
                with contextlib.suppress(ParamhubError):
                    optimizer.zero_grad()
        super().on_exception(exception)
