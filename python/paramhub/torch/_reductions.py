"""What becomes of the ranks' tensors, and how they travel, by Horovod's names."""

from __future__ import annotations

import torch

from paramhub.errors import MisuseError


class Reduction:
    """How tensors of several ranks become one. Use `Average`, `Sum`, `Min`, `Max` or `Product`."""

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
"""The smallest of each element."""
Max = Reduction("Max", "max")
"""The largest of each element."""
Product = Reduction("Product", "product")
"""The product."""


class Compressor:
    """How f32 tensors travel: in ``dtype``, or as they are without one. Sums are made in f32 whatever travels. A ``codec``
    without a ``dtype`` is for gradients alone."""

    def __init__(self, name: str, codec: str | None, dtype: torch.dtype | None) -> None:
        self.name = name
        self.codec = codec
        self.dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """``tensor`` as it travels, and its own type for `decompress`."""
        if self.codec is not None and self.dtype is None:
            raise MisuseError(
                f"{self!r} needs steps that follow one another, to make up for what each loses: use it with "
                "DistributedOptimizer"
            )
        if self.dtype is None or tensor.dtype not in (torch.float32, torch.float64):
            return tensor, tensor.dtype
        return tensor.to(self.dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What `compress` made ``tensor`` from, as far as it can be had back."""
        return tensor.to(dtype)

    def __repr__(self) -> str:
        return f"paramhub.torch.Compression.{self.name}"


class Compression:
    """The ways gradients may travel."""

    none = Compressor("none", None, None)
    """As they are."""
    fp16 = Compressor("fp16", "f16", torch.float16)
    """In half precision. Gradients beyond 65504 become infinite."""
    bf16 = Compressor("bf16", "bf16", torch.bfloat16)
    """As bfloat16: f32's range with 8 bits of precision."""
    one_bit = Compressor("one_bit", "one-bit", None)
    """Matrices in one bit an element, both ways; what is lost goes with the next step's. Gradients must be finite."""
    two_bit = Compressor("two_bit", "two-bit", None)
    """As `one_bit`, in two bits, which lose less than half."""


def codec_of(compression: Compressor) -> str | None:
    """The hub's name for it."""
    if not isinstance(compression, Compressor):
        raise MisuseError(
            "compression is to be one of paramhub.torch.Compression's none, fp16, bf16, one_bit and two_bit, not "
            f"{compression!r}: hubs decode what they sum"
        )
    return compression.codec
