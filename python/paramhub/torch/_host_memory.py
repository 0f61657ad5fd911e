"""Contiguous host memory for the tensors of collectives, whatever their strides."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paramhub.errors import MisuseError

Finish = Callable[[], None]
"""Called once an exchange has ended without an error."""


def staged(
    tensor: torch.Tensor, *, reads: bool = True, writes: bool = True
) -> tuple[torch.Tensor, Finish | None]:
    """A contiguous host tensor that is exchanged instead of ``tensor``; ``tensor`` itself if possible.

    ``reads`` says that the exchange uses the elements, ``writes`` that it changes them. The caller must call the second result
    once the exchange has ended without an error.
    """
    check_dense(tensor)
    if is_plain(tensor):
        return tensor, None
    host = _copied(tensor) if reads else torch.empty(tensor.shape, dtype=tensor.dtype)
    return host, (lambda: _copy(tensor, host)) if writes else None


def check_dense(tensor: torch.Tensor) -> None:
    """Raises MisuseError for a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise MisuseError(
            f"a {tensor.layout} tensor cannot be exchanged: pass a dense one, for example tensor.to_dense()"
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a dense tensor's memory has just its elements, in the order of its dimensions."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _copy(tensor: torch.Tensor, host: torch.Tensor) -> None:
    # This may run on one of this package's threads, where torch records gradients by default.
    with torch.no_grad():
        tensor.copy_(host)


def together(finishes: list[Finish | None]) -> Finish | None:
    """One `Finish` that calls all of these; None if there is none."""
    given = [finish for finish in finishes if finish is not None]
    if len(given) < 2:
        return given[0] if given else None

    def finish() -> None:
        for each in given:
            each()

    return finish


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Returns whether two ranges of memory (address, bytes) share a byte."""
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1] and one[1] > 0 and other[1] > 0
