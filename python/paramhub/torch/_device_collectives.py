"""Collectives of a group on tensors of a device.

A tensor passes through host memory, and `HostCollectives` exchanges it there. Reductions, broadcasts and allgathers do so in
pieces: while one piece is exchanged, the next is copied to the host and the one before is copied back. All ranks cut tensors in
the same way, so each piece is an operation of its own. Operations in which a rank does not know the lengths of all others, such
as all_to_all, go in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paramhub.errors import JobFailedError
from paramhub.torch._device_streams import Copies, DeviceStreams
from paramhub.torch._host_collectives import ELEMENTS, HostCollectives, Op, element_of, real, same_element
from paramhub.torch._host_memory import Finish, check_dense, is_plain, together
from paramhub.torch._staged_exchanges import Piece, StagedExchanges
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._work import Work

PIECE_BYTES = 4 << 20
"""Bytes of a piece, of all ranks' parts together where an operation has parts."""
PART_BYTES_MIN = 64 << 10
"""The fewest bytes of one rank's part in a piece, of which its bytes are a multiple."""

NOTHING: Copies = ((), ())


class DeviceCollectives:
    """The operations of `HostCollectives`, on tensors of the device of ``streams``. Tensors have their values at this point of
    the current device stream."""

    def __init__(self, host: HostCollectives, exchanges: StagedExchanges, streams: DeviceStreams) -> None:
        """``exchanges`` are those of the group, whose operations all ranks begin in the same order."""
        self._host = host
        self._exchanges = exchanges
        self._streams = streams

    # Reductions

    def allreduce(self, tensor: torch.Tensor, op: Op) -> Work:
        tensor = real(tensor, op)
        element = element_of(tensor, "allreduce")
        memory, finish = self._in_place(tensor)
        host = self._on_host(memory)
        pieces = [
            Piece(
                ([host[part]], [memory[part]]),
                partial(self._host.allreduce, host[part], op),
                ([memory[part]], [host[part]]),
            )
            for (part,) in _cut([host])
        ]
        self._note("allreduce", [host], pieces, dtype=element, op=op)
        return self._begin(pieces, finish, self._host.explanation_of(host, op))

    def reduce(self, tensor: torch.Tensor, root: int, op: Op) -> Work:
        tensor = real(tensor, op)
        element = element_of(tensor, "reduce")
        is_root = self._host.rank == root
        memory, finish = self._in_place(tensor)
        host = self._on_host(memory)
        pieces = [
            Piece(
                ([host[part]], [memory[part]]),
                partial(self._host.reduce, host[part], root, op),
                ([memory[part]], [host[part]]) if is_root else NOTHING,
            )
            for (part,) in _cut([host])
        ]
        self._note("reduce", [host], pieces, dtype=element, op=op, root=root)
        return self._begin(pieces, finish if is_root else None)

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Op) -> Work:
        sources = [self._source(real(each, op)) for each in inputs]
        target, finish = self._target(real(output, op))
        element = same_element(target, sources, "reduce_scatter")
        sends, receive = [self._on_host(each) for each in sources], self._on_host(target)
        pieces = []
        for parts in _cut([*sends, receive]):
            cut_sends = _parts_of(sends, parts)
            pieces.append(
                Piece(
                    (cut_sends, _parts_of(sources, parts)),
                    partial(self._host.reduce_scatter, receive[parts[-1]], cut_sends, op),
                    ([target[parts[-1]]], [receive[parts[-1]]]),
                )
            )
        self._note("reduce_scatter", sends, pieces, dtype=element, op=op)
        return self._begin(pieces, finish)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, op: Op) -> Work:
        source = self._source(real(input, op))
        return self.reduce_scatter(real(output, op), self._host.parts(source, "reduce_scatter"), op)

    # Moves

    def broadcast(self, tensor: torch.Tensor, root: int, compares_types: bool) -> Work:
        is_root = self._host.rank == root
        memory, finish = (self._source(tensor), None) if is_root else self._target(tensor)
        host = self._on_host(memory)
        pieces = []
        for (part,) in _cut([host]):
            copies: Copies = ([host[part]], [memory[part]])
            back: Copies = ([memory[part]], [host[part]])
            request = partial(self._host.broadcast, host[part], root, compares_types)
            pieces.append(Piece(copies if is_root else NOTHING, request, NOTHING if is_root else back))
        element = ELEMENTS.get(host.dtype) if compares_types else None
        self._note("broadcast", [host], pieces, dtype=element, root=root)
        return self._begin(pieces, finish)

    def allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Work:
        return self._allgather(*self._targets(outputs), self._source(tensor))

    def allgather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        target, finish = self._target(output)
        return self._allgather(self._host.parts(target, "allgather"), finish, self._source(tensor))

    def _allgather(self, targets: list[torch.Tensor], finish: Finish | None, source: torch.Tensor) -> Work:
        receives = [self._on_host(each) for each in targets]
        own = self._host.rank
        # This rank's part can be sent from where the result has it, if the caller has given it that place.
        has_place = own < len(targets) and targets[own].nbytes == source.nbytes
        send = receives[own].view(source.dtype) if has_place else self._on_host(source)
        pieces = []
        for parts in _cut([*receives, send]):
            cut_receives, cut_send = _parts_of(receives, parts), send[parts[-1]]
            pieces.append(
                Piece(
                    ([cut_send], [source[parts[-1]]]),
                    partial(self._host.allgather, cut_receives, cut_send),
                    (_parts_of(targets, parts), cut_receives),
                )
            )
        self._note("allgather", receives, pieces)
        return self._begin(pieces, finish)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Work:
        source = self._source(tensor)
        targets, finish = self._targets(outputs)
        send, receives = self._on_host(source), [self._on_host(each) for each in targets]
        request = partial(self._host.gather, receives, send, root)
        return self._begin([Piece(([send], [source]), request, (targets, receives))], finish)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Work:
        sources = [self._source(each) for each in inputs]
        target, finish = self._target(output)
        sends, receive = [self._on_host(each) for each in sources], self._on_host(target)
        request = partial(self._host.scatter, receive, sends, root)
        return self._begin([Piece((sends, sources), request, ([target], [receive]))], finish)

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        return self._all_to_all(*self._targets(outputs), [self._source(each) for each in inputs])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: Sequence[int] | None,
        input_rows: Sequence[int] | None,
    ) -> Work:
        target, finish = self._target(output)
        targets = self._host.parts(target.view(output.shape), "all_to_all", output_rows)
        sources = self._host.parts(self._source(input).view(input.shape), "all_to_all", input_rows)
        flat = [[each.reshape(-1) for each in parts] for parts in (targets, sources)]
        return self._all_to_all(flat[0], finish, flat[1])

    def _all_to_all(
        self, targets: list[torch.Tensor], finish: Finish | None, sources: list[torch.Tensor]
    ) -> Work:
        sends, receives = [self._on_host(each) for each in sources], [self._on_host(each) for each in targets]
        request = partial(self._host.all_to_all, receives, sends)
        return self._begin([Piece((sends, sources), request, (targets, receives))], finish)

    # Point to point

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Work:
        source = self._source(tensor)
        host = self._on_host(source)
        return self._begin([Piece(([host], [source]), partial(self._host.send, host, to, tag), NOTHING)])

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Work:
        target, finish = self._target(tensor)
        host = self._on_host(target)
        request = partial(self._host.receive, host, source, tag)
        return self._begin([Piece(NOTHING, request, ([target], [host]))], finish)

    def _note(
        self, name: str, tensors: Sequence[torch.Tensor], pieces: list[Piece], **arguments: Any
    ) -> None:
        """Has the ranks compare an operation of several pieces as a whole: tensors of different lengths may have the same first
        pieces."""
        if len(pieces) > 1:
            lengths = [tensor.nbytes for tensor in tensors]
            note = partial(self._host.connected().note, name, lengths, **arguments)
            pieces.insert(0, Piece(NOTHING, note, NOTHING))

    def _begin(
        self,
        pieces: Sequence[Piece],
        finish: Finish | None = None,
        explained: Callable[[JobFailedError, float], JobFailedError] | None = None,
    ) -> Work:
        # A group that has failed says so at once.
        self._host.connected()
        handle = StagedHandle(self._streams)
        self._exchanges.begin(handle, self._streams.current_stream(), pieces, finish)
        return Work((handle,), None, explained)

    def _in_place(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
        """`_source` and `_target` of a tensor that is both."""
        memory = self._source(tensor)
        return memory, None if is_plain(tensor) else self._write_of(tensor, memory)

    def _source(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's elements in one dimension, contiguous in the device's memory."""
        check_dense(tensor)
        return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1)

    def _target(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Finish | None]:
        """Contiguous memory in the device for a result in one dimension, and what copies it into the tensor, if that is not its
        memory."""
        check_dense(tensor)
        if is_plain(tensor):
            return tensor.data.view(-1), None
        memory = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return memory, self._write_of(tensor, memory)

    def _targets(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Finish | None]:
        pairs = [self._target(each) for each in tensors]
        return [memory for memory, _ in pairs], together([finish for _, finish in pairs])

    def _write_of(self, tensor: torch.Tensor, memory: torch.Tensor) -> Finish:
        """What writes a result into a tensor that is not contiguous. It runs on the results' device stream."""

        def write() -> None:
            tensor.data.copy_(memory.view(tensor.shape))
            self._streams.keep([tensor, memory])

        return write

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the host for the elements of a tensor in one dimension."""
        return self._streams.empty(tensor.shape, tensor.dtype)


def _cut(tensors: Sequence[torch.Tensor]) -> list[list[slice]]:
    """For each piece of an operation the parts of its tensors in one dimension. A part has the same bytes of every tensor as far
    as the tensor goes. The cut follows from the tensors' bytes alone, so all ranks that know these make the same."""
    units = max(1, PIECE_BYTES // len(tensors) // PART_BYTES_MIN)
    part_bytes = units * PART_BYTES_MIN
    longest = max(tensor.nbytes for tensor in tensors)
    steps = [part_bytes // tensor.element_size() for tensor in tensors]
    count = max(1, -(-longest // part_bytes))
    return [[slice(step * number, step * (number + 1)) for step in steps] for number in range(count)]


def _parts_of(tensors: Sequence[torch.Tensor], parts: Sequence[slice]) -> list[torch.Tensor]:
    return [tensor[part] for tensor, part in zip(tensors, parts, strict=False)]
