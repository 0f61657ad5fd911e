"""paramhub for PyTorch (2.7 and later)."""

from __future__ import annotations

from paramhub.torch import trace
from paramhub.torch._reductions import Average, Compression, Max, Min, Product, Sum
from paramhub.torch._world import init, is_initialized, local_rank, local_size, rank, shutdown, size
from paramhub.torch.ddp import HubState, hub_hook
from paramhub.torch.distributed_optimizer import DistributedOptimizer
from paramhub.torch.hub_optimizer import HubOptimizer

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HubOptimizer",
    "HubState",
    "Max",
    "Min",
    "Product",
    "Sum",
    "hub_hook",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "trace",
]
