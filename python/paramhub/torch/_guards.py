"""Guards make code that reads a parameter through its module wait for the parameter's new value.

There are three ways to read a parameter. A module's forward pass may use a reference of its own, as recurrent layers do: a
pre-hook waits for all parameters of the module. Other code may read it from the module (``self.out_proj.weight`` in a
parent's forward pass, ``model.parameters()``, ``state_dict()``): the module's table of parameters waits. Compiled code of
torch.compile may have it among its inputs: the guards record parameters that are traced, and the optimizer waits for those
before compiled code can run.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import ItemsView, Iterable, Iterator, Sequence, ValuesView
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from paramhub.torch import _ddp_conflict
from paramhub.torch._exchange import Exchange


class Guards:
    """The guards of one optimizer's parameters."""

    _numbers = itertools.count()

    def __init__(self, model: torch.nn.Module, exchanges: Sequence[Exchange]) -> None:
        self.number = next(self._numbers)
        self.exchanges = exchanges
        self.compiled: set[int] = set()
        """Parameters that compiled code reads without waiting for them."""
        self._bounded: set[int] = set()
        self._removable: list[Any] = []
        self._tables: list[tuple[torch.nn.Module, ParameterTable]] = []
        of_parameter = {id(exchange.parameter): exchange for exchange in exchanges}
        for module in model.modules():
            self._guard(module, of_parameter)
        _guards[self.number] = self

    def _guard(self, module: torch.nn.Module, of_parameter: dict[int, Exchange]) -> None:
        if is_compiled(module):
            inner = [of_parameter[id(p)] for p in module.parameters() if id(p) in of_parameter]
            self._removable.append(
                module.register_forward_pre_hook(_BeforeForward(inner, None), prepend=True)
            )
            self._bounded.update(exchange.number for exchange in inner)
            return
        own = {
            name: of_parameter[id(parameter)]
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in of_parameter
        }
        if not own:
            return
        if isinstance(module, torch.jit.ScriptModule):
            # Its forward pass uses neither the pre-hook nor the table.
            self.compiled.update(exchange.number for exchange in own.values())
            return
        hook = _BeforeForward(list(own.values()), self.number)
        self._removable.append(module.register_forward_pre_hook(hook, prepend=True))
        table = module._parameters
        if not isinstance(table, ParameterTable):
            table = ParameterTable(table)
            module.__dict__["_parameters"] = table
        # Another optimizer may exchange other parameters of the module, so the table may have guards already.
        table.exchanges.update(own)
        table.guard_numbers.update(dict.fromkeys(own, self.number))
        self._tables.append((module, table))

    def note(self, exchange: int) -> None:
        """Called when a compiled region that is being traced reads a parameter."""
        self.exchanges[exchange].wait()
        if exchange not in self._bounded:
            self.compiled.add(exchange)

    def remove(self) -> None:
        """Removes the guards."""
        _guards.pop(self.number, None)
        for handle in self._removable:
            handle.remove()
        for module, table in self._tables:
            for name in [name for name, number in table.guard_numbers.items() if number == self.number]:
                del table.guard_numbers[name], table.exchanges[name]
            if not table.guard_numbers and module._parameters is table:
                module.__dict__["_parameters"] = dict(table)


_guards: weakref.WeakValueDictionary[int, Guards] = weakref.WeakValueDictionary()
_are_suspended = False


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """For code that asks a module only which parameters it has: it does not wait for their values."""
    global _are_suspended
    before, _are_suspended = _are_suspended, True
    try:
        yield
    finally:
        _are_suspended = before


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether this module is a result of torch.compile."""
    return "_orig_mod" in module._modules and "dynamo_ctx" in module.__dict__


def _note(guards: int, exchange: int) -> int:
    # Dynamo calls this while it traces; the compiled code does not.
    found = _guards.get(guards)
    if found is not None:
        found.note(exchange)
    return 0


# torch.compiler.assume_constant_result does the same, but imports the compiler, which takes as long as importing torch itself.
_note._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _BeforeForward:
    """A module's forward pre-hook. Copies and saved states of the module do not have it."""

    __slots__ = ("exchanges", "guards", "numbers")

    def __init__(self, exchanges: Iterable[Exchange], guards: int | None) -> None:
        self.exchanges = tuple(exchanges)
        self.numbers = tuple(exchange.number for exchange in self.exchanges)
        self.guards = guards

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        if is_compiling():
            if self.guards is not None:
                for number in self.numbers:
                    _note(self.guards, number)
            return
        if DistributedDataParallel._active_ddp_module is not None:
            _ddp_conflict.refuse_in_forward(self.exchanges)
        for exchange in self.exchanges:
            if exchange.handle is not None:
                exchange.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_to_wait_for, ()


class _NothingToWaitFor:
    """Replaces the pre-hook in a copy of the module."""

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        return None


def _nothing_to_wait_for() -> _NothingToWaitFor:
    return _NothingToWaitFor()


class ParameterTable(dict[str, "torch.nn.Parameter | None"]):
    """A module's parameters by name. Looking up a parameter waits for it. Copies are plain dicts."""

    __slots__ = ("exchanges", "guard_numbers")

    def __init__(self, parameters: dict[str, torch.nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.exchanges: dict[str, Exchange] = {}
        self.guard_numbers: dict[str, int] = {}

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        if is_compiling():
            if name in self.exchanges:
                _note(self.guard_numbers[name], self.exchanges[name].number)
            return dict.__getitem__(self, name)
        exchange = self.exchanges.get(name)
        if exchange is not None and exchange.handle is not None:
            exchange.wait()
        return dict.__getitem__(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (it is what looks up here)

    def items(self) -> ItemsView[str, torch.nn.Parameter | None]:
        self._wait()
        return dict.items(self)

    def values(self) -> ValuesView[torch.nn.Parameter | None]:
        self._wait()
        return dict.values(self)

    def _wait(self) -> None:
        if is_compiling():
            for name, exchange in self.exchanges.items():
                _note(self.guard_numbers[name], exchange.number)
            return
        if _are_suspended:
            return
        for exchange in self.exchanges.values():
            if exchange.handle is not None:
                exchange.wait()

    def __copy__(self) -> dict[str, torch.nn.Parameter | None]:
        return dict(self.items())

    def copy(self) -> dict[str, torch.nn.Parameter | None]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)
