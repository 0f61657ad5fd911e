"""The extension module. Memory is passed as address and bytes: callers have inspected it with `Memory`, or own it."""

from collections.abc import Callable, Generator
from typing import Any, final

__version__: str

Range = tuple[int, int]
"""Address and bytes."""

def main(arguments: list[str], started_as: list[str]) -> int: ...
def unread_variables() -> list[str]:
    """A line for each environment variable that begins with ``PARAMHUB_`` and that neither the command nor a worker reads."""

def admin_token() -> str | None:
    """The admin token in the environment, or in the file that it names. Raises ValueError if it is set twice or unreadable."""

def derive_secret(secret: bytes, label: str) -> bytes:
    """A secret of 32 bytes for one use, which is named by the label, from another secret of 32 bytes."""

def seal(secret: bytes, label: str, text: str) -> bytes:
    """Encrypts and authenticates ``text`` under a secret of 32 bytes and a label."""

def open_sealed(secret: bytes, label: str, sealed: bytes) -> str | None:
    """The text that `seal` has encrypted. None if secret or label are others, or the bytes were changed."""

def after_fork_in_child() -> None: ...
def end_callbacks() -> None:
    """Waits for the callbacks of requests that have ended, at most 5 seconds. Later callbacks are not called."""

def conflict(features: list[str], settings: str | None = None) -> tuple[str, str] | None:
    """Returns whether features, by their identifiers, combine with one another and with a job's settings in JSON. Returns None
    if they do, else the message, and the reason alone. docs/combinations.md lists the features."""

def host_identity() -> str:
    """An identity of this host and its network namespace."""

def now_ns() -> int:
    """Nanoseconds of the monotonic clock, which all processes of one host share."""

def create_job(
    url: str,
    name: str,
    workers: int,
    *,
    admin_token: str | None = None,
    options: str = "{}",
    patience: float = 0.0,
    find: bool = False,
) -> tuple[str, str, str]:
    """The manager's URL for workers, and the job's namespace and secret."""

def ended_job(
    url: str, name: str, *, admin_token: str | None = None, patience: float = 0.0
) -> tuple[bool, int, str] | None:
    """How the newest job of this name ended, if it has: whether it finished, its steps, and why it failed."""

def stop_job(url: str, job: str, reason: str, *, admin_token: str | None = None) -> None: ...
def connect(
    url: str,
    namespace: str,
    secret: str,
    rank: int,
    *,
    transport: str | None = None,
    interfaces: str | None = None,
    shared_parameters: str = "never",
    spin_us: int = 0,
    rendezvous_timeout: float | None = None,
    rack: str | None = None,
    host: str | None = None,
    peers: bool = False,
    hub_rank: int | None = None,
    workers: int | None = None,
    manager_patience: float | None = None,
) -> Member: ...

@final
class Memory:
    def __new__(cls, tensor: Any, writable: bool = False) -> Memory: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...

@final
class Tensor:
    """Memory of a job that is exchanged without a copy. Use it through ``torch.from_dlpack`` and ``numpy.from_dlpack``. It
    returns to the job when the last reference to it is dropped."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **options: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Handle:
    """A request under way, or several that end together. An event loop can await it."""

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end. Raises TimeoutError after ``timeout`` seconds, and the job's error if the request failed."""

    def done(self) -> bool:
        """Returns whether it has ended, with or without an error."""

    def exception(self) -> BaseException | None:
        """Its error; None if it has not failed or has not ended."""

    def fail(self, message: str, culprit: int | None = None) -> None:
        """Fails it with JobFailedError if it has not ended. Its requests go on, and their memory stays alive until they end."""

    def awaited_ranks(self) -> list[int]:
        """The ranks that it waits for, as far as a mesh knows; none once it has ended."""

    @property
    def source(self) -> int | None:
        """The rank from which a receive got its bytes; None before its end."""

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        """Calls ``callback(handle)`` once it has ended: on a thread of this package, or at once if it has ended before."""

    @property
    def submitted_ns(self) -> int:
        """The time at which the request was submitted, in nanoseconds of the monotonic clock."""

    @property
    def finished_ns(self) -> int:
        """The time of its end; 0 before it."""

    def __await__(self) -> Generator[Any]: ...

@final
class Member:
    rank: int
    workers: int
    name: str
    def init(self, settings: str) -> Job: ...

@final
class Job:
    name: str
    rank: int
    workers: int
    shares_memory: bool
    shares_parameters: bool
    def key(self, name: str) -> int | None: ...
    def next_step(self, key: int) -> int: ...
    def push(self, keys: list[int], sends: list[Range], owner: object) -> Handle: ...
    def pull(self, keys: list[int], receives: list[Range], owner: object) -> Handle: ...
    def push_pull(
        self, keys: list[int], sends: list[Range], receives: list[Range], owner: object
    ) -> Handle: ...
    def push_pull_in_place(self, keys: list[int], ranges: list[Range], owner: object) -> Handle: ...
    def initialise(self, keys: list[int], sends: list[Range], owner: object, version: int) -> Handle: ...
    def set_hyperparameters(self, first_step: int, hyperparameters: str, group: int = 0) -> None: ...
    @property
    def resumed_step(self) -> int | None: ...
    @property
    def has_checkpoints(self) -> bool: ...
    @property
    def joined_running(self) -> bool: ...
    @property
    def rewind_every(self) -> int | None: ...
    @property
    def loses_workers(self) -> bool: ...
    @property
    def state_slots(self) -> int: ...
    def pull_state(self, keys: list[int], slot: int, receives: list[Range], owner: object) -> list[int]: ...
    def initialise_state(
        self, keys: list[int], slot: int, sends: list[Range], updates: list[int], owner: object
    ) -> Handle: ...
    def save_program_state(self, step: int, state: bytes) -> Handle: ...
    def program_state(self, step: int) -> bytes | None: ...
    def last_gradient_norm(self) -> tuple[int, float] | None: ...
    def gradient_norm(self, step: int) -> float: ...
    def release(self, step: int, factor: float | None) -> None: ...
    def push_pull_shared(self, keys: list[int], sends: list[Range], owner: object) -> Handle: ...
    def gradient_tensors(self, first: int, end: int) -> Tensor: ...
    def parameter_tensors(self, first: int, end: int) -> Tensor: ...
    def shared_parameters(self, first: int, end: int) -> Tensor: ...
    def gradient_tensor(self, key: int) -> Tensor: ...
    def parameter_tensor(self, key: int) -> Tensor: ...
    def statistics(self) -> dict[str, float]: ...
    def query(self, properties: list[str]) -> str: ...
    def best_scheme(self, layer: str) -> str: ...
    def plan(self) -> list[tuple[str, str, str]]:
        """The name and the scheme of each layer, and the reason for the scheme."""

    def factor_layers(self) -> list[tuple[str, int, int | None, int, str]]:
        """The layers that are exchanged as factors, by number: name, keys of weight and bias, most samples of a step, and
        type of the factors."""

    def begin_factors(self, keys: list[int], ranges: list[Range], owner: object) -> None:
        """Starts the layers of `factor_layers` with these parameters, equal at all ranks, and with the state at the hubs."""

    def push_factors(
        self,
        layer: int,
        factors: tuple[Range, Range],
        parameters: tuple[Range, Range | None],
        owner: object,
    ) -> Handle:
        """``factors`` are inputs and output gradients, which are copied. ``owner`` keeps ``parameters`` alive."""

    def failure(self) -> BaseException | None: ...
    def leave(self) -> None: ...
    def abandon(self) -> None: ...
    def give_up(self, reason: str) -> None: ...

@final
class Slots:
    """Keys of a job, ``(number, bytes)`` each, through which tensors of any size are exchanged. They accept tensors before the
    job is open."""

    def __new__(cls, slots: list[tuple[int, int]]) -> Slots: ...
    def open(self, job: Job) -> None: ...
    def exchange(self, range: Range, owner: object) -> Handle: ...
    def fail(self, message: str, culprit: int | None = None) -> None: ...

Key = str | int

def open_store(
    kind: str,
    membership: tuple[str, str, str, int] | None,
    *,
    transport: str | None = None,
    interfaces: str | None = None,
    rendezvous_timeout: float | None = None,
    rack: str | None = None,
    host: str | None = None,
    compute_threads: int | None = None,
    outstanding: int | None = None,
    check: bool = False,
    codec: str | None = None,
    reproducible: bool = False,
    consistency: str | None = None,
) -> Store:
    """``membership`` is the connection manager's URL, the job's namespace and secret, and the rank; None for a local store."""

@final
class Store:
    """A thread of the store runs its calls in order. It keeps a call's memory alive until the call's handle has ended; do not use
    that memory before."""

    kind: str
    rank: int
    size: int
    def init(self, keys: list[tuple[Key, Memory]]) -> Handle: ...
    def exchange(self, keys: list[tuple[Key, list[Memory], list[Memory]]], priority: int) -> Handle:
        """Each key comes with its values, which are pushed, and its outs, into which it is pulled. Either may be empty."""

    def set_optimizer(self, name: str, hyperparameters: str | None = None) -> Handle: ...
    def add_group(self, names: list[Key], hyperparameters: str) -> Handle: ...
    def set_hyperparameters(self, hyperparameters: str, group: int = 0) -> Handle: ...
    def optimizer_state(self, name: Key) -> tuple[list[bytes], int]: ...
    def set_optimizer_state(self, name: Key, slots: list[bytes], updates: int) -> Handle: ...
    def barrier(self) -> Handle: ...
    def leave(self) -> Handle: ...
    def abandon(self, reason: str) -> None: ...

@final
class MeshListener:
    address: str
    def __new__(cls, ip: str) -> MeshListener: ...
    def join(
        self,
        name: str,
        rank: int,
        addresses: list[str],
        secret: str,
        *,
        timeout: float,
        dead_after: float,
        shares_memory: bool,
        encrypts: bool,
        check: Callable[[list[int]], None],
    ) -> Mesh:
        """``check(missing)`` is called with the ranks that are not connected yet. It may raise an error to end the wait."""

@final
class Mesh:
    name: str
    rank: int
    size: int
    @property
    def shares_memory(self) -> bool: ...
    def send(self, peer: int, tag: int, range: Range, owner: object) -> Handle: ...
    def receive(self, peer: int | None, tag: int, range: Range, owner: object) -> Handle: ...
    def barrier(self) -> Handle: ...
    def broadcast(self, range: Range, root: int, owner: object, dtype: str | None = None) -> Handle: ...
    def allreduce(self, range: Range, dtype: str, op: str, owner: object) -> Handle: ...
    def note(
        self, name: str, lengths: list[int], *, dtype: str | None = None, op: str | None = None, root: int = 0
    ) -> Handle:
        """Lets the ranks compare a collective that does not go over the mesh, or goes in several operations. ``lengths`` are the
        bytes of all ranks' parts, or those of the tensor that all ranks have."""

    def reduce(self, range: Range, root: int, dtype: str, op: str, owner: object) -> Handle: ...
    def allgather(self, send: Range | None, receives: list[Range], owner: object) -> Handle: ...
    def reduce_scatter(
        self, sends: list[Range], receive: Range, dtype: str, op: str, owner: object
    ) -> Handle: ...
    def gather(self, send: Range, receives: list[Range], root: int, owner: object) -> Handle: ...
    def scatter(self, sends: list[Range], receive: Range, root: int, owner: object) -> Handle: ...
    def all_to_all(self, sends: list[Range], receives: list[Range], owner: object) -> Handle: ...
    def failure(self) -> BaseException | None: ...
    def leave(self, timeout: float) -> None: ...
    def abort(self, reason: str) -> None: ...

@final
class Hub:
    def __new__(
        cls,
        *,
        listen: list[str] | None = None,
        manager: str | None = None,
        join: str | None = None,
        rack: str | None = None,
        host: str | None = None,
        cores: int = 1,
        admin_token: str | None = None,
        memory: int | None = None,
        shared_memory: bool = True,
        checkpoints: str | None = None,
    ) -> Hub: ...
    url: str
    addresses: list[str]
    def memory_bytes(self) -> int: ...
    def stop(self) -> None: ...
    def failure(self) -> str | None: ...
