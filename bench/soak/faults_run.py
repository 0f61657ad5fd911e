"""What befalls the programs of one run, how it is undone, and what the log must say of it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from faults_log import NO_MANAGER, Log
from faults_plan import LOSING, OF_HUBS, WORKERS, Fault
from faults_programs import DEAD_AFTER_S, NAME, Programs

SURELY_LOST_S = 3.0
"""Seconds of silence after which a worker counts as lost for sure: hubs look now and then, and the last sign of life that was
under way counts. After less it may be lost or not."""
SURELY_AWAY_S = 1.5
"""Seconds after which every hub has called a manager that is away."""
CHECKPOINT_S = 1.0
"""Seconds in which a hub has tried to write a checkpoint that is due."""
NOT_WRITTEN = "cannot be written to"
START_PAUSE_S = 0.5
"""Seconds before a program that does not begin is started again."""
CUT_IS_OVER_S = 3.0
"""Seconds after which a worker whose connections were cut has gone on, or will not."""
CUTS_NAMED_AGAIN_S = 11.0
"""Seconds without a cut after which hubs name a worker's next one for sure. They do not repeat themselves sooner."""
HUB_IS_BACK_S = 2.0
"""Seconds after which every program has noticed that a hub runs again, or that it was frozen."""
ADDS_HUB_AFTER_S = 10.0
"""Seconds for which a job may lack standbys although all hubs run: two hubs that have a part in it may have lost each other, and
neither takes a further share."""
ASKS_AGAIN_S = 0.5
"""Seconds between two questions to the manager."""
LOSS_IS_OVER_S = 10.0
"""Seconds after which nothing that happens to a worker is due to an earlier fault any more."""


@dataclass
class Undo:
    """What is to happen when a fault has lasted long enough."""

    at: float
    rank: int | None
    """The worker that the fault has befallen, if any."""
    how: Callable[[], None]


class Run:
    """Strikes the programs of one run, and keeps them going."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.log = Log(programs.log)
        self.undoes: list[Undo] = []
        self.begun: dict[int, int] = {}
        """The processes of ranks that have made a step since they joined the job."""
        self.launched_with: set[int] = set()
        """The ranks that have made a step since the launcher was started last."""
        self.is_launcher_killed = False
        self.manager_back_at = self.launcher_back_at = 0.0
        self.least_step: int | None = None
        """The step from which a job that is launched again must go on at least. None while it has gone on."""
        self.cuts: list[tuple[float, int, int]] = []
        """When a worker must have gone on whose connections were cut, its rank and its process."""
        self.last_cut: dict[int, float] = {}
        """When connections of this rank were cut last."""
        self.last_loss: dict[int, float] = {}
        """When a fault began last that may cost this rank."""
        self.newest_step = 0
        """The newest step of which a worker has said that it has made it."""
        self.filled_at = self.not_written_at = 0.0
        """When a disk was filled last, and when a hub has said last that it cannot write a checkpoint."""
        self.hubs_back_at: dict[int, float] = {}
        """When a hub that was killed is to be started again."""
        self.away: set[int] = set()
        """The hubs that are frozen, isolated or separated from another."""
        self.hubs_whole_at = 0.0
        """From when on it makes sense to ask whether another hub may be lost."""
        self.may_lose_hub = False
        """Whether the job outlives the loss of a hub now."""
        self.adds_hub_at = math.inf
        """When an operator adds a hub if the job has not got all standbys again."""
        self.problems: list[str] = []
        self.full_states = 0
        """How often the manager has said that it cannot write its state."""

    def start(self) -> None:
        """Starts all programs."""
        self._start_manager()
        until = time.monotonic() + 30
        while not any("manager ready" in line for line in self.log.lines) and time.monotonic() < until:
            self.log.poll(self._heed)
            time.sleep(0.02)
        for number in range(self.programs.hub_count):
            self.programs.start_hub(number)
        self._launch()

    def _start_manager(self) -> None:
        self.manager_back_at = time.monotonic() + START_PAUSE_S
        self.programs.start_manager()

    def _launch(self) -> None:
        self.is_launcher_killed, self.launcher_back_at = False, time.monotonic() + START_PAUSE_S
        self.programs.launch()

    def has_begun(self) -> bool:
        """Returns whether every worker has made a step since the launch. Before that a job does not outlive a worker."""
        return len(self.launched_with) == WORKERS

    def has_ended(self) -> bool:
        """Returns whether the launcher has ended by itself, after its job has begun."""
        has_begun = bool(self.launched_with) and not self.is_launcher_killed
        return has_begun and self.programs.launcher_has_ended()

    def keep_up(self) -> None:
        """Reads the log, undoes what has lasted long enough, and starts programs again that were killed."""
        self.log.poll(self._heed)
        now = time.monotonic()
        for due in [each for each in self.undoes if each.at <= now]:
            self.undoes.remove(due)
            due.how()
        for disk in self.programs.disks.values():
            if disk.is_full:
                disk.fill()
        for at, rank, process in [each for each in self.cuts if each[0] <= now]:
            self.cuts.remove((at, rank, process))
            if self.programs.workers().get(rank) != process and not self.has_ended():
                self.problems.append(f"process {process} of rank {rank} has not gone on after a cut")
        if not self.programs.manager_runs and now >= self.manager_back_at:
            self._start_manager()
        for number, hub in self.programs.hubs.items():
            if hub.poll() is not None and now >= self.hubs_back_at.get(number, 0.0):
                # A port that another process has for a moment keeps it from starting.
                self.hubs_back_at[number] = now + START_PAUSE_S
                self.programs.start_hub(number)
                self.hubs_whole_at = now + HUB_IS_BACK_S
        self._ask_for_hubs(now)
        is_gone = self.programs.launcher_has_ended() and not self.has_ended()
        if is_gone and now >= self.launcher_back_at:
            self._launch()

    def _ask_for_hubs(self, now: float) -> None:
        """Finds out, now and then, whether the job outlives the loss of a hub."""
        runs = all(hub.poll() is None for hub in self.programs.hubs.values()) and not self.away
        if not self.programs.outlives_hubs or self.may_lose_hub or not runs or now < self.hubs_whole_at:
            return
        self.hubs_whole_at = now + ASKS_AGAIN_S
        if self.has_begun() and not self.has_ended():
            spare = self.programs.spare_hub
            if self.programs.has_standbys and spare is not None and now > self.adds_hub_at:
                self.programs.start_hub(spare)
            has_standbys = self.programs.has_standbys and self.programs.has_all_standbys()
            goes_back = self.programs.goes_back and self.programs.newest_checkpoint() > 0
            self.may_lose_hub = has_standbys or goes_back

    def end_after(self, steps: int) -> None:
        """Lets the job end when it has made about so many more steps. Workers say after every checkpoint where they are."""
        self.programs.end_after(self.newest_step + self.programs.checkpoint_every + steps)

    def await_names(self) -> None:
        """Waits until all faults are named, or have not been in time. A hub that is not the job's is named when it is back."""
        while self.log.expected:
            self.keep_up()
            time.sleep(0.02)

    def _heed(self, line: str) -> None:
        """Takes from a line what is known about the workers."""
        if begun := re.search(r"rank (\d) has begun at step (\d+), process (\d+)", line):
            rank, step, process = (int(each) for each in begun.groups())
            if not self.launched_with and self.least_step is not None:
                if step < self.least_step:
                    self.problems.append(
                        f"the job goes on at step {step}, after a checkpoint of step {self.least_step}"
                    )
                self.least_step = None
            self.begun[rank] = process
            self.launched_with.add(rank)
        elif gone := re.search(r"rank (\d) goes back|WARN rank (\d) was lost", line):
            # Hubs do not name a lost rank again before another process has it.
            self.begun.pop(int(gone[1] or gone[2]), None)
        elif end := re.search(r"rank (\d) ends with", line):
            self._forget_cuts(int(end[1]))
        elif "cannot say that this run has begun" in line:
            # The documents say that a later launch does not know then where this one was.
            self.least_step = None
        elif NOT_WRITTEN in line:
            self.not_written_at = time.monotonic()
        elif re.search(r"checkpoint of step \d+ written", line):
            # A slow hub has left out the one that was due while there was no room.
            self.log.excuse(("disk",))
        elif "cannot save the jobs' states" in line:
            self.full_states += 1
        elif made := re.search(r"rank \d has made step (\d+)", line):
            self.newest_step = max(self.newest_step, int(made[1]))
            self._expect_checkpoint()

    def _expect_checkpoint(self) -> None:
        """Expects that a hub says that it cannot write a checkpoint that has just become due."""
        disk = self.programs.disks.get("checkpoints")
        is_expected = any(each.kind == "disk" for each in self.log.expected)
        if disk is not None and disk.is_full and not is_expected:
            frees = [each.at for each in self.undoes if each.how == disk.free]
            if frees and frees[0] > time.monotonic() + CHECKPOINT_S:
                # The hub may have been faster than the worker that has said which step it has made.
                is_named = self.not_written_at > self.filled_at
                self.log.expect("disk", None, NOT_WRITTEN, is_named=is_named)

    def strike(self, fault: Fault) -> bool:
        """Does a fault. Returns whether everything was there that it befalls."""
        if fault.befalls_worker:
            process = self.programs.workers().get(fault.rank)
            is_struck = any(each.rank == fault.rank for each in self.undoes)
            return process is not None and not is_struck and self._strike_worker(fault, process)
        now = time.monotonic()
        if fault.kind == "disk":
            disk = self.programs.disks[fault.disk]
            if disk.is_full:
                return False
            disk.fill()
            self.filled_at = now
            self.undoes.append(Undo(now + fault.seconds, None, disk.free))
            return True
        if fault.kind in OF_HUBS:
            return self._strike_hub(fault, now)
        manager = self.programs.manager
        if manager is None or manager.poll() is not None or now < self.manager_back_at:
            return False
        if fault.kind == "manager":
            kill(manager)
            self.manager_back_at = now + fault.seconds
            if fault.seconds > SURELY_AWAY_S:
                # A hub that has said so, and has not heard a manager since, says nothing again.
                self.log.expect("manager", None, NO_MANAGER, is_named=self.log.outages > 0)
            return True
        return self._strike_launcher(fault)

    def _strike_hub(self, fault: Fault, now: float) -> bool:
        number = fault.hub % self.programs.hub_count
        hub = self.programs.hubs[number]
        if not self.may_lose_hub or hub.poll() is not None:
            return False
        self.may_lose_hub, self.hubs_whole_at = False, now + fault.seconds + HUB_IS_BACK_S
        self.adds_hub_at = self.hubs_whole_at + ADDS_HUB_AFTER_S
        if fault.kind == "hub":
            kill(hub)
            self.hubs_back_at[number] = now + fault.seconds
        else:
            self.away.add(number)
            self.undoes.append(Undo(now + fault.seconds, None, self._cut_off(fault, number, hub)))
        # Only the job's own hubs are missed so soon. The manager waits for a hub without jobs for longer. Whether a hub has a
        # stream to the one from which it is separated is not known here.
        misses = fault.kind in ("freeze", "isolate") and self.programs.has_part(number)
        is_missed = fault.seconds > SURELY_LOST_S and len(self.begun) == WORKERS and misses
        if fault.kind == "hub" or is_missed:
            # One that has no part in the job is missed when it does not call, or joins again at its address.
            address = re.escape(self.programs.addresses[1 + number])
            after = fault.seconds if fault.kind == "hub" else DEAD_AFTER_S
            self.log.expect(fault.kind, None, rf"hub \d+ \({address}\)|{address}", after)
        return True

    def _cut_off(self, fault: Fault, number: int, hub: subprocess.Popen[bytes]) -> Callable[[], None]:
        """Freezes a hub, isolates it or separates it from another. Returns how that is undone."""
        network, host = self.programs.network, f"hub{number}"
        if fault.kind == "freeze" or network is None:
            hub.send_signal(signal.SIGSTOP)
        elif fault.kind == "isolate":
            network.partition(host, fault.way)
        else:
            other = (number + fault.other) % self.programs.hub_count
            network.partition(host, fault.way, f"hub{other}")

        def undo() -> None:
            self.away.discard(number)
            if fault.kind == "freeze" or network is None:
                hub.send_signal(signal.SIGCONT)
            else:
                network.heal(host)

        return undo

    def _strike_launcher(self, fault: Fault) -> bool:
        self.may_lose_hub = False
        self.least_step = self.programs.newest_checkpoint()
        if self.programs.launcher is not None:
            kill(self.programs.launcher)
        self.is_launcher_killed, self.launcher_back_at = True, time.monotonic() + fault.seconds
        self.begun.clear()
        self.launched_with.clear()
        self.cuts.clear()
        # All workers of this launch end, and so does the job.
        self.log.excuse(("stop", "partition", "cut", "disk", "freeze", "isolate"))
        self.log.expect("launcher", None, "its launcher was killed")
        return True

    def _strike_worker(self, fault: Fault, process: int) -> bool:
        rank, now = fault.rank, time.monotonic()
        needs_checkpoint = self.programs.has_standbys and fault.kind in LOSING
        if needs_checkpoint and self.programs.newest_checkpoint() == 0:
            return False
        takes_part = self.begun.get(rank) == process
        lost = rf"rank {rank} was lost|rank {rank} gave up|worker {rank} (was killed|exited|had ended)"
        if fault.kind in LOSING:
            # While all ranks go back nobody misses a hub.
            self.log.excuse(("freeze", "isolate"))
            self.last_loss[rank] = now
            self._forget_cuts(rank)
        network = self.programs.network
        if fault.kind == "kill":
            signal_process(process, signal.SIGKILL)
            self.log.expect("kill", rank, lost)
            return True
        if fault.kind == "cut":
            # A hub that only stands by has no connections of workers.
            hubs = list(enumerate(self.programs.ports[1:]))
            groups = [dict(hubs[first : first + fault.hubs]) for first in range(len(hubs))]
            if network is None or not takes_part:
                return False
            if not any(network.cut(rank, group, fault.at_hub) for group in groups):
                return False
            if now > self.last_cut.get(rank, 0.0) + CUTS_NAMED_AGAIN_S:
                self.log.expect("cut", rank, rf"rank {rank} (of job `{NAME}` )?goes on over|{lost}")
            self.last_cut[rank] = now
            if now > self.last_loss.get(rank, 0.0) + LOSS_IS_OVER_S:
                self.cuts.append((now + CUT_IS_OVER_S, rank, process))
            return True
        if fault.kind == "stop":
            signal_process(process, signal.SIGSTOP)
            wake = Undo(now + fault.seconds, rank, lambda: signal_process(process, signal.SIGCONT))
            self.undoes.append(wake)
        elif network is not None:
            host = f"worker{rank}"
            network.partition(host, fault.way)
            self.undoes.append(Undo(now + fault.seconds, rank, lambda: network.heal(host)))
        if takes_part and fault.seconds > SURELY_LOST_S:
            silent = rf"{lost}|rank {rank} of job `{NAME}` (has not been heard|is awaited)|{missing(rank)}"
            self.log.expect(fault.kind, rank, silent, DEAD_AFTER_S)
        return True

    def _forget_cuts(self, rank: int) -> None:
        self.cuts = [each for each in self.cuts if each[1] != rank]

    def close(self) -> None:
        """Undoes what still lasts, so that the programs can end."""
        for each in self.undoes:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                each.how()
        self.log.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def missing(rank: int) -> str:
    """The pattern of a line that says that a job waits for this rank, and perhaps for others."""
    ranges = [f"{first} to {last}" for first in range(rank + 1) for last in range(rank, WORKERS)]
    return rf"ranks? [^;]*\b({'|'.join([str(rank), *ranges])})\b[^;]* (is|are) missing"


def signal_process(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
