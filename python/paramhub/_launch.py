"""`paramhub.run`: a function in several processes, as ``paramhub run`` starts a command. Each of these processes runs this
module."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from paramhub.errors import MisuseError, ParamhubError

INTERRUPT_TIMEOUT = 20.0
"""Seconds that the launcher has after Ctrl-C, for the last checkpoint of its hub and the end of its processes."""
KILL_TIMEOUT = 5.0
"""Seconds that it then has to kill them."""


def run(
    func: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    options: Sequence[str] = (),
    executable: str | None = None,
) -> list[Any]:
    """Calls ``func(*args, **kwargs)`` in ``num_proc`` processes of this host, which ``paramhub run`` starts, and returns
    their results by rank. It is shaped as ``horovod.run``; ``np`` is the old name of ``num_proc``. ::

        def train(lr):
            paramhub.torch.init()
            ...
            return accuracy

        accuracies = paramhub.run(train, args=(0.1,), num_proc=4)

    Function, arguments and results are pickled: by cloudpickle if it is installed, which takes functions of any kind, else by
    pickle, for which the function must be in a module that can be imported. ``options`` are further options of ``paramhub run``
    (``["--on-worker-loss", "rewind"]``), and ``executable`` is the Python that runs the processes, by default this one.

    Raises MisuseError for a function that cannot be pickled, and ParamhubError if a process ends without a result, with what each
    such rank raised, the first one first.
    """
    if hosts is not None:
        raise MisuseError(
            f"hosts={hosts!r}: paramhub.run starts processes on this host only. On several hosts start the same script on "
            "each with `paramhub run --hosts N --host-rank I`"
        )
    workers = num_proc if np is None else np
    if workers < 1:
        raise MisuseError(f"num_proc is to be a number from 1, not {workers}")
    pickler = _pickler()
    if pickler is pickle and getattr(func, "__module__", None) == "__main__":
        raise MisuseError(
            f"{getattr(func, '__name__', func)!r} is defined in the program itself, which other processes do not import: "
            "put it into a module, or install cloudpickle"
        )
    try:
        task = pickler.dumps((func, tuple(args), dict(kwargs or {})))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise MisuseError(
            f"the function or its arguments cannot be sent to other processes: {error}. Use a function of a module's top "
            "level, or install cloudpickle"
        ) from None
    python = executable or sys.executable
    # Only this user can enter the folder, so the pickles in it can be trusted.
    with tempfile.TemporaryDirectory(prefix="paramhub-run-") as name:
        folder = Path(name)
        # The modules of this Python are none for another one.
        path = sys.path if python == sys.executable else []
        (folder / "task").write_bytes(pickle.dumps((path, pickler.__name__, task)))
        command = [python, "-m", "paramhub", "run", "-n", str(workers), *options, "--"]
        code = _call([*command, python, "-m", "paramhub._launch", name])
        return _results(folder, workers, code)


def _call(command: Sequence[str]) -> int:
    """Runs the launcher, and returns its exit code. After Ctrl-C it has time to end its processes, and the run, in order."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # A terminal interrupts the launcher, too, and the second signal would have it kill its processes at once.
        if not _is_in_foreground():
            process.send_signal(signal.SIGINT)
        try:
            process.wait(INTERRUPT_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_TIMEOUT)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _is_in_foreground() -> bool:
    """Returns whether this process belongs to those that its terminal interrupts at Ctrl-C."""
    try:
        terminal = os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _results(folder: Path, workers: int, code: int) -> list[Any]:
    results: list[Any] = []
    problems: list[tuple[float, str]] = []
    for rank in range(workers):
        path = folder / f"result-{rank}"
        if not path.exists():
            problems.append((float("inf"), f"rank {rank} has ended without a result"))
            continue
        has_returned, ended_at, content = pickle.loads(path.read_bytes())
        if has_returned:
            results.append(pickle.loads(content))
        else:
            problems.append((ended_at, f"rank {rank} raised:\n{content}"))
    if problems or code != 0:
        told = [text for _, text in sorted(problems)] or [f"`paramhub run` has ended with {code}"]
        raise ParamhubError(f"paramhub.run: {len(problems)} of {workers} ranks failed. " + "\n".join(told))
    return results


def _pickler() -> ModuleType:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _work(folder: Path) -> int:
    """One process: calls the function, and writes its result, or what it raised."""
    path, pickler_name, task = pickle.loads((folder / "task").read_bytes())
    sys.path += [each for each in path if each not in sys.path]
    pickler = importlib.import_module(pickler_name)
    try:
        func, args, kwargs = pickler.loads(task)
        outcome = (True, time.time(), pickler.dumps(func(*args, **kwargs)))
    except BaseException as error:
        # The interpreter sets it where an exception ends a program: at its exit this rank then waits for no others.
        sys.last_value = error
        outcome = (False, time.time(), traceback.format_exc())
    # The parent reads whole files only.
    name = f"result-{os.environ['RANK']}"
    (folder / f".{name}").write_bytes(pickle.dumps(outcome))
    os.replace(folder / f".{name}", folder / name)
    return 0 if outcome[0] else 1


if __name__ == "__main__":
    sys.exit(_work(Path(sys.argv[1])))
