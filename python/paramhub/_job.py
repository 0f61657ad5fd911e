"""A worker's part in a job, for any library's tensors."""

from __future__ import annotations

import atexit
import json
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.optimizers import Mean, Optimizer, settings_of

if TYPE_CHECKING:
    from paramhub._native import Handle, Tensor

_REASON_MAX = 1000
"""The most characters of an error message that this rank sends to the others."""


def connect(
    url: str | None = None,
    job: str | None = None,
    secret: str | None = None,
    rank: int | None = None,
    *,
    transport: str | None = None,
    interfaces: str | None = None,
    timeout: float | None = None,
    rack: str | None = None,
    host: str | None = None,
    peers: bool = False,
    workers: int | None = None,
) -> Job:
    """Joins a job as one of its ranks. Returns when every rank has joined.

    Arguments that are left out come from the environment, which ``paramhub run`` fills: ``url``, the connection manager's,
    from ``PARAMHUB_URL``; ``job``, the namespace of the created job, from ``PARAMHUB_JOB``; ``secret`` from
    ``PARAMHUB_SECRET``; ``rank`` from ``RANK``.

    ``transport`` is ``auto`` (shared memory to a hub on this host, TCP to others), ``tcp`` or ``shm``. The default is the
    value of ``PARAMHUB_TRANSPORT``, else ``auto``. ``interfaces`` lists the network interfaces of this host that streams use
    (``"eth0,eth1"``, ``"10.0.0.0/24"``, ``"^docker"``). The default is the value of ``PARAMHUB_INTERFACES``, else all
    interfaces that lead to the hub. ``timeout`` in seconds bounds the wait. The job's own rendezvous timeout is usually
    shorter, and its error names the missing ranks.

    Where hubs serve racks or hosts, ``rack`` and ``host`` name the rack and the host of this worker. The defaults are
    ``PARAMHUB_RACK``, else no rack, and ``PARAMHUB_HOST``, else the system's host name. With ``peers`` this worker listens
    for connections of the other workers, on its interface towards the manager and a port that the system chooses. Layers
    that are exchanged as factors need it at every rank.

    ``workers`` is for a job with ``on_worker_loss="rewind"`` and ``max_workers`` (`create_job`): the number of ranks that have
    been started together with this one. When all ranks are started again, more or fewer, the job goes on with so many. A process
    that joins again after `paramhub.Rewound` leaves it out.

    Raises MisuseError if an argument is missing or unreadable, ConnectError if the manager cannot be reached or ranks are
    missing.
    """
    member = _native.connect(
        *worker_identity(url, job, secret, rank, "connect()"),
        transport=transport,
        interfaces=interfaces,
        rendezvous_timeout=timeout,
        rack=rack,
        host=host,
        peers=peers,
        workers=workers,
    )
    return Job(member)


def worker_identity(
    url: str | None, job: str | None, secret: str | None, rank: int | None, call: str
) -> tuple[str, str, str, int]:
    """URL, job, secret and rank of this worker: the arguments of ``call``, or else the environment's variables."""

    def given(value: str | None, variable: str, what: str) -> str:
        value = value if value is not None else os.environ.get(variable, "")
        if not value.strip():
            raise MisuseError(
                f"{what} is missing: start the worker with `paramhub run -n N -- CMD`, pass it to {call}, or set {variable}"
            )
        return value.strip()

    return (
        given(url, "PARAMHUB_URL", "the connection manager's URL"),
        given(job, "PARAMHUB_JOB", "the job's namespace"),
        given(secret, "PARAMHUB_SECRET", "the job's secret"),
        _number(given(str(rank) if rank is not None else None, "RANK", "this worker's rank")),
    )


def _number(text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) < 2**32:
        return int(text)
    raise MisuseError(f"a rank is a number from 0, not {text!r}")


class Job:
    """A worker's part in a job. `connect` makes it, `init` gives it its tensors, then the worker exchanges them.

    As a context manager it leaves the job at the end of the block. If the block raises, or the program ends by an exception
    before it has left, it gives up: the rank is lost, and the others hear why. ``sys.exit`` leaves. Several threads may use it.
    """

    def __init__(self, member: _native.Member) -> None:
        self._member: _native.Member | None = member
        self._native: _native.Job | None = None
        self._keys: dict[str, _Key] = {}
        self._layers: dict[str, _FactorLayer] = {}
        self._optimizer: Optimizer = Mean()
        self.name = member.name
        self.rank = member.rank
        self.workers = member.workers
        _made.add(self)

    def init(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        optimizer: Optimizer | None = None,
        *,
        priorities: Mapping[str, int] | None = None,
        consistency: str | dict[str, int] = "synchronous",
        chunk_bytes: int | None = None,
        codec: str | None = None,
        codecs: Mapping[str, str] | None = None,
        reproducible: bool = False,
        reject_non_finite: bool = False,
        layers: Mapping[str, Mapping[str, Any]] | None = None,
        scheme: str = "hub",
    ) -> Job:
        """Agrees with the other ranks on the tensors and on what the hub does with them. Returns this job.

        ``tensors`` are contiguous host tensors of f32, f16 or bf16 by name, in forward order. Earlier ones are more urgent;
        ``priorities`` (higher is more urgent) overrules that order. With an optimizer they are the parameters: rank 0 sends
        its own to the hub, and every other rank receives them in place. Without one (`Mean`, the default, or `Sum`) only
        their names, types and shapes are used.

        ``consistency`` is ``synchronous``, ``asynchronous``, or ``{"bounded_staleness": steps}``. ``codec`` (``f16``, ``bf16``)
        is the encoding of gradients in frames, by default that of the tensors. ``int8`` encodes tensors in a byte an element in
        both directions over TCP, in a synchronous job; a rank that shares memory with the hub sends them as they are. Error
        feedback adds what a step loses to the next step. ``one-bit`` and ``two-bit`` do the same for matrices; the other
        tensors then keep their own encoding. ``codecs`` gives single tensors, of any shape, a codec by name. ``chunk_bytes`` is
        the size of an f32 chunk, 32 KiB by default. With ``reproducible`` sums are made in rank order and are bit-equal from
        run to run. With ``reject_non_finite`` a NaN or an infinity in a gradient fails the job; the error names rank and
        tensor.

        ``layers`` groups tensors into layers. A fully connected one is
        ``{"fc6": {"tensors": ["fc6.weight", "fc6.bias"], "samples": 32}}``, where ``samples`` is the number of vectors that
        the weight (outputs by inputs) is multiplied by in a step: the batch, or in a model of sequences the batch times their
        length. Any other layer has only its tensors. ``"tied": True`` marks a layer whose weight is used elsewhere, too.
        ``scheme`` is how layers are exchanged: ``hub``, ``factors``, or ``auto`` for the one that moves the fewest bytes. A
        layer's own ``"scheme"`` overrules it. Factors are encoded in the type of the weight, or in a layer's
        ``"factor_codec"``, ``f16`` or ``bf16``. ``factors-to-hub`` is for programs in Rust and `paramhub train`. See `query`
        and `best_scheme`. Layers with the scheme ``factors`` are exchanged with `push_factors`. For ``factors`` and ``auto``
        the workers connect with ``peers=True``.

        Raises MisuseError if the ranks disagree on any of it; the error names what differs.
        """
        if self._member is None:
            raise MisuseError(f"job `{self.name}`, rank {self.rank}: it has its tensors already")
        optimizer = optimizer if optimizer is not None else Mean()
        pairs = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
        has_parameters = optimizer.name not in ("mean", "sum")
        views = [_native.Memory(tensor, has_parameters and self.rank != 0) for _, tensor in pairs]
        priorities = priorities or {}
        codecs = codecs or {}
        if unknown := codecs.keys() - {name for name, _ in pairs}:
            raise MisuseError(f"codecs names {sorted(unknown)}, which are none of the tensors")
        settings: dict[str, Any] = {
            "keys": [
                {
                    "name": name,
                    "shape": view.shape,
                    "dtype": view.dtype,
                    "priority": priorities.get(name, 0),
                    "codec": codecs.get(name),
                }
                for (name, _), view in zip(pairs, views, strict=True)
            ],
            "optimizer": optimizer.settings(),
            "consistency": consistency,
            "codec": codec,
            "reproducible": reproducible,
            "reject_non_finite": reject_non_finite,
            "scheme": scheme,
            "layers": [
                _layer(name, layer, [tensor for tensor, _ in pairs], [view.shape for view in views])
                for name, layer in (layers or {}).items()
            ],
        }
        if chunk_bytes is not None:
            settings["chunk_bytes"] = chunk_bytes
        self._native = self._member.init(json.dumps(settings))
        self._member = None
        # A copy: this job may change the hyperparameters, and the caller may use the optimizer for another job.
        self._optimizer = Optimizer(optimizer.name, **optimizer.hyperparameters)
        self._keys = {
            name: _Key(number, view.dtype, view.nbytes)
            for number, ((name, _), view) in enumerate(zip(pairs, views, strict=True))
        }
        names = [name for name, _ in pairs]
        self._layers = {
            name: _FactorLayer(number, names[weight], names[bias] if bias is not None else None, codec)
            for number, (name, weight, bias, _, codec) in enumerate(self._native.factor_layers())
        }
        if has_parameters:
            numbers = list(range(len(views)))
            ranges = [(view.address, view.nbytes) for view in views]
            if self.rank == 0 and self._native.resumed_step is None:
                self._native.initialise(numbers, ranges, views, 0).wait()
            else:
                self._native.pull(numbers, ranges, views).wait()
            self._native.begin_factors(numbers, ranges, views)
        return self

    @property
    def resumed_step(self) -> int | None:
        """The step of the checkpoint from which the hubs have resumed, or at which this process has joined a running job. `init`
        has received its parameters. None where the parameters are rank 0's. Hyperparameters are those of that step, too:
        change them with `set_hyperparameters`."""
        return self._running().resumed_step

    def push(self, name: str, gradient: Any) -> Handle:
        """Contributes a gradient to the tensor's next step. The handle ends when the gradient has taken effect.

        Until then the handle keeps ``gradient`` alive, and the caller must not write to it.
        """
        key, memory = self._look(name, gradient, writable=False)
        return self._running().push([key.number], [(memory.address, memory.nbytes)], memory)

    def pull(self, name: str, out: Any) -> Handle:
        """Receives into ``out`` the parameters after the last step that this worker has pushed. The caller must not use
        ``out`` until the handle has ended."""
        key, memory = self._look(name, out, writable=True)
        return self._running().pull([key.number], [(memory.address, memory.nbytes)], memory)

    def push_pull(self, name: str, gradient: Any, out: Any) -> Handle:
        """Contributes a gradient and receives into ``out`` the parameters that follow from it. Where the job has no
        optimizer, ``out`` receives the mean (or sum) of all ranks' gradients.

        Nothing is copied if the tensors lie in memory of `gradient_tensor` and `parameter_tensor`, or if the hub is on
        another host. ``out`` may be ``gradient`` itself, but must not overlap it otherwise. Until the handle has ended, it keeps
        both alive, and the caller must not use them.
        """
        return self.push_pull_many([(name, gradient, out)])

    def push_pull_many(self, exchanges: Iterable[tuple[str, Any, Any]]) -> Handle:
        """`push_pull` for several tensors, each with its name, its gradient and its ``out``. The handle ends with the last.

        It takes less time than a request for each, above all where the tensors are small. If one of the tensors cannot be
        exchanged, this raises, and exchanges none.
        """
        keys, sends, receives, memories = [], [], [], []
        for name, gradient, out in exchanges:
            key, sent = self._look(name, gradient, writable=False)
            _, received = self._look(name, out, writable=True)
            keys.append(key.number)
            sends.append((sent.address, sent.nbytes))
            receives.append((received.address, received.nbytes))
            memories.append((sent, received))
        return self._running().push_pull(keys, sends, receives, memories)

    def push_factors(
        self, layer: str, inputs: Any, output_gradients: Any, weight_out: Any, bias_out: Any = None
    ) -> Handle:
        """Contributes the factors of a layer's gradient, if the layer's scheme is ``factors``. Receives the weight that
        follows from the factors of all ranks into ``weight_out``, and the bias into ``bias_out``, if given.

        For each sample of this rank's step, ``inputs`` has a row with the layer's input, and ``output_gradients`` a row with
        the gradient of the loss by the layer's output, in the type of the weight or the layer's ``factor_codec``. The gradient
        is ``output_gradients.T @ inputs``. The number of rows is at most the layer's ``samples`` in `init`, and may be 0.
        Every rank calls this once a step for each such layer, in the same order of layers. ``inputs`` and
        ``output_gradients`` are copied before this returns. The handle keeps ``weight_out`` and ``bias_out`` alive until it
        has ended; the caller must not use them before.

        All ranks receive bit-equal values. Gradients are divided by the number of ranks, as at a hub.
        """
        native = self._running()
        if layer not in self._layers:
            raise MisuseError(
                f"job `{self.name}`, rank {self.rank}: no layer {layer!r} goes by factors; those that do are "
                f"{', '.join(map(repr, self._layers)) or 'none'}"
            )
        of = self._layers[layer]
        _, weight = self._look(of.weight, weight_out, writable=True)
        sent = [_native.Memory(tensor, False) for tensor in (inputs, output_gradients)]
        for memory, columns in zip(sent, reversed(weight.shape), strict=True):
            if memory.dtype != of.codec or len(memory.shape) != 2 or memory.shape[1] != columns:
                raise MisuseError(
                    f"job `{self.name}`, rank {self.rank}: layer {layer!r} takes inputs of [samples, {weight.shape[1]}] and "
                    f"output gradients of [samples, {weight.shape[0]}] in {of.codec}, but one of {memory.shape} in "
                    f"{memory.dtype} was passed"
                )
        bias = None
        if bias_out is not None:
            if of.bias is None:
                raise MisuseError(f"job `{self.name}`, rank {self.rank}: layer {layer!r} has no bias")
            _, bias = self._look(of.bias, bias_out, writable=True)
        return native.push_factors(
            of.number,
            ((sent[0].address, sent[0].nbytes), (sent[1].address, sent[1].nbytes)),
            ((weight.address, weight.nbytes), (bias.address, bias.nbytes) if bias is not None else None),
            (weight, bias),
        )

    def gradient_tensor(self, name: str) -> Tensor:
        """Memory from which a tensor's gradient is exchanged without a copy; a hub on this host shares it. Use it through
        ``torch.from_dlpack`` or ``numpy.from_dlpack``.

        Raises MisuseError while an earlier result for the same tensor is in use.
        """
        return self._running().gradient_tensor(self._key(name).number)

    def parameter_tensor(self, name: str) -> Tensor:
        """Memory for a tensor's parameters; otherwise the same as `gradient_tensor`."""
        return self._running().parameter_tensor(self._key(name).number)

    def set_hyperparameters(self, first_step: int, **changed: float | bool) -> None:
        """Changes hyperparameters from step ``first_step`` on, by the hub's names (``learning_rate=0.01``).

        Any one rank calls it, before it pushes ``first_step``: then the change applies from that step of a synchronous job.
        Where layers are exchanged as factors, rank 0 calls it. In a job with ``on_worker_loss="continue"`` all ranks call it:
        the changes of the rank hold that has been there for longest, among several the lowest.
        """
        numbers = {**self._optimizer.hyperparameters, **changed}
        self._running().set_hyperparameters(first_step, json.dumps(settings_of(numbers)))
        self._optimizer.hyperparameters = numbers

    def next_step(self, name: str) -> int:
        """The step that the next push of a tensor contributes to; steps count from 0."""
        return self._running().next_step(self._key(name).number)

    @property
    def shares_memory(self) -> bool:
        """Returns whether any of the exchange is through shared memory."""
        return self._running().shares_memory

    def save_program_state(self, step: int, state: Any) -> Handle:
        """Saves this rank's program state of ``step`` at the hub, from ``bytes`` or any other buffer, which is copied.

        A program state is what the program must restore when its process is started again at this step, such as its data
        position and its random numbers. It has at most as many bytes as the job's ``program_state_bytes`` (`create_job`). The
        hub keeps the three newest states of each rank. One of the newest step replaces that; one of an earlier step cannot be
        saved. One state is saved at a time: wait for the handle before the next.
        """
        return self._running().save_program_state(step, memoryview(state).tobytes())

    def program_state(self, step: int) -> bytes | None:
        """Receives this rank's program state of ``step``, which this process or an earlier one of the rank has saved. Returns
        None if the hub does not have it. A rank that has saved none of any step, since it was not there before, receives that of
        the lowest rank which has one of the step."""
        return self._running().program_state(step)

    def statistics(self) -> dict[str, float]:
        """The totals of the exchange so far: ``bytes_sent`` and ``bytes_received``, through hubs and as factors;
        ``factor_bytes_sent``, the part of ``bytes_sent`` that was factors; ``requests``, ``in_flight_s`` and
        ``streams_moved`` of the exchange with hubs; and ``rebuilding_s``, the time spent on making gradients from factors and
        on updating with them."""
        return self._running().statistics()

    def query(self, *properties: str) -> dict[str, Any]:
        """Reads properties of the information book, which is equal at every node of the job. Returns a dict from the names
        to their values.

        Properties are ``workers``, ``hubs``, ``place``, ``layers``, ``layers.NAME``, and ``layers.NAME.FIELD`` with the FIELD
        type, outputs, inputs, samples, parameters, keys, scheme or why. Without arguments it returns the whole book.
        """
        found: dict[str, Any] = json.loads(self._running().query(list(properties)))
        return found

    def best_scheme(self, layer: str) -> str:
        """The scheme of a layer: ``hub`` or ``factors``. The property ``layers.NAME.why`` of `query` is the reason."""
        scheme: str = json.loads(self._running().best_scheme(layer))["scheme"]
        return scheme

    def leave(self) -> None:
        """Waits for the requests under way and leaves the job. A second call does nothing."""
        if self._native is not None:
            self._native.leave()
        self._member = None

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.leave()
            return
        # leave() could raise another error, which would hide the one that ends the block.
        if error is not None and not isinstance(error, SystemExit):
            self._give_up(error)
        self._native = None
        self._member = None

    def _give_up(self, error: BaseException) -> None:
        if self._native is not None:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._native.give_up(f"its program has failed: {reason}"[:_REASON_MAX])

    def __repr__(self) -> str:
        return f"<paramhub.Job {self.name!r} rank {self.rank} of {self.workers}>"

    def _running(self) -> _native.Job:
        if self._native is None:
            raise MisuseError(f"job `{self.name}`, rank {self.rank}: call init() with its tensors first")
        return self._native

    def _key(self, name: str) -> _Key:
        self._running()
        try:
            return self._keys[name]
        except KeyError:
            raise MisuseError(f"job `{self.name}`, rank {self.rank}: no tensor is called {name!r}") from None

    def _look(self, name: str, tensor: Any, *, writable: bool) -> tuple[_Key, _native.Memory]:
        key = self._key(name)
        memory = _native.Memory(tensor, writable)
        if memory.dtype != key.dtype or memory.nbytes != key.nbytes:
            raise MisuseError(
                f"job `{self.name}`, rank {self.rank}: tensor {name!r} has {key.nbytes} bytes of {key.dtype}, but one of "
                f"{memory.nbytes} bytes of {memory.dtype} was passed"
            )
        return key, memory


def _layer(
    name: str, layer: Mapping[str, Any], tensors: list[str], shapes: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """A layer in the form of the job's settings, which number its tensors."""
    known = {"tensors", "samples", "scheme", "factor_codec", "tied"}
    if "tensors" not in layer or not known.issuperset(layer):
        raise MisuseError(
            f"layer {name!r} has {', '.join(layer) or 'nothing'}: give it its tensors, and perhaps samples, scheme and tied"
        )
    try:
        keys = [tensors.index(tensor) for tensor in layer["tensors"]]
    except ValueError:
        missing = next(tensor for tensor in layer["tensors"] if tensor not in tensors)
        raise MisuseError(
            f"layer {name!r} names the tensor {missing!r}, which the job does not have"
        ) from None
    settings: dict[str, Any] = {"name": name, "keys": keys, "tied": bool(layer.get("tied", False))}
    for option in ("scheme", "factor_codec"):
        if option in layer:
            settings[option] = layer[option]
    if "samples" in layer:
        shape = tuple(shapes[keys[0]]) if keys else ()
        if len(shape) != 2:
            raise MisuseError(
                f"layer {name!r} has samples, but its first tensor has the shape {shape}: a fully connected layer's is "
                "its weight, of outputs by inputs"
            )
        size = {"outputs": shape[0], "inputs": shape[1], "samples": layer["samples"]}
        settings["type"] = {"fully-connected": size}
    return settings


class _FactorLayer(NamedTuple):
    """A layer that is exchanged as factors: its number, the names of its tensors, and the type of its factors."""

    number: int
    weight: str
    bias: str | None
    codec: str


class _Key:
    __slots__ = ("dtype", "nbytes", "number")

    def __init__(self, number: int, dtype: str, nbytes: int) -> None:
        self.number = number
        self.dtype = dtype
        self.nbytes = nbytes


_made: weakref.WeakSet[Job] = weakref.WeakSet()


def _at_exit() -> None:
    # The interpreter stores the exception that ends it. Without this the job would be left when it is freed.
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        for job in list(_made):
            job._give_up(error)


atexit.register(_at_exit)
# A forked child has copies of its parent's jobs, which only the parent may give up.
os.register_at_fork(after_in_child=_made.clear)
