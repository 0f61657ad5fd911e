"""Measures exchanges of tensors on a GPU: copies between it and the host, step times against DDP over gloo, and overlap.

    python bench/gpu/measure.py
    python bench/gpu/measure.py --ranks 2 --transports shm --models resnet50 --rounds 15 --json results.jsonl

All ranks share the GPU if there is not one for each. README.md beside this file says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import paramhub
from paramhub.torch._staging import Stage

RANK = Path(__file__).with_name("ranks.py")
BASELINES = {"hub": "gloo-step"}
COPIES = [1 << 16, 1 << 20, 1 << 24, 1 << 27]
"""Bytes of the copies that are timed."""
COPY_ROUNDS = 9
OVER_TCP = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
"""Keeps NCCL from what only ranks of one host have."""


class Report:
    """Prints the table, and writes the same as lines of JSON if there is a file for them."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path is not None else None

    def row(self, section: str, what: dict[str, Any], values: dict[str, float], shown: str) -> None:
        words = " ".join(f"{word:<11}" for word in map(str, what.values()))
        print(f"{section:<9} {words} {shown}", flush=True)
        if self._file is not None:
            print(json.dumps({"section": section, **what, **values}), file=self._file, flush=True)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def measure_copies(report: Report, device: torch.device) -> None:
    """Rates of copies from the device to host memory of three kinds, and back; and the time that a stage adds."""
    with paramhub.Hub() as hub:
        for nbytes in COPIES:
            ticket = hub.create_job(f"copies-{nbytes}", 1)
            with paramhub.connect(*ticket, 0, transport="shm") as job:
                job.init({"w": torch.zeros(nbytes // 4)}, paramhub.Sum())
                stage = Stage(job._running(), device, [torch.Size([nbytes // 4])], [torch.float32])
                on_device = torch.zeros(nbytes // 4, device=device)
                kinds = {
                    "arena": stage.parameters[0],
                    "pinned": torch.zeros(nbytes // 4, pin_memory=device.type == "cuda"),
                    "pageable": torch.zeros(nbytes // 4),
                }
                for direction in ("out", "back"):
                    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
                    for _ in range(COPY_ROUNDS + 1):
                        for kind, host in kinds.items():
                            pair = (host, on_device) if direction == "out" else (on_device, host)
                            rates[kind].append(nbytes / copy_seconds(*pair, device) / 1e9)
                    for kind, found in rates.items():
                        values = spread(found[1:])
                        report.row(
                            "copy",
                            {"direction": direction, "memory": kind, "bytes": nbytes},
                            values,
                            f"{values['median']:8.2f} GB/s   ({values['lowest']:.2f} to {values['highest']:.2f})",
                        )
                if nbytes == COPIES[0]:
                    measure_latency(report, stage, on_device)
                stage.close()
                del stage, kinds


def copy_seconds(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Seconds of one copy, as the host sees it: from its submission to its end."""
    await_device(device)
    started = time.perf_counter()
    to.copy_(source, non_blocking=True)
    await_device(device)
    return time.perf_counter() - started


def measure_latency(report: Report, stage: Stage, tensor: torch.Tensor) -> None:
    """The time of one small exchange of a single rank, from its submission until the device has the result."""
    times = []
    for _ in range(60):
        started = time.perf_counter()
        stage.push_pull([0], [tensor], [tensor]).wait()
        await_device(tensor.device)
        times.append(1e6 * (time.perf_counter() - started))
    values = spread(times[10:])
    report.row(
        "latency",
        {"direction": "both", "memory": "arena", "bytes": 4 * tensor.numel()},
        values,
        f"{values['median']:8.0f} us     ({values['lowest']:.0f} to {values['highest']:.0f})",
    )


def await_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def measure_ranks(report: Report, arguments: argparse.Namespace, deadline: float) -> bool:
    """Runs every number of ranks and transport. Returns whether all have ended well."""
    is_well = True
    for ranks in arguments.ranks:
        for transport in arguments.transports:
            left = deadline - time.monotonic()
            if left < 15:
                print(f"skipped  {ranks} ranks over {transport}: the time is over")
                is_well = False
                continue
            measures_overlap = ranks == min(arguments.ranks)
            found = run_ranks(arguments, ranks, transport, measures_overlap, left)
            if found is None:
                is_well = False
                continue
            place = {"ranks": ranks, "transport": transport}
            for model, each in found["exchange"].items():
                report_exchange(report, {**place, "model": model}, each["rounds_s"])
            if measures_overlap:
                report_overlap(report, place, found["overlap"])
    return is_well


def report_exchange(report: Report, place: dict[str, Any], rounds: dict[str, list[float]]) -> None:
    for name, taken in rounds.items():
        values = {f"{key}_s": seconds for key, seconds in spread(taken).items()}
        baseline = BASELINES.get(name, "gloo")
        ratio = statistics.median(b / t for b, t in zip(rounds[baseline], taken, strict=True))
        shown = (
            f"{1e3 * values['median_s']:8.1f} ms     ({1e3 * values['lowest_s']:.1f} to {1e3 * values['highest_s']:.1f})"
            f"   {ratio:5.2f} x {baseline}"
        )
        report.row(
            "exchange", {**place, "way": name}, {**values, "ratio": ratio, "rounds": len(taken)}, shown
        )


def report_overlap(report: Report, place: dict[str, Any], found: dict[str, Any]) -> None:
    rounds = {name: statistics.median(each) for name, each in found["rounds_s"].items()}
    computation = rounds["computation"]
    for name in ("gloo-step", "hook", "hub"):
        alone, both = rounds[f"{name} alone"], rounds[name]
        hidden = (computation + alone - both) / min(computation, alone)
        values = {"computation_s": computation, "exchange_s": alone, "both_s": both, "hidden": hidden}
        report.row(
            "overlap",
            {**place, "megabytes": round(found["megabytes"]), "way": name},
            values,
            f"{1e3 * computation:8.1f} ms computation, {1e3 * alone:.1f} ms exchange, {1e3 * both:.1f} ms both: "
            f"{100 * hidden:.0f} % hidden",
        )


def run_ranks(
    arguments: argparse.Namespace, ranks: int, transport: str, measures_overlap: bool, limit: float
) -> dict[str, Any] | None:
    """The results of one run, or None if it failed, in which case its output is printed."""
    with tempfile.TemporaryDirectory(prefix="paramhub-gpu-") as folder:
        result = Path(folder) / "result.json"
        command = [
            *(
                sys.executable,
                str(RANK),
                "--device",
                arguments.device,
                "--models",
                ",".join(arguments.models),
            ),
            *("--rounds", str(arguments.rounds), "--budget", str(arguments.budget)),
            *("--width", str(arguments.width), "--result", str(result)),
            *(["--overlap"] if measures_overlap else []),
        ]
        place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "PARAMHUB_TRANSPORT": transport}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        logs = [Path(folder) / f"rank-{rank}" for rank in range(ranks)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with log.open("wb") as output:
                    environment = {**os.environ, **place, **meeting, **OVER_TCP, **own}
                    started.append(
                        subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
                    )
            deadline = time.monotonic() + limit
            codes = [each.wait(max(0.1, deadline - time.monotonic())) for each in started]
        except subprocess.TimeoutExpired:
            codes = None
        finally:
            for each in started:
                each.kill()
                each.wait()
        if codes is not None and not any(codes):
            return dict(json.loads(result.read_text()))
        print(
            f"{ranks} ranks over {transport} " + ("took too long" if codes is None else f"ended with {codes}")
        )
        for rank, log in enumerate(logs):
            print(f"---- rank {rank} printed\n{log.read_text(errors='replace')[-3000:]}")
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    began = time.monotonic()
    arguments = parse()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "torch finds no GPU here: --device cpu runs the same without one, which measures nothing of a GPU"
        )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} processors; medians (lowest to highest)")
    report = Report(arguments.json)
    measure_copies(report, device)
    is_well = measure_ranks(report, arguments, began + arguments.limit)
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if is_well else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    listed = {"type": lambda text: text.split(",")}
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4])
    parser.add_argument("--transports", **listed, default=["shm", "tcp"])
    parser.add_argument("--models", **listed, default=["resnet18", "resnet50"], help="lists in models/")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--budget",
        type=float,
        default=9.0,
        help="seconds of a model's rounds, of which it makes 3 in any case",
    )
    parser.add_argument(
        "--width", type=int, default=1792, help="of the layers with which overlap is measured"
    )
    parser.add_argument("--limit", type=float, default=145.0, help="seconds for everything")
    parser.add_argument("--json", type=Path, help="a file for the same numbers as lines of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
