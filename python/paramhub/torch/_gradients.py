"""Averages gradients in place while backward computes them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.torch import trace
from paramhub.torch._initialization import world
from paramhub.torch._process_sets import ProcessSet, global_process_set
from paramhub.torch._sparse_gradients import Kinds, SparseSum, may_be_sparse
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._staging import NO_BACKWARD, Stage
from paramhub.torch._tensors import check_same_device, is_dense, key, needs_stage

NAMED_MAX = 5
"""The most parameters that an error names."""


class GradientExchange:
    """Sends each parameter's gradient when backward has completed it, and receives the mean (or sum) over all ranks into the
    same memory.

    Making one is collective: all ranks make theirs in the same order, with the same parameters. ``parameters`` are in
    forward order; earlier ones are more urgent. ``passes`` is the number of backward passes that make one gradient. The ranks
    are those of ``process_set``; on the others nothing is exchanged.

    A sparse gradient stays here until `synchronize`. Then the ranks exchange its rows, in the order of the parameters: backward
    passes may complete such gradients in another order on each rank.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.Tensor]],
        reduction: str,
        codec: str | None,
        passes: int,
        sparse_as_dense: bool,
        process_set: ProcessSet = global_process_set,
        takes_only_sparse: bool = False,
    ) -> None:
        """``takes_only_sparse`` says that the optimizer takes sparse gradients only, also on a rank whose backward passes have
        computed none yet."""
        self.passes = passes
        self.steps = 0
        """The number of steps whose gradients this rank has exchanged."""
        self.is_synchronized = False
        self._sparse_as_dense = sparse_as_dense
        self._gradients: list[Gradient] = []
        self._sent: list[Gradient] = []
        self._is_synchronizing = False
        self._is_in_backward = False
        self._backward_ns = 0
        self._stage: Stage | None = None
        self._world = here = world()
        self._frozen = [pair for pair in parameters if not pair[1].requires_grad]
        trained = [pair for pair in parameters if pair[1].requires_grad and pair[1].numel() > 0]
        for name, parameter in trained:
            if _exchanged.get(id(parameter)) is not None:
                raise MisuseError(
                    f"{name!r}: its gradient is exchanged by another DistributedOptimizer of this process already: "
                    "give it to one, or drop the other one first"
                )
        self._job: _native.Job | None = None
        """The job of the dense gradients, if there may be any."""
        self._kinds: Kinds | None = None
        self._served: list[_native.Handle | StagedHandle] = []
        self._served_kinds: _native.Handle | None = None
        self._label: str | None = None
        """The name under which joined ranks know this exchange, if it is one of all ranks."""
        if process_set.process_set_id is None:
            raise MisuseError(
                f"{process_set} is not in use: call paramhub.torch.add_process_set() on every rank before"
            )
        ranks = process_set.ranks
        if len(ranks) == 1 or here.rank not in ranks or not trained:
            return
        is_global = process_set is global_process_set
        self._process_set = process_set
        self._divisor = len(ranks) if reduction == "mean" else 1
        label = here.label("optimizer" if is_global else f"optimizer-set-{process_set.process_set_id}")
        if takes_only_sparse and not sparse_as_dense:
            self._gradients = [Gradient(*pair, -1, passes) for pair in trained]
            for gradient in self._gradients:
                gradient.is_sparse = True
        else:
            self._gradients = [Gradient(*pair, number, passes) for number, pair in enumerate(trained)]
            self._open_job(label, reduction, here.codec(codec), None if is_global else ranks)
        this = weakref.ref(self)
        hooks = []
        for gradient in self._gradients:
            parameter = gradient.parameter
            if sparse_as_dense and takes_only_sparse:
                # The gradient of an embedding is sparse in its rows.
                gradient.sparse_dimensions = 1
            hook = functools.partial(_on_gradient, this, gradient)
            hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            _exchanged[id(parameter)] = self
        # The parameters may outlive this object, and their hooks must not send then.
        weakref.finalize(self, _remove, hooks)
        if is_global:
            self._label = label
            here.joins.add_optimizer(label, self)

    def _open_job(self, label: str, reduction: str, codec: str | None, ranks: list[int] | None) -> None:
        """Opens the job of the dense gradients. It has the others, too, as long as no rank knows their kind."""
        trained = [(gradient.name, gradient.parameter) for gradient in self._gradients]
        keys = [key(*pair) for pair in trained]
        unknown = [] if self._sparse_as_dense else [g for g in self._gradients if may_be_sparse(g.parameter)]
        for gradient in self._gradients:
            gradient.is_sparse = False
        if unknown:
            for gradient in unknown:
                gradient.is_sparse = None
            self._kinds = Kinds(unknown, len(keys))
            keys.append(self._kinds.entry())
        device = check_same_device(trained)
        self._job = self._world.jobs.open(
            label,
            {"keys": keys, "optimizer": {"name": reduction}, "codec": codec},
            ranks,
            inherits=True,
        )
        if needs_stage(device):
            sizes = [torch.Size([parameter.numel()]) for _, parameter in trained]
            dtypes = [parameter.dtype for _, parameter in trained]
            self._stage = Stage(self._job, device, sizes, dtypes, is_encoded=codec is not None)

    @property
    def is_under_way(self) -> bool:
        """Returns whether gradients were sent, or are to be, since the last `synchronize`."""
        return self._is_synchronizing or bool(self._sent) or any(each.is_held for each in self._gradients)

    def on_gradient(self, gradient: Gradient) -> None:
        """Called when backward has added to a gradient."""
        if trace.active and not self._is_in_backward:
            self._is_in_backward = True
            self._backward_ns = _native.now_ns()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        gradient.passes_left -= 1
        if gradient.passes_left > 0:
            return
        if gradient.handle is not None or gradient.is_held:
            raise MisuseError(
                f"{gradient.name!r} has got a gradient in more than {self.passes} backward passes since the last step: "
                "call optimizer.step() after each, or give DistributedOptimizer backward_passes_per_step as many as "
                "are to be added up"
            )
        grad = gradient.parameter.grad
        if gradient.is_sparse or (gradient.is_sparse is None and grad is not None and grad.is_sparse):
            gradient.hold()
            self.is_synchronized = False
        else:
            self._send([gradient])

    def synchronize(self) -> None:
        """Waits until every gradient is averaged. Sends the gradients that were not sent before, and zeros for missing ones,
        because other ranks may have them."""
        self._world.check_process_group()
        changed = [gradient.name for gradient in self._gradients if gradient.was_changed_while_held()]
        self._is_synchronizing = True
        try:
            self._exchange()
        finally:
            self._is_synchronizing = False
        self._sent = []
        self.steps += 1
        changed += [gradient.name for gradient in self._gradients if gradient.was_changed()]
        for gradient in self._gradients:
            gradient.restore_layout()
            gradient.forget(self.passes)
        self.is_synchronized = True
        if changed:
            raise MisuseError(
                f"{_some(changed)}: changed after the gradient had left for the other ranks, by clipping, unscaling or "
                "clearing it. Call optimizer.synchronize() after backward, then change gradients, then call "
                "optimizer.step() within `with optimizer.skip_synchronize():`"
            )

    def _exchange(self) -> None:
        """Exchanges what has not left, and waits for all gradients."""
        if missing := [each for each in self._gradients if each.is_sparse is False and each.handle is None]:
            self._send(missing)
        if self._label is not None:
            self._world.joins.step_begins(self._label, self)
        if self._kinds is not None and self._kinds.open:
            self._agree(self._kinds)
        # Operations pair by their order, which is that of the parameters here.
        sums = [
            (gradient.parameter, self._sum(gradient.parameter))
            for gradient in self._gradients
            if gradient.is_sparse
        ]
        for gradient in self._sent:
            assert gradient.handle is not None
            if trace.active and not gradient.handle.done():
                with trace.wait(gradient.name):
                    self._wait(gradient.handle)
            else:
                self._wait(gradient.handle)
        for parameter, each in sums:
            mean = each.wait()
            # A parameter that was frozen meanwhile gets no gradient, or the optimizer would update it.
            if parameter.requires_grad:
                parameter.grad = mean

    def _agree(self, kinds: Kinds) -> None:
        """Learns which gradients are sparse, as far as any rank has had one. Exchanges those that are dense."""
        assert self._job is not None
        self._wait(kinds.push(self._job))
        if dense := [gradient for gradient in kinds.conclude() if gradient.handle is None]:
            self._send(dense)
        for gradient in kinds.open:
            # No rank has a gradient, so the mean is known.
            if gradient.parameter.requires_grad:
                gradient.parameter.grad = gradient.empty().zero_()

    def _sum(self, parameter: torch.Tensor) -> SparseSum:
        is_global = self._process_set is global_process_set
        group = self._world.joins.group() if is_global else self._process_set.group()
        return SparseSum(parameter, parameter.grad if parameter.requires_grad else None, group, self._divisor)

    def check_frozen(self) -> None:
        """Raises MisuseError for gradients that no exchange averages."""
        unfrozen = [name for name, parameter in self._frozen if parameter.grad is not None]
        if unfrozen:
            raise MisuseError(
                f"{_some(unfrozen)}: did not require a gradient when DistributedOptimizer was constructed, but has one: "
                "construct a new DistributedOptimizer after unfreezing parameters"
            )

    def set_passes(self, passes: int) -> None:
        """Makes ``passes`` backward passes one gradient from the next step on."""
        if self.is_under_way:
            raise MisuseError(
                "backward_passes_per_step changed while gradients are exchanged: change it after step()"
            )
        self.passes = passes
        for gradient in self._gradients:
            gradient.passes_left = passes

    def serve(self) -> None:
        """Contributes zeros to one step of the other ranks, for a rank that has no data any more. The group of all ranks serves
        the sums of sparse gradients."""
        self._served = self._submit_zeros([each for each in self._gradients if each.is_sparse is False])
        if self._kinds is not None and self._kinds.open:
            assert self._job is not None
            self._served_kinds = self._kinds.push(self._job, has_gradients=False)
        self.steps += 1

    def has_served(self) -> bool:
        """Returns whether the step of the last `serve` has ended, and raises its error if it failed."""
        if self._served_kinds is not None and self._served_kinds.done():
            self._served_kinds.wait()
            self._served_kinds = None
            assert self._kinds is not None
            self._served += self._submit_zeros(self._kinds.conclude())
        if self._served_kinds is not None or not all(handle.done() for handle in self._served):
            return False
        for handle in self._served:
            handle.wait()
        self._served = []
        return True

    def failure(self) -> BaseException | None:
        """The reason why nothing can be exchanged any more, or None."""
        return self._job.failure() if self._job is not None else None

    def _wait(self, handle: _native.Handle | StagedHandle) -> None:
        if self._label is not None:
            self._world.joins.wait(handle)
        else:
            handle.wait()

    def _send(self, gradients: Sequence[Gradient]) -> None:
        """Submits these gradients: in one request, or in groups of a stage."""
        memories = [self._prepare(gradient) for gradient in gradients]
        # The stage writes the result with a torch operation, which increments the version.
        versions = [memory._version + (self._stage is not None) for memory in memories]
        handles = self._submit(gradients, memories)
        for gradient, memory, version, handle in zip(gradients, memories, versions, handles, strict=True):
            gradient.memory = memory
            gradient.version = version
            gradient.handle = handle
            if trace.active:
                trace.request(gradient.name, handle)
        self._sent += gradients
        self.is_synchronized = False

    def _submit_zeros(self, gradients: Sequence[Gradient]) -> list[_native.Handle | StagedHandle]:
        if not gradients:
            return []
        return list(self._submit(gradients, [each.empty().zero_() for each in gradients]))

    def _submit(
        self, gradients: Sequence[Gradient], memories: list[torch.Tensor]
    ) -> Sequence[_native.Handle | StagedHandle]:
        assert self._job is not None
        keys = [gradient.key for gradient in gradients]
        if self._stage is None:
            ranges = [
                (memory.data_ptr(), gradient.nbytes)
                for gradient, memory in zip(gradients, memories, strict=True)
            ]
            return [self._job.push_pull_in_place(keys, ranges, memories)] * len(keys)
        parts = [memory.as_strided((memory.numel(),), (1,)) for memory in memories]
        handles = [self._stage.collect(key, part, part) for key, part in zip(keys, parts, strict=True)]
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            # Nothing comes after these, and another rank may wait for one of them before it sends the others.
            self._stage.hand_over()
        return handles

    def _prepare(self, gradient: Gradient) -> torch.Tensor:
        """The memory in which a gradient is exchanged, with the same layout on all ranks."""
        parameter = gradient.parameter
        memory = parameter.grad
        if memory is None:
            memory = gradient.empty().zero_()
            if parameter.requires_grad:
                parameter.grad = memory
            # A parameter that was frozen meanwhile contributes zeros. It gets no gradient, or the optimizer would update it.
            return memory
        if memory.layout is not torch.strided:
            gradient.sparse_dimensions = memory.sparse_dim()
            memory = parameter.grad = memory.to_dense()
        elif not self._sparse_as_dense:
            gradient.sparse_dimensions = None
        if memory.dtype is not gradient.dtype or memory.device != gradient.device:
            raise MisuseError(
                f"the gradient of {gradient.name!r} is {memory.dtype} on {memory.device}, but {gradient.dtype} on "
                f"{gradient.device} was agreed on: construct DistributedOptimizer after the model has got its type and "
                "device"
            )
        if memory.stride() != gradient.strides and not gradient.takes_order_of(memory):
            memory = parameter.grad = gradient.empty().copy_(memory)
        return memory

    def _on_backward_end(self) -> None:
        self._is_in_backward = False
        trace.record("backward", trace.COMPUTATION, self._backward_ns, _native.now_ns())


class Gradient:
    """One parameter's gradient in one step. ``key`` is its position in the job's key table, if it is dense."""

    __slots__ = (
        "device",
        "dtype",
        "handle",
        "held",
        "held_version",
        "is_sparse",
        "key",
        "memory",
        "name",
        "nbytes",
        "parameter",
        "passes_left",
        "sparse_dimensions",
        "strides",
        "version",
    )

    def __init__(self, name: str, parameter: torch.Tensor, key: int, passes: int) -> None:
        self.name = name
        self.parameter = parameter
        self.key = key
        self.dtype = parameter.dtype
        self.device = parameter.device
        self.nbytes = parameter.numel() * parameter.element_size()
        # Autograd gives a gradient its parameter's layout, or lays it out row by row if the parameter has gaps.
        laid_out = parameter if is_dense(parameter) else torch.empty(parameter.shape, device="meta")
        self.strides = laid_out.stride()
        self.passes_left = passes
        self.handle: _native.Handle | StagedHandle | None = None
        self.memory: torch.Tensor | None = None
        self.version = 0
        self.is_sparse: bool | None = False
        """Whether the ranks exchange it as rows. None as long as no rank has had it."""
        self.held: torch.Tensor | None = None
        """The complete gradient if it stays here until `GradientExchange.synchronize`."""
        self.held_version = 0
        self.sparse_dimensions: int | None = None
        """The number of sparse dimensions of a gradient that backward computes as a sparse one."""

    def empty(self) -> torch.Tensor:
        """Memory for the gradient, with the same layout on all ranks."""
        return torch.empty_strided(self.parameter.shape, self.strides, dtype=self.dtype, device=self.device)

    def takes_order_of(self, memory: torch.Tensor) -> bool:
        """Returns whether elements lie in the agreed order although strides differ: a dimension of extent 1 may have any
        stride."""
        pairs = zip(memory.stride(), self.strides, memory.shape, strict=True)
        if any(mine != agreed and extent != 1 for mine, agreed, extent in pairs):
            return False
        self.strides = memory.stride()
        return True

    @property
    def is_held(self) -> bool:
        return self.held is not None

    def hold(self) -> None:
        """Keeps the complete gradient until the ranks exchange its rows."""
        self.held = self.parameter.grad
        self.held_version = 0 if self.held is None else self.held._version

    def was_changed_while_held(self) -> bool:
        """Returns whether user code wrote, replaced or cleared a gradient that stays here."""
        if self.held is None:
            return False
        return self.parameter.grad is not self.held or self.held._version != self.held_version

    def was_changed(self) -> bool:
        """Returns whether user code wrote, replaced or cleared the gradient during the exchange."""
        if self.memory is None:
            return False
        held = self.parameter.grad
        is_held = held is self.memory or not self.parameter.requires_grad
        return not is_held or self.memory._version != self.version

    def restore_layout(self) -> None:
        """Makes a gradient sparse that was so before the exchange: optimizers such as SparseAdam take no other."""
        if self.sparse_dimensions is not None and self.parameter.grad is not None:
            self.parameter.grad = self.parameter.grad.to_sparse(self.sparse_dimensions)

    def forget(self, passes: int) -> None:
        self.handle = self.memory = self.held = None
        self.passes_left = passes


_exchanged: weakref.WeakValueDictionary[int, GradientExchange] = weakref.WeakValueDictionary()
"""The exchange of each parameter's gradient, by the parameter's id. The exchange keeps the parameter alive, and so the id."""


def _on_gradient(
    exchange: weakref.ref[GradientExchange], gradient: Gradient, parameter: torch.Tensor
) -> None:
    alive = exchange()
    if alive is not None:
        alive.on_gradient(gradient)


def _remove(hooks: Sequence[torch.utils.hooks.RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(map(repr, names[:NAMED_MAX])) + (f" and {more} more" if more > 0 else "")
