//! The dependency engine, communicators and key-value stores, between ranks that are threads here. What counts
//! the allocations of the whole process is in `allocations.rs`, a program of its own.

mod communicators;
mod engine;
mod kvstore;
mod loom;
