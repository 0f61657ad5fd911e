"""paramhub's own rows: `paramhub bench exchange`, which starts and ends its workers and its hub by itself."""

import json
import subprocess
from pathlib import Path

import processes
from rows import Ours

WRONG_USAGE = 2


class Refused(Exception):
    """This program does not have that row."""


class Failed(Exception):
    pass


class Program:
    def __init__(self, path: Path, keys: Path, workers: int, cores: int, scratch: Path):
        self.path = path
        self.common = ["--keys", str(keys), "--workers", str(workers), "--cores", str(cores)]
        self.scratch = scratch

    def probe(self, row: Ours, optimizer: str) -> None:
        """A single element, to hear whether the flags exist before anybody is timed."""
        tiny = self.scratch / "tiny.json"
        tiny.write_text('[{"name": "tiny", "shape": [1]}]')
        self._run(["--keys", str(tiny), "--workers", "1"], row, optimizer, iterations=1, warmup=0)

    def measure(self, row: Ours, optimizer: str, iterations: int, warmup: int) -> dict:
        return self._run(self.common, row, optimizer, iterations, warmup)

    def command(self, row: Ours, optimizer: str) -> str:
        """As a user would repeat it, but for the keys."""
        words = ["paramhub", "bench", "exchange", *self.common[2:], "--optimizer", optimizer, *row.flags]
        return " ".join(words)

    def _run(self, common: list, row: Ours, optimizer: str, iterations: int, warmup: int) -> dict:
        result = self.scratch / "ours.json"
        result.unlink(missing_ok=True)
        words = [str(self.path), "bench", "exchange", *common, "--optimizer", optimizer, *row.flags]
        words += ["--iters", str(iterations), "--warmup", str(warmup), "--json", str(result)]
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            # Ctrl-C is for the conductor, who then ends this one too.
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            complaint = lines[0] if lines else f"exit code {done.returncode}"
            raise (Refused if done.returncode == WRONG_USAGE else Failed)(complaint)
        return json.loads(result.read_text())


def path_of_program(given, repository: Path) -> Path:
    """The release build, made if there is none."""
    if given:
        if not given.is_file():
            raise SystemExit(f"--paramhub {given}: there is no such program")
        return given
    program = repository / "target" / "release" / "paramhub"
    if not program.is_file():
        build = ["cargo", "build", "--release", "--bin", "paramhub"]
        print(f"{' '.join(build)}, because there is no {program.relative_to(repository)}", flush=True)
        try:
            subprocess.run(build, cwd=repository, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"paramhub was not built: {error}") from None
    return program
