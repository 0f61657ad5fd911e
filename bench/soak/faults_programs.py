"""The programs of one run with faults: how they are started, found and ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from faults_disk import Disk
from faults_network import Network
from faults_plan import DISKS, HUBS, WORKERS
from kills import free_ports
from processes import end_all

POLICIES = (
    ("continue", 1),
    ("continue", WORKERS),
    ("rewind", WORKERS),
    ("replicas", WORKERS),
    ("replicas and rewind", WORKERS),
)
"""What becomes of a job that loses a worker or a hub, and the workers that it needs for a step."""
DEAD_AFTER_S = 2.0
WORKERS_END_S = 5.0
"""Seconds within which the workers of a launcher that was killed have ended."""
WORKER = Path(__file__).with_name("faults_worker.py")
NAME = "faults"
TOKEN = "0123456789abcdef0123456789abcdef"
"""A manager that other hosts reach asks for a token."""


class Programs:
    """Manager, hubs, launcher and workers, with a folder of their own for log, state and checkpoints."""

    def __init__(self, paramhub: str, seed: int, folder: Path, network: Network | None) -> None:
        chooser = random.Random(f"programs of {seed}")
        self.paramhub, self.folder, self.network = paramhub, folder, network
        self.policy, self.least = chooser.choice(POLICIES)
        self.rewind_every, self.checkpoint_every = chooser.choice((1, 5)), chooser.choice((50, 200))
        self.environment = {**os.environ, "PARAMHUB_TEST_FAULTS": str(folder)}
        self.ports = free_ports(1 + HUBS + 1)
        host, scheme = "127.0.0.1", "http"
        if network is not None:
            host, scheme = network.address, "https"
            self.environment["PARAMHUB_ADMIN_TOKEN"] = TOKEN
        self.addresses = [f"{host}:{port}" for port in self.ports]
        if network is not None:
            for number in range(HUBS + 1):
                hub = network.address_of[f"hub{number}"]
                self.addresses[1 + number] = f"{hub}:{self.ports[1 + number]}"
        self.url = f"{scheme}://{self.addresses[0]}"
        self.disks: dict[str, Disk] = {}
        self.manager: subprocess.Popen[bytes] | None = None
        self.hubs: dict[int, subprocess.Popen[bytes]] = {}
        self.launcher: subprocess.Popen[bytes] | None = None
        self.output = self.log.open("wb")

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def outlives_hubs(self) -> bool:
        return self.has_standbys or self.goes_back

    @property
    def has_standbys(self) -> bool:
        return self.policy.startswith("replicas")

    @property
    def goes_back(self) -> bool:
        return self.policy.endswith("rewind")

    @property
    def manager_runs(self) -> bool:
        return self.manager is not None and self.manager.poll() is None

    @property
    def spare_hub(self) -> int | None:
        """The hub that an operator adds to a job that does not get standbys again by itself; None once it is there."""
        return None if HUBS in self.hubs else HUBS

    @property
    def hub_count(self) -> int:
        """The hubs of a job at its beginning. One that comes back takes the place of one that is lost as a standby."""
        return HUBS if self.has_standbys else 2

    def make_disks(self) -> None:
        for name in DISKS:
            self.disks[name] = Disk(self.folder / name)

    def start_manager(self) -> None:
        """Starts the manager, or another one in place of one that has ended."""
        state = ["--state", str(self.folder / "state")]
        self.manager = self._start(["manager", "--listen", self.addresses[0], *state])

    def start_hub(self, number: int) -> None:
        """Starts a hub, or another one at the address of one that has ended."""
        kept = ["--checkpoints", str(self.folder / "checkpoints")]
        address = self.addresses[1 + number]
        self.hubs[number] = self._start(
            ["hub", "--listen", address, "--join", self.url, *kept], f"hub{number}"
        )

    def launch(self) -> None:
        how = ["--dead-after", f"{DEAD_AFTER_S:.0f}"]
        if self.has_standbys:
            how += ["--replicas", "1"]
        if self.goes_back or self.policy == "continue":
            loss = "rewind" if self.goes_back else "continue"
            how += ["--on-worker-loss", loss, "--linger", "60", "--max-restarts", "1000"]
        if self.policy == "continue":
            how += ["--min-workers", str(self.least)]
        if self.policy == "rewind":
            how += ["--rewind-every", str(self.rewind_every)]
        job = ["run", "--hub", self.url, "--hubs", "2", "-n", str(WORKERS), "--name", NAME, *how]
        kept = ["--checkpoint-every", str(self.checkpoint_every), "--resume=auto"]
        own = [] if self.network is None else self.network.inside_own()
        worker = [
            sys.executable,
            str(WORKER),
            str(self.folder / "end"),
            self.policy,
            str(self.checkpoint_every),
        ]
        self.launcher = self._start([*job, *kept, "--", *own, *worker])

    def _start(self, arguments: list[str], host: str = "servers") -> subprocess.Popen[bytes]:
        inside = [] if self.network is None else self.network.inside(host)
        command = [*inside, self.paramhub, *arguments]
        return subprocess.Popen(command, stdout=self.output, stderr=self.output, env=self.environment)

    def end_after(self, steps: int) -> None:
        """Lets the workers end when the job has made so many steps. No worker may have come so far yet."""
        written = self.folder / "end.new"
        written.write_text(str(steps))
        written.rename(self.folder / "end")

    def launcher_has_ended(self) -> bool:
        return self.launcher is None or self.launcher.poll() is not None

    def workers(self) -> dict[int, int]:
        """The processes of the ranks that have one."""
        found = {}
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not process.name.isdigit():
                    continue
                if (process / "cmdline").read_bytes().split(b"\0")[1:2] != [str(WORKER).encode()]:
                    continue
                variables = (process / "environ").read_bytes().split(b"\0")
                if f"PARAMHUB_TEST_FAULTS={self.folder}".encode() in variables:
                    rank = next(each for each in variables if each.startswith(b"RANK="))
                    found[int(rank.partition(b"=")[2])] = int(process.name)
        return found

    def newest_checkpoint(self) -> int:
        """The newest step of which there is a whole checkpoint. 0 if there is none."""
        folder = self.folder / "checkpoints"
        listed = subprocess.run(
            [self.paramhub, "checkpoints", "list", str(folder)], check=False, capture_output=True, text=True
        )
        return max((int(step) for step in re.findall(r" (\d+) .* complete ", listed.stdout)), default=0)

    def has_all_standbys(self) -> bool:
        """Whether each chunk of the job has a standby that can take over, as far as a manager says so."""
        return re.search(r"standbys +of all chunks", self._ask("jobs", "show", NAME)) is not None

    def has_part(self, number: int) -> bool:
        """Whether a hub has a part in the job, as far as a manager says so."""
        hubs = json.loads(self._ask("hubs", "--json") or '{"hubs": []}')["hubs"]
        address = self.addresses[1 + number]
        return any(hub["jobs"] > 0 and hub["shape"]["interfaces"][0]["address"] == address for hub in hubs)

    def _ask(self, *what: str) -> str:
        """What the tool prints that asks the manager; nothing if it is away."""
        inside = [] if self.network is None else self.network.inside("servers")
        command = [*inside, self.paramhub, *what, "--hub", self.url]
        asked = subprocess.run(command, check=False, capture_output=True, text=True, env=self.environment)
        return asked.stdout

    def close(self) -> None:
        """Ends all that this run has started, and removes its disks."""
        servers = (*self.hubs.values(), self.manager)
        end_all([each for each in (self.launcher, *servers) if each is not None])
        until = time.monotonic() + WORKERS_END_S
        while self.workers() and time.monotonic() < until:
            time.sleep(0.05)
        while workers := self.workers():
            for process in workers.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)
        for disk in self.disks.values():
            disk.close()
        self.output.close()
