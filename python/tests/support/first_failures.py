"""A program in which one forked process after the other fails its first request, and none may hang.

The first failure in a process does more than later ones: it looks up classes, and other threads get the GIL meanwhile.
"""

import ctypes
import os
import signal
import sys
import threading
import time

import paramhub.errors
from paramhub import _native

CHILDREN = 200
WAIT_TIMEOUT = 20.0
"""Seconds after which a process that takes milliseconds counts as hanging."""


def fail_first() -> None:
    """Fails a request that has a callback and for which several threads wait."""
    sys.setswitchinterval(1e-6)
    memory = bytearray(64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    slots = _native.Slots([(0, 1024)])
    handle = slots.exchange((address, len(memory)), memory)
    is_called = threading.Event()
    handle.add_done_callback(lambda _: is_called.set())

    def wait() -> None:
        try:
            handle.wait()
        except paramhub.errors.JobFailedError:
            return

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    slots.fail("for the test", 1)
    for waiter in waiters:
        waiter.join()
    is_called.wait()


def stands_still(child: int) -> bool:
    deadline = time.monotonic() + WAIT_TIMEOUT
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        time.sleep(0.001)
    return False


def main() -> None:
    for _ in range(CHILDREN):
        child = os.fork()
        if child == 0:
            fail_first()
            os._exit(0)
        if stands_still(child):
            sys.exit("a process stands still in its first failure")


if __name__ == "__main__":
    main()
