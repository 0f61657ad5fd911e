"""Collectives of a group on tensors of the host.

Sums and means of gradients, which are large, go through the hub, which sums each byte once while it is in cache. All other
operations go over a mesh of connections between the ranks, which has less to set up and to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from paramhub import _native
from paramhub.errors import JobFailedError, MisuseError
from paramhub.torch._host_memory import Finish, overlap, staged, together
from paramhub.torch._hub_sums import HubSums
from paramhub.torch._tensors import memory_range
from paramhub.torch._work import Work

Op = Literal["sum", "average", "product", "min", "max", "band", "bor", "bxor"]

ELEMENTS = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}
"""The types of elements that a mesh can reduce, by torch's types."""


class HostCollectives:
    """The operations of `paramhub.torch._collectives.Group`. A tensor that is not contiguous is copied."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        sums: HubSums,
        connected: Callable[[], _native.Mesh],
        explained: Callable[[JobFailedError, float], JobFailedError],
    ) -> None:
        """``connected()`` returns the group's mesh, or raises the error of a group that has failed. ``explained(failure,
        patience)`` returns a failure with the rank at fault, for which it may wait ``patience`` seconds."""
        self.rank = rank
        self.size = size
        self.connected = connected
        self._name = name
        self._sums = sums
        self._explained = explained

    # Reductions

    def allreduce(self, tensor: torch.Tensor, op: Op) -> Work:
        host, finish = staged(real(tensor, op))
        if not self._sums.takes(host, op):
            handle = self.connected().allreduce(memory_range(host), element_of(host, "allreduce"), op, host)
            return Work((handle,), finish)
        # The hub sums pieces of tensors, and cannot see whether the ranks' tensors differ. The mesh compares them, and notices
        # ranks that have ended.
        self.connected().note("allreduce", [host.nbytes], dtype=element_of(host, "allreduce"), op=op)
        return Work((self._sums.exchange(host, op),), finish, self._explained)

    def reduce(self, tensor: torch.Tensor, root: int, op: Op) -> Work:
        host, finish = staged(real(tensor, op), writes=self.rank == root)
        if self.rank != root and finish is None and host.data_ptr() == tensor.data_ptr():
            # The exchange writes partial sums into its tensor, and only the root's tensor may change.
            host = host.detach().clone()
        element = element_of(host, "reduce")
        return Work((self.connected().reduce(memory_range(host), root, element, op, host),), finish)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op) -> Work:
        sources = [staged(real(each, op), writes=False)[0] for each in inputs]
        target, finish = staged(real(output, op), reads=False)
        element = same_element(target, sources, "reduce_scatter")
        sends, receive = [memory_range(each) for each in sources], memory_range(target)
        if any(overlap(send, receive) for send in sends):
            target, finish = _apart(target, finish)
            receive = memory_range(target)
        handle = self.connected().reduce_scatter(sends, receive, element, op, (target, sources))
        return Work((handle,), finish)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, op: Op) -> Work:
        return self.reduce_scatter(output, self.parts(input, "reduce_scatter"), op)

    # Moves

    def broadcast(self, tensor: torch.Tensor, root: int, compares_types: bool) -> Work:
        is_root = self.rank == root
        host, finish = staged(tensor, reads=is_root, writes=not is_root)
        element = ELEMENTS.get(host.dtype) if compares_types else None
        return Work((self.connected().broadcast(memory_range(host), root, host, element),), finish)

    def allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Work:
        source, _ = staged(tensor, writes=False)
        targets, finish = _staged_all(outputs)
        send, receives = memory_range(source), [memory_range(each) for each in targets]
        own = self.rank < len(receives) and receives[self.rank] == send
        if not own and any(overlap(send, receive) for receive in receives):
            source = source.detach().clone()
            send = memory_range(source)
        handle = self.connected().allgather(None if own else send, receives, (source, targets))
        return Work((handle,), finish)

    def allgather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        target, finish = staged(output, reads=False)
        work = self.allgather(self.parts(target, "allgather"), tensor)
        # The parts are views of a contiguous tensor, so they need no `Finish` of their own.
        return work if finish is None else Work(work.handles, finish)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Work:
        source, _ = staged(tensor, writes=False)
        targets, finish = _staged_all(outputs)
        send, receives = memory_range(source), [memory_range(each) for each in targets]
        if any(overlap(send, receive) for receive in receives):
            source = source.detach().clone()
            send = memory_range(source)
        return Work((self.connected().gather(send, receives, root, (source, targets)),), finish)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Work:
        sources = [staged(each, writes=False)[0] for each in inputs]
        target, finish = staged(output, reads=False)
        sends, receive = [memory_range(each) for each in sources], memory_range(target)
        if any(overlap(send, receive) for send in sends):
            target, finish = _apart(target, finish)
            receive = memory_range(target)
        return Work((self.connected().scatter(sends, receive, root, (target, sources)),), finish)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        sources = [staged(each, writes=False)[0] for each in inputs]
        targets, finish = _staged_all(outputs)
        sends, receives = [memory_range(each) for each in sources], [memory_range(each) for each in targets]
        if any(overlap(send, receive) for send in sends for receive in receives):
            sources = [each.detach().clone() for each in sources]
            sends = [memory_range(each) for each in sources]
        return Work((self.connected().all_to_all(sends, receives, (sources, targets)),), finish)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: Sequence[int] | None,
        input_rows: Sequence[int] | None,
    ) -> Work:
        target, finish = staged(output, reads=False)
        source, _ = staged(input, writes=False)
        outputs = self.parts(target, "all_to_all", output_rows)
        inputs = self.parts(source, "all_to_all", input_rows)
        work = self.all_to_all(outputs, inputs)
        # The parts are views of a contiguous tensor, so they need no `Finish` of their own.
        return work if finish is None else Work(work.handles, finish)

    # Point to point

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        host, _ = staged(tensor, writes=False)
        return Work((self.connected().send(to, tag, memory_range(host), host),))

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Work:
        host, finish = staged(tensor, reads=False)
        return Work((self.connected().receive(source, tag, memory_range(host), host),), finish)

    def parts(self, tensor: torch.Tensor, name: str, rows: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Consecutive parts of a tensor, one for each rank, which have the given numbers of rows or are equal. ``name`` is the
        operation's in errors."""
        if rows:
            if len(rows) != self.size or tensor.dim() == 0 or sum(rows) != tensor.shape[0]:
                raise MisuseError(
                    f"{name} in `{self._name}`: a tensor of shape {list(tensor.shape)} has no parts of {list(rows)} rows "
                    f"for {self.size} ranks"
                )
            return list(tensor.split(list(rows)))
        flat = tensor.view(-1)
        if flat.numel() % self.size:
            raise MisuseError(
                f"{name} in `{self._name}`: {flat.numel()} elements are not {self.size} equal parts, one for each rank"
            )
        return list(flat.split(flat.numel() // self.size)) if flat.numel() else [flat] * self.size

    def explanation_of(
        self, tensor: torch.Tensor, op: Op
    ) -> Callable[[JobFailedError, float], JobFailedError] | None:
        """What explains the failure of an allreduce of this contiguous tensor; None if its error names the rank at fault."""
        return self._explained if self._sums.takes(tensor, op) else None


def real(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """A view of complex numbers as their parts, which are added separately; other tensors unchanged."""
    if tensor.is_complex() and op in ("sum", "average"):
        return torch.view_as_real(tensor)
    return tensor


def element_of(tensor: torch.Tensor, name: str) -> str:
    """The mesh's name of the tensor's type. Raises MisuseError if operation ``name`` cannot compute with it."""
    try:
        return ELEMENTS[tensor.dtype]
    except KeyError:
        raise MisuseError(f"{name} cannot compute with elements of {tensor.dtype}") from None


def same_element(tensor: torch.Tensor, others: Sequence[torch.Tensor], name: str) -> str:
    """`element_of` for several tensors. Raises MisuseError if their types differ."""
    for other in others:
        if other.dtype != tensor.dtype:
            raise MisuseError(f"{name} needs tensors of one type, not {tensor.dtype} and {other.dtype}")
    return element_of(tensor, name)


def _staged_all(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Finish | None]:
    pairs = [staged(each, reads=False) for each in tensors]
    return [host for host, _ in pairs], together([finish for _, finish in pairs])


def _apart(tensor: torch.Tensor, finish: Finish | None) -> tuple[torch.Tensor, Finish | None]:
    """Separate memory for a result whose own memory overlaps memory that is being sent."""
    host = torch.empty_like(tensor)

    def copy() -> None:
        with torch.no_grad():
            tensor.copy_(host)

    return host, together([copy, finish])
