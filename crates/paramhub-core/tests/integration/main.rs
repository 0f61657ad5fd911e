//! The cost model, the decoders and simulations of state machines, from outside the crate.

mod combinations;
mod cost;
mod decoders;
mod simulations;
