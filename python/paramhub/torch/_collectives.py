"""Collectives among some of the ranks. They do not change parameters, but training needs them.

Sums and means of gradients, which are large, go through the hub, which sums each byte once while it is in cache. All other
operations go over a mesh of connections between the ranks, which has less to set up and to wait for.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from paramhub import _native
from paramhub.errors import JobFailedError, MisuseError
from paramhub.torch import _sparse_sums
from paramhub.torch._host_memory import overlap, staged, together
from paramhub.torch._hub_sums import HubSums
from paramhub.torch._log import log
from paramhub.torch._rendezvous import LostRank, allgather_json
from paramhub.torch._shutdown import EXIT_TIMEOUT_AFTER_FAILURE
from paramhub.torch._spans import Spans
from paramhub.torch._tensors import memory_range
from paramhub.torch._watchdog import INTERVAL, Watchdog
from paramhub.torch._work import Work

if TYPE_CHECKING:
    from paramhub.torch._world import World

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

LEAVE_TIMEOUT = 10.0
"""Seconds for which a rank that leaves waits for operations under way."""


class Group:
    """Some of the world's ranks, numbered from 0, and the collectives among them.

    All of them make it together, under the same name, and then call the same collectives in the same order. Every operation
    is asynchronous and works in place; the caller must not use its tensors until it has ended. An operation that only moves
    elements takes any type; a reduction takes those of `ELEMENTS`. A tensor that is not contiguous is copied.

    Operations that do not end within ``timeout`` seconds fail, and the group with them; the error names the ranks that did
    not call them.
    """

    def __init__(
        self,
        name: str,
        world: World,
        store: dist.Store,
        *,
        members: Sequence[int] | None = None,
        timeout: float,
    ) -> None:
        """``members`` are the world's ranks in the group, in the order of their ranks here; by default all. They meet in
        ``store``, whose keys belong to this group alone."""
        self.name = name
        self.members = list(range(world.size)) if members is None else list(members)
        self.rank = self.members.index(world.rank)
        self.size = len(self.members)
        self.timeout = timeout
        self.world = world
        self._mesh = self._connect(store)
        self._sparse_sums = 0
        """The number of sums of sparse tensors so far."""
        self._sums = HubSums(name, world, self.members, shares_memory=self._mesh.shares_memory)
        self._failure: JobFailedError | None = None
        watched = dist.PrefixStore(f"watch/{name}", world.watch_store)
        self._watchdog = Watchdog(name, self.rank, self.size, watched, self._mesh.failure, self.give_up)
        self.spans = Spans(self.members)
        world.add_group(self)

    def _connect(self, store: dist.Store) -> _native.Mesh:
        listener = _native.MeshListener(self.world.own_address())
        # The salts keep the secrets of two groups of one name apart.
        own = {"address": listener.address, "salt": secrets.token_hex(16)}
        lost = LostRank(self.rank, self.size, lambda: self.world.lost_among(self.members))
        peers = allgather_json(store, "mesh", own, self.rank, self.size, self.timeout, lost=lost)
        salts = "".join(each["salt"] for each in peers)
        return listener.join(
            self.name,
            self.rank,
            [each["address"] for each in peers],
            self.world.run_secret.derive(f"mesh {self.name} {salts}"),
            timeout=self.timeout,
            dead_after=self.world.options.dead_after,
            shares_memory=self.world.transport != "tcp",
            encrypts=bool(self.world.hubs.access.job.encrypt),
            check=lost.check,
        )

    # Reductions

    def allreduce(self, tensor: torch.Tensor, op: Op = "sum", *, timeout: float | None = None) -> Work:
        """Reduces all ranks' tensors, at every rank."""
        host, finish = staged(_real(tensor, op))
        if self._sums.takes(host, op):
            # The hub sums pieces of tensors, and cannot see whether the ranks' tensors differ. The mesh compares them, and
            # notices ranks that have ended.
            self._connected().note_allreduce(host.nbytes, _element(host, "allreduce"), op)
            work = Work((self._sums.exchange(host, op),), finish, self._explained)
        else:
            handle = self._connected().allreduce(memory_range(host), _element(host, "allreduce"), op, host)
            work = Work((handle,), finish)
        return self._issued("allreduce", host, work, timeout)

    def sum_sparse(self, tensor: torch.Tensor, *, timeout: float | None = None) -> Work:
        """Sums all ranks' sparse COO tensors, at every rank. The numbers of their elements may differ, and the result is
        coalesced. The work raises MisuseError, on every rank, if ranks' tensors differ in type or shape; the group goes on."""
        work = _sparse_sums.begin(self._connected(), self.members, tensor, self._sparse_sums)
        self._sparse_sums += 1
        return self._issued("sum_sparse", None, work, timeout)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: Op = "sum", *, timeout: float | None = None
    ) -> Work:
        """Reduces all ranks' tensors into the root's."""
        host, finish = staged(_real(tensor, op), writes=self.rank == root)
        if self.rank != root and finish is None and host.data_ptr() == tensor.data_ptr():
            # The exchange writes partial sums into its tensor, and only the root's tensor may change.
            host = host.detach().clone()
        handle = self._connected().reduce(memory_range(host), root, _element(host, "reduce"), op, host)
        return self._issued("reduce", host, Work((handle,), finish), timeout)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        timeout: float | None = None,
    ) -> Work:
        """Reduces all ranks' ``inputs[i]`` into rank i's ``output``. Lengths may differ from rank to rank."""
        sources = [staged(_real(each, op), writes=False)[0] for each in inputs]
        target, finish = staged(_real(output, op), reads=False)
        element = _same_element(target, sources, "reduce_scatter")
        sends, receive = [memory_range(each) for each in sources], memory_range(target)
        if any(overlap(send, receive) for send in sends):
            target, finish = _apart(target, finish)
            receive = memory_range(target)
        owner = (target, sources)
        handle = self._connected().reduce_scatter(sends, receive, element, op, owner)
        return self._issued("reduce_scatter", target, Work((handle,), finish), timeout)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: Op = "sum", *, timeout: float | None = None
    ) -> Work:
        """`reduce_scatter` of equal parts of ``input``, one after the other."""
        return self.reduce_scatter(output, self._parts(input, "reduce_scatter"), op, timeout=timeout)

    # Moves

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, compares_types: bool = False, timeout: float | None = None
    ) -> Work:
        """Sends the root's tensor to every rank. With ``compares_types`` ranks whose types differ get an error; those of
        `ELEMENTS` are compared."""
        is_root = self.rank == root
        host, finish = staged(tensor, reads=is_root, writes=not is_root)
        element = ELEMENTS.get(host.dtype) if compares_types else None
        handle = self._connected().broadcast(memory_range(host), root, host, element)
        return self._issued("broadcast", host, Work((handle,), finish), timeout)

    def allgather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, timeout: float | None = None
    ) -> Work:
        """Sends every rank's ``tensor`` to every rank, into ``outputs`` by rank. Lengths may differ from rank to rank."""
        source, _ = staged(tensor, writes=False)
        targets, finishes = _staged_all(outputs)
        send, receives = memory_range(source), [memory_range(each) for each in targets]
        own = self.rank < len(receives) and receives[self.rank] == send
        if not own and any(overlap(send, receive) for receive in receives):
            source = source.detach().clone()
            send = memory_range(source)
        handle = self._connected().allgather(None if own else send, receives, (source, targets))
        return self._issued("allgather", source, Work((handle,), together(finishes)), timeout)

    def allgather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, *, timeout: float | None = None
    ) -> Work:
        """`allgather` into equal parts of ``output``, one after the other."""
        target, finish = staged(output, reads=False)
        work = self.allgather(self._parts(target, "allgather"), tensor, timeout=timeout)
        # The parts are views of a contiguous tensor, so they need no `Finish` of their own.
        return work if finish is None else Work(work.handles, finish)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        *,
        timeout: float | None = None,
    ) -> Work:
        """Sends every rank's ``tensor`` to the root, into ``outputs`` by rank. On the other ranks ``outputs`` is None."""
        source, _ = staged(tensor, writes=False)
        targets, finishes = _staged_all(outputs or ())
        send, receives = memory_range(source), [memory_range(each) for each in targets]
        if any(overlap(send, receive) for receive in receives):
            source = source.detach().clone()
            send = memory_range(source)
        handle = self._connected().gather(send, receives, root, (source, targets))
        return self._issued("gather", source, Work((handle,), together(finishes)), timeout)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        timeout: float | None = None,
    ) -> Work:
        """Sends the root's ``inputs[i]`` to rank i. On the other ranks ``inputs`` is None."""
        sources = [staged(each, writes=False)[0] for each in inputs or ()]
        target, finish = staged(output, reads=False)
        sends, receive = [memory_range(each) for each in sources], memory_range(target)
        if any(overlap(send, receive) for send in sends):
            target, finish = _apart(target, finish)
            receive = memory_range(target)
        handle = self._connected().scatter(sends, receive, root, (target, sources))
        return self._issued("scatter", target, Work((handle,), finish), timeout)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        timeout: float | None = None,
    ) -> Work:
        """Sends ``inputs[i]`` to rank i and receives ``outputs[i]`` from it. Any lengths will do if both ends use the same."""
        sources = [staged(each, writes=False)[0] for each in inputs]
        targets, finishes = _staged_all(outputs)
        sends, receives = [memory_range(each) for each in sources], [memory_range(each) for each in targets]
        if any(overlap(send, receive) for send in sends for receive in receives):
            sources = [each.detach().clone() for each in sources]
            sends = [memory_range(each) for each in sources]
        handle = self._connected().all_to_all(sends, receives, (sources, targets))
        return self._issued("all_to_all", None, Work((handle,), together(finishes)), timeout)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: Sequence[int] | None = None,
        input_rows: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> Work:
        """`all_to_all` of consecutive parts, which have the given numbers of rows or are equal."""
        target, finish = staged(output, reads=False)
        source, _ = staged(input, writes=False)
        outputs = self._parts(target, "all_to_all", output_rows)
        inputs = self._parts(source, "all_to_all", input_rows)
        work = self.all_to_all(outputs, inputs, timeout=timeout)
        # The parts are views of a contiguous tensor, so they need no `Finish` of their own.
        return work if finish is None else Work(work.handles, finish)

    def barrier(self, *, timeout: float | None = None) -> Work:
        """Ends once every rank has called it."""
        return self._issued("barrier", None, Work((self._connected().barrier(),)), timeout)

    # Point to point

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0, *, timeout: float | None = None) -> Work:
        """Sends to a rank, which must receive as many bytes with the same tag. Ends when the caller may change the tensor."""
        host, _ = staged(tensor, writes=False)
        work = Work((self._connected().send(to, tag, memory_range(host), host),))
        return self._passed(f"send to rank {to} with tag {tag}", work, timeout)

    def receive(
        self, tensor: torch.Tensor, source: int | None, tag: int = 0, *, timeout: float | None = None
    ) -> Work:
        """Receives from a rank, or with None from the first rank that sends. ``source`` of the result is that rank."""
        host, finish = staged(tensor, reads=False)
        work = Work((self._connected().receive(source, tag, memory_range(host), host),), finish)
        name = f"receive from {'any rank' if source is None else f'rank {source}'} with tag {tag}"
        return self._passed(name, work, timeout)

    # Ends

    def collectives(self) -> int:
        """The number of collectives that this rank has called so far."""
        return self._watchdog.number

    def awaited_ranks(self, work: Work) -> list[int]:
        """Ranks that have not called the operation of ``work``, as far as this rank knows."""
        return self._watchdog.culprits(self._watchdog.number, work.handles)

    def failure(self) -> BaseException | None:
        """Returns the reason why the group has failed, or None."""
        return self._failure or self._mesh.failure()

    def is_idle(self) -> bool:
        """Returns whether all operations of this rank have ended."""
        return self._watchdog.wait(0.0)

    def leave(self, *, abandon: bool = False) -> None:
        """Waits for operations under way and leaves. With ``abandon`` it does not wait, and the other ranks' operations fail."""
        failures = self.world.failures
        timeout = EXIT_TIMEOUT_AFTER_FAILURE if failures.is_failing() else LEAVE_TIMEOUT
        deadline = time.monotonic() + timeout
        self.world.remove_group(self)
        failure = self.failure()
        if not abandon and failure is None and not self._watchdog.wait(timeout):
            # An operation waits for a rank that hangs, or for one that ends with an exception as this rank does.
            failure = self.failure()
            abandon = failure is None and failures.is_failing()
        if abandon:
            # What the others get must name the rank that failed first, as far as this rank knows it.
            cause = failures.cause()
            because = "" if cause is None else f": {cause}"
            self._mesh.abort(f"rank {self.rank} of group `{self.name}` has given up{because}")
        elif failure is not None:
            # The mesh must report the reason to the others before the hub reports only that this rank has left.
            failures.wait_since_first(2 * INTERVAL)
        self._watchdog.close()
        self._sums.close(abandon=abandon or failure is not None)
        if abandon or failure is not None:
            return
        try:
            self._mesh.leave(max(1.0, deadline - time.monotonic()))
        except JobFailedError as error:
            # All operations have ended, and those that failed have raised where the caller waited for them.
            log(f"rank {self.world.rank}: {error}")
            failures.record()

    def give_up(self, message: str, culprit: int | None = None) -> None:
        """Fails the group: an operation has not ended in time and every later result would be wrong, or the caller is to have
        no others."""
        self._failure = JobFailedError(message)
        self._failure.culprit = culprit
        self._watchdog.fail(message, culprit)
        self._watchdog.close()
        self._sums.fail(message, culprit)
        self._mesh.abort(message)

    def _explained(self, failure: JobFailedError, patience: float) -> JobFailedError:
        """The failure with the rank that caused it. A hub in rank 0 ends with rank 0 and cannot name it, but the mesh can."""
        deadline = time.monotonic() + patience
        while failure.culprit is None:
            known = self.failure()
            if isinstance(known, JobFailedError):
                return known
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        return failure

    def _connected(self) -> _native.Mesh:
        if self._failure is not None:
            raise self._failure
        return self._mesh

    def _passed(self, name: str, work: Work, timeout: float | None) -> Work:
        self._watchdog.add_message(name, work, self._limit(timeout))
        self.spans.issued(name, work)
        return work

    def _issued(self, name: str, tensor: torch.Tensor | None, work: Work, timeout: float | None) -> Work:
        nbytes = None if tensor is None else tensor.numel() * tensor.element_size()
        self._watchdog.add_collective(name, nbytes, work, self._limit(timeout))
        self.spans.issued(name if nbytes is None else f"{name} of {nbytes} bytes", work)
        return work

    def _limit(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _parts(
        self, tensor: torch.Tensor, name: str, rows: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        if rows:
            if len(rows) != self.size or tensor.dim() == 0 or sum(rows) != tensor.shape[0]:
                raise MisuseError(
                    f"{name} in `{self.name}`: a tensor of shape {list(tensor.shape)} has no parts of {list(rows)} rows "
                    f"for {self.size} ranks"
                )
            return list(tensor.split(list(rows)))
        flat = tensor.view(-1)
        if flat.numel() % self.size:
            raise MisuseError(
                f"{name} in `{self.name}`: {flat.numel()} elements are not {self.size} equal parts, one for each rank"
            )
        return list(flat.split(flat.numel() // self.size)) if flat.numel() else [flat] * self.size


def _real(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """A view of complex numbers as their parts, which are added separately; other tensors unchanged."""
    if tensor.is_complex() and op in ("sum", "average"):
        return torch.view_as_real(tensor)
    return tensor


def _element(tensor: torch.Tensor, name: str) -> str:
    try:
        return ELEMENTS[tensor.dtype]
    except KeyError:
        raise MisuseError(f"{name} cannot compute with elements of {tensor.dtype}") from None


def _same_element(tensor: torch.Tensor, others: Sequence[torch.Tensor], name: str) -> str:
    for other in others:
        if other.dtype != tensor.dtype:
            raise MisuseError(f"{name} needs tensors of one type, not {tensor.dtype} and {other.dtype}")
    return _element(tensor, name)


def _staged_all(tensors: Sequence[torch.Tensor]):
    pairs = [staged(each, reads=False) for each in tensors]
    return [host for host, _ in pairs], [finish for _, finish in pairs]


def _apart(tensor: torch.Tensor, finish):
    """Separate memory for a result whose own memory overlaps memory that is being sent."""
    host = torch.empty_like(tensor)

    def copy() -> None:
        with torch.no_grad():
            tensor.copy_(host)

    return host, together([copy, finish])
