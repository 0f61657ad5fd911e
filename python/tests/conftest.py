"""Fixtures of all tests.

Tests that need torch are in ``torch/``, tests of frameworks in ``frameworks/``, and tests that need a GPU in ``gpu/``. They
import torch at the top of their files, except those of MXNet and JAX. The helpers are in ``support/``, from which tests
import by name: ``from team import Rank``.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import Ended, Launcher, Program
from team import ForkServer, Team

import paramhub

WITHOUT_TORCH = "PARAMHUB_TEST_WITHOUT_TORCH"
HAS_TORCH = importlib.util.find_spec("torch") is not None
# If torch is missing by mistake, its tests must fail, and they do so at their imports.
collect_ignore = ["torch", "frameworks", "gpu"] if not HAS_TORCH and os.environ.get(WITHOUT_TORCH) else []

# A shell that runs the tests in the background makes them ignore Ctrl-C, and with them the processes that must handle it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    if collect_ignore:
        return f"paramhub: torch is not installed and {WITHOUT_TORCH} is set: its tests are left out"
    return f"paramhub: {paramhub.__version__} in {Path(paramhub.__file__).parent}"


@pytest.fixture(scope="session")
def _fork_server() -> Iterator[Callable[[], ForkServer]]:
    started: list[ForkServer] = []

    def start() -> ForkServer:
        if not started:
            started.append(ForkServer())
        return started[0]

    yield start
    for fork_server in started:
        fork_server.close()


@pytest.fixture
def team(_fork_server: Callable[[], ForkServer], tmp_path: Path) -> Team:
    """``team(work, *arguments, ranks=4, env=None, timeout=120, dies=())`` calls a function in fresh processes.

    ``work`` is a function of a test module's top level. Each of the ``ranks`` processes calls ``work(Rank, *arguments)``. The
    team returns the list of their results, by rank. Arguments and results are pickled. ::

        def work(rank: Rank, factor: float) -> float:
            paramhub.torch.init()
            return factor * rank.rank

        def test_it(team):
            assert team(work, 2.0, ranks=2) == [0.0, 2.0]

    The processes are forked from one that has imported torch and nothing of paramhub, so that a team starts within a
    fraction of a second. After the function they call the functions registered at ``atexit``, but do not shut down the
    interpreter: tests of that need `launch`. They have the variables that torchrun sets (``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), one thread for each library, none of the
    caller's ``PARAMHUB_*``, and those of ``env`` (``env={"PARAMHUB_TRANSPORT": "tcp"}``). The working directory is
    ``Rank.folder``, the team's own.

    It raises `TeamError` with every rank's end and output if a rank raises, dies, or exits with another code than 0. When
    one does, the others have 10 seconds to end too. A rank that still runs after that, or after ``timeout`` seconds, prints
    its stacks and is killed, with all processes that it has started. A rank in ``dies`` must not end well; its result is
    `Died`.
    """
    return Team(_fork_server, tmp_path)


@pytest.fixture
def _launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


@pytest.fixture
def launch(_launcher: Launcher) -> Callable[..., Ended]:
    """``launch(*command, env=None, timeout=120)`` runs a program to its end: ``(code, output)``.

    It is for tests that need a program of their own. ``launching`` has the beginnings of commands::

        code, output = launch(*TORCHRUN, "--nproc-per-node=2", script)
        code, output = launch(*PARAMHUB, "run", "-n", "2", "--", PYTHON, script)

    The environment is the caller's without the variables of launchers, and with ``env``. A program that takes longer than
    ``timeout`` seconds is killed with all processes that it has started, and the test fails.
    """
    return _launcher.launch


@pytest.fixture
def start(_launcher: Launcher) -> Callable[..., Program]:
    """``start(*command, env=None)`` starts a program that runs beside the test, and ends it with the test."""
    return _launcher.start


@pytest.fixture
def hub() -> Iterator[paramhub.Hub]:
    """A hub on loopback in the tests' process."""
    with paramhub.Hub() as hub:
        yield hub


def pytest_collection_finish() -> None:
    # Several tests collect garbage. torch's objects are never garbage, and a search through them takes a fraction of a second.
    gc.freeze()
