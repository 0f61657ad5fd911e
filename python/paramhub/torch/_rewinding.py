"""`paramhub.torch.run`: a training loop that goes back by itself when another rank is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from paramhub.errors import Rewound
from paramhub.torch._log import log

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Rejoins(Protocol):
    """What goes back: a `HubOptimizer`, or a `paramhub.torch.State`."""

    def rejoin(self) -> None: ...


def run(state: Rejoins) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorates a training loop. When another rank is lost, the loop ends with `paramhub.Rewound`; then ``state`` joins the job
    again, at the step to which all ranks have gone back, and the loop is called once more::

        state = paramhub.torch.State(optimizer, scheduler=scheduler, epoch=0)

        @paramhub.torch.run(state)
        def train():
            while state.epoch < epochs:
                ...

        train()

    So the loop begins where ``state`` says, and not where it began at first. Ranks that are started again call it in the same
    way. It needs ``init(on_worker_loss="rewind")``, or ``paramhub run --on-worker-loss rewind``; otherwise the loop is only
    called. With ``init(max_workers=)`` the process ends with `paramhub.Rewound` instead, since its launcher starts all ranks
    again, perhaps more or fewer.
    """

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            while True:
                try:
                    return function(*args, **kwargs)
                except Rewound as rewound:
                    log(str(rewound))
                    # Another rank may be lost while this one joins.
                    state.rejoin()

        return wrapped

    return decorate
