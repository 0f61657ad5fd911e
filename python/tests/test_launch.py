"""`paramhub.run`: functions in several processes, and what comes back from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paramhub

MODULE = """
import os, signal
import numpy
import paramhub

def add(one, other=0):
    rank = int(os.environ["RANK"])
    weight = numpy.zeros(4, "f4")
    with paramhub.connect() as job:
        job.init({"weight": weight}, optimizer=paramhub.Sum())
        job.push_pull("weight", numpy.full(4, rank + 1, "f4"), out=weight).wait()
    return rank, one + other, float(weight[0])

def fail(rank):
    if os.environ["RANK"] == str(rank):
        raise ValueError("not this one")
    return rank

def wait_for(folder):
    import pathlib, time
    try:
        (pathlib.Path(folder) / "ready").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(1.0)
        (pathlib.Path(folder) / "interrupted").touch()
        raise

def fail_and_tell():
    import atexit, sys
    atexit.register(lambda: print("ended by", repr(sys.last_value), flush=True))
    raise ValueError("this one")

def path():
    import sys
    return sys.path

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_results_come_by_rank_and_errors_name_their_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launched_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import launched_functions

    assert signal.SIGKILL and os.environ.get("RANK") is None
    results = paramhub.run(launched_functions.add, (2,), {"other": 3}, np=2)
    assert results == [(0, 5, 3.0), (1, 5, 3.0)]
    with pytest.raises(paramhub.ParamhubError, match="1 of 1 ranks failed") as error:
        paramhub.run(launched_functions.fail, [0])
    assert "rank 0 raised" in str(error.value) and "ValueError: not this one" in str(error.value)
    with pytest.raises(paramhub.ParamhubError, match="rank 0 has ended without a result"):
        paramhub.run(launched_functions.die)
    with pytest.raises(paramhub.MisuseError, match="--host-rank"):
        paramhub.run(launched_functions.die, hosts="a:1,b:1")
    with pytest.raises(paramhub.MisuseError, match="from 1, not 0"):
        paramhub.run(launched_functions.die, num_proc=0)


def test_ranks_keep_their_own_path_and_know_at_their_exit_that_they_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "launched_paths.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import launched_paths

    (path,) = paramhub.run(launched_paths.path)
    assert path.index(str(tmp_path)) > path.index(str(Path(os.__file__).parent))
    # The same Python under another name, for which the modules of this one are none.
    other = str(Path(sys.executable).parent) + "/./" + Path(sys.executable).name
    with pytest.raises(paramhub.ParamhubError, match="No module named 'launched_paths'"):
        paramhub.run(launched_paths.path, executable=other)
    with pytest.raises(paramhub.ParamhubError, match="ValueError: this one"):
        paramhub.run(launched_paths.fail_and_tell)
    assert "ended by ValueError('this one')" in capfd.readouterr().out


def test_an_interrupted_run_lets_its_ranks_end(tmp_path: Path) -> None:
    (tmp_path / "launched_waits.py").write_text(MODULE)
    program = "import launched_waits, paramhub, sys; paramhub.run(launched_waits.wait_for, sys.argv[1:])"
    # Without a terminal, which would interrupt the launcher, too.
    command = [sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert b"KeyboardInterrupt" in told
    assert (tmp_path / "interrupted").exists()


def test_what_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises(paramhub.MisuseError, match="module's top level, or install cloudpickle"):
        paramhub.run(lambda: 1)

    def of_main() -> None:
        pass

    of_main.__module__ = "__main__"
    with pytest.raises(paramhub.MisuseError, match="'of_main' is defined in the program itself"):
        paramhub.run(of_main)
