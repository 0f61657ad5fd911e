"""Timelines: their content, their clock, and their files when ranks fail."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from team import Rank, Team
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, make

import paramhub
from paramhub import _native
from paramhub.torch import merge_traces, trace
from paramhub.torch._clocks import clock_identity, offset_to_rank_0
from paramhub.torch._trace_files import COMPUTATION, Event, Origin, write

STEPS = 3


def traced(rank: Rank) -> None:
    import torch

    import paramhub.torch

    dist.init_process_group("gloo")
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = paramhub.torch.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(STEPS):
        with paramhub.torch.trace.span("load data"):
            optimizer.zero_grad()
        loss_of(model, step, rank.rank).backward()
        optimizer.step()
    ddp = DistributedDataParallel(make(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(paramhub.torch.HubState(), paramhub.torch.hub_hook)
    for step in range(STEPS):
        loss_of(ddp, step, rank.rank).backward()


class Timeline:
    """A trace file, by rank."""

    def __init__(self, path: Path) -> None:
        with path.open() as file:
            content = json.load(file)
        self.about = content["otherData"]
        self.names: dict[int, str] = {}
        self.spans: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
        self.exchanges: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        begun: dict[str, float] = {}
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                assert event["dur"] >= 0
                self.spans[event["pid"], event["name"]].append(event)
            elif event["ph"] == "b":
                assert event["id"] not in begun
                begun[event["id"]] = event["ts"]
            elif event["ph"] == "e":
                begin = begun.pop(event["id"])
                assert event["ts"] >= begin
                self.exchanges[event["pid"], event["name"]].append((begin, event["ts"]))
            elif event["name"] == "process_name":
                self.names[event["pid"]] = event["args"]["name"]
        assert not begun


def test_a_timeline_shows_exchanges_during_backward(team: Team, tmp_path: Path) -> None:
    team(traced, ranks=2, env={"PARAMHUB_TRACE": str(tmp_path / "trace")})
    timeline = Timeline(tmp_path / "trace" / "trace.json")
    assert [timeline.names[rank].split(" (")[0] for rank in (0, 1)] == ["rank 0", "rank 1"]
    names = [name for name, _ in make().named_parameters()]
    for rank in (0, 1):
        assert timeline.about[f"rank-{rank}"]["dropped_events"] == 0
        assert len(timeline.spans[rank, "load data"]) == STEPS
        assert len(timeline.spans[rank, "step"]) == STEPS
        # DDP's first forward and backward passes begin before the hook knows the DDP instance.
        assert len(timeline.spans[rank, "forward"]) == STEPS - 1
        assert len(timeline.spans[rank, "backward"]) == STEPS + STEPS - 1
        for name in names:
            assert len(timeline.exchanges[rank, name]) >= STEPS, name
        for step, backward in enumerate(timeline.spans[rank, "backward"][:STEPS]):
            # The last layer's gradient is sent before backward has reached the first layer.
            begin, end = timeline.exchanges[rank, "heads.0.bias"][step]
            assert backward["ts"] <= begin < backward["ts"] + backward["dur"]
            assert end <= timeline.spans[rank, "step"][step]["ts"]
    # A mean needs the gradients of both ranks: on one clock no rank's exchange ends before the other's has begun.
    for name in names:
        mine, theirs = timeline.exchanges[0, name], timeline.exchanges[1, name]
        for one, other in zip(mine[:STEPS], theirs[:STEPS], strict=True):
            assert max(one[0], other[0]) <= min(one[1], other[1])


def traced_on_the_backend(rank: Rank) -> None:
    dist.init_process_group("paramhub")
    ddp = DistributedDataParallel(make(), bucket_cap_mb=0.02)
    for step in range(STEPS):
        loss_of(ddp, step, rank.rank).backward()
    dist.barrier()
    dist.destroy_process_group()


def test_a_timeline_of_ddp_on_the_backend_has_its_spans(team: Team, tmp_path: Path) -> None:
    team(traced_on_the_backend, ranks=2, env={"PARAMHUB_TRACE": str(tmp_path / "trace")})
    timeline = Timeline(tmp_path / "trace" / "trace.json")
    for rank in (0, 1):
        # DDP's first passes begin before the backend knows the DDP instance.
        assert len(timeline.spans[rank, "forward"]) == STEPS - 1
        backwards = timeline.spans[rank, "backward"]
        assert len(backwards) == STEPS - 1
        sums = sorted(
            begin
            for (of, name), spans in timeline.exchanges.items()
            if of == rank and name.startswith("allreduce of ")
            for begin, _ in spans
        )
        for backward in backwards:
            begun = [each for each in sums if backward["ts"] <= each <= backward["ts"] + backward["dur"]]
            assert len(begun) >= 2, "each bucket's exchange begins during backward"
        assert len(timeline.exchanges[rank, "barrier"]) >= 1


def mortal(rank: Rank) -> None:
    import torch

    import paramhub.torch

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = paramhub.torch.DistributedOptimizer(optimizer, model.named_parameters())
    with pytest.raises(paramhub.JobFailedError):
        for step in range(100):
            loss_of(model, step, rank.rank).backward()
            if rank.rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()


def test_the_timeline_of_a_failed_run_survives(team: Team, tmp_path: Path) -> None:
    team(mortal, ranks=2, dies=[1], env={"PARAMHUB_TRACE": str(tmp_path / "trace")})
    timeline = Timeline(tmp_path / "trace" / "trace.json")
    assert timeline.names.keys() == {0}
    assert timeline.spans[0, "backward"]


def unwritable(rank: Rank) -> bool:
    import paramhub.torch

    paramhub.torch.init()
    return paramhub.torch.trace.active


def test_a_directory_that_cannot_be_written_costs_only_the_trace(team: Team, tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("")
    assert team(unwritable, ranks=2, env={"PARAMHUB_TRACE": str(occupied)}) == [True, True]
    assert team(unwritable, ranks=2) == [False, False]


def origin(rank: int = 0, size: int = 1, run: str = "run", start_ns: int = 0, offset_ns: int = 0) -> Origin:
    return Origin(run, rank, size, "host", start_ns, offset_ns)


def test_the_newest_events_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trace, "EVENTS_MAX", 10)
    trace._start(str(tmp_path), origin())
    for number in range(25):
        with trace.span(f"span {number}"):
            pass
    trace._finish()
    assert not trace.active
    with trace.span("after the end"):
        pass
    timeline = Timeline(tmp_path / "trace.json")
    assert timeline.about["rank-0"]["dropped_events"] == 15
    assert [name for _, name in timeline.spans] == [f"span {number}" for number in range(15, 25)]


def test_times_are_rank_0s_from_the_beginning_of_the_run(tmp_path: Path) -> None:
    event = Event("span", COMPUTATION, 7_000_000, 9_500_000)
    write(str(tmp_path), origin(start_ns=1_000_000, offset_ns=-2_000_000), [event], 0, 0)
    (span,) = Timeline(tmp_path / "trace.json").spans[0, "span"]
    assert (span["ts"], span["dur"]) == (4000.0, 2500.0)


def test_ranks_that_end_together_lose_no_events(tmp_path: Path) -> None:
    size = 8

    def end(rank: int) -> None:
        events = [Event(f"of {rank}", COMPUTATION, 0, 1)] * 200
        write(str(tmp_path), origin(rank, size), events, 0, 0)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(end, range(size)))
    timeline = Timeline(tmp_path / "trace.json")
    assert sorted(timeline.names) == list(range(size))
    assert all(len(timeline.spans[rank, f"of {rank}"]) == 200 for rank in range(size))
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        *(f"rank-{rank}.json" for rank in range(size)),
        "trace.json",
    ]


def test_an_earlier_runs_files_are_passed_over(tmp_path: Path) -> None:
    for rank in range(3):
        write(str(tmp_path), origin(rank, 3, run="earlier"), [Event("old", COMPUTATION, 0, 1)], 0, 0)
    (tmp_path / "rank-9.json").write_text("no trace\n")
    for rank in range(2):
        write(str(tmp_path), origin(rank, 2), [Event("new", COMPUTATION, 0, 1)], 0, 0)
    timeline = Timeline(tmp_path / "trace.json")
    assert timeline.names.keys() == {0, 1}
    assert timeline.spans.keys() == {(0, "new"), (1, "new")}


def test_files_of_several_hosts_are_merged_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        # Rank 1's host merges nothing, because it has neither all ranks' files nor rank 0.
        write(str(tmp_path / f"host-{rank}"), origin(rank, 2), [Event("span", COMPUTATION, 0, 1)], 0, 0)
    assert not (tmp_path / "host-1" / "trace.json").exists()
    together = tmp_path / "together"
    together.mkdir()
    for rank in range(2):
        name = f"rank-{rank}.json"
        (together / name).write_bytes((tmp_path / f"host-{rank}" / name).read_bytes())
    assert merge_traces.main([str(together)]) == 0
    assert capsys.readouterr().out.strip() == str(together / "trace.json")
    assert Timeline(together / "trace.json").names.keys() == {0, 1}
    assert merge_traces.main([str(tmp_path)]) == 1
    assert "has no rank-N.json" in capsys.readouterr().err
    assert merge_traces.main([]) == 2


def test_another_hosts_clock_is_compared_with_rank_0s() -> None:
    store = dist.HashStore()
    skews_ns = [0, 10**15, -(10**15)]

    def offset(rank: int) -> int:
        def skewed_ns() -> int:
            return _native.now_ns() + skews_ns[rank]

        host = clock_identity() if rank == 0 else f"another host {rank}"
        return offset_to_rank_0(store, rank, 3, skewed_ns, 60, host)

    offsets = [0, 0, 0]

    def run(rank: int) -> None:
        offsets[rank] = offset(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert offsets[0] == 0
    for found, skew in zip(offsets[1:], skews_ns[1:], strict=True):
        # The error is at most half of the shortest round trip.
        assert abs(found + skew) < 10**10


def test_a_rank_without_a_clock_is_named() -> None:
    with pytest.raises(paramhub.ConnectError, match="rank 1 has not compared its clock"):
        offset_to_rank_0(dist.HashStore(), 0, 2, _native.now_ns, 0.05)
