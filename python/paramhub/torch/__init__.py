"""paramhub for PyTorch (2.7 and later)."""

from __future__ import annotations

from paramhub.errors import JobFailedError as HorovodInternalError
from paramhub.torch import backend, elastic, trace
from paramhub.torch._basics import (
    mpi_threads_supported,
    nccl_built,
)
from paramhub.torch._initialization import init, is_initialized, local_rank, local_size, rank, shutdown, size
from paramhub.torch._process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from paramhub.torch._program_state import State
from paramhub.torch._reductions import Adasum, Average, Compression, Max, Min, Product, Sum
from paramhub.torch._rewinding import run
from paramhub.torch.ddp import HubState, hub_hook
from paramhub.torch.distributed_optimizer import DistributedOptimizer
from paramhub.torch.functions import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from paramhub.torch.grouped import (
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
)
from paramhub.torch.hub_optimizer import HubOptimizer
from paramhub.torch.states import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HubOptimizer",
    "HubState",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "State",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "backend",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "hub_hook",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
    "trace",
]

backend.register()
