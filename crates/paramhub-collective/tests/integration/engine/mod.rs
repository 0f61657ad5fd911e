//! The engine's public interface: threads, random graphs, failures, and handles dropped in the middle.

mod callbacks;
mod common;
mod deferred;
mod failures;
mod graphs;
mod lifetimes;
mod scheduling;
mod timelines;
mod waits;
