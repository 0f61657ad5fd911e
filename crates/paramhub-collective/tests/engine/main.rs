//! The engine as its users meet it: threads, random graphs, failures, and what goes away in the middle.

mod common;
mod deferred;
mod failures;
mod graphs;
mod lifetimes;
mod scheduling;
mod telling;
mod timelines;
mod waits;
