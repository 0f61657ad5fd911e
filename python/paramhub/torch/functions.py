"""Horovod's operations on tensors.

All ranks make the same calls in the same order, and the order pairs the calls of different ranks. ``name`` does not; it
exists only for compatibility with Horovod. ``process_set`` limits an operation to some of the ranks, which are then all that
call it. Tensors have any shape and layout, on the host or on a GPU; do not use a tensor while its operation is under way.
Operations raise ConnectError if ranks do not arrive within `init`'s timeout, and JobFailedError when another rank has died, or
has called another operation, or the same with a tensor of another size or type. Gradients are those of Horovod.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paramhub.torch import _autograd, _operations
from paramhub.torch._initialization import world
from paramhub.torch._operations import Pending, PendingSparse, check_reduction, copy_of
from paramhub.torch._process_sets import ProcessSet, global_process_set
from paramhub.torch._reductions import Average, Compression, Compressor, Reduction


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
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The mean of all ranks' tensors, or their reduction by ``op``, as a new tensor.

    ``average`` is the old argument for ``op=Average`` or ``op=Sum``. Tensors are multiplied by ``prescale_factor`` before,
    and the result by ``postscale_factor``. Means and products of integers are rounded towards zero; a tensor of bools has no
    mean, and raises MisuseError. ``compression`` is the type in which floats are sent. Backward reduces the gradient in the
    same way; only Average and Sum have one. No operation has a second derivative.
    """
    op = check_reduction(average, op)
    compressed, dtype = compression.compress(tensor)
    if _autograd.needs_gradient(compressed):
        options = _autograd.Scaled(op, prescale_factor, postscale_factor, process_set)
        (reduced,) = _autograd.Allreduce.apply(options, compressed)
    else:
        pending = allreduce_async(compressed, None, name, op, prescale_factor, postscale_factor, process_set)
        reduced = pending.wait()
    return compression.decompress(reduced, dtype)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """`allreduce` without waiting; the handle is for `synchronize`."""
    return allreduce_async_(
        copy_of(tensor), average, name, op, prescale_factor, postscale_factor, process_set
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`allreduce` in place."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Reduction | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """`allreduce` in place, without waiting."""
    op = check_reduction(average, op)
    return _operations.reduce_in_place(tensor, op, prescale_factor, postscale_factor, process_set)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
) -> PendingSparse:
    """The mean or sum of sparse tensors, as a sparse tensor that is not coalesced. The handle is called for the result, or
    given to `synchronize`. Waits until all ranks have sent the sizes of their tensors. Raises MisuseError, on every rank, if
    their types or shapes differ."""
    return _operations.reduce_sparse(tensor, check_reduction(None, op), process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Rank ``root_rank``'s tensor, as a new one. ``tensor`` has the same shape and type on all ranks. In backward the root gets
    the mean of the gradients."""
    if _autograd.needs_gradient(tensor):
        return _autograd.Broadcast.apply(root_rank, process_set, tensor)
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """`broadcast` without waiting."""
    return broadcast_async_(copy_of(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`broadcast` in place."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """`broadcast` in place, without waiting."""
    return _operations.broadcast_in_place(tensor, root_rank, process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' tensors one after the other, along the first dimension. Only the first dimension may differ between
    ranks, else all raise MisuseError. In backward each rank gets the mean of the gradients of its part."""
    if _autograd.needs_gradient(tensor):
        return _autograd.Allgather.apply(process_set, tensor)[0]
    return allgather_async(tensor, name, process_set).wait()


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Pending:
    """`allgather` without waiting for the tensors. It does wait until all ranks have sent the sizes of their tensors."""
    (pending,), _ = _operations.gather_all([tensor], process_set)
    return pending


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends the first ``splits[0]`` rows to rank 0, the next ``splits[1]`` to rank 1, and so on, and returns the rows that
    have arrived, by rank. If splits are given, it also returns the number of rows that have come from each rank. Without
    splits the parts are equal.

    Raises MisuseError, on every rank, if the splits of one do not add up to its rows, or ranks' tensors differ in more than
    the first dimension. Backward sends the gradients back.
    """
    if _autograd.needs_gradient(tensor):
        received, received_splits = _autograd.Alltoall.apply(splits, process_set, tensor)
    else:
        received, received_splits = _operations.redistribute(tensor, splits, process_set).wait()
    return received if splits is None else (received, received_splits)


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Pending:
    """`alltoall` without waiting for the rows. It does wait until all ranks have sent the sizes of their tensors. The result
    of the handle always has the received splits, as with Horovod."""
    return _operations.redistribute(tensor, splits, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces all ranks' tensors by ``op``, and returns this rank's part of the rows. The parts follow one another by rank;
    if the rows do not divide, the first ranks get one more. Factors, compression and rounding are those of `allreduce`.

    Backward gathers the gradients of all parts; for ``op=Sum`` they are multiplied by the number of ranks, as with Horovod.
    """
    op = check_reduction(None, op)
    compressed, dtype = compression.compress(tensor)
    if _autograd.needs_gradient(compressed):
        options = _autograd.Scaled(op, prescale_factor, postscale_factor, process_set)
        (reduced,) = _autograd.Reducescatter.apply(options, compressed)
    else:
        pending = reducescatter_async(compressed, name, op, process_set, prescale_factor, postscale_factor)
        reduced = pending.wait()
    return compression.decompress(reduced, dtype)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Reduction = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Pending:
    """`reducescatter` without waiting."""
    op = check_reduction(None, op)
    return _operations.reduce_parts(tensor, op, prescale_factor, postscale_factor, process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns once every rank has called it."""
    Pending([process_set.group().barrier()], None).wait()


def join(device: int = -1) -> int:
    """Says that this rank has no data any more, and returns once every rank has said so. Returns the rank that said it last,
    whose model is the newest.

    Until then this rank adds zeros to the others' sums and means, which are still divided by the number of all ranks: to
    `allreduce`, `reducescatter` and the steps of a `DistributedOptimizer`. It takes part in barriers, and in broadcasts from
    other ranks. Other operations raise MisuseError on the ranks that call them. Operations of process sets are not served, nor
    are steps of a `HubOptimizer`. ``device`` is accepted for compatibility with Horovod.

    Raises MisuseError between backward and ``step()``, and JobFailedError when another rank has died or has left without joining.
    """
    return world().joins.join()
