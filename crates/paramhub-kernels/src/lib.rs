//! Sums, optimizers and conversions on slices, with SIMD inside.
