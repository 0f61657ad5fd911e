"""The counterpart of ``torch.cuda``, which `torch.get_device_module` returns for the simulated devices."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_library: Any = None
Place = torch.device | str | int | None
"""How callers name a device. None stands for the current one."""


def load(file: Path) -> None:
    """Loads the library that was built, which registers the devices with torch."""
    global _library
    _library = ctypes.CDLL(str(file))
    _library.simulated_sleep.argtypes = [ctypes.c_double]
    _library.simulated_drain.argtypes = [ctypes.c_double]
    _library.simulated_register()


def drain(seconds: float) -> None:
    """Waits until all streams are idle, but no longer than this."""
    _library.simulated_drain(seconds)


def is_available() -> bool:
    return _library is not None


def is_initialized() -> bool:
    return is_available()


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(_library.simulated_device_count())


def current_device() -> int:
    return int(_library.simulated_current_device())


def set_device(device: Place) -> None:
    _library.simulated_set_device(_index(device))


class device(contextlib.AbstractContextManager[None]):
    """A context in which this device is the current one."""

    def __init__(self, device: Place) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


class Stream(torch.Stream):
    """A new stream of the device."""

    def __new__(cls, device: Place = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=_device(device), priority=priority)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False) -> Event:
        return super().__new__(cls, device=_device(None), enable_timing=enable_timing, blocking=blocking)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """A context in which this stream is the current one, on its device."""
    if stream is None:
        yield
        return
    with stream:
        yield


def current_stream(device: Place = None) -> torch.Stream:
    return torch.accelerator.current_stream(_device(device))


def default_stream(device: Place = None) -> torch.Stream:
    place = _device(device)
    return torch.Stream(stream_id=0, device_index=place.index, device_type=_device_type())


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def synchronize(device: Place = None) -> None:
    """Waits until the device's streams have run all their tasks. Raises if a task has failed."""
    torch.accelerator.synchronize(_device(device))


def _sleep(seconds: float) -> None:
    """Puts a pause on the current stream."""
    _library.simulated_sleep(seconds)


# The host's generator, which `torch.manual_seed` seeds too, makes the random numbers.


def manual_seed(seed: int) -> None:
    pass


def manual_seed_all(seed: int) -> None:
    pass


def get_rng_state(device: Place = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Place = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _device(place: Place) -> torch.device:
    return torch.device("simulated", _index(place))


def _index(place: Place) -> int:
    if place is None:
        return current_device()
    if isinstance(place, int):
        return place
    found = torch.device(place).index
    return current_device() if found is None else found


def _device_type() -> int:
    return int(torch._C._autograd.DeviceType.PrivateUse1.value)
