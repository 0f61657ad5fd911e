"""Two simulated accelerators, ``simulated:0`` and ``simulated:1``, on which mistakes of order show on any machine.

Their streams are threads that compute on the host, asynchronously, as a GPU does. So a test fails if code does not wait for an
event, if it has memory reused too early, or if it reads a result before its copy has ended:

- Each operator is a task of the current stream. Those whose result's shape depends on values wait for this stream, and for no
  other.
- Copies between device and host that do not block begin late: after SIMULATED_COPY_DELAY_MS, which is 2 by default.
- Freed memory is given out again at once on its stream, and is then filled with bytes that are NaN. After `record_stream` it
  is only given out when the other stream has done its work.
- Copies without blocking keep the memory of the host that they use. Nothing keeps the memory of a device.

Random numbers are drawn from the host's generator. An operator that computes on arguments that do not fit fails later, at a call
that waits, as on a GPU. ``load()`` changes what torch does in the whole process, and cannot be undone. It starts no threads: a
process may be forked until it uses a device. It has to be called before the first backward pass, for which autograd counts the
devices.

The library is built with g++ at the first use, into the repository's ``target/python/simulated-device``.
"""

from __future__ import annotations

import atexit
import importlib
import threading

import torch

from simulated_device import collectives, device_module
from simulated_device.building import library

NAME = "simulated"
EXIT_TIMEOUT = 10.0
"""Seconds for which the end of the process waits for tasks that are under way."""

_lock = threading.Lock()
_is_loaded = False


def load() -> None:
    """Builds the devices if no process has done so before, and makes torch know them. A second call does nothing."""
    global _is_loaded
    with _lock:
        if _is_loaded:
            return
        torch.utils.rename_privateuse1_backend(NAME)
        device_module.load(library())
        torch._register_device_module(NAME, device_module)
        torch.utils.generate_methods_for_privateuse1_backend()
        collectives.register(NAME)
        # `Module.to` would make new parameters, and those that two layers share would become two.
        torch.__future__.set_swap_module_params_on_conversion(True)
        # torch computes shapes of results in functions that import this at their first call, which takes seconds.
        importlib.import_module("torch._dynamo")
        # Tasks may have the last references to objects of Python, which must end before the interpreter does.
        atexit.register(device_module.drain, EXIT_TIMEOUT)
        _is_loaded = True
