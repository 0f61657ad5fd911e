"""The errors of this package. Every message says which rank or object failed, at what, and what to do."""

from __future__ import annotations


class ParamhubError(RuntimeError):
    """Any error of this package."""


class MisuseError(ParamhubError, ValueError):
    """The caller asked for something that cannot work: a wrong name, size or type, or a call out of place."""


class ConnectError(ParamhubError, ConnectionError):
    """A connection manager or hub cannot be reached or refuses, or ranks of the job are missing. The message names those."""


class JobFailedError(ParamhubError):
    """The job has failed, for every rank: a worker or a hub was lost, or broke a rule.

    ``culprit`` is the rank at fault if the hub names one, else None.
    """

    culprit: int | None = None


class Rewound(JobFailedError):
    """Another rank was lost, and all ranks go back to an earlier step (``on_worker_loss="rewind"``); or a hub was lost, and they
    go back to the newest checkpoint. This rank joins anew: a `HubOptimizer` by ``rejoin()``, for instance through
    `paramhub.torch.run`, and a program with jobs of its own by `paramhub.connect`. A process that ends with this exception can
    be started again instead."""


class LateError(ParamhubError, TimeoutError):
    """An operation has not ended within its timeout, and goes on. The message names the ranks that it waits for, as far as
    they are known."""
