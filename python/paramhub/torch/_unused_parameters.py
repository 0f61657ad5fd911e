"""Finds the parameters that have a gradient on at least one rank, for models that do not use every parameter in each step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramhub import _native
from paramhub.torch._exchange import Exchange
from paramhub.torch._world import World


class UsedParameters:
    """One small exchange in each step, in which each rank reports the parameters for which it has a gradient. Making one is
    collective."""

    def __init__(self, world: World, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges
        key = {"name": "has a gradient", "shape": [len(exchanges)], "dtype": "f32"}
        self._world = world
        self.job = world.jobs.open(world.label("unused"), {"keys": [key], "optimizer": {"name": "sum"}})
        self._flags = torch.zeros(len(exchanges))
        self._request: _native.Handle | None = None
        largest = max(exchange.nbytes for exchange in exchanges)
        self._zeros = torch.zeros(largest, dtype=torch.uint8, device=exchanges[0].parameter.device)

    def used_somewhere(self, used: Sequence[bool]) -> list[bool]:
        """By parameter, whether any rank has used it in this step. A second call within the step returns the same."""
        if self._request is None:
            self._flags.copy_(torch.tensor(used, dtype=torch.float32))
            place = (self._flags.data_ptr(), 4 * len(self._exchanges))
            self._request = self.job.push_pull_in_place([0], [place], self._flags)
        self._request.wait()
        return [count > 0 for count in self._flags.tolist()]

    def finish_step(self) -> None:
        self._request = None

    def zeros_for(self, exchange: Exchange) -> torch.Tensor:
        """The contribution of a rank without a gradient. Do not write to it: all parameters share its memory."""
        parameter = exchange.parameter
        flat = self._zeros[: exchange.nbytes].view(parameter.dtype)
        return flat.as_strided(parameter.size(), parameter.stride())

    def close(self) -> None:
        self._world.jobs.close(self.job)
