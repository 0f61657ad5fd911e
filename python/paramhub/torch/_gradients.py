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
from paramhub.torch._staged_handle import StagedHandle
from paramhub.torch._staging import Stage
from paramhub.torch._tensors import check_same_device, is_dense, key, needs_stage

NAMED_MAX = 5
"""The most parameters that an error names."""


class GradientExchange:
    """Sends each parameter's gradient when backward has completed it, and receives the mean (or sum) over all ranks into the
    same memory.

    Making one is collective: all ranks make theirs in the same order, with the same parameters. ``parameters`` are in
    forward order; earlier ones are more urgent. ``passes`` is the number of backward passes that make one gradient. The ranks
    are those of ``process_set``; on the others nothing is exchanged.
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
        self._gradients: list[_Gradient] = []
        self._sent: list[_Gradient] = []
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
        self._served: list[_native.Handle | StagedHandle] = []
        self._label: str | None = None
        """The name under which joined ranks know this exchange, if it is one of all ranks."""
        if process_set.process_set_id is None:
            raise MisuseError(
                f"{process_set} is not in use: call paramhub.torch.add_process_set() on every rank before"
            )
        ranks = process_set.ranks
        if len(ranks) == 1 or here.rank not in ranks or not trained:
            return
        device, codec = check_same_device(trained), here.codec(codec)
        is_global = process_set is global_process_set
        label = here.label("optimizer" if is_global else f"optimizer-set-{process_set.process_set_id}")
        self._job = here.jobs.open(
            label,
            {
                "keys": [key(name, parameter) for name, parameter in trained],
                "optimizer": {"name": reduction},
                "codec": codec,
            },
            None if is_global else ranks,
            inherits=is_global,
        )
        if needs_stage(device):
            sizes = [torch.Size([parameter.numel()]) for _, parameter in trained]
            dtypes = [parameter.dtype for _, parameter in trained]
            self._stage = Stage(self._job, device, sizes, dtypes, is_encoded=codec is not None)
        this = weakref.ref(self)
        hooks = []
        for number, (name, parameter) in enumerate(trained):
            gradient = _Gradient(name, parameter, number, passes)
            if sparse_as_dense and takes_only_sparse:
                # The gradient of an embedding is sparse in its rows.
                gradient.sparse_dimensions = 1
            self._gradients.append(gradient)
            hook = functools.partial(_on_gradient, this, gradient)
            hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            _exchanged[id(parameter)] = self
        # The parameters may outlive this object, and their hooks must not send then.
        weakref.finalize(self, _remove, hooks)
        if is_global:
            self._label = label
            here.joins.add_optimizer(label, self)

    @property
    def is_under_way(self) -> bool:
        """Returns whether gradients were sent since the last `synchronize`."""
        return bool(self._sent)

    def on_gradient(self, gradient: _Gradient) -> None:
        """Called when backward has added to a gradient."""
        if trace.active and not self._is_in_backward:
            self._is_in_backward = True
            self._backward_ns = _native.now_ns()
            torch.autograd.Variable._execution_engine.queue_callback(self._on_backward_end)
        gradient.passes_left -= 1
        if gradient.passes_left > 0:
            return
        if gradient.handle is not None:
            raise MisuseError(
                f"{gradient.name!r} has got a gradient in more than {self.passes} backward passes since the last step: "
                "call optimizer.step() after each, or give DistributedOptimizer backward_passes_per_step as many as "
                "are to be added up"
            )
        self._send([gradient])

    def synchronize(self) -> None:
        """Waits until every gradient is averaged. Sends the gradients that were not sent before, and zeros for missing ones,
        because other ranks may have them."""
        self._world.check_process_group()
        missing = [gradient for gradient in self._gradients if gradient.handle is None]
        if missing:
            self._send(missing)
        if self._label is not None:
            self._world.joins.step_begins(self._label, self)
        for gradient in self._sent:
            assert gradient.handle is not None
            if trace.active and not gradient.handle.done():
                with trace.wait(gradient.name):
                    self._wait(gradient.handle)
            else:
                self._wait(gradient.handle)
        self._sent = []
        self.steps += 1
        changed = [gradient.name for gradient in self._gradients if gradient.was_changed()]
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
        if self._sent:
            raise MisuseError(
                "backward_passes_per_step changed while gradients are exchanged: change it after step()"
            )
        self.passes = passes
        for gradient in self._gradients:
            gradient.passes_left = passes

    def serve(self) -> None:
        """Contributes zeros to one step of the other ranks, for a rank that has no data any more."""
        self._served = list(self._submit(self._gradients, [each.empty().zero_() for each in self._gradients]))
        self.steps += 1

    def has_served(self) -> bool:
        """Returns whether the step of the last `serve` has ended, and raises its error if it failed."""
        if not all(handle.done() for handle in self._served):
            return False
        for handle in self._served:
            handle.wait()
        self._served = []
        return True

    def failure(self) -> BaseException | None:
        """The reason why nothing can be exchanged any more, or None."""
        return self._job.failure() if self._gradients else None

    def _wait(self, handle: _native.Handle | StagedHandle) -> None:
        if self._label is not None:
            self._world.joins.wait(handle)
        else:
            handle.wait()

    def _send(self, gradients: Sequence[_Gradient]) -> None:
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

    def _submit(
        self, gradients: Sequence[_Gradient], memories: list[torch.Tensor]
    ) -> Sequence[_native.Handle | StagedHandle]:
        keys = [gradient.key for gradient in gradients]
        if self._stage is None:
            ranges = [
                (memory.data_ptr(), gradient.nbytes)
                for gradient, memory in zip(gradients, memories, strict=True)
            ]
            return [self._job.push_pull_in_place(keys, ranges, memories)] * len(keys)
        parts = [memory.as_strided((memory.numel(),), (1,)) for memory in memories]
        return [self._stage.collect(key, part, part) for key, part in zip(keys, parts, strict=True)]

    def _prepare(self, gradient: _Gradient) -> torch.Tensor:
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
            if not self._sparse_as_dense:
                raise MisuseError(
                    f"the gradient of {gradient.name!r} is sparse: use sparse=False in its module, or give "
                    "DistributedOptimizer sparse_as_dense=True"
                )
            gradient.sparse_dimensions = memory.sparse_dim()
            memory = parameter.grad = memory.to_dense()
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


class _Gradient:
    """One parameter's gradient in one step."""

    __slots__ = (
        "device",
        "dtype",
        "handle",
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

    def was_changed(self) -> bool:
        """Returns whether user code wrote, replaced or cleared the gradient during the exchange."""
        assert self.memory is not None
        held = self.parameter.grad
        is_held = held is self.memory or not self.parameter.requires_grad
        return not is_held or self.memory._version != self.version

    def restore_layout(self) -> None:
        """Makes a gradient sparse that was so before the exchange: optimizers such as SparseAdam take no other."""
        if self.sparse_dimensions is not None and self.parameter.grad is not None:
            self.parameter.grad = self.parameter.grad.to_sparse(self.sparse_dimensions)

    def forget(self, passes: int) -> None:
        self.handle = self.memory = None
        self.passes_left = passes


_exchanged: weakref.WeakValueDictionary[int, GradientExchange] = weakref.WeakValueDictionary()
"""The exchange of each parameter's gradient, by the parameter's id. The exchange keeps the parameter alive, and so the id."""


def _on_gradient(
    exchange: weakref.ref[GradientExchange], gradient: _Gradient, parameter: torch.Tensor
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
