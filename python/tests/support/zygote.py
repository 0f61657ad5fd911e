"""A program that forks ranks: it has imported torch already, which takes seconds, and nothing of paramhub's.

It is started once for all tests, has one thread, and so can be forked safely. It alone starts, signals and reaps the ranks, so
that no process id is ever used after its process has gone. When the tests end, in whatever way, its socket closes, and it
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

from orders import Ended, Order, Signal

PR_SET_PDEATHSIG = 1


@dataclass
class Zygote:
    socket: Connection
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Team and rank by process id."""

    def serve(self) -> Order | None:
        """Returns None in this process when the tests end, and an order in every rank."""
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

    def fork(self, order: Order) -> bool:
        """Whether this process is the rank."""
        process = os.fork()
        if process == 0:
            become(order)
            self.socket.close()
            return True
        with contextlib.suppress(OSError):  # It does so too; who comes first does not matter.
            os.setpgid(process, process)
        self.ranks[process] = (order.team, order.rank)
        return False

    def reap(self) -> None:
        for process, (team, rank) in list(self.ranks.items()):
            if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            # Until it is reaped its id names its group alone, in which are the processes it has left behind.
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


def become(order: Order) -> None:
    """Turns a forked process into what a freshly started one would be."""
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


def obey(order: Order) -> int:
    """Does what is ordered, and all that a program does at its end but one thing: taking down the interpreter, with torch and
    everything else that is loaded, takes a second. Returns the exit code."""
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
    # A process that the rank has forked may come by here too.
    if os.getpid() == rank:
        _write(order.outcome, outcome)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _exit_code(error: BaseException) -> int:
    """Does what the interpreter does with an exception that ends it."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    # Handlers at exit may look for these.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _write(path: str, content: bytes) -> None:
    """Whole or not at all: the rank may be killed meanwhile."""
    partial = Path(f"{path}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def preload() -> None:
    """What takes long to import and starts no threads."""
    # The first optimizer imports torch._dynamo, which takes as long as torch itself.
    for name in ("pytest", "numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"a zygote must have one thread to be forked, and has {threads}")
    # What is there now is never looked through again, in no rank.
    gc.freeze()


if __name__ == "__main__":
    preload()
    socket = Connection(int(sys.argv[1]))
    socket.send("ready")
    ordered = Zygote(socket).serve()
    os._exit(obey(ordered) if ordered is not None else 0)
