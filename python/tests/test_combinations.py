"""What does not combine is refused with the reasons of the table that docs/combinations.md shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from workers import in_threads

import paramhub
from paramhub import _native
from paramhub import kvstore as kvs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"


def reasons(caller: str) -> list[str]:
    """The reasons of all rules about which ``caller`` asks."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows if len(row) == 6]
    return [why for _, _, _, why, _, callers in cells if caller in callers.split(", ")]


def test_python_shows_every_reason_that_it_asks_for(hub: paramhub.Hub) -> None:
    messages: list[str] = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(paramhub.MisuseError) as caught:
            call()
        messages.append(str(caught.value))

    for features in (
        ["factors", "two-phase"],
        ["factors", "registered-optimizer"],
        ["factors-in-pytorch", "reject-non-finite"],
        ["factors", "checkpoint-every"],
        ["several-sites", "quantised"],
    ):
        conflict = _native.conflict(features)
        assert conflict is not None
        message, why = conflict
        assert why in message
        messages.append(message)
    for fitting in ("reproducible", "several-sites"):
        assert _native.conflict(["factors", fitting]) is None
    refused(lambda: _native.conflict(["no-such-feature"]))

    def init(job: paramhub.Job) -> None:
        tensors = {"fc": numpy.zeros((3, 2), "f4")}
        layers = {"fc": {"tensors": ["fc"], "samples": 1}}
        for scheme in ("auto", "factors-to-hub"):
            refused(lambda scheme=scheme: job.init(tensors, layers=layers, scheme=scheme))

    in_threads(hub, 1, init)
    refused(lambda: paramhub.Hub(join=hub.url, manager="127.0.0.1:0"))
    for kind, options in (
        ("local", {"codec": "f16"}),
        ("local", {"transport": "tcp"}),
        ("local", {"outstanding": 2}),
        ("local", {"check": True}),
        ("funnel", {"transport": "shm"}),
        ("funnel", {"reproducible": True}),
    ):
        identity = {} if kind == "local" else {"url": hub.url, "job": 32 * "0", "secret": 64 * "0", "rank": 0}
        refused(lambda kind=kind, options=options, identity=identity: kvs.create(kind, **identity, **options))
    missing = [why for why in reasons("Python") if not any(why in message for message in messages)]
    assert reasons("Python") and not missing


def test_settings_are_compared_with_hubs_of_racks() -> None:
    keys = '{"keys": [{"name": "w", "shape": [4, 3]}], "optimizer": {"name": "sgd"}%s}'
    for fitting in ("", ', "clip_norm": 1.0', ', "consistency": "asynchronous"'):
        assert _native.conflict(["several-sites"], keys % fitting) is None
    conflict = _native.conflict(["several-sites"], keys % ', "codec": "one-bit"')
    assert conflict is not None and "key `w` (one-bit)" in conflict[0]
    assert _native.conflict(["several-sites"], "no JSON") is None, "InitService reports it"
