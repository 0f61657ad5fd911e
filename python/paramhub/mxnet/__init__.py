"""Key-value stores for MXNet. Importing this module registers them with MXNet.

A training program, started with ``paramhub run -n 4 -- python train.py``::

    import paramhub.mxnet

    store = mx.kv.create("paramhub")                       # store.rank chooses this rank's data
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    ...
    trainer.step(batch_size * store.num_workers)

``paramhub`` exchanges through a hub, where the optimizer runs; in ``paramhub_async`` it runs on each push alone.
``paramhub_depcha``, ``paramhub_concom`` and ``paramhub_funnel`` exchange by collectives among the ranks. Each has a second name,
which is its ``type``: ``dist_sync_paramhub``, ``dist_async_paramhub``, ``dist_sync_paramhub_depcha`` and so on.
docs/mxnet.md says what is supported.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any

import mxnet as mx
import mxnet.gluon.trainer
import mxnet.model
import mxnet.module.module
from mxnet.kvstore import KVStoreBase

import paramhub.kvstore
from paramhub.mxnet._store import Store

__all__ = ["Store"]


def _register() -> None:
    names = set()
    for kind, consistency in (
        ("hub", None),
        ("hub", "async"),
        ("depcha", None),
        ("concom", None),
        ("funnel", None),
    ):
        made = {"kind": kind, "consistency": consistency, "__doc__": Store.__doc__, "__module__": __name__}
        name = "paramhub" if kind == "hub" else f"paramhub_{kind}"
        second = f"dist_{consistency or 'sync'}_{name}"
        for each in (f"{name}_{consistency}" if consistency else name, second):
            # MXNet looks a store up by the name of its class, in lower case.
            KVStoreBase.register(type(each, (Store,), {**made, "type": second}))
            names.add(each)
    for module in (mxnet.model, mxnet.module.module, mxnet.gluon.trainer):
        module._create_kvstore = _made_first(module._create_kvstore, names)


def _made_first(create: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
    """MXNet's function that makes a trainer's store. It would take the name of a store for none if there is one device and the
    name does not contain ``dist``, and each rank would train alone. So a store of ours is made before."""

    def create_kvstore(kvstore: Any, *arguments: Any) -> Any:
        is_ours = isinstance(kvstore, str) and kvstore.lower() in names
        return create(mx.kv.create(kvstore) if is_ours else kvstore, *arguments)

    return create_kvstore


def _at_exit() -> None:
    # The engine's threads run Python code until its last exchange has ended, and must not at the interpreter's end.
    paramhub.kvstore._at_exit()
    mx.nd.waitall()


_register()
atexit.register(_at_exit)
# At a fork MXNet joins its engine's threads, while the forking thread holds the GIL. A thread that waits for an exchange needs
# the GIL to end, so all exchanges end before.
os.register_at_fork(before=mx.nd.waitall)
