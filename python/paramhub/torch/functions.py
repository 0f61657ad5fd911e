"""Horovod's operations on tensors.

All ranks make the same calls in the same order, and the order pairs the calls of different ranks. ``name`` does not; it
exists only for compatibility with Horovod. Tensors are host tensors of any shape and layout; do not use a tensor while its
operation is under way. Operations raise ConnectError if ranks do not arrive within `init`'s timeout, and JobFailedError
when another rank has died.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch._collectives import Group
from paramhub.torch._initialization import world
from paramhub.torch._reductions import Average, Compression, Compressor, Reduction, Sum
from paramhub.torch._work import Work


class Pending:
    """An operation under way, for `poll` and `synchronize`."""

    __slots__ = ("_finish", "_output", "_work")

    def __init__(self, work: Work, output: torch.Tensor, finish: Callable[[], torch.Tensor] | None) -> None:
        self._work = work
        self._output = output
        self._finish = finish

    def done(self) -> bool:
        """Returns whether the operation has ended, with or without an error."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> torch.Tensor:
        """Waits for the end, and returns the result. Raises TimeoutError after ``timeout`` seconds."""
        self._work.wait(timeout)
        if self._finish is not None:
            self._output, self._finish = self._finish(), None
        return self._output


def poll(handle: Pending) -> bool:
    """Returns whether an asynchronous operation has ended; `synchronize` then returns at once."""
    return handle.done()


def synchronize(handle: Pending) -> torch.Tensor:
    """Waits for an asynchronous operation, and returns its result."""
    return handle.wait()


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction | None = None,
) -> torch.Tensor:
    """The mean of all ranks' tensors, or their reduction by ``op``, as a new tensor.

    ``average`` is the old argument for ``op=Average`` or ``op=Sum``. Means of integers are rounded down. ``compression``
    is the type in which floats are sent. Backward reduces the gradient in the same way; only Average and Sum have one.
    """
    op = _reduction(average, op)
    compressed, dtype = compression.compress(tensor)
    if compressed.requires_grad and torch.is_grad_enabled():
        reduced = _Allreduce.apply(compressed, op)
    else:
        reduced = _allreduce(_copy(compressed), op).wait()
    return compression.decompress(reduced, dtype)


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Reduction | None = None
) -> Pending:
    """`allreduce` without waiting; the handle is for `synchronize`."""
    return _allreduce(_copy(tensor), _reduction(average, op))


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Reduction | None = None
) -> torch.Tensor:
    """`allreduce` in place."""
    return allreduce_async_(tensor, average, name, op).wait()


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Reduction | None = None
) -> Pending:
    """`allreduce` in place, without waiting."""
    return _allreduce(tensor, _reduction(average, op))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Rank ``root_rank``'s tensor, as a new one. ``tensor`` has the same shape and type on all ranks. In backward the root gets
    the sum of the gradients."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Broadcast.apply(tensor, root_rank)
    return broadcast_async_(_copy(tensor), root_rank).wait()


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Pending:
    """`broadcast` without waiting."""
    return broadcast_async_(_copy(tensor), root_rank)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """`broadcast` in place."""
    return broadcast_async_(tensor, root_rank).wait()


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Pending:
    """`broadcast` in place, without waiting."""
    return Pending(_group().broadcast(tensor, check_root(root_rank)), tensor, None)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """All ranks' tensors one after the other, along the first dimension. Only the first dimension may differ between
    ranks. In backward each rank gets the sum of the gradients of its part."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Allgather.apply(tensor)
    return allgather_async(tensor).wait()


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Pending:
    """`allgather` without waiting for the tensors. It does wait until all ranks have sent the sizes of their tensors."""
    rows = tensor.detach()
    rows = (rows.unsqueeze(0) if rows.dim() == 0 else rows).contiguous()
    group = _group()
    counts = _row_counts(group, rows)
    output = torch.empty((sum(counts), *rows.shape[1:]), dtype=rows.dtype)
    return Pending(group.allgather(list(output.split(counts)), rows), output, None)


def barrier() -> None:
    """Returns once every rank has called it."""
    _group().barrier().wait()


def nccl_built() -> bool:
    """False, because paramhub does not use NCCL. It is here for scripts that call it."""
    return False


def mpi_threads_supported() -> bool:
    """False, because paramhub.torch does not use MPI. It is here for scripts that call it."""
    return False


def check_root(root_rank: int) -> int:
    """Returns the root if it is a rank, else raises MisuseError."""
    size = world().size
    if not 0 <= root_rank < size:
        raise MisuseError(f"root_rank {root_rank} is none of {size} ranks: ranks count from 0")
    return root_rank


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
        ctx.op = op
        return _allreduce(_copy(tensor), op).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.op is not Average and ctx.op is not Sum:
            raise MisuseError(f"allreduce with {ctx.op!r} has no gradient: detach the tensor")
        return _allreduce(_copy(gradient), ctx.op).wait(), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> torch.Tensor:
        ctx.root_rank = root_rank
        return broadcast_async_(_copy(tensor), root_rank).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = _allreduce(_copy(gradient), Sum).wait()
        return summed if world().rank == ctx.root_rank else torch.zeros_like(summed), None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        group = _group()
        own = tensor.detach()
        ctx.is_scalar = own.dim() == 0
        counts = _row_counts(group, own.unsqueeze(0) if ctx.is_scalar else own)
        ctx.begin, ctx.rows = sum(counts[: group.rank]), counts[group.rank]
        return allgather_async(own).wait()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        own = _allreduce(_copy(gradient), Sum).wait().narrow(0, ctx.begin, ctx.rows)
        return own.squeeze(0) if ctx.is_scalar else own


def _group() -> Group:
    return world().group()


def _allreduce(tensor: torch.Tensor, op: Reduction) -> Pending:
    """Reduces the tensor in place."""
    if op is not Average or tensor.is_floating_point() or tensor.is_complex():
        return Pending(_group().allreduce(tensor, op.collective), tensor, None)
    size = world().size

    def divide() -> torch.Tensor:
        return tensor.copy_(torch.div(tensor, size, rounding_mode="floor"))

    return Pending(_group().allreduce(tensor, Sum.collective), tensor, divide)


def _row_counts(group: Group, rows: torch.Tensor) -> list[int]:
    """The number of rows of each rank. Raises MisuseError unless all rows have one size."""
    own = torch.tensor([rows.shape[0], rows[:1].numel() if rows.shape[0] else -1])
    gathered = torch.empty(group.size * 2, dtype=own.dtype)
    group.allgather_single(gathered, own).wait()
    pairs = gathered.view(-1, 2).tolist()
    sizes: dict[int, int] = {}
    for rank, (_, size) in enumerate(pairs):
        if size >= 0:
            sizes.setdefault(size, rank)
    if len(sizes) > 1:
        (one, its), (other, others) = list(sizes.items())[:2]
        raise MisuseError(
            f"allgather: rank {its} has {one} elements in a row, and rank {others} {other}: only the first dimension may "
            "differ"
        )
    return [count for count, _ in pairs]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _reduction(average: bool | None, op: Reduction | None) -> Reduction:
    if average is not None and op is not None:
        raise MisuseError("give average or op, not both: average is the old name of op=Average and op=Sum")
    if op is None:
        return Average if average is None or average else Sum
    if not isinstance(op, Reduction):
        raise MisuseError(
            f"op is to be one of paramhub.torch's Average, Sum, Min, Max and Product, not {op!r}"
        )
    return op
