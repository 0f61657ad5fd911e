"""Programs that tests start: workers under a launcher, hubs, scripts. See the fixtures `start` and `launch` in conftest.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from team import clean_environment

PYTHON = sys.executable
AWAITED_S = 120.0
"""Seconds within which a program must have come as far as a test expects. On a busy machine importing torch takes a minute."""
PARAMHUB = (PYTHON, "-m", "paramhub")
TORCHRUN = (
    PYTHON,
    "-m",
    "torch.distributed.run",
    "--nnodes=1",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
)


class Ended(NamedTuple):
    """A program's end: its exit code (negative for a signal), and what it printed on either stream."""

    code: int
    output: str


class Program:
    """A running program, in a process group of its own. What it prints, on either stream, goes into one file.

    Until `end` it is not reaped: its id, which is its group's, can be no other process's or group's meanwhile.
    """

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path, output: Path) -> None:
        self.command = command
        self._output = output
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def output(self) -> str:
        """Returns the output so far."""
        return self._output.read_text(errors="replace")

    def await_output(self, pattern: str, timeout: float = AWAITED_S) -> re.Match[str]:
        """Waits until it has printed text that matches."""
        deadline = time.monotonic() + timeout
        while True:
            code = self._code()
            found = re.search(pattern, self.output(), re.MULTILINE)
            if found is not None:
                return found
            if code is not None:
                raise AssertionError(
                    f"{self} ended with {code} and had not printed {pattern!r}:\n{self.output()}"
                )
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{self} did not print {pattern!r} within {timeout:g} s:\n{self.output()}"
                )
            time.sleep(0.01)

    def await_sleep(self, timeout: float = AWAITED_S) -> None:
        """Waits until its main thread has slept for a while, so that it has certainly reached the wait."""
        deadline, since, last = time.monotonic() + timeout, time.monotonic(), ""
        while time.monotonic() < since + 0.5:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
            # Its state, and its processor time in ticks of ten milliseconds.
            state = f"{fields[0]} {fields[11]}"
            if state != last or not state.startswith("S"):
                since, last = time.monotonic(), state
            if time.monotonic() > deadline:
                raise AssertionError(f"{self} does not wait: {state}\n{self.output()}")
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self._code() is None:
            os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends a signal to it and to what it has started, as a terminal does with Ctrl-C."""
        if self._code() is None:
            os.killpg(self.pid, number)

    def wait(self, timeout: float = 120.0) -> Ended:
        """Waits for its end. A program that takes longer is killed, after it has printed its stacks if it is Python."""
        code = self._await_code(timeout)
        if code is None:
            self.signal(signal.SIGABRT)
            self._await_code(2)
            self.end()
            raise AssertionError(f"{self} had not ended after {timeout:g} s:\n{self.output()}")
        return Ended(code, self.output())

    def end(self) -> None:
        """Kills it and all processes that it has started."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def _await_code(self, timeout: float) -> int | None:
        deadline = time.monotonic() + timeout
        while (code := self._code()) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return code

    def _code(self) -> int | None:
        """The exit code if it has ended, negative for a signal. Does not reap it."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def __str__(self) -> str:
        return f"`{' '.join(self.command)}`"


class Launcher:
    """Starts programs and ends them with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs: list[Program] = []

    def start(self, *command: str | Path, env: dict[str, str] | None = None) -> Program:
        # With faulthandler a Python program prints its stacks at SIGABRT. Its output stays buffered: unbuffered, `print`
        # writes a line and the end of the line apart, and the lines of several processes mix.
        environment = clean_environment(PYTHONFAULTHANDLER="1", **(env or {}))
        environment.pop("PYTHONUNBUFFERED", None)
        output = self._folder / f"output-{len(self._programs)}"
        program = Program([str(word) for word in command], environment, self._folder, output)
        self._programs.append(program)
        return program

    def launch(
        self, *command: str | Path, env: dict[str, str] | None = None, timeout: float = 120.0
    ) -> Ended:
        return self.start(*command, env=env).wait(timeout)

    def end(self) -> None:
        for program in self._programs:
            program.end()
