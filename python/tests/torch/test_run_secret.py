"""What ranks exchange through torch's store, and how they find the secret under which it is encrypted."""

from __future__ import annotations

import json
import os
import threading

import pytest
from team import Rank, Team

import paramhub
import paramhub.torch
from paramhub.torch._run_secret import RunSecret, own_sources

TOKEN = "a-token-that-operators-know"
JOB_SECRET = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PARAMHUB_SECRET", "PARAMHUB_ADMIN_TOKEN", "PARAMHUB_ADMIN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("source", ["job", "token", "memory", "store"])
def test_every_rank_finds_the_secret_of_rank_0(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    known = {"job": ("PARAMHUB_SECRET", JOB_SECRET), "token": ("PARAMHUB_ADMIN_TOKEN", TOKEN)}
    if source in known:
        monkeypatch.setenv(*known[source])
    chosen, choice = RunSecret.choose(own_sources(), is_on_one_host=source == "memory")
    assert json.loads(choice)["from"] == source
    assert chosen.is_exposed == (source == "store")
    found = RunSecret.find(1, choice)
    sealed = chosen.seal("hub", "who reads this knows the token")
    assert found.open("hub", sealed) == "who reads this knows the token"
    assert chosen.seal("hub", "who reads this knows the token") != sealed
    assert found.derive("mesh") == chosen.derive("mesh") != chosen.derive("another mesh")
    for altered in [sealed[:-8] + "AAAAAAA=", "sealed:", "", json.dumps(["http://elsewhere", "", ""])]:
        with pytest.raises(paramhub.ConnectError, match="was not written by a rank of this run"):
            found.open("hub", altered)
    with pytest.raises(paramhub.ConnectError):
        found.open("job/first", sealed)
    shown = choice + sealed
    assert not any(secret in shown for secret in (TOKEN, JOB_SECRET))
    chosen.close()


def test_a_jobs_secret_with_a_fingerprint_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMHUB_SECRET", f"{JOB_SECRET}.{'ab' * 32}")
    chosen, choice = RunSecret.choose(own_sources(), is_on_one_host=False)
    assert json.loads(choice)["from"] == "job" and not chosen.is_exposed
    # The fingerprint is no secret: ranks that were given the secret without it find the same.
    monkeypatch.setenv("PARAMHUB_SECRET", JOB_SECRET)
    assert RunSecret.find(1, choice).derive("mesh") == chosen.derive("mesh")
    chosen.close()


def test_two_runs_with_one_token_have_different_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMHUB_ADMIN_TOKEN", TOKEN)
    one, other = (RunSecret.choose(["token"], is_on_one_host=False)[0] for _ in range(2))
    with pytest.raises(paramhub.ConnectError):
        other.open("hub", one.seal("hub", "secret"))


def test_a_rank_with_another_token_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARAMHUB_ADMIN_TOKEN", TOKEN)
    chosen, choice = RunSecret.choose(["token"], is_on_one_host=False)
    monkeypatch.setenv("PARAMHUB_ADMIN_TOKEN", "another")
    with pytest.raises(paramhub.ConnectError, match="the same PARAMHUB_ADMIN_TOKEN"):
        RunSecret.find(1, choice).open("hub", chosen.seal("hub", "secret"))
    monkeypatch.delenv("PARAMHUB_ADMIN_TOKEN")
    with pytest.raises(paramhub.ConnectError, match="this rank does not"):
        RunSecret.find(1, choice)


def test_only_memory_of_this_user_is_believed() -> None:
    chosen, choice = RunSecret.choose([], is_on_one_host=True)
    of_init = json.dumps({"from": "memory", "path": "/proc/1/fd/0"})
    short = os.memfd_create("short")
    too_short = json.dumps({"from": "memory", "path": f"/proc/{os.getpid()}/fd/{short}"})
    for wrong in [json.dumps({"from": "memory", "path": "/etc/hostname"}), of_init, too_short]:
        with pytest.raises(paramhub.ConnectError):
            RunSecret.find(1, wrong)
    os.close(short)
    chosen.close()
    with pytest.raises(paramhub.ConnectError, match="cannot read the run's secret"):
        RunSecret.find(1, choice)


def test_a_token_may_stand_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    path = os.path.join(str(tmp_path), "token")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{TOKEN}\n")
    os.chmod(path, 0o600)
    monkeypatch.setenv("PARAMHUB_ADMIN_TOKEN_FILE", path)
    assert own_sources() == ["token"]
    monkeypatch.setenv("PARAMHUB_ADMIN_TOKEN", TOKEN)
    with pytest.raises(paramhub.MisuseError, match="given twice"):
        own_sources()


def shows(rank: Rank, names_host: bool, token: str | None) -> tuple[list[str], str]:
    """What this rank finds in the store after a job and, on one host, a collective, and what rank 0 has printed."""
    import contextlib
    import io

    import torch
    import torch.distributed as dist

    if names_host:
        os.environ["PARAMHUB_HOST"] = f"host-{rank.rank}"
        # A launcher that does not know the hosts.
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    if token is not None:
        os.environ["PARAMHUB_ADMIN_TOKEN"] = token
    texts: list[str] = []
    set_text = dist.Store.set

    def record(store: dist.Store, key: str, text: str) -> None:
        texts.append(text)
        set_text(store, key, text)

    dist.PrefixStore.set = record
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        paramhub.torch.init()
        model = torch.nn.Linear(4, 3)
        optimizer = paramhub.torch.HubOptimizer(model, paramhub.SGD(lr=0.1))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.synchronize()
        if not names_host:
            tensor = torch.ones(3)
            assert paramhub.torch.allreduce(tensor, op=paramhub.torch.Sum).tolist() == [2.0] * 3
        paramhub.torch.shutdown()
    return texts, printed.getvalue()


@pytest.mark.parametrize(
    ("names_host", "token", "source"),
    [(False, None, "memory"), (True, TOKEN, "token"), (True, None, "store")],
)
def test_no_secret_goes_through_the_store_in_clear(
    team: Team, names_host: bool, token: str | None, source: str
) -> None:
    with paramhub.Hub(manager="127.0.0.1:0", admin_token=token) as hub:
        results = team(shows, names_host, token, ranks=2, env={"PARAMHUB_URL": hub.url})
    texts = [text for rank_texts, _ in results for text in rank_texts]
    choices = [text for text in texts if text.startswith('{"from"')]
    assert [json.loads(choice)["from"] for choice in choices] == [source], texts
    assert any(text.startswith("sealed:") for text in texts)
    assert not any(hub.url in text or TOKEN in text for text in texts), texts
    warned = "go through torch's store, and whoever can listen" in results[0][1]
    assert warned == (source == "store"), results[0][1]


def comes_and_goes(rank: Rank) -> None:
    if rank.rank == 1:
        rank.await_mark("gone")
    paramhub.torch.init()
    if rank.rank == 0:
        # Rank 1 finds the secret while this rank leaves.
        threading.Timer(0.2, rank.mark, ["gone"]).start()
    paramhub.torch.shutdown()


def test_rank_0_may_leave_before_the_others_have_come(team: Team, hub: paramhub.Hub) -> None:
    team(comes_and_goes, ranks=2, env={"PARAMHUB_URL": hub.url})
