"""paramhub's rows: `paramhub bench exchange`, which starts and ends its workers and its hub by itself."""

import json
import shlex
import subprocess
from pathlib import Path

import processes
from rows import Ours

WRONG_USAGE = 2


class Refused(Exception):
    """This build of paramhub does not support that row."""


class Failed(Exception):
    pass


class Program:
    def __init__(self, path: Path, keys: Path, workers: int, cores: int, scratch: Path):
        self.path, self.keys, self.workers, self.cores = path, keys, workers, cores
        self.scratch = scratch

    def probe(self, row: Ours, optimizer: str) -> None:
        """A tiny exchange that shows before any timing whether the flags exist. It has 64 keys, enough for many hubs."""
        tiny = self.scratch / "tiny.json"
        tiny.write_text(json.dumps([{"name": f"tiny.{number}", "shape": [1]} for number in range(64)]))
        self._run(tiny, row, optimizer, iterations=1, warmup=0)

    def measure(self, row: Ours, optimizer: str, iterations: int, warmup: int) -> dict:
        return self._run(self.keys, row, optimizer, iterations, warmup)

    def command(self, row: Ours, optimizer: str) -> str:
        """The command for users who repeat the row, without the keys."""
        words = ["paramhub", "bench", "exchange", *self._size(row), "--optimizer", optimizer, *row.flags]
        return shlex.join(words)

    def _size(self, row: Ours) -> list:
        return ["--workers", str(row.workers or self.workers), "--cores", str(row.cores or self.cores)]

    def _run(self, keys: Path, row: Ours, optimizer: str, iterations: int, warmup: int) -> dict:
        result = self.scratch / "ours.json"
        result.unlink(missing_ok=True)
        words = [str(self.path), "bench", "exchange", "--keys", str(keys), *self._size(row)]
        words += ["--optimizer", optimizer, *row.flags]
        words += ["--iters", str(iterations), "--warmup", str(warmup), "--json", str(result)]
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            # Only the driver handles Ctrl-C, and then ends this process, too.
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            complaint = lines[0] if lines else f"exit code {done.returncode}"
            raise (Refused if done.returncode == WRONG_USAGE else Failed)(complaint)
        return json.loads(result.read_text())


def path_of_program(given, repository: Path) -> Path:
    """The path of the release build, which this builds if there is none."""
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
