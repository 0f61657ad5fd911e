"""Joining a job, and its errors."""

from __future__ import annotations

import re
import threading

import numpy
import pytest
from workers import TIMEOUT, in_threads, new_job

import paramhub

VARIABLES = ["PARAMHUB_URL", "PARAMHUB_JOB", "PARAMHUB_SECRET", "RANK"]


def test_variables_of_a_launcher_are_enough(hub: paramhub.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, [*new_job(hub, 1), "0"], strict=True):
        monkeypatch.setenv(name, f" {value}\n")
    with paramhub.connect() as job:
        assert (job.rank, job.workers) == (0, 1)
        assert repr(job) == f"<paramhub.Job {job.name!r} rank 0 of 1>"
    # Arguments overrule the environment.
    with paramhub.connect(*new_job(hub, 1)) as other:
        assert other.name != job.name


@pytest.mark.parametrize("missing", VARIABLES)
def test_a_missing_variable_is_named(
    hub: paramhub.Hub, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name, value in zip(VARIABLES, [*new_job(hub, 1), "0"], strict=True):
        monkeypatch.setenv(name, value)
    for absence in (lambda: monkeypatch.delenv(missing), lambda: monkeypatch.setenv(missing, "")):
        absence()
        with pytest.raises(paramhub.MisuseError, match=rf"paramhub run(.|\n)*set {missing}$"):
            paramhub.connect()


def test_ranks_that_cannot_be_are_refused(hub: paramhub.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = new_job(hub, 2)
    with pytest.raises(paramhub.ConnectError, match="has ranks 0 and 1 only, not rank 2"):
        paramhub.connect(*ticket, 2)
    for wrong in (-1, 2**32):
        with pytest.raises(paramhub.MisuseError, match=f"{wrong}"):
            paramhub.connect(*ticket, wrong)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(paramhub.MisuseError, match="a rank is a number from 0, not 'first'"):
        paramhub.connect(*ticket)


def test_a_rank_is_one_process_s(hub: paramhub.Hub) -> None:
    ticket = new_job(hub, 1)
    with (
        paramhub.connect(*ticket, 0),
        pytest.raises(paramhub.ConnectError, match=r"rank 0 of job .* belongs to process"),
    ):
        paramhub.connect(*ticket, 0)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_an_encrypted_job_has_the_right_numbers(
    hub: paramhub.Hub, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("PARAMHUB_JOB_ENCRYPT", "1")
    ticket = new_job(hub, 1, **({"encrypt": True} if by == "argument" else {}))
    with paramhub.connect(*ticket, 0, transport="tcp") as job:
        gradient = numpy.arange(100_000, dtype=numpy.float32)
        mean = numpy.zeros_like(gradient)
        job.init({"w": gradient})
        job.push_pull("w", gradient, mean).wait(TIMEOUT)
        assert (mean == gradient).all()


WRONG = {
    "the URL's scheme": ({"url": "ftp://127.0.0.1"}, paramhub.ConnectError, "neither http nor https"),
    "no manager there": (
        {"url": "http://127.0.0.1:9"},
        paramhub.ConnectError,
        "no connection manager answers",
    ),
    "another secret": ({"secret": "0" * 64}, paramhub.ConnectError, "no job of this namespace whose nonce"),
    "no secret": ({"secret": "guess"}, paramhub.MisuseError, "64 hexadecimal digits"),
    "another job": ({"job": "0" * 32}, paramhub.ConnectError, "no job of this namespace whose nonce"),
    "no job": ({"job": "mine"}, paramhub.MisuseError, "namespace"),
    "the transport": ({"transport": "pigeon"}, paramhub.MisuseError, "auto, tcp or shm"),
    "the interfaces": ({"interfaces": "10.0.0.0/99"}, paramhub.MisuseError, "is no network"),
    "the timeout": ({"timeout": -1.0}, paramhub.MisuseError, "0 or more seconds"),
    "no number": ({"timeout": float("nan")}, paramhub.MisuseError, "0 or more seconds"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_refused(
    hub: paramhub.Hub, wrong: tuple[dict[str, object], type[Exception], str]
) -> None:
    change, kind, reason = wrong
    ticket = new_job(hub, 1)
    with pytest.raises(kind, match=reason) as refused:
        paramhub.connect(**{**ticket._asdict(), "rank": 0, **change})
    assert ticket.secret not in str(refused.value)
    # The refusal has not harmed the job.
    paramhub.connect(*ticket, 0).leave()


def test_an_unknown_transport_in_the_environment_is_refused(
    hub: paramhub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARAMHUB_TRANSPORT", "pigeon")
    with pytest.raises(paramhub.MisuseError, match="PARAMHUB_TRANSPORT"):
        paramhub.connect(*new_job(hub, 1), 0)


def test_a_rank_that_does_not_come_is_named(hub: paramhub.Hub) -> None:
    ticket = new_job(hub, 3, rendezvous_timeout=0.5)
    with pytest.raises(
        paramhub.ConnectError, match=r"ranks 0 and 1 have not connected to job .* within 0.5 s"
    ):
        paramhub.connect(*ticket, 2)


def test_connect_waits_no_longer_than_its_timeout(hub: paramhub.Hub) -> None:
    ticket = new_job(hub, 2, rendezvous_timeout=600)
    with pytest.raises(paramhub.ConnectError, match=r"within 0.5 s"):
        paramhub.connect(*ticket, 1, timeout=0.5)
    # The rank is free again.
    other = threading.Thread(target=lambda: paramhub.connect(*ticket, 0, timeout=TIMEOUT))
    other.start()
    paramhub.connect(*ticket, 1, timeout=TIMEOUT)
    other.join(TIMEOUT)


def test_a_rank_without_settings_is_named(hub: paramhub.Hub) -> None:
    ticket = new_job(hub, 2, rendezvous_timeout=1.0)
    waiting = threading.Thread(target=lambda: kept.append(paramhub.connect(*ticket, 1)))
    kept: list[paramhub.Job] = []
    waiting.start()
    job = paramhub.connect(*ticket, 0)
    waiting.join(TIMEOUT)
    with pytest.raises(paramhub.ConnectError, match="rank 1 "):
        job.init({"w": numpy.zeros(3, "f4")})


DIFFERENT = {
    "shapes": (lambda rank: {"tensors": {"w": numpy.zeros(3 + rank, "f4")}}, "w"),
    "names": (lambda rank: {"tensors": {f"w{rank}": numpy.zeros(3, "f4")}}, "w"),
    "types": (lambda rank: {"tensors": {"w": numpy.zeros(3, ["f4", "f2"][rank])}}, "w"),
    "optimizers": (
        lambda rank: {"tensors": {"w": numpy.zeros(3, "f4")}, "optimizer": paramhub.SGD(lr=0.1 + rank)},
        "learning_rate|optimizer",
    ),
    "reproducibility": (
        lambda rank: {"tensors": {"w": numpy.zeros(3, "f4")}, "reproducible": bool(rank)},
        "reproducible",
    ),
}


@pytest.mark.parametrize("different", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_the_point_on_which_ranks_disagree_is_named(hub: paramhub.Hub, different: tuple[object, str]) -> None:
    arguments, named = different

    def work(job: paramhub.Job) -> str:
        with pytest.raises(paramhub.ParamhubError) as refused:
            job.init(**arguments(job.rank))
        return str(refused.value)

    messages = in_threads(hub, 2, work)
    assert all(re.search(named, message) for message in messages), messages


def test_out_of_place_calls_are_refused(hub: paramhub.Hub) -> None:
    tensor = numpy.zeros(3, "f4")
    job = paramhub.connect(*new_job(hub, 1), 0)
    for call in (lambda: job.push("w", tensor), lambda: job.statistics(), lambda: job.shares_memory):
        with pytest.raises(paramhub.MisuseError, match="call init"):
            call()
    job.init({"w": tensor})
    with pytest.raises(paramhub.MisuseError, match="has its tensors already"):
        job.init({"w": tensor})
    job.leave()
    job.leave()
    for call in (lambda: job.push("w", tensor), lambda: job.init({"w": tensor}), lambda: job.statistics()):
        with pytest.raises(paramhub.MisuseError):
            call()


def test_leaving_without_tensors_gives_the_rank_up(hub: paramhub.Hub) -> None:
    ticket = new_job(hub, 2)

    def leaves() -> None:
        paramhub.connect(*ticket, 1).leave()

    thread = threading.Thread(target=leaves)
    thread.start()
    job = paramhub.connect(*ticket, 0)
    thread.join(TIMEOUT)
    with pytest.raises(paramhub.ParamhubError, match="rank 1"):
        job.init({"w": numpy.zeros(3, "f4")})


def test_jobs_that_cannot_be_are_refused(hub: paramhub.Hub) -> None:
    hub.create_job("taken", 1)
    for name, workers, options, reason in [
        ("taken", 1, {}, "taken"),
        ("two words", 1, {}, "no job name"),
        ("", 1, {}, "no job name"),
        ("none", 0, {}, "1 to 1024"),
        ("many", 5000, {}, "1 to 1024"),
        ("short", 1, {"lease": -1.0}, "lease_s"),
        ("quick", 1, {"dead_after": 0.0}, "dead_after_s"),
    ]:
        with pytest.raises(paramhub.ParamhubError, match=reason):
            hub.create_job(name, workers, **options)


def test_hubs_that_cannot_be_are_refused(hub: paramhub.Hub) -> None:
    for options, reason in [
        ({"listen": ["here"]}, "IP:PORT"),
        ({"listen": hub.addresses}, "in use"),
        ({"manager": "0.0.0.0:0"}, "admin token"),
        ({"cores": 0}, "cores"),
    ]:
        with pytest.raises(paramhub.ParamhubError, match=reason):
            paramhub.Hub(**options)


def test_a_job_that_does_not_fit_the_memory_is_refused() -> None:
    with paramhub.Hub(memory=1_000_000) as hub:
        with (
            paramhub.connect(*new_job(hub, 1), 0) as job,
            pytest.raises(paramhub.ParamhubError, match=r"memory|bytes"),
        ):
            job.init({"w": numpy.zeros(1_000_000, "f4")})
        with paramhub.connect(*new_job(hub, 1), 0) as job:
            job.init({"w": numpy.zeros(10_000, "f4")})


def test_a_hub_with_a_token_asks_for_it() -> None:
    with paramhub.Hub(admin_token="secret-of-ours") as hub:
        with pytest.raises(paramhub.ConnectError, match="token"):
            paramhub.create_job(hub.url, "a", 1)
        with pytest.raises(paramhub.ConnectError) as refused:
            paramhub.create_job(hub.url, "a", 1, admin_token="guess")
        assert "secret-of-ours" not in str(refused.value)
        paramhub.create_job(hub.url, "a", 1, admin_token="secret-of-ours")
        hub.create_job("b", 1)


def test_workers_without_shared_memory_use_tcp() -> None:
    with paramhub.Hub(shared_memory=False) as hub:

        def work(job: paramhub.Job) -> bool:
            return job.init({"w": numpy.zeros(3, "f4")}).shares_memory

        assert in_threads(hub, 1, work) == [False]
        with pytest.raises(paramhub.ConnectError, match="--no-shared-memory"):
            in_threads(hub, 1, work, transport="shm")


def test_a_job_waits_for_its_hubs(hub: paramhub.Hub) -> None:
    ticket = hub.create_job("two-hubs", 1, hubs=2, rendezvous_timeout=0.3)
    with pytest.raises(paramhub.ConnectError, match="of the 2 hubs that it waits for only 1, hub 0"):
        paramhub.connect(*ticket, 0)
    with pytest.raises(paramhub.ConnectError, match="waits for 1025 hubs: at most 1024 are possible"):
        hub.create_job("many-hubs", 1, hubs=1025)
    with paramhub.connect(*hub.create_job("one-hub", 1, hubs=1), 0) as job:
        assert job.name == "one-hub"


def test_of_several_managers_the_one_that_answers_is_called(hub: paramhub.Hub) -> None:
    urls = f"http://127.0.0.1:1,{hub.url}"
    ticket = paramhub.create_job(urls, "several", 1)
    assert ticket.url == urls
    with paramhub.connect(*ticket, 0) as job:
        assert job.name == "several"
    with pytest.raises(
        paramhub.MisuseError, match=r"`ftp://a` is no connection manager's URL.*separated by commas"
    ):
        paramhub.create_job("http://127.0.0.1:1,ftp://a", "several", 1)
