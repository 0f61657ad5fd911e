"""A rank or a hub that is lost where hubs serve racks: all ranks go back to the newest checkpoint, and end with the parameters of
an undisturbed run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, Program

PROGRAM = """
import os, pathlib, time
import numpy
import paramhub

def say(text):
    os.write(1, f"{text}\\n".encode())

def last():
    # The step after which all ranks end: unknown until the test writes one that is far ahead.
    path = pathlib.Path("last-step")
    return int(path.read_text()) if path.exists() else 1 << 30

def train():
    values = {"first": numpy.zeros(20000, "f4"), "second": numpy.zeros(100, "f4")}
    with paramhub.connect() as job:
        job.init(values, optimizer=paramhub.SGD(lr=1.0))
        say(f"rank {job.rank} begins at step {job.next_step('first')} and is process {os.getpid()}")
        while (step := job.next_step("first")) < last():
            handles = [
                job.push_pull(name, numpy.full_like(value, float(step % 7 * 4 + job.rank)), out=value)
                for name, value in values.items()
            ]
            for handle in handles:
                handle.wait()
            # The ranks add up to the same at each step, and a step that was made twice or not at all is missed.
            expected = -sum(made % 7 * 4 + 1.5 for made in range(step + 1))
            wrong = [name for name, value in values.items() if (value != expected).any()]
            assert not wrong, (step, wrong, values["first"][0], expected)
            if step % 10 == 0:
                say(f"rank {job.rank} has made step {step}")
            time.sleep(0.01)
        say(f"rank {job.rank} ends at the right parameters")

while True:
    try:
        train()
        break
    except paramhub.Rewound as rewound:
        say(f"{rewound}")
"""

Start = Callable[..., Program]


class Racks:
    """A manager, hubs of two racks, and a job with two ranks in each."""

    def __init__(self, start: Start, folder: Path) -> None:
        self._start, self._folder = start, folder
        self._manager = start(*PARAMHUB, "manager", "--listen", "127.0.0.1:0")
        self.url = self._manager.await_output(r"(http://\S+)")[1]
        (folder / "train.py").write_text(PROGRAM)

    def hub(self, *options: str) -> Program:
        command = (
            "hub",
            "--listen",
            "127.0.0.1:0",
            "--join",
            self.url,
            "--checkpoints",
            self._folder / "kept",
        )
        hub = self._start(*PARAMHUB, *command, *options)
        hub.await_output("hub ready")
        return hub

    def ranks(self, reduction: str) -> list[Program]:
        command = (
            *("run", "-n", "2", "--hosts", "2", "--name", "racks", "--hub", self.url, "--max-restarts", "5"),
            *("--on-worker-loss", "rewind", "--checkpoint-every", "5", "--reduction", reduction),
        )
        return [
            self._start(
                *PARAMHUB,
                *command,
                "--host-rank",
                str(host),
                "--",
                PYTHON,
                self._folder / "train.py",
                env={"PARAMHUB_RACK": rack},
            )
            for host, rack in enumerate("ab")
        ]

    def await_checkpoint(self) -> None:
        """Waits until the job has a whole checkpoint."""
        shown = ("jobs", "show", "racks", "--hub", self.url, "--json")
        while True:
            code, output = self._start(*PARAMHUB, *shown).wait()
            if code == 0 and re.search(r'"checkpoints": *\{[^}]*"step": *\d', output):
                return

    def end(self, ranks: list[Program]) -> list[str]:
        steps = re.findall(r"has made step (\d+)", "".join(program.output() for program in ranks))
        written = self._folder / "last-step.new"
        written.write_text(str(max(map(int, steps)) + 60))
        written.rename(self._folder / "last-step")
        ended = [program.wait() for program in ranks]
        assert [code for code, _ in ended] == [0, 0], ended
        assert all(output.count("ends at the right parameters") == 2 for _, output in ended), ended
        return [output for _, output in ended]


@pytest.fixture
def racks(start: Start, tmp_path: Path) -> Racks:
    return Racks(start, tmp_path)


@pytest.mark.parametrize("reduction", ["tree", "ring"])
def test_ranks_of_a_rack_whose_hub_is_killed_go_on_at_the_hub_of_all(racks: Racks, reduction: str) -> None:
    racks.hub()
    racks.hub("--rack", "a")
    of_rack = racks.hub("--rack", "b")
    ranks = racks.ranks(reduction)
    racks.await_checkpoint()
    of_rack.signal(signal.SIGKILL)
    ranks[1].await_output(r"(?:rank 3 begins at step[\s\S]*){2}")
    outputs = racks.end(ranks)
    assert all(re.search(r"rank \d begins at step [1-9]", output) for output in outputs), outputs


def test_ranks_wait_for_the_hub_of_their_rack_if_no_other_serves_them(racks: Racks) -> None:
    racks.hub("--rack", "a")
    of_rack = racks.hub("--rack", "b")
    ranks = racks.ranks("sharded")
    racks.await_checkpoint()
    of_rack.signal(signal.SIGKILL)
    of_rack.wait()
    ranks[0].await_output("goes back to its newest checkpoint")
    racks.hub("--rack", "b")
    ranks[1].await_output(r"(?:rank 3 begins at step[\s\S]*){2}")
    racks.end(ranks)


def test_a_rank_that_is_killed_in_a_rack_is_replaced_and_all_go_back(racks: Racks) -> None:
    racks.hub("--rack", "a")
    racks.hub("--rack", "b")
    ranks = racks.ranks("tree")
    racks.await_checkpoint()
    process = ranks[1].await_output(r"rank 3 begins at step 0 and is process (\d+)")[1]
    os.kill(int(process), signal.SIGKILL)
    ranks[1].await_output(r"(?:rank 3 begins at step[\s\S]*){2}")
    outputs = racks.end(ranks)
    # The ranks of the other rack stay in their processes, and hear who was lost.
    assert re.search(r"goes back to its newest checkpoint: rank 3 was lost", outputs[0]), outputs
    assert len(set(re.findall(r"is process (\d+)", outputs[0]))) == 2, outputs
