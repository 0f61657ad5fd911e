"""The full path: gradients leave during backward, the hub runs the optimizer, parameters come back in place."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from paramhub.errors import JobFailedError, MisuseError
from paramhub.optimizers import Optimizer
from paramhub.torch import _ddp_around, _memory, _numbers, _optimizer_state, _startup, _tensors, trace
from paramhub.torch._attachment import Attachment, check_free
from paramhub.torch._exchange import Exchange, StepUnderWay
from paramhub.torch._opening import open_job
from paramhub.torch._schemes import Schemes
from paramhub.torch._unused import Agreement
from paramhub.torch._world import World, say, world

NAMED_MAX = 5
"""Parameters an error names."""
AFTER_IT_LEFT = (
    "between backward and step(), when it had left. This step was made with it as it had left. Give HubOptimizer max_grad_norm "
    "instead of clipping (and max_grad_norm=0 to a trainer that clips by itself), scale the loss instead of gradients, use bf16, "
    "which needs no GradScaler, and call zero_grad() after step()"
)


class HubOptimizer(torch.optim.Optimizer):
    """An optimizer that the hub runs for all ranks, and that exchanges while the model computes.

    Every rank makes it, with equal arguments; rank 0's parameters become everybody's. From then on a training loop is as with
    any optimizer::

        optimizer = paramhub.torch.HubOptimizer(model, paramhub.Nesterov(lr=0.1, momentum=0.9))
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()

    Each gradient leaves as soon as backward has completed it. The hub takes the mean of all ranks' and updates the parameter,
    whose new value arrives in place, perhaps while backward still goes on (see `Exchange` for why that is right). `step`
    only checks that everything left; the next forward pass waits for one module's parameters at a time. So a parameter is
    read through its module, which waits: ``model.fc.weight``, ``model.parameters()``, ``model.state_dict()``. Before anything
    reads one that it holds by itself, call `synchronize`.

    ``optimizer`` is one of `paramhub.SGD`, `Nesterov`, `Adam`, `AdamW`, or one registered at the hub. ``params`` are the
    parameters or groups of them, as for torch.optim, by default all of the model's. What ``param_groups`` say before backward
    holds in that step, as rank 0 has them, so that learning-rate schedulers work as usual. Frozen parameters are left out.

    - ``codec`` (``bf16``, ``f16``) is how gradients travel, by default as they lie in memory. ``one-bit`` and ``two-bit`` are for
      the matrices of a model, mostly its fully connected layers and embeddings: see `paramhub.Job.init`. Gradients must be
      finite then. ``codecs`` names codecs of single parameters.
    - ``backward_passes_per_step``: the gradients of so many passes are added up before they leave; see also `no_sync`.
    - ``max_grad_norm``: gradients are clipped to this norm, of all parameters' mean gradient together, as
      ``torch.nn.utils.clip_grad_norm_`` does it. No parameter is updated before the last gradient of all ranks has arrived.
    - ``find_unused_parameters``: ranks agree in each step on which parameters nobody has a gradient for, and leave those as
      they are; a rank without a gradient that others have contributes zeros. Without it all need a gradient in each step.
    - ``overlap_forward``: if False, `step` waits for all parameters.
    - ``broadcast_buffers``: rank 0's buffers and frozen parameters become everybody's, once, now.
    - ``chunk_bytes``, ``reproducible`` and ``reject_non_finite`` are as for `paramhub.Job.init`.
    - ``scheme``: with ``auto`` each Linear whose gradient would move more than its factors (its inputs and output gradients)
      goes by these, from rank to rank, and each rank makes the update; with ``factors`` each that can. The first step goes
      through the hub and is looked at; rank 0 then prints which layer goes which way, and why, and `schemes` has it.
      ``samples`` is the most rows that a rank puts through a Linear in a step, for all of them or by name, where later steps
      have more than the first.

    Raises MisuseError for what cannot work, and if ranks disagree on any of it; ConnectError where a rank does not arrive.
    """

    _stages_all = False
    """For tests: the host's own tensors pass through a stage, too."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer = None,  # type: ignore[assignment]  # Who leaves it out is told what to give.
        *,
        params: Iterable[Any] | None = None,
        codec: str | None = None,
        codecs: Mapping[str, str] | None = None,
        backward_passes_per_step: int = 1,
        max_grad_norm: float | None = None,
        find_unused_parameters: bool = False,
        overlap_forward: bool = True,
        broadcast_buffers: bool = True,
        chunk_bytes: int | None = None,
        reproducible: bool | None = None,
        reject_non_finite: bool = False,
        scheme: str = "hub",
        samples: int | Mapping[str, int] | None = None,
    ) -> None:
        _startup.check_arguments(model, optimizer)
        if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
            raise MisuseError(
                f"backward_passes_per_step is to be a number from 1, not {backward_passes_per_step!r}"
            )
        names = _startup.names(model)
        self._kind = optimizer.name
        self._names = _numbers.defaults(optimizer)
        self._is_complete = False
        super().__init__(model.parameters() if params is None else params, dict(self._names))
        self._is_complete = True
        self._overlaps_forward = overlap_forward
        self._clips = max_grad_norm is not None
        self._settings: dict[str, Any] = {"codec": codec, "reject_non_finite": reject_non_finite}
        for name, value in (
            ("clip_norm", max_grad_norm),
            ("chunk_bytes", chunk_bytes),
            ("reproducible", reproducible),
        ):
            if value is not None:
                self._settings[name] = value
        self._world = world()
        self._step = StepUnderWay(backward_passes_per_step)
        self._step.needs_all = self._clips or find_unused_parameters
        self._exchanges = self._make_exchanges(names)
        self._codecs = dict(codecs or {})
        if unknown := self._codecs.keys() - {exchange.name for exchange in self._exchanges}:
            raise MisuseError(f"codecs names {sorted(unknown)}, which are none of the parameters")
        self._frozen = [
            (names[id(parameter)], parameter) for parameter in self._all() if not parameter.requires_grad
        ]
        if broadcast_buffers:
            _startup.broadcast_rest(self._world, model, {id(e.parameter) for e in self._exchanges})
        why_no_factors = _why_no_factors(self._kind, self._clips, reject_non_finite)
        self._schemes = Schemes(self._world, model, self._exchanges, scheme, samples, why_no_factors)
        self._agreement = Agreement(self._world, self._exchanges) if find_unused_parameters else None
        self._open_job(None)
        self._resumed_step = self._step.job.resumed_step
        self._attachment = Attachment(model, self._exchanges)
        self._step.watch = trace.watch(model)
        self._released = weakref.finalize(
            self, _release, self._world, self._step, self._attachment, self._agreement, self._schemes
        )
        # At the end of the process the world leaves all jobs in the right order.
        self._released.atexit = False

    def _make_exchanges(self, names: dict[int, str]) -> list[Exchange]:
        given = {id(parameter): parameter for parameter in self._all()}
        strangers = [index for index, at in enumerate(given) if at not in names]
        if strangers:
            raise MisuseError(
                f"parameter {strangers[0]} of those given is none of the model's: all must be, so that whoever reads them "
                "through the model waits"
            )
        # Forward order, as far as the model's definition tells: what is needed first is most urgent.
        named = [(name, given[at]) for at, name in names.items() if at in given and given[at].requires_grad]
        for name, parameter in named:
            _startup.check(name, parameter)
        named = [(name, parameter) for name, parameter in named if parameter.numel() > 0]
        self._step.is_staged = _tensors.check_same_device(named).type != "cpu" or self._stages_all
        check_free(named)
        for _, parameter in named:
            _memory.make_dense(parameter)
        _memory.check_apart(named)
        self._step.total = len(named)
        return [Exchange(number, *pair, self._step) for number, pair in enumerate(named)]

    def _open_job(self, states: Sequence[_optimizer_state.State] | None) -> None:
        """All ranks agree on parameters and numbers, and start from what rank 0 has."""
        group_of = {id(p): at for at, group in enumerate(self.param_groups) for p in group["params"]}
        groups = [group_of[id(exchange.parameter)] for exchange in self._exchanges]
        first, *others = [
            _numbers.settings_of(_numbers.of_group(group, self._names)) for group in self.param_groups
        ]
        chosen = {"name": self._kind, "hyperparameters": first, "groups": others}
        settings = {**self._settings, **self._schemes.settings, "optimizer": chosen}
        open_job(self._world, self._exchanges, groups, settings, states, self._codecs)
        self._schemes.opened(self._step.job)
        members: list[list[Exchange]] = [[] for _ in self.param_groups]
        for exchange, group in zip(self._exchanges, groups, strict=True):
            members[group].append(exchange)
        self._tuning = _numbers.Tuning(
            self._step.job, self.param_groups, self._names, members, may_lag=self._agreement is not None
        )
        self._step.begin = self._tuning.begin_step
        # It is at the hub. torch.distributed.checkpoint makes a step of zeros with an optimizer that has none at all.
        self.state.update({exchange.parameter: {} for exchange in self._exchanges})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step: checks that every gradient has left, and lets those leave that no hook has.

        It does not wait for the new values (unless ``overlap_forward`` is off); whoever reads them does. ``closure`` is called
        first, and its result returned.

        Raises MisuseError where a parameter has no gradient, or where gradients or numbers of ``param_groups`` were changed
        after they had left, and JobFailedError if the job has failed. Where all gradients had left, the step is made all the
        same, with what had left; else the next `zero_grad` ends it.
        """
        self._world.check_process_group()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with trace.span("step"):
            try:
                self._let_the_rest_leave()
                self._schemes.flush()
            except BaseException:
                self._step.is_cut = self._step.left > 0
                raise
            refusal = None
            try:
                self._check_unchanged()
            except MisuseError as error:
                # Everything has left, and the other ranks count on this one in the steps to come.
                refusal = error
            self._end_step()
            if refusal is not None:
                raise refusal
        return loss

    def _end_step(self) -> None:
        """All gradients have left."""
        for exchange in self._exchanges:
            exchange.forget_step()
        self._schemes.finish_step()
        if self._agreement is not None:
            self._agreement.finish_step()
        self._step.begin_next()
        if self._overlaps_forward:
            for number in self._attachment.guards.compiled:
                self._exchanges[number].wait()
        else:
            self.synchronize()
        if self._schemes.is_observing:
            # Then every rank is about here: only so long do they wait for one another.
            self.synchronize()
            if self._schemes.conclude():
                self._reopen_job(self._pull_states())

    def _end_cut_step(self) -> None:
        """An exception has cut a step short. What had left of it counts, and zeros stand for the rest: the other ranks, which may
        have heard of nothing, do not wait for this one, and all have made as many steps."""
        used = [True] * self._step.total
        if self._agreement is not None:
            used = self._agreement.used_somewhere([exchange.has_left for exchange in self._exchanges])
        for exchange in self._exchanges:
            # Clipped gradients are awaited whether or not any rank has one.
            is_awaited = used[exchange.number] or self._clips
            if is_awaited and exchange.layer is None and not exchange.has_left:
                exchange.wait()
                exchange.leave_zeros()
        self._schemes.complete(used)
        self._end_step()

    def _let_the_rest_leave(self) -> None:
        """Gradients of passes without exchange, or put there by the user; and what no rank has one for is left out."""
        used = None
        if self._agreement is not None:
            used = self._agreement.used_somewhere(
                [exchange.parameter.grad is not None for exchange in self._exchanges]
            )
            unused = [e.name for e, is_used in zip(self._exchanges, used, strict=True) if not is_used]
            if unused and self._clips:
                raise MisuseError(
                    f"no rank has a gradient for {_some(unused)}: gradients are clipped by the norm of all, so all must be "
                    "there. Freeze what takes no part before HubOptimizer is made"
                )
        if self._step.left == self._step.total:
            return
        missing = [exchange for exchange in self._exchanges if not exchange.has_left]
        without = [exchange.name for exchange in missing if exchange.parameter.grad is None]
        if without and used is None:
            raise MisuseError(
                f"{len(without)} of {self._step.total} parameters have no gradient in step(): {_some(without)}. Was "
                "backward() called? If parameters take no part, freeze them (requires_grad_(False)) before HubOptimizer is "
                "made, or give it find_unused_parameters=True if they do in some steps or on some ranks"
            )
        for exchange in missing:
            gradient = exchange.parameter.grad
            if gradient is not None:
                exchange.wait()
                exchange.leave(gradient)
            elif self._agreement is not None and used is not None and used[exchange.number]:
                exchange.wait()
                exchange.leave(self._agreement.zeros_for(exchange))
                exchange.gradient = None

    def _check_unchanged(self) -> None:
        for exchange in self._exchanges:
            if (what := exchange.what_became_of_gradient) is not None:
                if _ddp_around.is_around(exchange.parameter):
                    raise _ddp_around.refusal(exchange.name)
                raise MisuseError(f"the gradient of {exchange.name!r} was {what} {AFTER_IT_LEFT}")
        changed = self._tuning.changed() if self._step.has_begun else None
        if changed:
            raise MisuseError(
                f"param_groups' {', '.join(changed)} changed between backward and step(), when gradients had left: change "
                "them, or step a scheduler, after step() and before backward"
            )
        thawed = [name for name, parameter in self._frozen if parameter.grad is not None]
        if thawed:
            raise MisuseError(
                f"{_some(thawed)}: frozen when HubOptimizer was made, and has a gradient now. close() it and make a new one "
                "after unfreezing parameters"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim's. Gradients that are to be zeroed in place are exchanged first.

        After an exception in a backward pass or in `step` this ends the step, where gradients of it have left: they count, and
        zeros stand for the rest. So the other ranks do not wait for this one, and training goes on with the next batch.
        """
        if self._step.was_cut_short:
            self._end_cut_step()
        elif self._step.left > 0:
            raise MisuseError(
                "zero_grad() came between backward and step(), when gradients had left: call it after step(). A backward pass "
                "whose gradients are not meant for this optimizer runs in `with optimizer.no_sync():`"
            )
        else:
            # A pass of several may have been cut short, and passes are counted anew.
            for exchange in self._exchanges:
                exchange.forget_step()
            self._step.begin_next()
        if not set_to_none:
            self.synchronize()
            self._schemes.forget()
        super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context add their gradients up, and none leaves. The first pass outside, or `step`, lets
        the sum leave."""
        before, self._step.is_paused = self._step.is_paused, True
        try:
            yield
        finally:
            self._step.is_paused = before

    def synchronize(self) -> None:
        """Waits until all parameters have their newest values.

        Needed only before code that reads a parameter it holds by itself, not through its module.
        """
        for exchange in self._exchanges:
            exchange.wait()

    @property
    def schemes(self) -> dict[str, tuple[str, str]]:
        """By the names of the model's Linears the scheme of each, and why. Empty with ``scheme="hub"``, and before the end of the
        first step there are only those whose scheme was known before."""
        return dict(self._schemes.found)

    @property
    def resumed_step(self) -> int | None:
        """The step that training goes on from, where parameters and the optimizer's state are those of a checkpoint that hubs
        wrote; None where they are rank 0's. ``param_groups`` are as the script made them, and so is the place in the data."""
        return self._resumed_step

    @property
    def last_grad_norm(self) -> float | None:
        """With ``max_grad_norm``, the norm that the mean gradient had in the last step, before it was clipped."""
        if not self._clips:
            return None
        self.synchronize()
        last = self._step.job.last_gradient_norm()
        return last[1] if last is not None else None

    def state_dict(self) -> dict[str, Any]:
        """As of torch.optim's optimizer of this kind, which can load it: the hub's state, after this rank's last step, under
        torch's names. Any rank may ask, between steps."""
        self._refuse_within_step("state_dict()")
        states = _optimizer_state.pull(self._step.job, self._exchanges)
        state_of = {id(e.parameter): state for e, state in zip(self._exchanges, states, strict=True)}
        saved = super().state_dict()
        saved["state"] = {}
        for index, (group, parameter) in enumerate(self._with_groups()):
            if id(parameter) in state_of:
                entry = _optimizer_state.as_torch_has_it(self._kind, state_of[id(parameter)], group)
                if entry:
                    saved["state"][index] = entry
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a saved state, of a HubOptimizer or of torch.optim's optimizer of this kind, and from the parameters
        that the model has now: load the model's first. Collective; what rank 0 loads holds for all."""
        self._refuse_within_step("load_state_dict()")
        for group, saved in zip_longest(
            self.param_groups, state_dict["param_groups"], fillvalue={"params": ()}
        ):
            if len(group["params"]) != len(saved["params"]):
                raise MisuseError(
                    f"a saved group has {len(saved['params'])} parameters, and its counterpart here {len(group['params'])}: the "
                    "state is another model's, or was grouped otherwise"
                )
            _numbers.of_group(saved, self._names)
        of = {id(exchange.parameter): exchange for exchange in self._exchanges}
        states = [_optimizer_state.State(0, []) for _ in self._exchanges]
        ids = [at for group in state_dict["param_groups"] for at in group["params"]]
        for at, parameter in zip(ids, self._all(), strict=True):
            entry, exchange = state_dict["state"].get(at), of.get(id(parameter))
            if entry and exchange is not None:
                states[exchange.number] = _optimizer_state.from_torch(self._kind, entry, exchange)
        super().load_state_dict({**state_dict, "state": {}})
        self._reopen_job(states)

    def broadcast_parameters(self) -> None:
        """Rank 0's parameters become everybody's again, and the hub's; the optimizer's state stays. Collective. For after
        they were changed here: by ``model.load_state_dict()``, a new initialisation, and the like."""
        self._refuse_within_step("broadcast_parameters()")
        self._reopen_job(self._pull_states())

    def _pull_states(self) -> Sequence[_optimizer_state.State] | None:
        """What rank 0 needs to open another job that goes on from here."""
        if self._world.rank != 0:
            return None
        return _optimizer_state.pull(self._step.job, self._exchanges)

    def _reopen_job(self, states: Sequence[_optimizer_state.State] | None) -> None:
        """What training starts from is given to a job at its beginning, so this is another job."""
        self.synchronize()
        stage = self._step.stage
        if self._step.job.has_checkpoints and self._world.rank == 0:
            say(
                "the hubs write no more checkpoints: what was loaded or changed is given to another job, which has none"
            )
        self._world.close_job(self._step.job)
        if stage is not None:
            stage.close()
        self._open_job(states)

    def _refuse_within_step(self, what: str) -> None:
        if self._step.was_cut_short:
            raise MisuseError(
                f"{what} came after an exception that has cut a step short, when gradients had left: call zero_grad() first, "
                "which ends the step, or close()"
            )
        if self._step.left > 0:
            raise MisuseError(
                f"{what} came between backward and step(), when gradients had left: call it after step()"
            )

    def close(self) -> None:
        """Waits for all parameters and leaves the job, as every rank does. The model is free again, also where this raises
        JobFailedError because the job has failed. A step that an exception has cut short is ended as by `zero_grad`. Called
        again it does nothing."""
        if not self._released.alive:
            return
        try:
            if self._step.was_cut_short:
                self._end_cut_step()
            self._refuse_within_step("close()")
            self.synchronize()
        except JobFailedError:
            with contextlib.suppress(JobFailedError):
                self._let_go()
            raise
        self._let_go()

    def _let_go(self) -> None:
        self._released.detach()
        self._attachment.remove()
        self._schemes.remove()
        if self._step.watch is not None:
            self._step.watch.remove()
        if self._step.stage is not None:
            self._step.stage.close()
        try:
            self._world.close_job(self._step.job)
        finally:
            if self._agreement is not None:
                self._agreement.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_complete:
            raise MisuseError(
                "a HubOptimizer's parameters are agreed on when it is made: close() it and make another one"
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks this before it unscales, which leaves no trace in the gradients' versions.
        raise MisuseError(
            "GradScaler cannot be used with HubOptimizer: scaled gradients have left when it unscales them, and it leaves steps "
            "out. bf16 needs none"
        )

    def _all(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for _, parameter in self._with_groups())

    def _with_groups(self) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
        """All parameters, frozen ones too, in the order in which torch.optim counts them."""
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])

    def __getstate__(self) -> dict[str, Any]:
        raise MisuseError("a HubOptimizer cannot be copied or pickled: save optimizer.state_dict()")


def _release(
    world: World, step: StepUnderWay, attachment: Attachment, agreement: Agreement | None, schemes: Schemes
) -> None:
    """Nobody has the optimizer any more. Its jobs end when nobody has those either."""
    attachment.remove()
    schemes.remove()
    if step.watch is not None:
        step.watch.remove()
    world.forget_job(step.job)
    if agreement is not None:
        world.forget_job(agreement.job)


def _why_no_factors(optimizer: str, clips: bool, rejects_non_finite: bool) -> str | None:
    if clips:
        return "max_grad_norm takes the norm of the whole gradient, which hubs then need all of"
    if rejects_non_finite:
        return "reject_non_finite has hubs look at every gradient"
    if optimizer not in _optimizer_state.NAMES:
        return f"the optimizer {optimizer!r} is the hubs' own, and ranks make these updates"
    return None


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(map(repr, names[:NAMED_MAX])) + (f" and {more} more" if more > 0 else "")
