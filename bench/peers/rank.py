"""One rank of a peer: receives orders, exchanges, and reports the time.

    python rank.py MODULE SOCKET

MODULE is the peer (gloo, ddp, mpi, mxnet_kvstore); its class `Peer` has

    version              the library and its version
    prepare(form)        makes all gradients ready; not timed
    exchange(form)       returns once this rank has every result; timed
    check(form)          makes one more exchange and compares its results with the known sums
    leave()              ends the peer
"""

import importlib
import os
import sys
import time
import traceback

import processes
from json_connection import JsonConnection


def main() -> None:
    module, path = sys.argv[1:]
    # If a launcher such as mpirun is killed, its ranks must end, too.
    processes.die_with_parent()
    connection = JsonConnection.dial(path)
    connection.send({"pid": os.getpid()})
    task = connection.receive()
    if task is None:
        return
    try:
        peer = importlib.import_module(module).Peer(task)
        connection.send({"version": peer.version})
        while (order := connection.receive()) is not None:
            connection.send(obey(peer, order))
    except Exception as error:
        traceback.print_exc()
        connection.send({"failed": f"{type(error).__name__}: {error}"})
        # The other ranks may hang in a collective that this rank has left, so this rank ends without waiting for them.
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
    # All ranks start at the same instant, so that no order is being sent while a rank is timed.
    time.sleep(max(0.0, start - time.monotonic()))
    cpu_seconds = time.process_time()
    started = time.monotonic()
    peer.exchange(form)
    ended = time.monotonic()
    return {"seconds": ended - started, "cpu_seconds": time.process_time() - cpu_seconds}


if __name__ == "__main__":
    main()
