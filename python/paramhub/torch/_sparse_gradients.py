"""Which gradients are sparse, and their sums.

Only a backward pass shows that a gradient is sparse, and a rank whose pass has not used an embedding would contribute a dense
tensor of zeros where the others exchange rows. So the ranks tell each other, in the steps up to the first in which any of them
has a gradient of the parameter, whether theirs is dense or sparse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paramhub import _native
from paramhub.torch._tensors import memory_range

if TYPE_CHECKING:
    from paramhub.torch._collectives import Group
    from paramhub.torch._gradients import Gradient
    from paramhub.torch._join import JoinableGroup

KEY = "paramhub.kinds-of-gradients"
"""The name of the key through which ranks agree."""


def may_be_sparse(parameter: torch.Tensor) -> bool:
    """Returns whether a gradient with rows can be expected. Sparse gradients of vectors are exchanged as dense ones."""
    return parameter.dim() > 1


class Kinds:
    """The agreement on the kinds of some gradients. Each has two numbers in a key of the job: the ranks' sum of the first is
    above 0 if one has a dense gradient, that of the second if one has a sparse gradient."""

    def __init__(self, gradients: Sequence[Gradient], key: int) -> None:
        self._gradients = gradients
        self._key = key
        self._sent: torch.Tensor | None = None

    def entry(self) -> dict[str, Any]:
        """The entry in the job's key table."""
        return {"name": KEY, "shape": [2 * len(self._gradients)], "dtype": "f32", "priority": 0}

    @property
    def open(self) -> list[Gradient]:
        """The gradients of which no rank has had any."""
        return [gradient for gradient in self._gradients if gradient.is_sparse is None]

    def push(self, job: _native.Job, *, has_gradients: bool = True) -> _native.Handle:
        """Tells the other ranks of this rank's gradients, and asks for theirs."""
        self._sent = kinds = torch.zeros(len(self._gradients), 2)
        for line, gradient in zip(kinds, self._gradients, strict=True):
            held = gradient.parameter.grad
            if has_gradients and held is not None:
                line[int(held.is_sparse and gradient.handle is None)] = 1.0
        return job.push_pull_in_place([self._key], [memory_range(kinds)], kinds)

    def conclude(self) -> list[Gradient]:
        """Called when the exchange has ended. Returns the gradients that are dense from now on. One that is dense on some rank
        is so on all: it may have left already."""
        assert self._sent is not None
        dense = []
        for (dense_ranks, sparse_ranks), gradient in zip(self._sent.tolist(), self._gradients, strict=True):
            if gradient.is_sparse is None and (dense_ranks or sparse_ranks):
                gradient.is_sparse = not dense_ranks
                dense += [gradient] if dense_ranks else []
        self._sent = None
        return dense


class SparseSum:
    """The sum of one parameter's sparse gradients over all ranks, divided by a number, under way. It has no timeout, as exchanges
    through the hub have none: a rank may compute for long. ``gradient`` is this rank's, if it has one."""

    def __init__(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        group: Group | JoinableGroup,
        divisor: int,
    ) -> None:
        self._device = parameter.device
        # The sum is written into a tensor of its own, for the gradient may be used in other ways meanwhile.
        self._rows = (rows_of(gradient) if gradient is not None else _no_rows(parameter)).cpu()
        self._divisor = divisor
        self._work = group.sum_sparse(self._rows, timeout=math.inf)

    @torch.no_grad()
    def wait(self) -> torch.Tensor:
        """Waits for the end. Returns the result, which is coalesced."""
        self._work.wait()
        if self._divisor > 1:
            self._rows.div_(self._divisor)
            self._divisor = 1
        return self._rows.to(self._device)


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a tensor that is sparse in its first dimension; the given one if it is that."""
    if not gradient.is_sparse:
        return gradient.detach().to_sparse(1)
    if gradient.sparse_dim() == 1:
        return gradient.detach()
    gradient = gradient.detach().coalesce()
    indices, found = gradient.indices(), gradient.values()
    rows, positions = torch.unique(indices[0], return_inverse=True)
    values = found.new_zeros(len(rows), *gradient.shape[1:])
    values[(positions, *indices[1:])] = found
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, gradient.shape, is_coalesced=True, check_invariants=False
    )


def _no_rows(parameter: torch.Tensor) -> torch.Tensor:
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, is_coalesced=True, check_invariants=False
    )
