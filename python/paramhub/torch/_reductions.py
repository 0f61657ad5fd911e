"""Reductions and compression of tensors, with Horovod's names."""

from __future__ import annotations

import torch

from paramhub.errors import MisuseError


class Reduction:
    """The way in which the tensors of several ranks are reduced to one. Use `Average`, `Sum`, `Min`, `Max` or `Product`."""

    def __init__(self, name: str, collective: str) -> None:
        self.name = name
        self.collective = collective

    def __repr__(self) -> str:
        return f"paramhub.torch.{self.name}"

    def __reduce__(self) -> str:
        return self.name


Average = Reduction("Average", "average")
"""The mean."""
Sum = Reduction("Sum", "sum")
"""The sum."""
Min = Reduction("Min", "min")
"""The smallest value of each element."""
Max = Reduction("Max", "max")
"""The largest value of each element."""
Product = Reduction("Product", "product")
"""The product."""
Adasum = Reduction("Adasum", "adasum")
"""Horovod's name for a reduction that this package does not have: operations refuse it."""


class Compressor:
    """The encoding of f32 tensors in frames: ``dtype``, or f32 without one. Sums are made in f32 in any case. A ``codec``
    without a ``dtype`` is only for gradients."""

    def __init__(self, name: str, codec: str | None, dtype: torch.dtype | None) -> None:
        self.name = name
        self.codec = codec
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """``tensor`` in the type in which it is sent, and its own type for `decompress`."""
        if self.codec is not None and self.dtype is None:
            raise MisuseError(
                f"{self!r} needs steps that follow one another, to make up for what each loses: use it with "
                "DistributedOptimizer"
            )
        if self.dtype is None or tensor.dtype not in (torch.float32, torch.float64):
            return tensor, tensor.dtype
        return tensor.to(self.dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Converts ``tensor`` back to the type that it had before `compress`. Lost precision stays lost."""
        return tensor.to(dtype)

    def __repr__(self) -> str:
        return f"paramhub.torch.Compression.{self.name}"


class Compression:
    """The encodings of gradients in frames."""

    none = Compressor("none", None, None)
    """No compression: gradients keep their type."""
    fp16 = Compressor("fp16", "f16", torch.float16)
    """Half precision. Gradients beyond 65504 become infinite."""
    bf16 = Compressor("bf16", "bf16", torch.bfloat16)
    """bfloat16: f32's range with 8 bits of precision."""
    int8 = Compressor("int8", "int8", None)
    """A byte for each element, in both directions, with error feedback. Gradients must be finite."""
    one_bit = Compressor("one_bit", "one-bit", None)
    """One bit for each element of a matrix, in both directions, with error feedback. Gradients must be finite."""
    two_bit = Compressor("two_bit", "two-bit", None)
    """The same as `one_bit` with two bits, which lose less than half."""


def codec_of(compression: Compressor) -> str | None:
    """The hub's name of the compression's codec."""
    if not isinstance(compression, Compressor):
        raise MisuseError(
            "compression is to be one of paramhub.torch.Compression's none, fp16, bf16, int8, one_bit and two_bit, not "
            f"{compression!r}: hubs decode what they sum"
        )
    return compression.codec
