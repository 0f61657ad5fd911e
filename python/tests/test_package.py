"""The package's names, and the type stubs of the extension module."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import PYTHON

import paramhub
from paramhub import _native

STUBS = Path(paramhub.__file__).with_name("_native.pyi")


def test_every_public_name_is_there_and_documented() -> None:
    for name in paramhub.__all__:
        assert getattr(paramhub, name).__doc__, name
    public = {name for name in vars(paramhub) if not name.startswith("_")} - {
        "errors",
        "kvstore",
        "optimizers",
        "annotations",
        "torch",
    }
    assert public == set(paramhub.__all__) - {"__version__"}


def test_importing_it_imports_no_library() -> None:
    program = "import sys, json, paramhub; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, check=True).stdout
    imported = set(json.loads(output))
    assert "paramhub._native" in imported
    assert not imported & {"torch", "numpy", "jax", "asyncio", "multiprocessing"}


def test_errors_are_what_python_expects() -> None:
    assert issubclass(paramhub.MisuseError, ValueError)
    assert issubclass(paramhub.ConnectError, ConnectionError)
    assert issubclass(paramhub.JobFailedError, RuntimeError)
    for error in (paramhub.MisuseError, paramhub.ConnectError, paramhub.JobFailedError):
        assert issubclass(error, paramhub.ParamhubError)


def test_the_native_errors_are_the_packages_own() -> None:
    with pytest.raises(paramhub.MisuseError) as raised:
        _native.Memory(None)
    assert type(raised.value) is paramhub.MisuseError


def test_stubs_name_what_the_module_has() -> None:
    declared = {node.name: node for node in _stub().body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert declared.keys() == {name for name in vars(_native) if not name.startswith("__")}
    for name, node in declared.items():
        actual = getattr(_native, name)
        if isinstance(node, ast.FunctionDef):
            assert _declared(node) == _actual(actual), name
        else:
            _compare_class(node, actual)


def _stub() -> ast.Module:
    return ast.parse(STUBS.read_text())


def _compare_class(node: ast.ClassDef, actual: type) -> None:
    # The names that `object` has are left out, and those that every class has.
    names = {name for name in vars(actual) if name not in ("__doc__", "__module__", "__new__")}
    properties, methods = set(), {}
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign):
            assert isinstance(entry.target, ast.Name)
            properties.add(entry.target.id)
        elif isinstance(entry, ast.FunctionDef) and entry.decorator_list:
            properties.add(entry.name)
        elif isinstance(entry, ast.FunctionDef):
            methods[entry.name] = entry
    constructor = methods.pop("__new__", None)
    assert properties | methods.keys() == names, node.name
    for name in properties:
        assert inspect.isgetsetdescriptor(vars(actual)[name]), f"{node.name}.{name}"
    for name, method in methods.items():
        if not name.startswith("__"):
            assert _declared(method) == _actual(getattr(actual, name)), f"{node.name}.{name}"
    if constructor is None:
        with pytest.raises(TypeError, match=r"No constructor|cannot create"):
            actual()
    else:
        own, *given = _declared(constructor)
        assert own[0] == "cls"
        assert given == _actual(actual), node.name


def _declared(node: ast.FunctionDef) -> list[tuple[str, str, Any]]:
    """Name, kind and default of every parameter."""
    arguments, parameters = node.args, []
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        parameters.append((argument.arg, "positional", _value(default)))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append((argument.arg, "keyword", _value(default)))
    return parameters


def _value(default: ast.expr | None) -> Any:
    return "needed" if default is None else ast.literal_eval(default)


def _actual(function: Any) -> list[tuple[str, str, Any]]:
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        kind = "keyword" if parameter.kind is parameter.KEYWORD_ONLY else "positional"
        default = "needed" if parameter.default is parameter.empty else parameter.default
        parameters.append((parameter.name, kind, default))
    return parameters
