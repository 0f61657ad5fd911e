"""Horovod's elastic names, on top of `paramhub.torch.State` and `paramhub.torch.run`.

A script that was written for ``horovod.torch.elastic`` runs with ``import paramhub.torch as hvd`` if its optimizer is a
`HubOptimizer`, in a job with ``init(on_worker_loss="rewind")`` or under ``paramhub run --on-worker-loss rewind``. The hub has
the parameters and the optimizer's state, so only the rest is saved and restored here.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.utils.data import Sampler

from paramhub.errors import MisuseError
from paramhub.torch import _initialization, _rewinding
from paramhub.torch._log import log
from paramhub.torch._program_state import State
from paramhub.torch.hub_optimizer import HubOptimizer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TorchState(State):
    """Horovod's name for a `State`. ``model`` and ``optimizer`` are attributes of it, as are all ``values``::

        state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, epochs):
                for inputs, targets in batches(state.epoch, start=state.batch):
                    state.optimizer.zero_grad()
                    loss(state.model(inputs), targets).backward()
                    state.optimizer.step()
                    state.batch += 1
                    state.commit()
                state.batch = 0

        train(state)

    Make it after everything whose state it has. Each rank has values of its own. Call `commit` after every step, and not once in
    several steps: no step is lost then. With ``init(rewind_every=N)`` most of its calls do nothing. Where equal bits matter,
    give a DataLoader a ``generator`` of its own: each pass over it, also one that begins once more, draws a number.

    Raises MisuseError if ``optimizer`` is not a `HubOptimizer`, and for values that cannot be saved: see `State`.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: HubOptimizer | None = None, **values: Any
    ) -> None:
        if not isinstance(optimizer, HubOptimizer):
            given = "None" if optimizer is None else type(optimizer).__name__
            raise MisuseError(
                f"the optimizer of a TorchState is a paramhub.torch.HubOptimizer, not {given}: the hub keeps its parameters and "
                "state when a rank is lost, while other optimizers, those of DistributedOptimizer too, have theirs in the ranks. "
                "Make one with paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.1)), or AdamW and others"
            )
        for name, value in values.items():
            if isinstance(value, torch.optim.Optimizer):
                raise MisuseError(
                    f"a TorchState has one optimizer: {name!r} is another. Make a TorchState for each"
                )
        self.__dict__["_callbacks"] = []
        super().__init__(optimizer, **({} if model is None else {"model": model}), **values)
        if optimizer._job.rewind_every is None and optimizer._job.rank == 0:
            log(
                'nothing is kept for a rank that is lost: elastic runs need init(on_worker_loss="rewind"), or '
                "`paramhub run --on-worker-loss rewind`"
            )

    @property
    def optimizer(self) -> HubOptimizer:
        return self._optimizer

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Has these functions called whenever all ranks have gone back because one was lost, before the loop begins again. They
        find the state as it was at that step. A process that takes the place of a lost one does not call them."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        for callback in self._callbacks:
            callback()

    def rejoin(self) -> None:
        super().rejoin()
        self.on_reset()

    def save(self) -> None:
        """The same as `commit`."""
        self.commit()

    def check_host_updates(self) -> None:
        """Raises `paramhub.Rewound` if a rank was lost. Without this call the next step raises it."""
        failure = self._optimizer._job.failure()
        if failure is not None:
            raise failure

    def sync(self) -> None:
        """Does nothing: every rank has the parameters of the hub, and its own values of the same step."""


def run(
    function: Callable[Concatenate[TorchState, Arguments], Result],
) -> Callable[Concatenate[TorchState, Arguments], Result]:
    """Decorates a training loop, whose first argument is a `TorchState`. When another rank is lost the state goes back to the
    step to which all ranks go back, and the loop is called again. See `paramhub.torch.run`."""

    @functools.wraps(function)
    def wrapped(state: TorchState, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not isinstance(state, State):
            raise MisuseError(
                f"the first argument of {function.__name__}() is to be a TorchState, not {type(state).__name__}"
            )
        return _rewinding.run(state)(function)(state, *args, **kwargs)

    return wrapped


class ElasticSampler(Sampler[int]):
    """Divides a data set among the ranks, and after a restart what is left of it in the epoch. As a value of a `TorchState` it
    goes back with it.

    Call `record_batch` before each commit, and `set_epoch` at the end of an epoch, for the next one.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def reset(self) -> None:
        """Divides what is left of the epoch."""
        self.rank, self.num_replicas = _initialization.rank(), _initialization.size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which no part has been processed."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that each rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Sized) -> None:
        """Notes that each rank has processed as many samples as these."""
        self.processed_num += len(indices) * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def __iter__(self) -> Iterator[int]:
        # All ranks are to make as many steps, so some samples come twice if the number does not divide.
        left = self.remaining_indices
        places = range(self.rank, self.num_samples * self.num_replicas, self.num_replicas)
        return iter([left[place % len(left)] for place in places])

    def __len__(self) -> int:
        return self.num_samples
