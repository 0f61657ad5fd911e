"""paramhub for PyTorch (2.7 and later)."""

from __future__ import annotations

from paramhub.torch import backend, elastic, trace
from paramhub.torch._initialization import init, is_initialized, local_rank, local_size, rank, shutdown, size
from paramhub.torch._program_state import State
from paramhub.torch._reductions import Average, Compression, Max, Min, Product, Sum
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
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    mpi_threads_supported,
    nccl_built,
    poll,
    synchronize,
)
from paramhub.torch.hub_optimizer import HubOptimizer
from paramhub.torch.states import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HubOptimizer",
    "HubState",
    "Max",
    "Min",
    "Product",
    "State",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "hub_hook",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "run",
    "shutdown",
    "size",
    "synchronize",
    "trace",
]

backend.register()
