"""Gradients whose sums are known, by the rule of `paramhub bench exchange`.

Every element is a multiple of 1/8 between -1 and 7/8, and depends on rank, key and position. So the sum over any ranks in any
order is exact in f32, and no tensor equals another.
"""

import numpy

GOLDEN = 0x9E37_79B9_7F4A_7C15
WORD = (1 << 64) - 1
# Tensors begin at multiples of so many bytes in a buffer, as an allocator would place them.
ALIGNMENT = 64
BLOCK_ELEMENTS = 1 << 20


class Layout:
    """The positions of the tensors in one buffer, and of buckets of neighbouring tensors."""

    def __init__(self, elements: list):
        step = ALIGNMENT // 4
        self.spans = []
        end = 0
        for count in elements:
            start = -(-end // step) * step
            end = start + count
            self.spans.append((start, end))
        self.elements = end

    def buffer(self) -> numpy.ndarray:
        """Zeros that were written, so that no exchange pays for the kernel's first mapping of the memory."""
        raw = numpy.empty(4 * self.elements + ALIGNMENT, numpy.uint8)
        raw.fill(0)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + 4 * self.elements].view(numpy.float32)

    def buckets(self, bucket_bytes: int) -> list:
        """Spans of whole tensors, from last to first. Each is as large as allowed, or is one tensor that is larger."""
        buckets = []
        for start, end in reversed(self.spans):
            if buckets and 4 * (buckets[-1][1] - start) <= bucket_bytes:
                buckets[-1] = (start, buckets[-1][1])
            else:
                buckets.append((start, end))
        return buckets


def fill(layout: Layout, rank: int, buffer: numpy.ndarray) -> None:
    for key, (start, end) in enumerate(layout.spans):
        for first in range(start, end, BLOCK_ELEMENTS):
            last = min(first + BLOCK_ELEMENTS, end)
            buffer[first:last] = contribution(rank, key, first - start, last - first)


def contribution(rank: int, key: int, first: int, count: int) -> numpy.ndarray:
    mixed = ((rank << 32 | key) + GOLDEN) & WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58_476D_1CE4_E5B9) & WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D0_49BB_1331_11EB) & WORD
    places = numpy.arange(first, first + count, dtype=numpy.uint64)
    places *= numpy.uint64(GOLDEN)
    places += numpy.uint64(mixed)
    places >>= numpy.uint64(60)
    return (places.astype(numpy.float32) - 8) / 8


def compare(layout: Layout, workers: int, tensors: list, expect, tolerance: float) -> dict:
    """The number of elements that differ from `expect` of the ranks' sum, and the largest difference."""
    wrong, largest = 0, 0.0
    for key, ((start, end), tensor) in enumerate(zip(layout.spans, tensors)):
        for first in range(0, end - start, BLOCK_ELEMENTS):
            count = min(BLOCK_ELEMENTS, end - start - first)
            total = sum(contribution(rank, key, first, count) for rank in range(workers))
            error = numpy.abs(tensor[first : first + count] - expect(total))
            # NaN counts as wrong, too, hence not `error > tolerance`.
            wrong += int(count - numpy.count_nonzero(error <= tolerance))
            largest = max(largest, float(numpy.nan_to_num(error, nan=numpy.inf, posinf=numpy.inf).max()))
    return {"wrong": wrong, "max_abs_error": min(largest, 3.4e38)}
