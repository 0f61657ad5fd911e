"""The ``paramhub`` command through Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, Ended, Program

import paramhub

WORKER = """
import os
import numpy, paramhub

weight, gradient = numpy.zeros((128, 64), "f4"), numpy.ones((128, 64), "f4")
with paramhub.connect() as job:
    job.init({"weight": weight}, optimizer=paramhub.SGD(lr=0.1))
    job.push_pull("weight", gradient, out=weight).wait()
    print(f"{job.rank} of {job.workers}: {weight.mean():.3f}, local {os.environ['LOCAL_RANK']}")
"""


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def test_the_command_prints_its_version(launch: Callable[..., Ended]) -> None:
    assert launch(*PARAMHUB, "--version") == (0, f"paramhub {paramhub.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "Usage"),
        (["nonsense"], "nonsense"),
        (["hub", "--cores", "many"], "many"),
        (["run", "-n", "0", "--", "true"], "worker"),
        (["hub", "--listen", "nowhere"], "nowhere"),
    ],
)
def test_wrong_usage_ends_with_2(launch: Callable[..., Ended], arguments: list[str], named: str) -> None:
    code, output = launch(*PARAMHUB, *arguments)
    assert code == 2
    assert named in output


def test_a_hub_that_cannot_be_reached_ends_with_1(launch: Callable[..., Ended]) -> None:
    code, output = launch(*PARAMHUB, "jobs", "list", env={"PARAMHUB_URL": "http://127.0.0.1:9"})
    assert code == 1
    assert "http://127.0.0.1:9" in output


def test_run_starts_workers_with_a_hub_of_their_own(launch: Callable[..., Ended], worker: Path) -> None:
    code, output = launch(*PARAMHUB, "run", "-n", "2", "--", PYTHON, worker)
    assert code == 0, output
    for rank in range(2):
        assert f"{rank} of 2: -0.100, local {rank}" in output


def test_run_uses_the_hub_that_it_is_given(
    launch: Callable[..., Ended], start: Callable[..., Program], worker: Path
) -> None:
    program = start(*PARAMHUB, "hub", "--manager", "127.0.0.1:0", "--listen", "127.0.0.1:0")
    url = program.await_output(r"^hub ready: manager (\S+)")[1]
    code, output = launch(
        *PARAMHUB, "run", "-n", "2", "--hub", url, "--name", "by-name", "--", PYTHON, worker
    )
    assert code == 0, output
    assert "by-name" in program.output()


def test_run_passes_on_what_its_workers_end_with(launch: Callable[..., Ended], tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text("import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)\n")
    assert launch(*PARAMHUB, "run", "-n", "2", "--", PYTHON, failing).code == 7


def test_an_exchange_is_measured(launch: Callable[..., Ended], tmp_path: Path) -> None:
    """The launcher starts its processes with the same command, and so through Python."""
    keys, report = tmp_path / "keys.json", tmp_path / "report.json"
    keys.write_text(json.dumps([{"name": "weight", "shape": [128, 64]}, {"name": "bias", "shape": [64]}]))
    code, output = launch(
        *PARAMHUB,
        "bench",
        "exchange",
        "--keys",
        keys,
        "--workers",
        "2",
        "--iters",
        "3",
        "--json",
        report,
        timeout=300,
    )
    assert code == 0, output
    assert "all exact" in output
    assert json.loads(report.read_text())["max_abs_error"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["train", "--workers", "2", "--json", "report.json"],
        ["train", "--help"],
        ["bench", "sweep", "chunk", "--model", "resnet50"],
        ["bench", "plot", "results.json", "--svg", "out.svg"],
    ],
)
def test_commands_that_the_package_leaves_out_are_refused_with_the_way_to_get_them(
    launch: Callable[..., Ended], arguments: list[str]
) -> None:
    code, output = launch(*PARAMHUB, *arguments)
    assert code == 2
    assert "cargo install --path crates/paramhub-cli" in output


def test_the_help_shows_only_what_is_there(launch: Callable[..., Ended]) -> None:
    for arguments in ([], ["bench"]):
        code, output = launch(*PARAMHUB, *arguments, "--help")
        assert code == 0
        assert "train " not in output
        assert "sweep" not in output


def test_a_table_for_train_in_the_configuration_is_left_alone(
    launch: Callable[..., Ended], tmp_path: Path
) -> None:
    path = tmp_path / "paramhub.toml"
    path.write_text("[train]\nepochs = 3\n[run]\nworkers = 2\n")
    code, output = launch(*PARAMHUB, "run", "--config", path, "--print-config")
    assert code == 0, output
    assert "workers = 2" in output
    assert "epochs = 3" in output
