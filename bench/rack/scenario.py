"""Scenario files: a testbed, and rows that are measured on its hosts."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import rows

try:
    import tomllib
except ImportError:
    raise SystemExit("scenarios are TOML, which Python reads from 3.11 on") from None


@dataclass
class Row:
    """A row of paramhub: `paramhub bench exchange`, with its processes on hosts."""

    name: str
    label: str
    deployment: str = "ncc"
    # The hosts of workers; the scenario's if empty.
    hosts: list = field(default_factory=list)
    hub_hosts: list = field(default_factory=list)
    # The number of interfaces that each hub uses; 0 for all.
    interfaces: int = 0
    # True if the next interface of each hub is a link for hubs alone.
    between_hubs: bool = False
    cores: int = 0
    transport: str = "auto"
    # True if hosts and hubs belong to the racks with which their names begin, as in r0w3 and r1hub.
    racks: bool = False
    flags: list = field(default_factory=list)
    # The least that the busiest link must carry, in units of a model over a worker's link.
    least: float = 1.0

    def as_ours(self, testbed, scenario) -> rows.Ours:
        if self.between_hubs and not self.interfaces:
            raise SystemExit(f"{self.name}: between-hubs takes the interface after `interfaces`: give their number")
        hosts = self.hosts or scenario.hosts
        flags = ["--hosts", ",".join(testbed.with_addresses(host, racks=self.racks) for host in hosts)]
        if self.hub_hosts:
            hubs = [
                testbed.with_addresses(host, self.interfaces, self.racks, self.between_hubs)
                for host in self.hub_hosts
            ]
            flags += ["--hub-hosts", ",".join(hubs)]
        flags += ["--enter", " ".join(testbed.enter_command("{host}")), "--deployment", self.deployment]
        flags += ["--transport", self.transport, *self.flags]
        return rows.Ours(self.name, self.label, tuple(flags), workers=len(hosts), cores=self.cores)


@dataclass
class Scenario:
    title: str
    # The flags of `testbed up`, without their hyphens.
    testbed: dict
    hosts: list
    model: str = "resnet18"
    scale: int = 1
    optimizer: str = "mean"
    # The cores of each hub.
    cores: int = 1
    rounds: int = 5
    iterations: int = 3
    warmup: int = 1
    ours: list = field(default_factory=list)
    # Names from bench/peers/rows.py: team and form, such as gloo-buckets.
    peers: list = field(default_factory=list)

    @staticmethod
    def read(path: Path) -> "Scenario":
        try:
            with open(path, "rb") as file:
                scenario = tomllib.load(file)
            return Scenario(**{**scenario, "ours": [build(Row, row) for row in scenario.get("ours", [])]})
        except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
            raise SystemExit(f"{path}: {error}") from None

    def least(self) -> dict:
        """`Row.least` of paramhub's rows, by the rows' names in the results."""
        suffix = "" if self.optimizer == "mean" else f"-{self.optimizer}"
        return {f"ours-{row.name}{suffix}": row.least for row in self.ours}

    def testbed_flags(self) -> str:
        return " ".join(f"--{name} {value}" for name, value in self.testbed.items())

    def teams(self) -> list:
        """The peers' teams, each with the forms that the scenario names."""
        found = []
        for team in rows.TEAMS:
            forms = tuple(form for form in team.forms if f"{team.name}-{form.name}" in self.peers)
            if forms:
                found.append(dataclasses.replace(team, forms=forms))
        known = {f"{team.name}-{form.name}" for team in rows.TEAMS for form in team.forms}
        if unknown := set(self.peers) - known:
            raise SystemExit(
                f"peers: there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
            )
        return found


def build(kind, table: dict):
    return kind(**{name.replace("-", "_"): value for name, value in table.items()})
