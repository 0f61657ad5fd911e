"""`paramhub.torch.State`: what a program must have to go on at a step, besides the parameters and the optimizer's state."""

from __future__ import annotations

import io
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from paramhub.errors import MisuseError
from paramhub.torch._log import log

if TYPE_CHECKING:
    from paramhub._native import Handle
    from paramhub.torch.hub_optimizer import HubOptimizer


class State:
    """What a rank needs to go on at a step besides the parameters and the optimizer's state, which the hub has: the position
    in the data, schedulers, buffers, random numbers. It is kept at the hub with the steps to which the job can go back::

        paramhub.torch.init(on_worker_loss="rewind")
        optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
        state = paramhub.torch.State(optimizer, model=model, scheduler=scheduler, epoch=0, batch=0)

        @paramhub.torch.run(state)
        def train():
            while state.epoch < epochs:
                for inputs, targets in batches(state.epoch, start=state.batch):
                    optimizer.zero_grad()
                    loss(model(inputs), targets).backward()
                    optimizer.step()
                    state.batch += 1
                    state.commit()
                state.epoch, state.batch = state.epoch + 1, 0
                scheduler.step()
                state.commit()

    A module's part are its buffers, such as those of BatchNorm. Of an object with ``state_dict`` and ``load_state_dict`` it is
    what these save and load; a sampler or a data loader may have them. Everything else is a value, and an attribute of the
    state. The values of ``param_groups``, such as learning rates, belong to it, and with ``random`` so do the states of the
    random number generators of torch, Python and numpy. Each rank has a state of its own. All of it must be tensors, numbers,
    texts, and lists, tuples and dictionaries of these.

    Make it after the optimizer, and after everything whose state it has. If the ranks have gone back to a step, or were started
    again, it then has what the rank had saved at that step. Where more ranks are started than before (``init(max_workers=)``),
    those that are new have what rank 0 had saved, but for the random numbers. In a job without ``on_worker_loss="rewind"`` it
    keeps nothing.

    Raises MisuseError for what cannot be saved.
    """

    def __init__(self, optimizer: HubOptimizer, *, random: bool = True, **parts: Any) -> None:
        own: dict[str, Any] = self.__dict__
        own["_optimizer"] = optimizer
        own["_has_random"] = random
        own["_objects"] = {name: part for name, part in parts.items() if _has_state(part)}
        own["_values"] = {name: part for name, part in parts.items() if not _has_state(part)}
        own["_saved_step"] = None
        own["_save"] = None
        own["_is_checked"] = False
        if unsuitable := sorted(name for name in parts if hasattr(type(self), name)):
            raise MisuseError(
                f"a part of a {type(self).__name__} cannot be called {unsuitable[0]!r}, which is a name of its own"
            )
        optimizer._attach_state(self)
        self._begin()

    def __getattr__(self, name: str) -> Any:
        for parts in ("_values", "_objects"):
            if name in self.__dict__.get(parts, {}):
                return self.__dict__[parts][name]
        raise AttributeError(f"this State has no part {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        elif name in self._values:
            self._values[name] = value
        else:
            raise AttributeError(
                f"this State has no value {name!r}: give each value its first one when you make the State"
            )

    @property
    def step(self) -> int:
        """The number of the next step, which is that of the steps made so far."""
        return self._optimizer._next_step()

    def commit(self) -> None:
        """Saves the state of the next step at the hub. Call it between two steps, when all parts are as that step needs them; it
        may be called more than once.

        The next backward pass waits until the hub has it. So no rank can go back to a step whose state is missing. In a job that
        can go back to every Nth step only, it saves nothing at the other steps.

        Raises MisuseError for what cannot be saved, or has more bytes than ``init(program_state_bytes=)`` allows.
        """
        self._optimizer._refuse_within_step("commit()")
        step = self.step
        if not self._is_kept(step):
            return
        saved = io.BytesIO()
        torch.save(self._state_dict(), saved)
        if not self._is_checked:
            self._check(saved)
        self._save = self._optimizer._job.save_program_state(step, saved.getvalue())
        self._saved_step = step

    def restore(self) -> None:
        """Sets all parts to what this rank has saved at the step to which the ranks have gone back, or with which they were
        started again. `run` calls it. Where nothing was saved the parts stay as they are."""
        job = self._optimizer._job
        self._save = self._saved_step = None
        if job.resumed_step is None or job.rewind_every is None:
            return
        saved = job.program_state(job.resumed_step)
        if saved is None:
            log(
                f"rank {job.rank}: the hub has no program state of step {job.resumed_step}, so it begins with the "
                "one that it has"
            )
            return
        self._load_state_dict(torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True))
        self._saved_step = job.resumed_step

    def rejoin(self) -> None:
        """Joins the job again after `paramhub.Rewound`, and restores the state. `run` calls it."""
        self._optimizer.rejoin()
        self.restore()

    def _begin(self) -> None:
        """Restores or saves the state with which a job begins."""
        self.restore()
        if self._saved_step is None:
            self.commit()

    def _await_saved(self) -> None:
        """Waits until the hub has the state of the next step. The optimizer calls it before the step's first gradient."""
        step = self.step
        if not self._is_kept(step):
            return
        if self._saved_step != step:
            raise MisuseError(
                f"step {step} begins, and commit() was not called after the step before it: call it after every step, when all "
                "parts of the State are as the next step needs them"
            )
        save: Handle | None = self._save
        if save is not None:
            save.wait()
            self._save = None

    def _is_kept(self, step: int) -> bool:
        """Returns whether the job can go back to this step."""
        job = self._optimizer._job
        return job.rewind_every is not None and (step - (job.resumed_step or 0)) % job.rewind_every == 0

    def _state_dict(self) -> dict[str, Any]:
        objects = {
            name: dict(part.named_buffers()) if isinstance(part, torch.nn.Module) else part.state_dict()
            for name, part in self._objects.items()
        }
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        rank = self._optimizer._job.rank
        state = {"rank": rank, "objects": objects, "values": self._values, "groups": groups}
        if self._has_random:
            state["random"] = _random_state()
        return state

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        for name, part in self._objects.items():
            saved = state["objects"].get(name)
            if saved is None:
                raise MisuseError(
                    f"the State that was saved has no {name!r}: give State() the same parts at every start"
                )
            if isinstance(part, torch.nn.Module):
                with torch.no_grad():
                    for buffer_name, buffer in part.named_buffers():
                        buffer.copy_(saved[buffer_name])
            else:
                part.load_state_dict(saved)
        self._values.update(state["values"])
        for group, saved_group in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update(saved_group)
        # A rank that was not there before gets the state of another, and must not draw the same numbers.
        if "random" in state and self._has_random and state["rank"] == self._optimizer._job.rank:
            _set_random_state(state["random"])

    def _check(self, saved: io.BytesIO) -> None:
        """Raises MisuseError if a part cannot be loaded again. Only plain data is loaded, since other data could run code."""
        try:
            torch.load(io.BytesIO(saved.getvalue()), map_location="cpu", weights_only=True)
        except Exception:
            for name, part in {**self._values, **self._state_dict()["objects"]}.items():
                alone = io.BytesIO()
                torch.save(part, alone)
                alone.seek(0)
                try:
                    torch.load(alone, map_location="cpu", weights_only=True)
                except Exception as error:
                    raise MisuseError(
                        f"{name!r} cannot be part of a State, which takes tensors, numbers, texts, and lists, tuples and "
                        f"dictionaries of these: {str(error).splitlines()[0]}"
                    ) from None
            raise
        self._is_checked = True


def _has_state(part: Any) -> bool:
    return isinstance(part, torch.nn.Module) or (
        hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    )


def _random_state() -> dict[str, Any]:
    """The states of the random number generators that the program has in use, as plain data."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # Each device has a generator of its own, and the model need not be on the current one.
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_current"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        saved = state["cuda"]
        if isinstance(saved, torch.Tensor):
            # An earlier release saved the generator of the current device alone.
            torch.cuda.set_rng_state(saved)
        else:
            for device, of_device in enumerate(saved[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(of_device, device)
            # The rank may have another GPU of its host now.
            torch.cuda.set_rng_state(state["cuda_current"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys, *rest))
