"""A parameter hub for distributed deep-learning training.

Workers push gradients to a hub, whose cores sum each chunk, update its parameters and answer while it is in
cache. This package has these parts:

- `paramhub.torch` is for PyTorch: an optimizer, a DDP hook, a ``torch.distributed`` backend, and Horovod's API.
- `paramhub.jax` averages gradients for JAX, and `paramhub.mxnet` has stores for MXNet's trainers.
- `paramhub.kvstore` has key-value stores with MXNet's API, through a hub or by collectives among the ranks.
- `connect`, `Job`, `Handle` and `Tensor` are for any library's tensors.
- `Hub` runs a hub inside this process; the ``paramhub`` command runs hubs and workers as programs.
- `run` calls a function in several processes of this host.

A worker of any library, started with ``paramhub run -n 4 -- python worker.py``::

    import numpy, paramhub

    weight, gradient = numpy.zeros((128, 64), "f4"), numpy.ones((128, 64), "f4")
    with paramhub.connect() as job:
        job.init({"weight": weight}, optimizer=paramhub.SGD(lr=0.1))
        job.push_pull("weight", gradient, out=weight).wait()
"""

from __future__ import annotations

import atexit as _atexit
import os as _os

from paramhub import _native
from paramhub._hub import Hub, create_job
from paramhub._job import Job, connect
from paramhub._launch import run
from paramhub._native import Handle, Tensor
from paramhub.errors import ConnectError, JobFailedError, MisuseError, ParamhubError, Rewound
from paramhub.optimizers import (
    LAMB,
    LARS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Mean,
    NAdam,
    Nesterov,
    Optimizer,
    RMSprop,
    Sum,
)

__version__ = _native.__version__
__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "ConnectError",
    "Handle",
    "Hub",
    "Job",
    "JobFailedError",
    "Lion",
    "Mean",
    "MisuseError",
    "NAdam",
    "Nesterov",
    "Optimizer",
    "ParamhubError",
    "RMSprop",
    "Rewound",
    "Sum",
    "Tensor",
    "__version__",
    "connect",
    "create_job",
    "run",
]

# A forked child must not use its parent's jobs and hubs: calls that need their threads or connections raise in it.
_os.register_at_fork(after_in_child=_native.after_fork_in_child)
# atexit calls in reverse order, so this runs after the functions that end jobs and their requests.
_atexit.register(_native.end_callbacks)
