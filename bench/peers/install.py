"""Installs the peers into virtual environments of their own beside this file, and nothing elsewhere."""

import subprocess
import sys
from pathlib import Path

from rows import ENVIRONMENTS, Environment

HERE = Path(__file__).resolve().parent


class NotInstalled(Exception):
    pass


def install_all(teams, python: str):
    """The folder of each team's programs, and for each team that could not be installed the reason."""
    binaries, missing = {}, {}
    for team in teams:
        try:
            binaries[team.name] = install(ENVIRONMENTS[team.environment], python)
        except NotInstalled as error:
            missing[team.name] = str(error)
    return binaries, missing


def install(environment: Environment, python: str) -> Path:
    """The folder of the environment's programs."""
    folder = HERE / f".venv-{environment.name}"
    binaries = folder / "bin"
    # Written last, so that an interrupted installation is repeated.
    receipt = folder / "installed"
    wanted = "\n".join(environment.packages) + "\n"
    if receipt.is_file() and receipt.read_text() == wanted:
        return binaries
    print(f"installing {' '.join(environment.packages)} into {folder.relative_to(HERE.parents[1])}", file=sys.stderr)
    command([python, "-m", "venv", "--clear", str(folder)])
    command([str(binaries / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir", *environment.packages])
    receipt.write_text(wanted)
    return binaries


def command(words: list) -> None:
    try:
        # The process is not in the terminal's process group: only the driver handles Ctrl-C.
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
    except OSError as error:
        raise NotInstalled(f"{words[0]}: {error}") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise NotInstalled(f"`{' '.join(words[1:4])} ...` failed: {' | '.join(errors[-2:])[:300]}")
