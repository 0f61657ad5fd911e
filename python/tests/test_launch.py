"""`paramhub.run`: functions in several processes, and what comes back from them."""

from __future__ import annotations

import os
import signal
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


def test_what_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises(paramhub.MisuseError, match="module's top level, or install cloudpickle"):
        paramhub.run(lambda: 1)

    def of_main() -> None:
        pass

    of_main.__module__ = "__main__"
    with pytest.raises(paramhub.MisuseError, match="'of_main' is defined in the program itself"):
        paramhub.run(of_main)
