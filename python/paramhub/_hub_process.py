"""A hub in a process of its own, which outlives the processes that use it: ``python -m paramhub._hub_process``."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

from paramhub._hub import Hub
from paramhub.errors import ConnectError

_LOOK_MS = 1000
"""Milliseconds between two looks at whether the hub still works."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class HubProcess:
    """A hub that this process has started in another. It ends with the process ``ends_with``."""

    def __init__(self, ends_with: int, **options: Any) -> None:
        """``options`` are those of `Hub`. Raises ConnectError with the hub's own words if it does not start."""
        watched = os.pidfd_open(ends_with)
        try:
            # The session of its own keeps away the signals with which launchers end their workers' groups.
            process = subprocess.Popen(
                [sys.executable, "-m", "paramhub._hub_process", str(watched)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[watched],
                start_new_session=True,
                text=True,
            )
        finally:
            os.close(watched)
        assert process.stdin is not None and process.stdout is not None
        # The options may have a token, which the arguments of a process would show to everybody.
        with process.stdin as stdin:
            stdin.write(json.dumps(options))
        with process.stdout as stdout:
            text = stdout.read()
        if not text:
            raise ConnectError(f"the hub's process ended with {process.wait()} before the hub was ready")
        answer = json.loads(text)
        if "error" in answer:
            process.wait()
            raise ConnectError(answer["error"])
        # It outlives this process, which need not wait for its end.
        process.returncode = 0
        self.url: str = answer["url"]
        """The connection manager's URL."""
        self.addresses: list[str] = answer["addresses"]
        """The data addresses."""


def main() -> int:
    """Reads the options of a `Hub` from its input, runs it, and writes its addresses, or why it does not start, to its output.

    The argument is a pidfd: the hub ends with that process, or at SIGTERM.
    """
    watched = int(sys.argv[1])
    for number in _SIGNALS:
        signal.signal(number, _raise_ended)
    try:
        hub = Hub(**json.load(sys.stdin))
    except Exception as error:
        json.dump({"error": str(error)}, sys.stdout)
        return 1
    json.dump({"url": hub.url, "addresses": hub.addresses}, sys.stdout)
    sys.stdout.flush()
    # The starter reads to the end of the output.
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    with contextlib.suppress(_Ended):
        while not poll.poll(_LOOK_MS):
            if (failure := hub.failure()) is not None:
                print(f"paramhub: the hub of this run has ended: {failure}", file=sys.stderr, flush=True)
                return 1
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    hub.stop()
    return 0


class _Ended(Exception):
    """A signal has asked the process to end."""


def _raise_ended(number: int, frame: object) -> None:
    raise _Ended


if __name__ == "__main__":
    sys.exit(main())
