"""A worker's part in a job, for any library's tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from paramhub import _native
from paramhub.errors import MisuseError
from paramhub.optimizers import Mean, Optimizer, settings_of

if TYPE_CHECKING:
    from paramhub._native import Handle, Tensor


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
) -> Job:
    """Joins a job as one of its ranks and returns when every rank has.

    What is left out comes from the environment, which ``paramhub run`` fills: ``url`` from ``PARAMHUB_URL`` (the connection
    manager's), ``job`` from ``PARAMHUB_JOB`` (the namespace that creating the job answered), ``secret`` from
    ``PARAMHUB_SECRET``, ``rank`` from ``RANK``. ``transport`` is ``auto`` (shared memory beside the hub, TCP elsewhere), ``tcp``
    or ``shm``; by default what ``PARAMHUB_TRANSPORT`` says, else ``auto``. ``interfaces`` says from which of this host's network
    interfaces streams leave (``"eth0,eth1"``, ``"10.0.0.0/24"``, ``"^docker"``); by default what ``PARAMHUB_INTERFACES``
    says, else all that lead to the hub. ``timeout`` in seconds bounds the wait; the job's own
    rendezvous timeout, usually shorter, names the ranks that are missing.
    Where hubs serve racks or hosts, ``rack`` and ``host`` are the names of this worker's, by default ``PARAMHUB_RACK`` and
    ``PARAMHUB_HOST``, else none and the system's own. With ``peers`` this worker listens for the others, on its interface
    towards the manager and a port that the system chooses: layers that go by factors need it, at every rank.

    Raises MisuseError if something is missing or unreadable, ConnectError if the manager cannot be reached or ranks are
    missing.
    """
    member = _native.connect(
        *seat_of(url, job, secret, rank, "connect()"),
        transport=transport,
        interfaces=interfaces,
        rendezvous_timeout=timeout,
        rack=rack,
        host=host,
        peers=peers,
    )
    return Job(member, peers=peers)


def seat_of(
    url: str | None, job: str | None, secret: str | None, rank: int | None, call: str
) -> tuple[str, str, str, int]:
    """Who this worker is, by what ``call`` was given or else by the environment: URL, job, secret and rank."""

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
    """A worker's part in a job. Made by `connect`; give it its tensors with `init`, then exchange them.

    As a context manager it leaves the job at the end. It may be used from several threads.
    """

    def __init__(self, member: _native.Member, *, peers: bool = False) -> None:
        self._member: _native.Member | None = member
        self._listens = peers
        self._native: _native.Job | None = None
        self._keys: dict[str, _Key] = {}
        self._layers: dict[str, _FactorLayer] = {}
        self._optimizer: Optimizer = Mean()
        self.name = member.name
        self.rank = member.rank
        self.workers = member.workers

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
        """Agrees with the other ranks on the tensors and on what the hub does with them, and returns this job.

        ``tensors`` name contiguous host tensors of f32, f16 or bf16, in forward order: earlier ones are more urgent, and
        ``priorities`` (higher is more urgent) overrules that. With an optimizer they are the parameters: rank 0's are sent to
        the hub and received, in place, into every other rank's. Without one (`Mean`, the default, or `Sum`) they only tell names,
        types and shapes.

        ``consistency`` is ``synchronous``, ``asynchronous``, or ``{"bounded_staleness": steps}``. ``codec`` (``f16``, ``bf16``)
        is how gradients travel, by default as they lie in memory. ``one-bit`` and ``two-bit`` are for matrices of f32: those
        travel so both ways, in a synchronous job, over TCP, and what a step loses goes with the next; the other tensors stay as
        they are. ``codecs`` names codecs of single tensors, whatever their shape. ``chunk_bytes`` is the size of an f32 chunk,
        32 KiB by default. With ``reproducible`` sums are made in rank order and are bit-equal from run to run. With
        ``reject_non_finite`` a NaN or an infinity in a gradient fails the job, naming rank and tensor.

        ``layers`` say which tensors make up a layer: of a fully connected one
        ``{"fc6": {"tensors": ["fc6.weight", "fc6.bias"], "samples": 32}}``, where ``samples`` are the vectors that the weight
        (outputs by inputs) is multiplied by in a step, the batch or in a model of sequences the batch times their length; of any
        other only its tensors. ``"tied": True`` says that something else uses the weight, too. ``scheme`` is how they are
        exchanged: ``hub``, ``factors``, or ``auto`` for what moves least, and a layer's own ``"scheme"`` goes before it.
        Factors travel in the type of the weight, or in a layer's ``"factor_codec"``, ``f16`` or ``bf16``.
        ``factors-to-hub`` is for programs in Rust and `paramhub train`. See `query` and `best_scheme`. What goes by ``factors``
        is exchanged with `push_factors`; for that and for ``auto`` the workers connect with ``peers=True``.

        Raises MisuseError if the ranks disagree on any of it, naming what differs.
        """
        if self._member is None:
            raise MisuseError(f"job `{self.name}`, rank {self.rank}: it has its tensors already")
        optimizer = optimizer if optimizer is not None else Mean()
        asked = {scheme, *(layer.get("scheme") for layer in (layers or {}).values())}
        if "factors-to-hub" in asked:
            raise MisuseError(
                f"job `{self.name}`, rank {self.rank}: the Python package sends no factors to hubs: ask for hub, factors or auto"
            )
        if not self._listens and not asked.isdisjoint(("auto", "factors")):
            raise MisuseError(
                f"job `{self.name}`, rank {self.rank}: factors go from worker to worker, and this one does not listen for the "
                "others: connect(peers=True) on every rank, or ask for scheme='hub'"
            )
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
        member, self._member = self._member, None
        self._native = member.init(json.dumps(settings))
        # A copy: its numbers may change here, and the caller may use it for another job.
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
        """The step of the checkpoint that the hubs have begun with, whose parameters `init` has received; None where they are
        rank 0's. Hyperparameters are the checkpoint's, too: change them with `set_hyperparameters`."""
        return self._running().resumed_step

    def push(self, name: str, gradient: Any) -> Handle:
        """Contributes a gradient to the tensor's next step. The handle ends when it has taken effect.

        Until then ``gradient`` is kept, and must not be written.
        """
        key, memory = self._look(name, gradient, writable=False)
        return self._running().push([key.number], [(memory.address, memory.nbytes)], memory)

    def pull(self, name: str, out: Any) -> Handle:
        """Receives the parameters after the last step this worker has pushed into ``out``, which must be left alone until
        the handle has ended."""
        key, memory = self._look(name, out, writable=True)
        return self._running().pull([key.number], [(memory.address, memory.nbytes)], memory)

    def push_pull(self, name: str, gradient: Any, out: Any) -> Handle:
        """Contributes a gradient and receives into ``out`` the parameters that follow from it, or the mean (or sum) of all
        ranks' gradients where the job has no optimizer.

        Nothing is copied where the tensors lie in memory of `gradient_tensor` and `parameter_tensor`, or where the hub is on
        another host. ``out`` may be ``gradient`` itself. Until the handle has ended, both are kept and must be left alone.
        """
        key, sent = self._look(name, gradient, writable=False)
        _, received = self._look(name, out, writable=True)
        send, receive = (sent.address, sent.nbytes), (received.address, received.nbytes)
        if send == receive:
            return self._running().push_pull_in_place([key.number], [receive], received)
        return self._running().push_pull([key.number], [send], [receive], (sent, received))

    def push_factors(
        self, layer: str, inputs: Any, output_gradients: Any, weight_out: Any, bias_out: Any = None
    ) -> Handle:
        """Contributes the factors of a layer's gradient, where the plan has it go by ``factors``, and receives the weight that
        follows from those of all ranks into ``weight_out``, and the bias into ``bias_out``, if given.

        For each sample of this rank's step, ``inputs`` has a row of what went into the layer and ``output_gradients`` one of
        the loss's gradient by what came out, in the type of the weight or the layer's ``factor_codec``: the gradient is
        ``output_gradients.T @ inputs``. There may be as many rows as the layer has samples in `init`, fewer, or none: every
        rank calls it once a step, for all such layers in the same order. The two are copied before this returns;
        ``weight_out`` and ``bias_out`` are kept until the handle has ended, and must be left alone.

        What comes is equal to the bit at all ranks. Gradients are divided by the number of ranks, as by a hub.
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
        """Memory for a tensor's gradient that is exchanged where it lies: shared with a hub on this host. Look at it with
        ``torch.from_dlpack`` or ``numpy.from_dlpack``; one can be had at a time."""
        return self._running().gradient_tensor(self._key(name).number)

    def parameter_tensor(self, name: str) -> Tensor:
        """Memory for a tensor's parameters, otherwise as `gradient_tensor`."""
        return self._running().parameter_tensor(self._key(name).number)

    def set_hyperparameters(self, first_step: int, **changed: float | bool) -> None:
        """Changes some of the optimizer's numbers from step ``first_step`` on, by the hub's names (``learning_rate=0.01``).

        Called by any one rank before that rank's push of ``first_step``, it holds for that step of a synchronous job. Where
        layers go by factors, that rank is rank 0.
        """
        numbers = {**self._optimizer.hyperparameters, **changed}
        self._running().set_hyperparameters(first_step, json.dumps(settings_of(numbers)))
        self._optimizer.hyperparameters = numbers

    def next_step(self, name: str) -> int:
        """The step that the next push of a tensor contributes to; steps count from 0."""
        return self._running().next_step(self._key(name).number)

    @property
    def shares_memory(self) -> bool:
        """Whether any of the exchange is through shared memory."""
        return self._running().shares_memory

    def statistics(self) -> dict[str, float]:
        """What has been exchanged so far: ``bytes_sent`` and ``bytes_received``, through hubs and by factors, of which
        ``factor_bytes_sent`` left as factors; ``requests``, ``in_flight_s`` and ``streams_moved`` at the hubs; and
        ``rebuilding_s``, the time it took to make gradients of factors and to update."""
        return self._running().statistics()

    def query(self, *properties: str) -> dict[str, Any]:
        """Looks into the information book, which every node of the job has alike: an object of these names and their values.

        Properties are ``workers``, ``hubs``, ``place``, ``layers``, ``layers.NAME``, and ``layers.NAME.FIELD`` with the FIELD
        type, outputs, inputs, samples, parameters, keys, scheme or why. Without any it is the whole book.
        """
        found: dict[str, Any] = json.loads(self._running().query(list(properties)))
        return found

    def best_scheme(self, layer: str) -> str:
        """How a layer is exchanged: ``hub`` or ``factors``. `query` says why."""
        scheme: str = json.loads(self._running().best_scheme(layer))["scheme"]
        return scheme

    def leave(self) -> None:
        """Waits for the requests under way and leaves the job. Left before, it does nothing."""
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
        # The error that ends the block is the one to be seen.
        self._native = None
        self._member = None

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
    """A layer as the job's settings have it, with its tensors by number."""
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
    """A layer that goes by factors: its number, the names of its tensors, and the type of its factors."""

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
