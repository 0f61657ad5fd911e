"""paramhub for PyTorch (2.7 and later)."""

from __future__ import annotations

from paramhub.torch._world import init, is_initialized, local_rank, local_size, rank, shutdown, size
from paramhub.torch.hub_optimizer import HubOptimizer

__all__ = ["HubOptimizer", "init", "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size"]
