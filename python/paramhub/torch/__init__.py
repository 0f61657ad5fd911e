"""paramhub for PyTorch (2.7 and later)."""

from __future__ import annotations

from paramhub.torch import backend
from paramhub.torch._world import init, is_initialized, local_rank, local_size, rank, shutdown, size

__all__ = ["init", "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size"]

backend.register()
