"""The tests' own tools with failing and hanging ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PYTHON, Ended, Program
from team import Died, Rank, Team, TeamError


def place(rank: Rank, factor: int) -> tuple[int, int, str, str]:
    assert "paramhub" not in sys.modules
    return rank.rank * factor, int(os.environ["RANK"]), os.environ["MASTER_PORT"], os.environ["OF_MINE"]


def test_ranks_have_their_places_and_return_by_rank(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMHUB_URL", "http://nowhere")
    results = team(place, 10, ranks=3, env={"OF_MINE": "yes"})
    assert [result[:2] for result in results] == [(0, 0), (10, 1), (20, 2)]
    assert len({result[2] for result in results}) == 1
    assert {result[3] for result in results} == {"yes"}
    assert team(inherited, ranks=1) == [None]


def inherited(rank: Rank) -> str | None:
    return os.environ.get("PARAMHUB_URL")


def fails(rank: Rank) -> None:
    print(f"rank {rank.rank} says this")
    if rank.rank == 1:
        raise ValueError("on purpose")


def test_a_rank_that_raises_is_named_with_everything_printed(team: Team) -> None:
    with pytest.raises(TeamError) as failed:
        team(fails, ranks=2)
    message = str(failed.value)
    assert "rank 1 raised ValueError: on purpose" in message
    assert "rank 0 says this" in message
    assert "in fails" in message


def hangs(rank: Rank) -> None:
    if rank.rank == 0:
        child = subprocess.Popen(["sleep", "600"])
        (rank.folder / "child").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)


def test_a_hanging_rank_shows_where_and_dies_with_its_children(team: Team, tmp_path: Path) -> None:
    with pytest.raises(TeamError) as failed:
        team(hangs, ranks=2, timeout=2)
    assert "rank 0 had not ended after 2 s" in str(failed.value)
    assert "in hangs" in str(failed.value)
    (written,) = tmp_path.glob("team-*/child")
    assert not any(is_alive(int(pid)) for pid in written.read_text().split())


def is_alive(pid: int) -> bool:
    try:
        # A killed orphan may wait for init to reap it.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def dies(rank: Rank) -> str:
    if rank.rank == 1:
        rank.await_mark("notified")
        os.kill(os.getpid(), signal.SIGKILL)
    rank.mark("notified")
    return "alive"


def test_a_death_is_expected_or_fails_the_team(team: Team) -> None:
    assert team(dies, ranks=2, dies=[1]) == ["alive", Died(-signal.SIGKILL)]
    with pytest.raises(TeamError, match="rank 1 was ended by SIGKILL without a result"):
        team(dies, ranks=2)
    with pytest.raises(TeamError, match="rank 0 was to die, but ended well"):
        team(dies, ranks=2, dies=[0, 1])


def exits_badly(rank: Rank) -> None:
    import atexit

    atexit.register(os._exit, 7)


def test_the_exit_code_after_the_function_counts(team: Team) -> None:
    with pytest.raises(TeamError, match="rank 0 exited with 7 after its function had returned"):
        team(exits_badly, ranks=1)


def test_programs_report_their_end_and_are_ended(
    launch: Callable[..., Ended], start: Callable[..., Program]
) -> None:
    assert launch(PYTHON, "-c", "import os; print(os.environ['A']); exit(3)", env={"A": "b"}) == (3, "b\n")
    with pytest.raises(AssertionError, match=r"had not ended after 1 s(.|\n)*line 1 in <module>"):
        launch(PYTHON, "-c", "import time; time.sleep(600)", timeout=1)
    program = start(PYTHON, "-c", "import time; print('ready', flush=True); time.sleep(600)")
    program.await_output("^ready$")
    program.signal(signal.SIGTERM)
    assert program.wait() == (-signal.SIGTERM, "ready\n")


def test_a_program_keeps_its_id_until_what_it_left_behind_is_killed(start: Callable[..., Program]) -> None:
    program = start(PYTHON, "-c", "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)")
    code, output = program.wait()
    assert code == 0 and is_alive(int(output))
    # If it were reaped, another group could have the id to which `end` sends its signal.
    assert Path(f"/proc/{program.pid}/stat").exists()
    program.end()
    assert not Path(f"/proc/{program.pid}/stat").exists()
    deadline = time.monotonic() + 10
    while is_alive(int(output)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(int(output))
    program.signal(signal.SIGKILL)
