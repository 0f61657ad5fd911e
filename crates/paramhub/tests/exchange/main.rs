//! Workers, a hub and a manager over real sockets in one process: what is exchanged is right, and what is wrong is said.
//! `shm.rs` and `mixed.rs` run the same over shared memory, and with every other rank over it.

mod bad_frames;
mod book;
mod bystander;
mod clipping;
mod cluster;
mod consistency;
mod factors;
mod fairness;
mod groups;
mod in_place;
mod kvstore;
mod numerics;
mod offences;
mod panics;
mod quantised;
mod raw;
mod reproducible;
mod sites;
mod state;
mod stragglers;
mod streams;
mod stuck;
mod syncers;
mod tenants;

use paramhub_worker::Transport;

/// Rank r exchanges over the one at r modulo their number.
const TRANSPORTS: &[Transport] = &[Transport::Tcp];
