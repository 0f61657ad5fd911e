"""Whoever reads a parameter through its module waits for its value first.

Three ways lead to a parameter. A module's forward pass may hold it by itself, as recurrent layers do: a pre-hook waits for
all of the module's own. Anybody may ask a module for it (``self.out_proj.weight`` in a parent's forward pass,
``model.parameters()``, ``state_dict()``): the module's table of parameters waits. Code that torch.compile makes may have it
among its inputs: who is traced is noted, and waited for before such code can run.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import ItemsView, Iterable, Sequence, ValuesView
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel

from paramhub.torch import _ddp_around
from paramhub.torch._exchange import Exchange


class Guards:
    """The guards of one optimizer's parameters."""

    _numbers = itertools.count()

    def __init__(self, model: torch.nn.Module, exchanges: Sequence[Exchange]) -> None:
        self.number = next(self._numbers)
        self.exchanges = exchanges
        self.compiled: set[int] = set()
        """Parameters that compiled code reads, and for which nobody waits before it runs."""
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
            # Its forward pass knows neither of these guards.
            self.compiled.update(exchange.number for exchange in own.values())
            return
        hook = _BeforeForward(list(own.values()), self.number)
        self._removable.append(module.register_forward_pre_hook(hook, prepend=True))
        table = module._parameters
        if not isinstance(table, ParameterTable):
            table = ParameterTable(table)
            module.__dict__["_parameters"] = table
        # Another optimizer may have others of the module's parameters.
        table.exchanges.update(own)
        table.books.update(dict.fromkeys(own, self.number))
        self._tables.append((module, table))

    def note(self, exchange: int) -> None:
        """A compiled region that is being traced reads a parameter."""
        self.exchanges[exchange].wait()
        if exchange not in self._bounded:
            self.compiled.add(exchange)

    def remove(self) -> None:
        """Takes the guards away."""
        _guards.pop(self.number, None)
        for handle in self._removable:
            handle.remove()
        for module, table in self._tables:
            for name in [name for name, book in table.books.items() if book == self.number]:
                del table.books[name], table.exchanges[name]
            if not table.books and module._parameters is table:
                module.__dict__["_parameters"] = dict(table)


_guards: weakref.WeakValueDictionary[int, Guards] = weakref.WeakValueDictionary()


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether it is what torch.compile has made of a module."""
    return "_orig_mod" in module._modules and "dynamo_ctx" in module.__dict__


@torch.compiler.assume_constant_result
def _note(guards: int, exchange: int) -> int:
    # Called while dynamo traces, and not by the code it makes.
    found = _guards.get(guards)
    if found is not None:
        found.note(exchange)
    return 0


class _BeforeForward:
    """A module's forward pre-hook. Copies of the module, and what is saved of it, have none."""

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
            _ddp_around.refuse_in_forward(self.exchanges)
        for exchange in self.exchanges:
            if exchange.handle is not None:
                exchange.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing_to_wait_for, ()


class _NothingToWaitFor:
    """Stands for a pre-hook in a copy."""

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        return None


def _nothing_to_wait_for() -> _NothingToWaitFor:
    return _NothingToWaitFor()


class ParameterTable(dict[str, "torch.nn.Parameter | None"]):
    """A module's parameters by name, each of which is waited for when it is looked up. Copies are plain."""

    __slots__ = ("books", "exchanges")

    def __init__(self, parameters: dict[str, torch.nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.exchanges: dict[str, Exchange] = {}
        self.books: dict[str, int] = {}

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        if is_compiling():
            if name in self.exchanges:
                _note(self.books[name], self.exchanges[name].number)
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
                _note(self.books[name], exchange.number)
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
