"""Which parameters have a gradient on some rank, where not every rank has one for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramhub import _native
from paramhub.torch._exchange import Exchange
from paramhub.torch._world import World


class Agreement:
    """A small exchange a step: each rank says what it has a gradient for. Making one is collective."""

    def __init__(self, world: World, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges
        key = {"name": "has a gradient", "shape": [len(exchanges)], "dtype": "f32"}
        self._world = world
        self.job = world.open_job(world.label("unused"), {"keys": [key], "optimizer": {"name": "sum"}})
        self._flags = torch.zeros(len(exchanges))
        self._question: _native.Handle | None = None
        largest = max(exchange.nbytes for exchange in exchanges)
        self._zeros = torch.zeros(largest, dtype=torch.uint8, device=exchanges[0].parameter.device)

    def used_somewhere(self, used: Sequence[bool]) -> list[bool]:
        """By parameter, whether any rank has used it in this step. Asked once more within it, the answer stays."""
        if self._question is None:
            self._flags.copy_(torch.tensor(used, dtype=torch.float32))
            place = (self._flags.data_ptr(), 4 * len(self._exchanges))
            self._question = self.job.push_pull_in_place([0], [place], self._flags)
        self._question.wait()
        return [count > 0 for count in self._flags.tolist()]

    def finish_step(self) -> None:
        self._question = None

    def zeros_for(self, exchange: Exchange) -> torch.Tensor:
        """What a rank contributes that has no gradient: to be read only, for all parameters share it."""
        parameter = exchange.parameter
        flat = self._zeros[: exchange.nbytes].view(parameter.dtype)
        return flat.as_strided(parameter.size(), parameter.stride())

    def close(self) -> None:
        self._world.close_job(self.job)
