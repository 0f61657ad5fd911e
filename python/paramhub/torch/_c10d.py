"""torch.distributed's collectives, with its names and arguments, on a `Group`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paramhub.errors import ConnectError, LateError, MisuseError
from paramhub.torch._collectives import Group
from paramhub.torch._host_memory import together
from paramhub.torch._rendezvous import explained_store_errors, format_ranks, wait_for_keys
from paramhub.torch._tensors import needs_stage
from paramhub.torch._work import Work

_RedOpType = dist.ReduceOp.RedOpType
OPERATIONS = {
    _RedOpType.SUM: "sum",
    _RedOpType.AVG: "average",
    _RedOpType.PRODUCT: "product",
    _RedOpType.MIN: "min",
    _RedOpType.MAX: "max",
    _RedOpType.BAND: "band",
    _RedOpType.BOR: "bor",
    _RedOpType.BXOR: "bxor",
}

last_result = threading.local()
"""``work``: the result of the last collective on this thread."""


class C10dWork(dist.Work):
    """An operation under way, in torch's form."""

    def __init__(
        self, group: Group, work: Work, outputs: list[torch.Tensor], is_collective: bool = True
    ) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._outputs = outputs
        self._is_collective = is_collective
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for the end, and raises the error if the operation failed. With a timeout of zero, as without one, the group's
        timeout applies."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if seconds <= 0.0:
            self._work.wait()
            return True
        try:
            self._work.wait(seconds)
        except TimeoutError:
            awaited = self._group.awaited_ranks(self._work)
            raise LateError(
                f"group `{self._group.name}`, rank {self._group.rank}: what was waited for has not ended within {seconds:g} s"
                + (f": it waits for {format_ranks(awaited)}" if awaited else "")
            ) from None
        return True

    def is_completed(self) -> bool:
        if not self._work.done():
            return False
        if any(needs_stage(each.device) for each in self._outputs) and self._work.exception() is None:
            # By torch's rule the current device stream can use the result now.
            self._work.wait()
        return True

    def is_success(self) -> bool:
        return self._work.done() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        source = self._work.source
        if source is None:
            raise MisuseError("only a receive that has ended has a source rank")
        return source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future that one of this package's threads completes with the output tensors, or fails with the operation's message.

        DDP takes the future in its backward pass, and waits for it at the end of the pass in C++. There Ctrl-C does not interrupt
        a wait, and an exception loses its type. So a callback that runs before DDP's waits first.
        """
        if self._future is None:
            self._future = _Promise(self._work, self._outputs).future
            if self._is_collective:
                with contextlib.suppress(RuntimeError):  # Outside of a backward pass.
                    torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
                    self._group.spans.is_in_backward()
        return self._future

    def _backward_ended(self) -> None:
        self._group.spans.backward_ended()
        self._work.wait()


class _Promise:
    """A future of torch that ends when a `Work` ends, with the same result."""

    def __init__(self, work: Work, outputs: list[torch.Tensor]) -> None:
        self._outputs = outputs
        self._failure: BaseException | None = None
        # The future must know the device on whose stream the result arrives.
        devices = list({each.device for each in outputs if each.device.type != "cpu"})
        ended: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        self._ended = ended
        # set_exception would set the exception as the result. C++ takes that for tensors and fails, or
        # crashes. An exception that a callback raises is an error for C++, too.
        self.future = ended.then(self._outcome)
        work.add_done_callback(self._complete)

    def _complete(self, work: Work) -> None:
        self._failure = work.exception()
        self._ended.set_result(self._outputs)

    def _outcome(self, ended: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        if self._failure is not None:
            raise self._failure
        return ended.value()


class Collectives:
    """The methods that c10d calls, under their old and their new names. Each returns a `C10dWork`."""

    _group: Group
    _store: dist.Store

    def _init_collectives(self, group: Group, store: dist.Store) -> None:
        self._group = group
        self._store = store
        self._monitored = 0
        self._coalescing: list[Work] | None = None

    def getBackendName(self) -> str:
        return "paramhub"

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> C10dWork:
        return self._allreduce_all(_listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> C10dWork:
        return self._allreduce_all(list(tensors), opts)

    def _allreduce_all(self, tensors: list[torch.Tensor], opts: Any) -> C10dWork:
        op, factor = _reduction(opts)
        if factor is not None:
            for tensor in tensors:
                tensor.mul_(factor)
        if any(tensor.is_sparse for tensor in tensors):
            return self._sum_sparse(tensors, op, opts)
        works = [self._group.allreduce(tensor, op, timeout=_limit(opts)) for tensor in tensors]
        return self._made(works, tensors)

    def _sum_sparse(self, tensors: list[torch.Tensor], op: str, opts: Any) -> C10dWork:
        if op != "sum":
            raise MisuseError(
                f"allreduce of sparse tensors only sums, and has no {op!r}: use ReduceOp.SUM, and divide by the number of ranks "
                "for a mean"
            )
        if len(tensors) > 1 or self._coalescing is not None:
            raise MisuseError(
                "allreduce takes one sparse tensor in a call: call it for each, without coalescing"
            )
        return self._made([self._group.sum_sparse(tensors[0], timeout=_limit(opts))], tensors)

    def reduce(self, tensors: Any, opts: Any) -> C10dWork:
        tensors = _listed(tensors)
        op, factor = _reduction(opts)
        works = []
        for tensor in tensors:
            if factor is not None:
                tensor.mul_(factor)
            works.append(self._group.reduce(tensor, opts.rootRank, op, timeout=_limit(opts)))
        return self._made(works, tensors)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> C10dWork:
        outputs = _listed(outputs)
        lists = [inputs] if inputs and isinstance(inputs[0], torch.Tensor) else inputs
        op, factor = _reduction(opts)
        works = [
            self._group.reduce_scatter(
                output, [_scaled(each, factor) for each in parts], op, timeout=_limit(opts)
            )
            for output, parts in zip(outputs, lists, strict=True)
        ]
        return self._made(works, outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> C10dWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> C10dWork:
        op, factor = _reduction(opts)
        works = [
            self._group.reduce_scatter_single(output, _scaled(input, factor), op, timeout=_limit(opts))
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._made(works, list(outputs))

    # Moves

    def broadcast(self, tensors: Any, opts: Any) -> C10dWork:
        tensors = _listed(tensors)
        works = [self._group.broadcast(each, opts.rootRank, timeout=_limit(opts)) for each in tensors]
        return self._made(works, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> C10dWork:
        inputs = _listed(inputs)
        lists = [outputs] if outputs and isinstance(outputs[0], torch.Tensor) else outputs
        works = [
            self._group.allgather(parts, input, timeout=_limit(opts))
            for parts, input in zip(lists, inputs, strict=True)
        ]
        return self._made(works, [each for parts in lists for each in parts])

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> C10dWork:
        # Here there is one list for each rank; allgather takes one for each input.
        by_input = [list(parts) for parts in zip(*output_lists, strict=True)]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> C10dWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> C10dWork:
        works = [
            self._group.allgather_single(output, input, timeout=_limit(opts))
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._made(works, list(outputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> C10dWork:
        (input,) = _listed(inputs)
        parts = list(outputs[0]) if outputs else None
        work = self._group.gather(parts, input, opts.rootRank, timeout=_limit(opts))
        return self._made([work], parts or [])

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> C10dWork:
        (output,) = _listed(outputs)
        parts = list(inputs[0]) if inputs else None
        work = self._group.scatter(output, parts, opts.rootRank, timeout=_limit(opts))
        return self._made([work], [output])

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> C10dWork:
        work = self._group.all_to_all(outputs, inputs, timeout=_limit(opts))
        return self._made([work], list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = None,
    ) -> C10dWork:
        work = self._group.all_to_all_single(output, input, output_rows, input_rows, timeout=_limit(opts))
        return self._made([work], [output])

    # The names of torch 2.13 and before.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Point to point

    def send(self, tensors: Any, to: int, tag: int = 0) -> C10dWork:
        (tensor,) = _listed(tensors)
        return self._made([self._group.send(tensor, to, tag)], [tensor], is_collective=False)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> C10dWork:
        (tensor,) = _listed(tensors)
        return self._made([self._group.receive(tensor, source, tag)], [tensor], is_collective=False)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> C10dWork:
        (tensor,) = _listed(tensors)
        return self._made([self._group.receive(tensor, None, tag)], [tensor], is_collective=False)

    # Order

    def barrier(self, opts: Any = None) -> C10dWork:
        return self._made([self._group.barrier(timeout=_limit(opts))], [])

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that raises an error with the missing ranks on every rank. It is slow, and the group survives its failure."""
        limit = _limit(opts)
        limit = self._group.timeout if limit is None else limit
        self._monitored += 1
        own, size = self._group.rank, self._group.size
        key = f"monitored/{self._monitored}/"
        missing_key = f"{key}missing"
        with explained_store_errors(self._store, own):
            if own == 0:
                came = [f"{key}{rank}" for rank in range(1, size)]
                missing = (
                    [came.index(each) + 1 for each in wait_for_keys(self._store, came, limit)] if came else []
                )
                self._store.set(missing_key, ",".join(map(str, missing)))
            else:
                self._store.set(f"{key}{own}", "")
                # Rank 0 may arrive later than this rank, and then waits for the whole limit.
                if wait_for_keys(self._store, [missing_key], 2 * limit):
                    missing = [0]
                else:
                    missing = [int(rank) for rank in self._store.get(missing_key).decode().split(",") if rank]
        if missing:
            raise ConnectError(
                f"group `{self._group.name}`, rank {own}: {format_ranks(missing)} did not come to the monitored barrier within "
                f"{limit:g} s"
            )

    def start_coalescing(self) -> None:
        self._coalescing = []

    def end_coalescing(self) -> C10dWork:
        works, self._coalescing = self._coalescing or [], None
        return self._made(works, [])

    def _start_coalescing(self, _device: torch.device | None = None) -> None:
        self.start_coalescing()

    def _end_coalescing(self, _device: torch.device | None = None) -> C10dWork:
        return self.end_coalescing()

    # The group itself

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._group.collectives()

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: numbers start from 0 on every rank."""

    def _made(self, works: list[Work], outputs: list[torch.Tensor], is_collective: bool = True) -> C10dWork:
        work = works[0] if len(works) == 1 else _joined(works)
        if self._coalescing is not None:
            self._coalescing.append(work)
        last_result.work = result = C10dWork(self._group, work, outputs, is_collective)
        return result


def _joined(works: list[Work]) -> Work:
    handles = tuple(handle for work in works for handle in work.handles)
    # Each work copies its own results before the joined work ends.
    joined = Work(handles, together([work.conclude for work in works if work.has_to_conclude]))
    joined.name = ", ".join(work.name for work in works[:2]) + (", ..." if len(works) > 2 else "")
    return joined


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _limit(opts: Any) -> float | None:
    """A collective's own timeout in seconds, if it has one."""
    timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def _reduction(opts: Any) -> tuple[Any, Any]:
    """The operation's name, and the factor by which inputs are multiplied first, if there is one."""
    given = getattr(opts, "reduceOp", opts)
    kind = getattr(given, "op", given)
    if kind is None:
        return "sum", None
    if kind == _RedOpType.PREMUL_SUM:
        return "sum", given.__getstate__()[1]
    try:
        return OPERATIONS[kind], None
    except KeyError:
        raise MisuseError(f"ranks cannot be reduced by {kind}") from None


def _scaled(tensor: torch.Tensor, factor: Any) -> torch.Tensor:
    return tensor if factor is None else tensor * factor
