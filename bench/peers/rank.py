"""One rank of a peer: takes orders, exchanges, and says how long it took.

    python rank.py MODULE SOCKET

MODULE is the peer (gloo, ddp, mpi, mxnet_kvstore); its class `Peer` has

    version              what was measured
    prepare(form)        makes all gradients ready; not timed
    exchange(form)       returns once this rank has every result; timed
    check(form)          one more exchange, compared with what the gradients must give
"""

import importlib
import os
import sys
import time
import traceback

import processes
from line import Line


def main() -> None:
    module, path = sys.argv[1:]
    # A launcher such as mpirun that is killed must not leave its ranks behind.
    processes.die_with_parent()
    line = Line.dial(path)
    line.say({"pid": os.getpid()})
    task = line.hear()
    if task is None:
        return
    try:
        peer = importlib.import_module(module).Peer(task)
        line.say({"version": peer.version})
        while (order := line.hear()) is not None:
            line.say(obey(peer, order))
    except Exception as error:
        traceback.print_exc()
        line.say({"failed": f"{type(error).__name__}: {error}"})
        # The other ranks may hang in a collective that this one has left: no farewell that waits for them.
        os._exit(1)
    peer.leave()


def obey(peer, order: dict) -> dict:
    form = order["form"]
    if order["do"] == "prepare":
        peer.prepare(form)
        return {}
    if order["do"] == "exchange":
        return exchange(peer, form, order["start"])
    return peer.check(form)


def exchange(peer, form: str, start: float) -> dict:
    # All ranks were told the same instant, so that no order is under way while anyone is timed.
    time.sleep(max(0.0, start - time.monotonic()))
    cpu_seconds = time.process_time()
    started = time.monotonic()
    peer.exchange(form)
    ended = time.monotonic()
    return {"seconds": ended - started, "cpu_seconds": time.process_time() - cpu_seconds}


if __name__ == "__main__":
    main()
