"""HubOptimizer: ranks send gradients during backward, the hub runs the optimizer, ranks receive parameters in place."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paramhub import _native
from paramhub.errors import JobFailedError, MisuseError, Rewound
from paramhub.optimizers import BY_NAME, NEED_TENSOR_NORMS, Optimizer
from paramhub.torch import (
    _hyperparameters,
    _memory,
    _model_checks,
    _optimizer_state,
    _rows,
    _tensors,
    _trained_models,
    trace,
)
from paramhub.torch._buffer_sync import BufferSync
from paramhub.torch._exchange import Exchange, StepState
from paramhub.torch._initialization import world
from paramhub.torch._log import log
from paramhub.torch._loss_scaling import LossScaling
from paramhub.torch._optimizer_job import open_job
from paramhub.torch._parameter_hooks import ParameterHooks, check_free
from paramhub.torch._rows import Rows
from paramhub.torch._schemes import Schemes, why_no_factors
from paramhub.torch._stateful_optimizer import StatefulOptimizer
from paramhub.torch._step_gradients import StepGradients
from paramhub.torch._unused_parameters import UsedParameters
from paramhub.torch._world import World

if TYPE_CHECKING:
    from paramhub.torch._program_state import State


class HubOptimizer(StatefulOptimizer):
    """An optimizer that the hub runs for all ranks, and that exchanges while the model computes.

    Every rank makes it, with equal arguments, and receives rank 0's parameters. From then on a training loop is as with
    any optimizer::

        optimizer = paramhub.torch.HubOptimizer(model, paramhub.Nesterov(lr=0.1, momentum=0.9))
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()

    Each gradient is sent as soon as backward has completed it. The hub takes the mean over all ranks and updates the
    parameter. Its new value arrives in place, perhaps while backward still goes on (see `Exchange` for why that is right).
    `step` only checks that all gradients were sent. In the next forward pass each module waits for its own parameters. So read
    a parameter through its module, which waits: ``model.fc.weight``, ``model.parameters()``, ``model.state_dict()``. Call
    `synchronize` before code that reads a parameter to which it keeps a reference of its own.

    ``optimizer`` is one of `paramhub.optimizers`, such as `paramhub.SGD` or `AdamW`, or one that is registered at the hub.
    ``params`` are the parameters or groups of them, as for torch.optim, by default all of the model's. A step uses the values
    that rank 0's ``param_groups`` have before backward, so learning-rate schedulers work as usual. Frozen parameters are not
    exchanged.

    - ``codec`` (``bf16``, ``f16``) is the encoding of gradients in frames, by default that of the gradients. ``int8`` encodes
      all parameters in a byte an element, ``one-bit`` and ``two-bit`` the matrices of a model, mostly its fully connected
      layers and embeddings: see `paramhub.Job.init`. They need finite gradients. ``codecs`` gives single parameters a codec by
      name.
    - ``backward_passes_per_step``: the number of passes whose gradients are added up before they are sent; see also `no_sync`.
    - ``max_grad_norm``: gradients are clipped to this norm of the mean gradient of all parameters together, as
      ``torch.nn.utils.clip_grad_norm_`` does it. The hub updates no parameter before it has the last gradient of all ranks.
    - ``grad_scaler``: the torch.amp.GradScaler of the loop, which goes on as usual: ``scaler.scale(loss).backward()``,
      ``scaler.step(optimizer)``, ``scaler.update()``, without ``unscale_``. If a gradient of any rank overflows, no rank makes
      the step, and the scalers of all ranks reduce their scale. All ranks begin with rank 0's scale; if a scaler's state is
      loaded later, every rank loads the same. The hub holds its updates as with ``max_grad_norm``, which may be given as well.
    - ``find_unused_parameters``: ranks agree in each step on the parameters for which no rank has a gradient, and leave these
      unchanged. A rank without a gradient that others have contributes zeros. Without this option every parameter needs a
      gradient in each step.
    - ``overlap_forward``: if False, `step` waits for all parameters.
    - ``broadcast_buffers``: every rank receives rank 0's buffers and frozen parameters, once, when the optimizer is made at the
      first start. A rank that is started again makes its frozen parameters itself, and has its buffers from a
      `paramhub.torch.State`.
    - ``sync_buffers``: every rank receives rank 0's buffers, such as BatchNorm's running statistics, before each forward pass in
      training mode, as with DDP. All ranks call the model equally often.
    - ``sparse_adam``: with Adam or AdamW, embeddings with ``sparse=True`` are updated as torch.optim.SparseAdam does, with the
      lr, betas and eps of their groups, and without weight decay.
    - ``ema_decay``: the hub also keeps an exponential moving average of each parameter, as torch.optim.swa_utils'
      ``get_ema_multi_avg_fn(ema_decay)`` after each step; see `ema_parameters`.
    - ``chunk_bytes``, ``reproducible`` and ``reject_non_finite`` are as for `paramhub.Job.init`.
    - ``scheme``: with ``auto`` a Linear whose gradient has more bytes to move than its factors (its inputs and output
      gradients) is exchanged as factors, from rank to rank, and each rank makes the update. With ``factors`` every Linear that
      can be is. The first step goes through the hub, and the optimizer observes it. Rank 0 then prints the scheme of each layer
      and the reason; `schemes` has them, too. ``samples`` is the most rows that a rank puts through a Linear in a step, for all
      Linears or by name. Give it if later steps have more rows than the first.

    Of ``Embedding(sparse=True)`` and ``EmbeddingBag(sparse=True)`` the ranks exchange the rows that a step has used, in
    ``step()``, and each rank updates these rows itself, with SGD without momentum and weight decay, or with ``sparse_adam``. A
    rank may have no gradient for them in a step, and rows that no rank has used stay as they are. This cannot be had with
    ``max_grad_norm``, ``grad_scaler``, ``ema_decay``, ``reject_non_finite``, checkpoints of the hub, or
    ``init(on_worker_loss=)``.

    Raises MisuseError for arguments that cannot work, and if ranks disagree on any; ConnectError if a rank does not arrive.
    """

    _stages_all = False
    """Set by tests: host tensors pass through a stage, too."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer = None,  # type: ignore[assignment]  # check_arguments explains a missing optimizer.
        *,
        params: Iterable[Any] | None = None,
        codec: str | None = None,
        codecs: Mapping[str, str] | None = None,
        backward_passes_per_step: int = 1,
        max_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        find_unused_parameters: bool = False,
        overlap_forward: bool = True,
        broadcast_buffers: bool = True,
        sync_buffers: bool = False,
        ema_decay: float | None = None,
        chunk_bytes: int | None = None,
        reproducible: bool | None = None,
        reject_non_finite: bool = False,
        sparse_adam: bool = False,
        scheme: str = "hub",
        samples: int | Mapping[str, int] | None = None,
    ) -> None:
        _model_checks.check_arguments(model, optimizer)
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise MisuseError(
                f"backward_passes_per_step is to be a number from 1, not {backward_passes_per_step!r}"
            )
        names = _model_checks.names(model)
        self._kind = optimizer.name
        self._names = _hyperparameters.defaults(optimizer)
        if ema_decay is not None:
            if self._kind not in BY_NAME:
                raise MisuseError(
                    f"ema_decay cannot be had with {self._kind!r}: hubs average for their own optimizers"
                )
            self._names[_optimizer_state.EMA_DECAY] = ema_decay
        self._is_complete = False
        super().__init__(model.parameters() if params is None else params, dict(self._names))
        self._is_complete = True
        self._overlaps_forward = overlap_forward
        self._max_grad_norm = max_grad_norm
        self._scaling = LossScaling.of(grad_scaler, max_grad_norm)
        self._holds_steps = (
            max_grad_norm is not None or self._scaling is not None or self._kind in NEED_TENSOR_NORMS
        )
        self._settings: dict[str, Any] = {"reject_non_finite": reject_non_finite}
        for name, value in (
            ("clip_norm", max_grad_norm if self._scaling is None else None),
            ("two_phase", True if self._scaling is not None else None),
            ("chunk_bytes", chunk_bytes),
            ("reproducible", reproducible),
        ):
            if value is not None:
                self._settings[name] = value
        self._world = world()
        self._settings["codec"] = self._world.codec(codec)
        self._step = StepState(backward_passes_per_step, self._world.failures)
        self._step.needs_all = self._holds_steps or find_unused_parameters
        self._model = model
        self._sparse_adam = sparse_adam
        self._rows: Rows | None = None
        self._exchanges = self._make_exchanges(names)
        self._codecs = dict(codecs or {})
        if unknown := self._codecs.keys() - {exchange.name for exchange in self._exchanges}:
            raise MisuseError(f"codecs names {sorted(unknown)}, which are none of the parameters")
        no_factors = why_no_factors(self._kind, self._holds_steps, reject_non_finite)
        self._schemes = Schemes(self._world, model, self._exchanges, scheme, samples, no_factors)
        if find_unused_parameters and (consistency := self._world.hubs.access.job.consistency) not in (
            None,
            "sync",
        ):
            raise MisuseError(
                f"find_unused_parameters waits in each step for every rank, and with consistency={consistency!r} some may not "
                "come: leave one of the two out"
            )
        self._has_schemes = scheme != "hub"
        self._finds_unused = find_unused_parameters
        self._resumed_step: int | None = None
        self._program_state: State | None = None
        self._syncs_buffers = sync_buffers
        self._buffer_sync: BufferSync | None = None
        self._connect(names, None)
        if self._rows is not None:
            self._rows.broadcast(with_state=False)
        # If another process of this rank was lost, the other ranks may go on, and have made this exchange before.
        if broadcast_buffers and not self._step.job.joined_running:
            exchanged = {id(exchange.parameter) for exchange in self._exchanges}
            own_rows = set() if self._rows is None else self._rows.names.keys()
            _model_checks.broadcast_rest(self._world, model, exchanged | own_rows)
        if self._scaling is not None and not self._step.job.joined_running:
            self._scaling.share(self._world)
        _trained_models.add(self)

    def _connect(
        self,
        names: dict[int, str],
        states: Sequence[_optimizer_state.State] | None,
        *,
        replaces: bool = False,
    ) -> None:
        """Opens the job of the exchanged parameters, and connects them with it."""
        frozen = [
            (names[id(parameter)], parameter) for parameter in self._all() if not parameter.requires_grad
        ]
        self._used_parameters = UsedParameters(self._world, self._exchanges) if self._finds_unused else None
        self._gradients = StepGradients(
            self._exchanges,
            self._step,
            self._schemes,
            self._used_parameters,
            frozen,
            holds_steps=self._holds_steps,
        )
        self._step.total = len(self._exchanges)
        self._open_job(states, replaces=replaces)
        if self._syncs_buffers and self._buffer_sync is None:
            self._buffer_sync = BufferSync(self._world, self._model, self._step)
        self._parameter_hooks = ParameterHooks(self._model, self._exchanges)
        # The span of a forward pass has its waits in it, so its hooks come before those of the parameters.
        if self._step.watch is not None:
            self._step.watch.remove()
        self._step.watch = trace.watch(self._model)
        self._released = weakref.finalize(
            self,
            _release,
            self._world,
            self._step,
            self._parameter_hooks,
            self._buffer_sync,
            self._used_parameters,
            self._schemes,
        )
        # At the end of the process `World` leaves all jobs in the right order.
        self._released.atexit = False

    def _make_exchanges(self, names: dict[int, str], former: Sequence[Exchange] = ()) -> list[Exchange]:
        """The exchanges of all parameters. This optimizer exchanges those of ``former`` already."""
        given = {id(parameter): parameter for parameter in self._all()}
        unknown = [index for index, at in enumerate(given) if at not in names]
        if unknown:
            raise MisuseError(
                f"parameter {unknown[0]} of those given is none of the model's: all must be, so that code that reads them "
                "through the model waits"
            )
        # The order of the model's definition, which is mostly forward order: parameters that are needed first are most urgent.
        named = [(name, given[at]) for at, name in names.items() if at in given and given[at].requires_grad]
        for name, parameter in named:
            _model_checks.check(name, parameter)
        named = self._without_sparse(named, is_first=not former)
        named = [(name, parameter) for name, parameter in named if parameter.numel() > 0]
        self._step.is_staged = _tensors.check_same_device(named).type != "cpu" or self._stages_all
        known = {id(exchange.parameter) for exchange in former}
        added = [(name, parameter) for name, parameter in named if id(parameter) not in known]
        check_free(added)
        for _, parameter in added:
            _memory.make_dense(parameter)
        _memory.check_apart(named)
        return [Exchange(number, *pair, self._step) for number, pair in enumerate(named)]

    def _without_sparse(
        self, named: list[tuple[str, torch.nn.Parameter]], *, is_first: bool
    ) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters whose gradients are dense. The first call makes the `Rows` of the others."""
        dense, sparse = _rows.divided(self._model, named)
        if is_first and sparse and not dense:
            raise MisuseError(
                "all gradients of the model are sparse, and a hub has nothing to do for it: use "
                "paramhub.torch.DistributedOptimizer with torch.optim.SparseAdam or SGD, which exchanges rows"
            )
        if is_first and sparse:
            features = {
                "max_grad_norm": self._max_grad_norm is not None,
                "grad_scaler": self._scaling is not None,
                "ema_decay": self._has_averages,
                "reject_non_finite": bool(self._settings["reject_non_finite"]),
            }
            _rows.check(self._model, sparse, self._kind, self._sparse_adam)
            _rows.check_features(sparse[0][0], features, self._world.hubs.access.job)
            self._rows = Rows(self._world, sparse, self._step.failures, sparse_adam=self._sparse_adam)
            self._rows.check_hyperparameters(self.param_groups)
        elif is_first and self._sparse_adam:
            raise MisuseError(
                "sparse_adam is for Embedding and EmbeddingBag modules with sparse=True, and none of their parameters is trained"
            )
        known = {} if self._rows is None else self._rows.names
        if added := [name for name, parameter in sparse if id(parameter) not in known]:
            raise MisuseError(
                f"add_param_group() cannot add {added[0]!r}, whose gradient is sparse: close() the optimizer and make another one"
            )
        return dense

    def _open_job(
        self,
        states: Sequence[_optimizer_state.State] | None,
        former: _native.Job | None = None,
        *,
        replaces: bool = False,
    ) -> None:
        """Opens a job with these parameters and hyperparameters, which starts from rank 0's values; or joins the job of
        ``former`` again, which has gone back to an earlier step. ``replaces`` is as for `open_job`."""
        group_of = {id(p): at for at, group in enumerate(self.param_groups) for p in group["params"]}
        groups = [group_of[id(exchange.parameter)] for exchange in self._exchanges]
        first, *others = [
            _hyperparameters.settings_of(_hyperparameters.group_hyperparameters(group, self._names))
            for group in self.param_groups
        ]
        chosen = {"name": self._kind, "hyperparameters": first, "groups": others}
        settings = {**self._settings, **self._schemes.settings, "optimizer": chosen}
        open_job(
            self._world, self._exchanges, groups, settings, states, self._codecs, former, replaces=replaces
        )
        self._schemes.opened(self._step.job)
        if self._rows is not None and self._step.job.has_checkpoints:
            raise MisuseError(
                "the hubs write checkpoints, which would lack the parameters whose gradients are sparse: use sparse=False in "
                "their modules"
            )
        if self._step.job.resumed_step is not None:
            self._resumed_step = self._step.job.resumed_step
        members: list[list[Exchange]] = [[] for _ in self.param_groups]
        for exchange, group in zip(self._exchanges, groups, strict=True):
            members[group].append(exchange)
        self._step.hyperparameters = _hyperparameters.HyperparameterSync(
            self._step.job, self.param_groups, self._names, members, may_lag=self._used_parameters is not None
        )
        self._step.begin = self._step.hyperparameters.begin_step
        # The hub has the state. With an empty `state` torch.distributed.checkpoint would make a step with zero gradients.
        self.state.update({exchange.parameter: {} for exchange in self._exchanges})

    def _attach_state(self, state: State) -> None:
        """Has steps wait until the hub has the program's state."""
        self._program_state, self._step.program_state = state, weakref.ref(state)

    @property
    def _job(self) -> _native.Job:
        return self._step.job

    def _next_step(self) -> int:
        """The number of the next step."""
        return self._exchanges[0].next_step()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step: sends the gradients that no hook has sent, and checks all of them.

        It does not wait for the new values (unless ``overlap_forward`` is off), but for the rows of embeddings with
        ``sparse=True``; code that reads a parameter waits for it. ``closure`` is called first, and its result returned.

        Raises MisuseError if a parameter has no gradient, or if gradients or values of ``param_groups`` were changed after
        gradients were sent, and JobFailedError if the job has failed. If all gradients were sent before the error, the step is
        made nevertheless, with the gradients as they were sent. Otherwise the next `zero_grad` ends the step.
        """
        self._world.check_process_group()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with trace.span("step"):
            try:
                self._gradients.send_remaining()
                self._schemes.flush()
                if self._rows is not None:
                    self._step.hand_over()
                    self._rows.step(self.param_groups)
            except BaseException:
                self._step.is_interrupted = self._step.left > 0
                raise
            finally:
                self._step.hand_over()
            refusal = None
            try:
                self._gradients.check_unchanged()
            except MisuseError as error:
                # All gradients were sent, so the step counts. The other ranks need this rank in the next steps.
                refusal = error
            is_refused = False
            if self._scaling is not None and (of_scaling := self._scaling.refusal(self)) is not None:
                refusal, is_refused = of_scaling, True
            self._end_step(is_refused=is_refused)
            if refusal is not None:
                raise refusal
        return loss

    def _end_step(self, *, is_refused: bool = False) -> None:
        """Ends a step in which all gradients were sent. A step that ``is_refused`` is left out, if its loss was scaled."""
        if self._scaling is not None:
            self._scaling.end_step(
                self, self._job, self._next_step() - 1, self._world.rank, is_refused=is_refused
            )
        for exchange in self._exchanges:
            exchange.reset_step()
        self._schemes.finish_step()
        if self._used_parameters is not None:
            self._used_parameters.finish_step()
        self._step.begin_next()
        if self._overlaps_forward:
            for number in self._parameter_hooks.guards.compiled:
                self._exchanges[number].wait()
        else:
            self.synchronize()
        if self._schemes.is_observing:
            # After this every rank has about reached this point, so the ranks do not wait long for one another.
            self.synchronize()
            if self._schemes.conclude():
                self._reopen_job(self._pull_states())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does the same as torch.optim's. With ``set_to_none=False`` it first waits for the exchange of the gradients.

        After an exception in a backward pass or in `step` this ends the step if any of its gradients were sent: those count,
        and zeros are sent for the rest. So other ranks do not wait for this rank, and training goes on with the next batch.
        """
        if self._step.was_interrupted:
            self._complete_interrupted()
        elif self._step.left > 0:
            raise MisuseError(
                "zero_grad() came between backward and step(), when gradients had left: call it after step(). A backward pass "
                "whose gradients are not meant for this optimizer runs in `with optimizer.no_sync():`"
            )
        else:
            # An exception may have ended one of several passes, so passes are counted from 0 again.
            for exchange in self._exchanges:
                exchange.reset_step()
            self._step.begin_next()
        if not set_to_none:
            self.synchronize()
            self._schemes.forget()
        super().zero_grad(set_to_none)

    def _complete_interrupted(self) -> None:
        """Ends a step that an exception has interrupted after a part of the gradients was sent."""
        self._gradients.complete_interrupted()
        if self._rows is not None:
            self._rows.step(self.param_groups, contributes=False)
        self._end_step()
        if self._scaling is not None:
            self._scaling.update()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context add up their gradients and send none. The first pass outside, or `step`, sends the
        sum."""
        before, self._step.is_paused = self._step.is_paused, True
        try:
            yield
        finally:
            self._step.is_paused = before

    def synchronize(self) -> None:
        """Waits until all parameters have their newest values.

        Call it before code that reads a parameter by a reference of its own and not through the parameter's module.
        """
        for exchange in self._exchanges:
            exchange.wait()

    @property
    def schemes(self) -> dict[str, tuple[str, str]]:
        """The scheme of each Linear and the reason for it, by the Linear's name in the model. Empty with ``scheme="hub"``. Before
        the end of the first step it has only Linears whose scheme needs no observation."""
        return dict(self._schemes.found)

    @property
    def resumed_step(self) -> int | None:
        """The step from which training resumes, if parameters and the optimizer's state are the hubs': those of a checkpoint, or
        those that an earlier start of the ranks has left (see `init` for ``on_worker_loss``). None if they are rank 0's. The
        hubs set neither ``param_groups`` nor the position in the data."""
        return self._resumed_step

    @property
    def last_grad_norm(self) -> float | None:
        """With ``max_grad_norm``, ``grad_scaler``, LARS or LAMB, the norm of the last step's mean gradient before it was clipped,
        and without the scale of the loss."""
        if not self._holds_steps:
            return None
        self.synchronize()
        return self.newest_grad_norm

    @property
    def newest_grad_norm(self) -> float | None:
        """`last_grad_norm` of the newest step of which the hub has told. It waits for nothing."""
        last = self._step.job.last_gradient_norm() if self._holds_steps else None
        if last is None:
            return None
        return last[1] if self._scaling is None else self._scaling.unscaled(last[1])

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which gradients are clipped."""
        return self._max_grad_norm

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of the loss; None without one, or if it is disabled."""
        return None if self._scaling is None else self._scaling.scaler

    @property
    def skipped_last_step(self) -> bool:
        """Returns whether the newest step was left out because scaled gradients of a rank had overflowed. A learning rate's
        schedule then waits, too."""
        return self._scaling is not None and self._scaling.has_skipped

    def _reopen_job(self, states: Sequence[_optimizer_state.State] | None) -> None:
        """Closes the job and opens another one, because only a new job accepts initial parameters and state."""
        self.synchronize()
        stage = self._step.stage
        had_checkpoints = self._step.job.has_checkpoints
        self._world.jobs.close(self._step.job)
        if stage is not None:
            stage.close()
        self._open_job(states, replaces=True)
        if had_checkpoints and not self._step.job.has_checkpoints and self._world.rank == 0:
            log(
                "the hubs write no more checkpoints: what was loaded or changed is given to another job, which has none"
            )
        if self._program_state is not None:
            self._program_state._begin()

    def rejoin(self) -> None:
        """Joins the job again after `paramhub.Rewound`. Returns when each rank has a process that has joined. The parameters are
        then those of `resumed_step`, to which all ranks have gone back, and the gradients of the step under way are forgotten.

        `paramhub.torch.run` calls it. ``param_groups`` stay as they are; `paramhub.torch.State` sets them back. With
        ``init(max_workers=)`` it raises Rewound again, since the ranks that come may be more or fewer.
        """
        if self._used_parameters is not None:
            raise MisuseError(
                "rejoin() cannot be had with find_unused_parameters, whose exchange cannot be joined again: let the process end, "
                "so that its launcher starts it again"
            )
        if self._world.hubs.access.job.max_workers is not None:
            # This process cannot know how many ranks there will be, and launchers such as torchrun wait for its end.
            raise Rewound(
                f"rank {self._world.rank} ends, so that its launcher starts all ranks again, whose number may change "
                "(max_workers)"
            )
        job, stage = self._step.job, self._step.stage
        for exchange in self._exchanges:
            exchange.forget()
        self._step.begin_next()
        self._schemes.forget()
        super().zero_grad(set_to_none=True)
        if stage is not None:
            stage.close()
        self._open_job(None, former=job)

    def _refuse_within_step(self, what: str) -> None:
        if self._step.was_interrupted:
            raise MisuseError(
                f"{what} came after an exception that has cut a step short, when gradients had left: call zero_grad() first, "
                "which ends the step, or close()"
            )
        if self._step.left > 0:
            raise MisuseError(
                f"{what} came between backward and step(), when gradients had left: call it after step()"
            )

    def close(self) -> None:
        """Waits for all parameters, leaves the job, and removes all hooks from the model, even if it raises JobFailedError
        because the job has failed. Every rank calls it. It ends a step that an exception has interrupted as `zero_grad` does.
        A second call does nothing."""
        if not self._released.alive:
            return
        try:
            if self._step.was_interrupted:
                self._complete_interrupted()
            self._refuse_within_step("close()")
            self.synchronize()
        except JobFailedError:
            with contextlib.suppress(JobFailedError):
                self._release_model()
            raise
        self._release_model()

    def _release_model(self) -> None:
        self._released.detach()
        _trained_models.remove(self)
        if self._rows is not None:
            self._rows.close()
        self._parameter_hooks.remove()
        if self._buffer_sync is not None:
            self._buffer_sync.remove()
        self._schemes.remove()
        if self._step.watch is not None:
            self._step.watch.remove()
        if self._step.stage is not None:
            self._step.stage.close()
        try:
            self._world.jobs.close(self._step.job)
        finally:
            if self._used_parameters is not None:
                self._used_parameters.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model, such as those of a layer that is trained from now on. Collective, between steps. The
        state of the other parameters stays; all ranks receive rank 0's values of the added ones. Parameters that were frozen
        leave the group in which they were."""
        if not self._is_complete:
            super().add_param_group(param_group)
            return
        self._refuse_within_step("add_param_group()")
        if self._has_schemes:
            raise MisuseError(
                'add_param_group() cannot be had with scheme="auto" or "factors", which choose for all layers at once: close() '
                "the optimizer and make another one"
            )
        former, names = self._exchanges, _model_checks.names(self._model)
        self.synchronize()
        states = self._pull_states()
        groups = [dict(group) for group in self.param_groups]
        try:
            self._add_trained_now(param_group, {id(exchange.parameter) for exchange in former})
            exchanges = self._make_exchanges(names, former)
            _hyperparameters.group_hyperparameters(self.param_groups[-1], self._names)
        except BaseException:
            del self.param_groups[len(groups) :]
            for group, before in zip(self.param_groups, groups, strict=True):
                group["params"] = before["params"]
            raise
        self._released.detach()
        self._parameter_hooks.remove()
        stage = self._step.stage
        self._world.jobs.close(self._step.job)
        if stage is not None:
            stage.close()
        if self._used_parameters is not None:
            self._used_parameters.close()
        if states is not None:
            of = {exchange.name: state for exchange, state in zip(former, states, strict=True)}
            states = [of.get(exchange.name) or _optimizer_state.State(0, []) for exchange in exchanges]
        self._exchanges = exchanges
        self._schemes = Schemes(self._world, self._model, exchanges, "hub", None, None)
        self._connect(names, states, replaces=True)
        if self._program_state is not None:
            self._program_state._begin()

    def _add_trained_now(self, param_group: dict[str, Any], exchanged: set[int]) -> None:
        """Adds a group, whose parameters may have been in another one while they were frozen."""
        given = param_group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        moved = {id(parameter) for parameter in given} - exchanged
        for group in self.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
        super().add_param_group({**param_group, "params": given})

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler reads this before it unscales. Unscaling does not change the gradients' versions, so no check would see it.
        if self._scaling is None:
            raise MisuseError(
                "the gradients have left for the hub, which must know that they are scaled: give HubOptimizer "
                "grad_scaler=scaler. bf16 needs no scaler"
            )
        return True

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("a HubOptimizer cannot be copied or pickled: save optimizer.state_dict()")


def _release(
    world: World,
    step: StepState,
    hooks: ParameterHooks,
    buffer_sync: BufferSync | None,
    used_parameters: UsedParameters | None,
    schemes: Schemes,
) -> None:
    """Releases the optimizer's hooks and jobs once nothing refers to it. A job ends when nothing else refers to the job."""
    hooks.remove()
    if buffer_sync is not None:
        buffer_sync.remove()
    schemes.remove()
    if step.watch is not None:
        step.watch.remove()
    world.jobs.forget(step.job)
    if used_parameters is not None:
        world.jobs.forget(used_parameters.job)
