//! Sums, optimizers and conversions on slices, with SIMD inside.
//!
//! A hub core passes one chunk at a time to this crate: the bytes of a contribution in the receive buffer,
//! the chunk's sum, its model and its optimizer state. Everything here is a function on slices: it starts no
//! thread, allocates nothing and knows no jobs, keys or frames.
//!
//! # The rounding rule
//!
//! Every operation on an element is one IEEE 754 operation, rounded on its own to the nearest, ties to even.
//! There is no fused multiply-add, no reciprocal estimate and no reassociation, and no element is combined
//! with another. So the same inputs give the same bits on every CPU, with every instruction set, in the
//! vector body as in its tail, and however a tensor is cut into chunks. Three modules have rules of their
//! own: [`squares`](squares::squares) and [`quantise`] add elements up, and [`product`] multiplies matrices.
//! One freedom that IEEE leaves open stays open: the payload of a NaN that results from two NaNs.
//!
//! # Wire bytes
//!
//! Contributions are the little-endian elements of a [`Codec`] in a `&[u8]` of any alignment, so a hub adds
//! straight from its receive buffer. Sums, models and optimizer state are `f32`.
//!
//! # One step of a chunk
//!
//! ```
//! use paramhub_kernels::{Codec, Hyperparameters, Registry, Step};
//!
//! let registry = Registry::with_builtins();
//! let aggregator = registry.aggregator("sum").unwrap();
//! let optimizer = registry.optimizer("sgd").unwrap();
//! let hyperparameters = Hyperparameters { learning_rate: 0.5, ..optimizer.defaults() };
//!
//! let mut model = [1.0_f32, 2.0];
//! let mut state = vec![0.0; optimizer.state_slots(&hyperparameters) * model.len()];
//! let gradients: [[u8; 8]; 2] = [
//!     [[0, 0, 0x80, 0x3f], [0, 0, 0, 0]].concat().try_into().unwrap(), // 1.0, 0.0
//!     [[0, 0, 0x40, 0x40], [0, 0, 0, 0]].concat().try_into().unwrap(), // 3.0, 0.0
//! ];
//!
//! let mut sum = [0.0; 2];
//! aggregator.assign(&mut sum, &gradients[0], Codec::F32);
//! aggregator.add(&mut sum, &gradients[1], Codec::F32);
//! let step = Step { hyperparameters: &hyperparameters, number: 1, contributions: 2, factor: 1.0, tensor: None };
//! optimizer.apply(&step, &mut model, &sum, &mut state);
//! assert_eq!(model, [0.0, 2.0]); // the mean gradient is 2.0
//! ```

mod aggregate;
pub mod convert;
mod dispatch;
pub mod factors;
pub mod finite;
mod half_precision;
pub mod nontemporal;
pub mod optimizer;
pub mod product;
pub mod quantise;
mod registry;
pub mod shared;
pub mod squares;
pub mod sum;

pub use aggregate::{Aggregator, Sum, TILE_ELEMENTS};
pub use dispatch::{ISA_VARIABLE, Isa, UnknownIsa};
pub use optimizer::{
    Adadelta, Adagrad, Adam, Averaged, Lamb, Lars, Lion, Mean, NAdam, Optimizer, RmsProp, Sgd, Step,
    TensorSquares, Undivided, mean_factor,
};
pub use registry::{Registry, RegistryError};

// The vocabulary of these signatures, so that the author of an optimizer or a codec needs this crate alone.
pub use paramhub_core::codec::{
    Codec, QuantisedCodec, QuantisedFormat, RegisterCodecError, register as register_codec,
};
pub use paramhub_core::hyperparameters::{
    EXTRA_NAME_BYTES_MAX, EXTRA_VALUES_MAX, ExtraValues, HyperparameterError, Hyperparameters,
};
