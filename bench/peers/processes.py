"""Processes that end with the process that started them, and their processor time."""

import ctypes
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CPUCLOCK_SCHED = 2

libc = ctypes.CDLL(None, use_errno=True)


class Interrupted(BaseException):
    def __init__(self, number: int):
        self.number = number


def supervised(work) -> int:
    """Calls `work` with a folder of its own. At its end, in whatever way, this ends all processes that it started."""
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in caught:
        signal.signal(number, interrupt)
    adopt_orphans()
    scratch = Path(tempfile.mkdtemp(prefix="paramhub-peers-"))
    try:
        return work(scratch)
    except Interrupted as error:
        print(f"interrupted by {signal.Signals(error.number).name}; all processes have been ended", file=sys.stderr)
        return 128 + error.number
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_IGN)
        kill_all_descendants()
        shutil.rmtree(scratch, ignore_errors=True)


def interrupt(number, _frame):
    raise Interrupted(number)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    libc.prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Makes processes that mpirun and the like leave behind children of this process, which can find and end them."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def cpu_seconds(pid: int) -> float:
    """Processor time of a whole process; 0 once it is gone."""
    # The kernel's clock id of another process, computed as clock_getcpuclockid(3) does.
    clock = (~pid << 3) | CPUCLOCK_SCHED
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def descendants(pid: int) -> list:
    children = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                # The process's name comes before it, in parentheses, and may contain any character.
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # the process has ended meanwhile
        children.setdefault(parent, []).append(int(entry))
    found = []
    frontier = [pid]
    while frontier:
        of_this = children.get(frontier.pop(), [])
        found += of_this
        frontier += of_this
    return found


def shared_segments(pid: int) -> set:
    """Files in /dev/shm that a process has mapped and that were not deleted."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            paths = {line.split(maxsplit=5)[5].strip() for line in file if "/dev/shm/" in line}
    except OSError:
        return set()
    return {path for path in paths if path.startswith("/dev/shm/") and not path.endswith("(deleted)")}


def kill(pids: list) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def kill_all_descendants() -> None:
    """Kills in several rounds, because processes may start others meanwhile."""
    for _ in range(100):
        alive = descendants(os.getpid())
        if not alive:
            return
        kill(alive)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def loopback_bytes() -> int:
    """All bytes that the loopback interface has carried, of all processes."""
    with open("/proc/net/dev") as file:
        for line in file:
            name, _, counters = line.partition(":")
            if name.strip() == "lo":
                return int(counters.split()[0])
    return 0


def machine() -> str:
    name = "an unknown processor"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{len(os.sched_getaffinity(0))} processors of {name}, Linux {platform.release()}"


def available_bytes() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0
