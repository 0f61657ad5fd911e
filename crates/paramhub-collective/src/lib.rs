//! Collectives in a dependency engine. So far the engine: [`engine::Engine`].
#![forbid(unsafe_code)]

pub mod engine;
