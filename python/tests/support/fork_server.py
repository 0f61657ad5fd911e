"""A program that forks ranks. It has imported torch already, which takes seconds, and nothing of paramhub.

It is started once for all tests, and has one thread, so that it can be forked safely. Only it starts, signals and reaps the
ranks, so that no process id is used after its process was reaped. When the tests end, in whatever way, its socket closes. Then it
ends every rank before itself. `team.py` is the other end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rank_tasks import Ended, RankTask, Signal

PR_SET_PDEATHSIG = 1


@dataclass
class ForkServer:
    socket: Connection
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Team and rank by process id."""

    def serve(self) -> RankTask | None:
        """Handles messages. Returns None in this process when the tests end, and the task in every rank's process."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            while True:
                ready = wait([self.socket, woken])
                if woken in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
                    self.reap()
                if self.socket in ready:
                    request = self.socket.recv()
                    if isinstance(request, Signal):
                        self.signal(request)
                    elif self.fork(request):
                        signal.set_wakeup_fd(-1)
                        os.close(woken)
                        os.close(wake)
                        return request
        except (EOFError, ConnectionError):
            for team in {team for team, _ in self.ranks.values()}:
                self.signal(Signal(team, signal.SIGKILL, whole_group=True))
            return None

    def fork(self, order: RankTask) -> bool:
        """Forks a rank. Returns True in the rank's process, False in this one."""
        process = os.fork()
        if process == 0:
            become(order)
            self.socket.close()
            return True
        with contextlib.suppress(OSError):  # The child does so, too; either may be first.
            os.setpgid(process, process)
        self.ranks[process] = (order.team, order.rank)
        return False

    def reap(self) -> None:
        for process, (team, rank) in list(self.ranks.items()):
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # Until it is reaped, no other group can have its id. Its group has the processes that it has left behind.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            del self.ranks[process]
            self.socket.send(Ended(team, rank, os.waitstatus_to_exitcode(status)))

    def signal(self, request: Signal) -> None:
        for process, (team, rank) in self.ranks.items():
            if team == request.team and (request.ranks is None or rank in request.ranks):
                send = os.killpg if request.whole_group else os.kill
                with contextlib.suppress(ProcessLookupError):
                    send(process, request.number)


def become(order: RankTask) -> None:
    """Gives a forked process the state of a freshly started one."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    sys.path[:] = order.path
    sys.argv[:] = [order.file]


def load(name: str, file: str) -> types.ModuleType:
    """The module under the name that it has in the tests' process, so that pickles find it."""
    if name in sys.modules:
        return sys.modules[name]
    parents = name.split(".")[:-1]
    for end in range(1, len(parents) + 1):
        parent = ".".join(parents[:end])
        sys.modules.setdefault(parent, types.ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_task(order: RankTask) -> int:
    """Runs the task, and the steps of a program's end without the shutdown of the interpreter, which takes a second with torch
    loaded. Returns the exit code."""
    rank = os.getpid()
    try:
        found: Any = load(order.module, order.file)
        for part in order.function.split("."):
            found = getattr(found, part)
        outcome = pickle.dumps((True, found(*pickle.loads(order.arguments))))
        code = 0
    except BaseException as error:
        outcome = pickle.dumps((False, traceback.format_exc()))
        code = _exit_code(error)
    # A process that the rank has forked may reach this line, too.
    if os.getpid() == rank:
        _write(order.outcome, outcome)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _exit_code(error: BaseException) -> int:
    """Handles an exception that ends the program as the interpreter does. Returns the exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    # Functions registered at ``atexit`` may read these.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _write(path: str, content: bytes) -> None:
    """Writes a file at once, because the rank may be killed meanwhile."""
    partial = Path(f"{path}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def preload() -> None:
    """Imports modules that take long to import and start no threads."""
    # The first optimizer imports torch._dynamo, which takes as long as torch itself.
    for name in ("pytest", "numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"a fork server must have one thread to be forked, and has {threads}")
    # The garbage collector then skips all present objects, in every rank.
    gc.freeze()


if __name__ == "__main__":
    preload()
    socket = Connection(int(sys.argv[1]))
    socket.send("ready")
    ordered = ForkServer(socket).serve()
    os._exit(run_task(ordered) if ordered is not None else 0)
