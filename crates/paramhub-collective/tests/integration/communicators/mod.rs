//! Communicators between ranks that are threads here, over real sockets and shared memory.

mod checking;
mod collectives;
mod exercise;
pub(super) mod group;
mod naive;
