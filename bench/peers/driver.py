"""Measures every row once in each round, and collects the results."""

import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import ours
import rows
from team import Failed, TeamProcesses, Timed


@dataclass
class Plan:
    workers: int
    rounds: int
    iterations: int
    warmup: int
    seed: int
    # Each team's processes live only during its turns: for models of which memory cannot hold several copies.
    is_one_at_a_time: bool
    elements: list
    shapes: list
    # For each rank the words that make a command run on the rank's host; empty if all ranks are on this machine.
    enter_commands: list = field(default_factory=list)


# Rows are compared by identity, because two may have equal fields.
@dataclass(eq=False)
class Row:
    """One row of the table, with its results."""

    name: str
    title: str
    label: str
    optimizer: str
    # Only paramhub's rows have one.
    transport: str = ""
    is_control: bool = False
    # One summary for each round; None if the row failed in that round.
    rounds: list = field(default_factory=list)
    verdict: dict = None

    @property
    def seconds(self) -> list:
        return [summary["seconds"] for summary in self.rounds if summary]


@dataclass
class Results:
    rows: list = field(default_factory=list)
    # Rows and teams that were not measured, and why.
    missing: dict = field(default_factory=dict)
    # Rows and teams that failed after their start, or gave wrong numbers.
    failures: dict = field(default_factory=dict)
    versions: dict = field(default_factory=dict)
    # The command that started each.
    commands: dict = field(default_factory=dict)
    # The share of one processor that each team used between its turns.
    idle_shares: dict = field(default_factory=dict)


class Peer:
    """A team of processes, with the row of each of its forms."""

    def __init__(self, team: rows.Team, binaries: Path, plan: Plan, scratch: Path):
        self.team, self.binaries, self.plan, self.scratch = team, binaries, plan, scratch
        self.team_processes = None
        self.rows = [
            Row(f"{team.name}-{form.name}", team.title, form.label, team.optimizer, is_control=form.is_control)
            for form in team.forms
        ]

    @property
    def forms(self):
        return zip(self.team.forms, self.rows)

    def start(self) -> None:
        task = {
            "workers": self.plan.workers,
            "elements": self.plan.elements,
            "shapes": self.plan.shapes,
            "forms": [form.name for form in self.team.forms],
            "optimizer": self.team.optimizer,
        }
        folder = Path(tempfile.mkdtemp(prefix=self.team.name + "-", dir=self.scratch))
        self.team_processes = TeamProcesses(self.team, self.binaries, task, folder, self.plan.enter_commands)

    def stop(self) -> None:
        if self.team_processes:
            self.team_processes.stop()
            self.team_processes = None


class Driver:
    def __init__(self, plan: Plan, program: ours.Program, scratch: Path):
        self.plan, self.program, self.scratch = plan, program, scratch
        self.results = Results()
        # For each row the function that measures it once.
        self.turns = []
        self.peers = []
        # Called before each round, when no team exchanges.
        self.before_round = lambda number: None

    def add_ours(self, row: rows.Ours, optimizer: str) -> None:
        name = f"ours-{row.name}" + ("" if optimizer == "mean" else f"-{optimizer}")
        try:
            self.program.probe(row, optimizer)
        except ours.Refused as error:
            self.results.missing[name] = f"refused by this build of paramhub: {error}"
            return
        except ours.Failed as error:
            self.results.failures[name] = str(error)
            return
        known = Row(name, "paramhub", f"{row.label}, {optimizer}", optimizer, transport=row.label)
        self.results.rows.append(known)
        self.results.commands[name] = self.program.command(row, optimizer)
        self.turns.append((known, lambda: self._turn_of_ours(row, known)))

    def add_team(self, team: rows.Team, binaries: Path) -> None:
        if team.launcher:
            words = [word.format(bin=binaries, workers=self.plan.workers) for word in team.launcher]
            self.results.commands[team.name] = " ".join([Path(words[0]).name, *words[1:]])
        peer = Peer(team, binaries, self.plan, self.scratch)
        self.peers.append(peer)
        for form, known in peer.forms:
            self.results.rows.append(known)
            self.turns.append((known, lambda form=form, known=known: self._turn_of_peer(peer, form, known)))

    def run(self) -> None:
        try:
            if not self.plan.is_one_at_a_time:
                self._start_all()
            order = random.Random(self.plan.seed)
            for number in range(self.plan.rounds):
                self.before_round(number)
                turns = list(self.turns)
                order.shuffle(turns)
                for known, turn in turns:
                    progress(f"round {number + 1} of {self.plan.rounds}: {known.name}")
                    known.rounds.append(turn())
            if not self.plan.is_one_at_a_time:
                self._check_all()
        finally:
            progress("")
            for peer in self.peers:
                peer.stop()

    def _start_all(self) -> None:
        for peer in self.peers:
            progress(f"starting {peer.team.title}")
            try:
                peer.start()
            except Failed as error:
                self._drop(peer, str(error))

    def _turn_of_ours(self, row: rows.Ours, known: Row):
        try:
            report = self.program.measure(row, known.optimizer, self.plan.iterations, self.plan.warmup)
        except (ours.Failed, ours.Refused) as error:
            self.results.failures[known.name] = str(error)
            return None
        # The program compares its numbers itself, and fails if they are wrong.
        known.verdict = {"wrong": 0, "max_abs_error": report["max_abs_error"]}
        cpu_seconds_worker, cpu_seconds_server = report["cpu_seconds_worker"], report["cpu_seconds_hub"]
        return {
            "seconds": report["seconds_median"],
            "cpu_seconds_worker": cpu_seconds_worker,
            "cpu_seconds_server": cpu_seconds_server,
            "cpu_seconds_all": self.plan.workers * cpu_seconds_worker + cpu_seconds_server,
            "report": report,
        }

    def _turn_of_peer(self, peer: Peer, form: rows.Form, known: Row):
        if peer not in self.peers:
            return None  # dropped earlier in this round
        try:
            if self.plan.is_one_at_a_time:
                peer.start()
            team_processes = peer.team_processes
            team_processes.wake()
            timed = [team_processes.iterate(form.name) for _ in range(self.plan.warmup + self.plan.iterations)]
            team_processes.sleep()
            self.results.versions[peer.team.name] = team_processes.version
            self.results.idle_shares[peer.team.name] = team_processes.idle_share()
            if self.plan.is_one_at_a_time:
                self._check(peer, form, known)
                peer.stop()
            return summarize(timed[self.plan.warmup :])
        except Failed as error:
            self._drop(peer, str(error))
            return None

    def _check_all(self) -> None:
        for peer in list(self.peers):
            try:
                for form, known in peer.forms:
                    progress(f"checking {known.name}")
                    self._check(peer, form, known)
            except Failed as error:
                self._drop(peer, str(error))

    def _check(self, peer: Peer, form: rows.Form, known: Row) -> None:
        if known.is_control:
            return
        known.verdict = peer.team_processes.check(form.name)
        if known.verdict["wrong"]:
            reason = "WRONG RESULT: {wrong} elements of all ranks together, by up to {max_abs_error}"
            self.results.failures[known.name] = reason.format(**known.verdict)

    def _drop(self, peer: Peer, reason: str) -> None:
        """Removes a team; the others continue."""
        self.peers.remove(peer)
        self.turns = [(known, turn) for known, turn in self.turns if known not in peer.rows]
        has_begun = peer.team_processes is not None or any(row.seconds for row in peer.rows)
        (self.results.failures if has_begun else self.results.missing)[peer.team.name] = reason
        peer.stop()


def summarize(timed: list) -> dict:
    median = statistics.median
    return {
        "seconds": median(one.seconds for one in timed),
        "cpu_seconds_worker": statistics.mean(one.cpu_seconds_worker for one in timed),
        "cpu_seconds_server": statistics.mean(one.cpu_seconds_server for one in timed),
        "cpu_seconds_all": statistics.mean(one.cpu_seconds_all for one in timed),
        "loopback_bytes": median(one.loopback_bytes for one in timed),
        "iterations": [one.seconds for one in timed],
    }


def progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)
