"""Collectives among some of the ranks. They do not change parameters, but training needs them.

A group has a mesh of connections between its ranks, and for large sums a job at the hub. Tensors of the host are exchanged where
they are (`HostCollectives`), those of a device through host memory (`DeviceCollectives`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paramhub import _native
from paramhub.errors import JobFailedError, MisuseError
from paramhub.torch import _sparse_sums
from paramhub.torch._device_collectives import DeviceCollectives
from paramhub.torch._device_streams import DeviceStreams
from paramhub.torch._host_collectives import HostCollectives, Op
from paramhub.torch._hub_sums import HubSums
from paramhub.torch._log import log
from paramhub.torch._rendezvous import LostRank, allgather_json
from paramhub.torch._shutdown import EXIT_TIMEOUT_AFTER_FAILURE
from paramhub.torch._spans import Spans
from paramhub.torch._staged_exchanges import StagedExchanges
from paramhub.torch._tensors import needs_stage
from paramhub.torch._watchdog import INTERVAL, Watchdog
from paramhub.torch._work import Work

if TYPE_CHECKING:
    from paramhub.torch._world import World

LEAVE_TIMEOUT = 10.0
"""Seconds for which a rank that leaves waits for operations under way."""


class Group:
    """Some of the world's ranks, numbered from 0, and the collectives among them.

    All of them make it together, under the same name, and then call the same collectives in the same order. Every operation
    is asynchronous and works in place; the caller must not use its tensors until it has ended. An operation that only moves
    elements takes any type; a reduction takes those of `ELEMENTS`. All tensors of one operation are on one device. Those of a
    device have their values at this point of the current device stream, and `Work.wait` orders it after the result.

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
        self._host = HostCollectives(name, self.rank, self.size, self._sums, self._connected, self._explained)
        self._exchanges = StagedExchanges()
        """The exchanges of tensors of devices."""
        self._streams: dict[torch.device, DeviceStreams] = {}
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
        return self._issued("allreduce", tensor, self._of(tensor).allreduce(tensor, op), timeout)

    def sum_sparse(self, tensor: torch.Tensor, *, timeout: float | None = None) -> Work:
        """Sums all ranks' sparse COO tensors, at every rank. The numbers of their elements may differ, and the result is
        coalesced. The work raises MisuseError, on every rank, if ranks' tensors differ in type or shape; the group goes on.
        A tensor of a device is awaited and copied to the host first."""
        if needs_stage(tensor.device):
            own, write = tensor.detach().coalesce().cpu(), self._streams_of(tensor.device).write
        else:
            own, write = tensor.detach().coalesce(), _write
        self._exchanges.await_submissions()
        work = _sparse_sums.begin(
            self._connected(), self.members, own, lambda summed: write(tensor, summed), self._sparse_sums
        )
        self._sparse_sums += 1
        return self._issued("sum_sparse", None, work, timeout)

    def reduce(
        self, tensor: torch.Tensor, root: int, op: Op = "sum", *, timeout: float | None = None
    ) -> Work:
        """Reduces all ranks' tensors into the root's."""
        return self._issued("reduce", tensor, self._of(tensor).reduce(tensor, root, op), timeout)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: Op = "sum",
        *,
        timeout: float | None = None,
    ) -> Work:
        """Reduces all ranks' ``inputs[i]`` into rank i's ``output``. Lengths may differ from rank to rank."""
        work = self._of(output, *inputs).reduce_scatter(output, inputs, op)
        return self._issued("reduce_scatter", output, work, timeout)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, op: Op = "sum", *, timeout: float | None = None
    ) -> Work:
        """`reduce_scatter` of equal parts of ``input``, one after the other."""
        work = self._of(output, input).reduce_scatter_single(output, input, op)
        return self._issued("reduce_scatter", output, work, timeout)

    # Moves

    def broadcast(
        self, tensor: torch.Tensor, root: int, *, compares_types: bool = False, timeout: float | None = None
    ) -> Work:
        """Sends the root's tensor to every rank. With ``compares_types`` ranks whose types differ get an error; those of
        `ELEMENTS` are compared."""
        work = self._of(tensor).broadcast(tensor, root, compares_types)
        return self._issued("broadcast", tensor, work, timeout)

    def allgather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, timeout: float | None = None
    ) -> Work:
        """Sends every rank's ``tensor`` to every rank, into ``outputs`` by rank. Lengths may differ from rank to rank."""
        work = self._of(tensor, *outputs).allgather(outputs, tensor)
        return self._issued("allgather", tensor, work, timeout)

    def allgather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, *, timeout: float | None = None
    ) -> Work:
        """`allgather` into equal parts of ``output``, one after the other."""
        work = self._of(tensor, output).allgather_single(output, tensor)
        return self._issued("allgather", tensor, work, timeout)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        root: int,
        *,
        timeout: float | None = None,
    ) -> Work:
        """Sends every rank's ``tensor`` to the root, into ``outputs`` by rank. On the other ranks ``outputs`` is None."""
        outputs = outputs or ()
        work = self._of(tensor, *outputs).gather(outputs, tensor, root)
        return self._issued("gather", tensor, work, timeout)

    def scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        *,
        timeout: float | None = None,
    ) -> Work:
        """Sends the root's ``inputs[i]`` to rank i. On the other ranks ``inputs`` is None."""
        inputs = inputs or ()
        work = self._of(output, *inputs).scatter(output, inputs, root)
        return self._issued("scatter", output, work, timeout)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        timeout: float | None = None,
    ) -> Work:
        """Sends ``inputs[i]`` to rank i and receives ``outputs[i]`` from it. Any lengths will do if both ends use the same."""
        work = self._of(*outputs, *inputs).all_to_all(outputs, inputs)
        return self._issued("all_to_all", None, work, timeout)

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
        work = self._of(output, input).all_to_all_single(output, input, output_rows, input_rows)
        return self._issued("all_to_all", None, work, timeout)

    def barrier(self, *, timeout: float | None = None) -> Work:
        """Ends once every rank has called it."""
        self._exchanges.await_submissions()
        return self._issued("barrier", None, Work((self._connected().barrier(),)), timeout)

    # Point to point

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0, *, timeout: float | None = None) -> Work:
        """Sends to a rank, which must receive as many bytes with the same tag. Ends when the caller may change the tensor."""
        work = self._of(tensor).send(tensor, to, tag)
        return self._passed(f"send to rank {to} with tag {tag}", work, timeout)

    def receive(
        self, tensor: torch.Tensor, source: int | None, tag: int = 0, *, timeout: float | None = None
    ) -> Work:
        """Receives from a rank, or with None from the first rank that sends. ``source`` of the result is that rank."""
        work = self._of(tensor).receive(tensor, source, tag)
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
        self._exchanges.close()
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

    def _of(self, *tensors: torch.Tensor) -> HostCollectives | DeviceCollectives:
        """The collectives for tensors where these are. Operations on the host wait until those before them on a device are
        submitted: all ranks' operations have one order."""
        if not tensors:
            return self._host
        device = tensors[0].device
        for tensor in tensors[1:]:
            if tensor.device != device:
                raise MisuseError(
                    f"one operation has tensors on {device} and on {tensor.device}: move them to one device, or to the host"
                )
        if needs_stage(device):
            return DeviceCollectives(self._host, self._exchanges, self._streams_of(device))
        self._exchanges.await_submissions()
        return self._host

    def _streams_of(self, device: torch.device) -> DeviceStreams:
        if device not in self._streams:
            self._streams[device] = DeviceStreams(device)
        return self._streams[device]


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    # This may run on one of this package's threads, where torch records gradients by default.
    with torch.no_grad():
        tensor.copy_(value)
