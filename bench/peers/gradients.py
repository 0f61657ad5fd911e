"""Gradients whose sums are known, by the rule of `paramhub bench exchange`.

Every element is an eighth between -1 and 7/8 and differs by rank, key and place, so the sum of any ranks in any order
is exact in f32 and no tensor can be taken for another.
"""

import numpy

GOLDEN = 0x9E37_79B9_7F4A_7C15
WORD = (1 << 64) - 1
# Tensors begin at multiples of this in a buffer, as an allocator would place them.
ALIGNMENT = 64
BLOCK_ELEMENTS = 1 << 20


class Layout:
    """Where the tensors lie in one buffer, and where buckets of neighbouring tensors do."""

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
        """Zeros that are written, so that no exchange pays for memory that the kernel has only promised."""
        raw = numpy.empty(4 * self.elements + ALIGNMENT, numpy.uint8)
        raw.fill(0)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + 4 * self.elements].view(numpy.float32)

    def buckets(self, bucket_bytes: int) -> list:
        """Spans from back to front, of whole tensors, each as large as allowed or one tensor that is larger."""
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
    """How many elements are not what `expect` makes of the ranks' sum, and by how much at most."""
    wrong, largest = 0, 0.0
    for key, ((start, end), tensor) in enumerate(zip(layout.spans, tensors)):
        for first in range(0, end - start, BLOCK_ELEMENTS):
            count = min(BLOCK_ELEMENTS, end - start - first)
            total = sum(contribution(rank, key, first, count) for rank in range(workers))
            error = numpy.abs(tensor[first : first + count] - expect(total))
            # What is no number is wrong too, hence not `error > tolerance`.
            wrong += int(count - numpy.count_nonzero(error <= tolerance))
            largest = max(largest, float(numpy.nan_to_num(error, nan=numpy.inf, posinf=numpy.inf).max()))
    return {"wrong": wrong, "max_abs_error": min(largest, 3.4e38)}
