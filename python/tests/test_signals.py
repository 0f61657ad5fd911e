"""Ctrl-C during a wait. Each waiter is a program of its own, as at a terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PARAMHUB, PYTHON, Program
from workers import new_job

import paramhub

PROMPTLY = 10.0
"""Seconds far below every timeout of the waits, and far above the time that Ctrl-C takes."""

BEGIN = """
import sys, threading, time
import paramhub
url, job, secret = sys.argv[1:4]
print("waiting", flush=True)
"""

WAITS = {
    "connect": "paramhub.connect(url, job, secret, 0)",
    "init": """
threading.Thread(target=lambda: kept.append(paramhub.connect(url, job, secret, 1)), daemon=True).start()
kept = [paramhub.connect(url, job, secret, 0)]
import array
kept[0].init({"w": array.array("f", [0.0])})
""",
    "wait": """
import array
one = array.array("f", [0.0])
def other():
    kept.append(paramhub.connect(url, job, secret, 1).init({"w": one}))
kept = []
threading.Thread(target=other, daemon=True).start()
mine = paramhub.connect(url, job, secret, 0).init({"w": one})
mine.push_pull("w", one, one).wait()
""",
    "create": "paramhub.create_job('http://127.0.0.1:9', 'x', 1, patience=600)",
    "leave": """
import array
one = array.array("f", [0.0])
def other():
    kept.append(paramhub.connect(url, job, secret, 1).init({"w": one}))
kept = []
threading.Thread(target=other, daemon=True).start()
mine = paramhub.connect(url, job, secret, 0).init({"w": one})
mine.push_pull("w", one, one)
mine.leave()
""",
}


@pytest.mark.parametrize("waits", WAITS.values(), ids=WAITS.keys())
def test_ctrl_c_ends_every_wait(hub: paramhub.Hub, start: Callable[..., Program], waits: str) -> None:
    ticket = new_job(hub, 2, rendezvous_timeout=600)
    program = start(PYTHON, "-c", BEGIN + waits, *ticket)
    program.await_output("^waiting$")
    # It must sleep in the wait itself. Before that, Ctrl-C would interrupt ordinary Python code.
    program.await_sleep()
    program.signal(signal.SIGINT)
    code, output = program.wait(PROMPTLY)
    assert code == -signal.SIGINT, output
    assert output.rstrip().endswith("KeyboardInterrupt"), output


def test_a_handler_that_does_not_raise_interrupts_nothing(
    hub: paramhub.Hub, start: Callable[..., Program]
) -> None:
    handled = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("handled", flush=True))
"""
    waits = "\nparamhub.connect(url, job, secret, 0)\nprint('connected')\n"
    ticket = new_job(hub, 2, rendezvous_timeout=600)
    program = start(PYTHON, "-c", handled + BEGIN + waits, *ticket)
    program.await_output("^waiting$")
    program.await_sleep()
    program.signal(signal.SIGUSR1)
    # The handler must run during the wait, not after it.
    program.await_output("^handled$", PROMPTLY)
    paramhub.connect(*ticket, 1)
    code, output = program.wait(PROMPTLY)
    assert (code, output.splitlines()) == (0, ["waiting", "handled", "connected"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_hub_command_ends_well(start: Callable[..., Program], number: int) -> None:
    program = start(*PARAMHUB, "hub", "--manager", "127.0.0.1:0", "--listen", "127.0.0.1:0")
    program.await_output("^hub ready:")
    program.signal(number)
    assert program.wait(PROMPTLY).code == 0


def test_ctrl_c_ends_run_and_its_workers(start: Callable[..., Program]) -> None:
    worker = """
import array, os, paramhub
one = array.array("f", [0.0])
job = paramhub.connect().init({"w": one})
print("here", os.getpid(), flush=True)
if job.rank == 0:
    job.push_pull("w", one, one).wait()
else:
    import time
    time.sleep(600)
"""
    program = start(*PARAMHUB, "run", "-n", "2", "--", PYTHON, "-c", worker)
    program.await_output(r"here \d+(.|\n)*here \d+")
    pids = [int(line.rsplit(" ", 1)[1]) for line in program.output().splitlines() if "here " in line]
    program.signal_group(signal.SIGINT)
    assert program.wait(PROMPTLY).code != 0
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
