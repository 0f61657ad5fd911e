"""What Horovod's operations exchange, for `functions` and `grouped`. Nothing here has gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch._collectives import Group
from paramhub.torch._descriptions import DESCRIPTION_LENGTH, describe, text_of
from paramhub.torch._join import JoinableGroup, JoinableWork
from paramhub.torch._process_sets import ProcessSet
from paramhub.torch._reductions import Adasum, Average, Reduction, Sum
from paramhub.torch._work import Work

REFUSED = 2
"""The first number of a rank's descriptions if the rank does not take part in the operation."""


class Pending:
    """An operation under way, for `poll` and `synchronize`."""

    __slots__ = ("_finish", "_output", "_works")

    def __init__(
        self, works: Sequence[Work | JoinableWork], output: Any, finish: Callable[[], Any] | None = None
    ) -> None:
        """``finish()`` makes the result of the exchanged tensors; without it ``output`` is the result."""
        self._works = works
        self._output = output
        self._finish = finish

    def done(self) -> bool:
        """Returns whether the operation has ended, with or without an error."""
        return all(work.done() for work in self._works)

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end, and returns the result. Raises TimeoutError after ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._finish is not None:
            self._output, self._finish = self._finish(), None
        return self._output


class PendingSparse(Pending):
    """A `Pending` that is called for its result, as Horovod's handle of a sparse allreduce is."""

    __slots__ = ()

    def __call__(self) -> torch.Tensor:
        return self.wait()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy without a gradient."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def together(pending: Sequence[Pending]) -> Pending:
    """One handle for several operations, whose result is the list of theirs."""
    works = [work for each in pending for work in each._works]
    return Pending(works, None, lambda: [each.wait() for each in pending])


def check_reduction(average: bool | None, op: Reduction | None) -> Reduction:
    """The reduction that ``op``, or Horovod's old argument ``average``, names. Raises MisuseError for others."""
    if average is not None and op is not None:
        raise MisuseError("give average or op, not both: average is the old name of op=Average and op=Sum")
    if op is None:
        return Average if average is None or average else Sum
    if op is Adasum:
        raise MisuseError("Adasum is not implemented: use Average, with a learning rate for that many ranks")
    if not isinstance(op, Reduction):
        raise MisuseError(
            f"op is to be one of paramhub.torch's Average, Sum, Min, Max and Product, not {op!r}"
        )
    return op


def root_in(process_set: ProcessSet, root_rank: int) -> int:
    """The root's place in the set. Raises MisuseError if it is no rank of the set."""
    ranks = process_set.group().members
    if root_rank not in ranks:
        size = len(ranks)
        if ranks == list(range(size)):
            raise MisuseError(f"root_rank {root_rank} is none of {size} ranks: ranks count from 0")
        raise MisuseError(f"root_rank {root_rank} is none of the process set's ranks, {ranks}")
    return ranks.index(root_rank)


def reduce_in_place(
    tensor: torch.Tensor, op: Reduction, prescale: float, postscale: float, process_set: ProcessSet
) -> Pending:
    """Multiplies by ``prescale``, reduces among the ranks, and multiplies by ``postscale``. Integers are rounded towards zero."""
    group = process_set.group()
    _check_mean(tensor, op)
    _scale(tensor, prescale)
    divisor = _divisor(tensor, op, group.size)
    work = group.allreduce(tensor, Sum.collective if divisor > 1 else op.collective)
    if divisor == 1 and postscale == 1.0:
        return Pending([work], tensor)
    return Pending([work], tensor, lambda: _finished(tensor, divisor, postscale))


def broadcast_in_place(tensor: torch.Tensor, root_rank: int, process_set: ProcessSet) -> Pending:
    """Copies the root's tensor into every rank's."""
    root = root_in(process_set, root_rank)
    return Pending([process_set.group().broadcast(tensor, root, compares_types=True)], tensor)


def gather_all(
    tensors: Sequence[torch.Tensor], process_set: ProcessSet, sparse: torch.Tensor | None = None
) -> tuple[list[Pending], list[list[int]]]:
    """Gathers each tensor of all ranks along the first dimension. Returns the handles, and for each tensor each rank's number of
    rows. Waits for the descriptions of all ranks' tensors. ``sparse`` is the tensor of which these are the parts, if they are.

    Raises MisuseError, on every rank, if ranks' tensors differ in more than the first dimension, or sparse ones at all.
    """
    group = process_set.group()
    rows = [_as_rows(tensor) for tensor in tensors]
    whole = [] if sparse is None else describe(sparse)
    described = _exchange_descriptions(group, "allgather", rows, whole)
    for rank, descriptions in zip(group.members, described, strict=True):
        if descriptions[-1] != described[0][-1]:
            raise MisuseError(
                f"sparse_allreduce_async: rank {group.members[0]} has {text_of(described[0][-1])}, and rank {rank} "
                f"{text_of(descriptions[-1])}: all ranks give sparse tensors of one type and shape"
            )
    pending, all_counts = [], []
    for place, tensor in enumerate(rows):
        counts = [descriptions[place][0] for descriptions in described]
        output = tensor.new_empty((sum(counts), *tensor.shape[1:]))
        pending.append(Pending([group.allgather(list(output.split(counts)), tensor)], output))
        all_counts.append(counts)
    return pending, all_counts


def redistribute(
    tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, process_set: ProcessSet
) -> Pending:
    """Sends consecutive parts of each rank's rows to the ranks. The result is what has arrived, by rank, and the numbers of
    its rows. Waits for the descriptions of all ranks' tensors. ``splits`` are by default equal.

    Raises MisuseError, on every rank, for wrong splits, and if ranks' tensors differ in more than the first dimension.
    """
    group = process_set.group()
    rows = _as_rows(tensor)
    problem: Exception | None = None
    try:
        sent = _checked_splits(rows, splits, group.size)
    except Exception as error:
        # The others are to know: they would wait for this rank.
        problem, sent = error, [0] * group.size
    described = _exchange_descriptions(group, "alltoall", [rows], sent, problem)
    # Behind the one tensor of each rank come its splits.
    received = [descriptions[1][group.rank] for descriptions in described]
    output = rows.new_empty((sum(received), *rows.shape[1:]))
    work = group.all_to_all(list(output.split(received)), list(rows.split(sent)))
    numbers = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32
    return Pending([work], (output, torch.tensor(received, dtype=numbers)))


def reduce_parts(
    tensor: torch.Tensor, op: Reduction, prescale: float, postscale: float, process_set: ProcessSet
) -> Pending:
    """Reduces among the ranks, and gives each rank a part of the rows. If they do not divide, the first ranks get one row
    more."""
    group = process_set.group()
    if tensor.dim() == 0:
        raise MisuseError("reducescatter: a scalar has no rows to give to the ranks: use allreduce")
    rows = _scale(copy_of(tensor), prescale) if prescale != 1.0 else tensor.detach().contiguous()
    size = group.size
    counts = [len(rows) // size + (rank < len(rows) % size) for rank in range(size)]
    return reduce_split(rows, counts, op, postscale, process_set)


def reduce_split(
    rows: torch.Tensor, counts: list[int], op: Reduction, postscale: float, process_set: ProcessSet
) -> Pending:
    """`reduce_parts` with the number of rows of each rank."""
    group = process_set.group()
    _check_mean(rows, op)
    divisor = _divisor(rows, op, group.size)
    output = rows.new_empty((counts[group.rank], *rows.shape[1:]))
    collective = Sum.collective if divisor > 1 else op.collective
    work = group.reduce_scatter(output, list(rows.split(counts)), collective)
    return Pending([work], output, lambda: _finished(output, divisor, postscale))


def reduce_sparse(tensor: torch.Tensor, op: Reduction, process_set: ProcessSet) -> PendingSparse:
    """The sum or mean of sparse tensors: each rank gets all ranks' indices and values."""
    if not tensor.is_sparse:
        raise MisuseError(
            "sparse_allreduce_async takes a sparse COO tensor: use allreduce_async for a dense one"
        )
    if op is not Average and op is not Sum:
        raise MisuseError(f"sparse tensors are reduced by Average or Sum, not by {op!r}")
    sparse = tensor.detach()
    pending, _ = gather_all([sparse._indices().t().contiguous(), sparse._values()], process_set, sparse)
    size = process_set.group().size

    def assembled() -> torch.Tensor:
        indices, values = (each.wait() for each in pending)
        values = values / size if op is Average else values
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True)

    return PendingSparse([work for each in pending for work in each._works], None, assembled)


def _check_mean(tensor: torch.Tensor, op: Reduction) -> None:
    if op is Average and tensor.dtype is torch.bool:
        raise MisuseError(
            "a tensor of torch.bool has no mean: convert it to numbers, for instance by tensor.float(), or use op=Min, Max "
            "or Sum"
        )


def _divisor(tensor: torch.Tensor, op: Reduction, size: int) -> int:
    """The number by which a sum is to be divided: a mesh has no mean of integers."""
    return size if op is Average and not _is_inexact(tensor) else 1


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiplies in place. The products of integers are made in f64 and rounded towards zero."""
    if factor == 1.0:
        return tensor
    with torch.no_grad():
        return tensor.mul_(factor) if _is_inexact(tensor) else tensor.copy_(tensor.double() * factor)


def _finished(tensor: torch.Tensor, divisor: int, postscale: float) -> torch.Tensor:
    """Divides a sum of integers, and multiplies by ``postscale``, in place. It rounds once, and not the factor before."""
    if divisor > 1 and postscale != 1.0:
        return tensor.copy_(tensor.double() * postscale / divisor)
    if divisor > 1:
        return tensor.copy_(torch.div(tensor, divisor, rounding_mode="trunc"))
    return _scale(tensor, postscale)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.detach()
    return (rows.unsqueeze(0) if rows.dim() == 0 else rows).contiguous()


def _checked_splits(rows: torch.Tensor, splits: torch.Tensor | Sequence[int] | None, size: int) -> list[int]:
    if splits is None:
        if len(rows) % size:
            raise MisuseError(
                f"alltoall: {len(rows)} rows are not {size} equal parts, one for each rank: give it splits"
            )
        return [len(rows) // size] * size
    if isinstance(splits, torch.Tensor) and (splits.is_floating_point() or splits.dim() != 1):
        raise MisuseError(
            f"alltoall: splits are to be whole numbers of rows, one for each rank, not {splits.dtype} of shape "
            f"{list(splits.shape)}"
        )
    counts = [int(count) for count in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) != len(rows):
        raise MisuseError(f"alltoall: {len(rows)} rows cannot be split into {counts} for {size} ranks")
    return counts


def _exchange_descriptions(
    group: Group | JoinableGroup,
    name: str,
    tensors: Sequence[torch.Tensor],
    further: Sequence[int] = (),
    problem: Exception | None = None,
) -> list[list[list[int]]]:
    """For each rank the shapes of its tensors, and behind them its ``further`` numbers. Raises MisuseError, on every rank, if
    a rank has joined, or ranks' tensors differ in more than the first dimension, or a rank has a ``problem``, which that rank
    raises itself."""
    descriptions = [describe(tensor) for tensor in tensors]
    own = torch.tensor([*(number for each in descriptions for number in each), *further])
    if problem is not None:
        own[0] = REFUSED
    gathered = own.new_empty(group.size * len(own))
    group.allgather_single(gathered, own).wait()
    if problem is not None:
        raise problem
    found: list[list[list[int]]] = []
    for rank, line in zip(group.members, gathered.view(group.size, -1).tolist(), strict=True):
        if not line[0]:
            raise MisuseError(
                f"{name}: rank {rank} has called join() and has nothing to give: only allreduce, reducescatter, barrier and "
                "broadcasts from other ranks go on without it"
            )
        if line[0] == REFUSED:
            raise MisuseError(
                f"{name}: rank {rank} has refused its arguments, and says there what is wrong with them"
            )
        ends = range(0, DESCRIPTION_LENGTH * len(tensors), DESCRIPTION_LENGTH)
        found.append([line[begin : begin + DESCRIPTION_LENGTH] for begin in ends] + [line[ends.stop :]])
    for place in range(len(tensors)):
        first = found[0][place]
        for rank, descriptions in zip(group.members, found, strict=True):
            other = descriptions[place]
            # The first dimension is behind the type and the number of dimensions.
            if other[:3] != first[:3] or other[4:] != first[4:]:
                raise MisuseError(
                    f"{name}: rank {group.members[0]} has {text_of(first)}, and rank {rank} {text_of(other)}: only the first "
                    "dimension may differ"
                )
    return [[each[3:] for each in lines[:-1]] + [lines[-1]] for lines in found]
