//! What is exchanged over shared memory is as right as over TCP, and what is wrong is said.

mod bystander;
mod clipping;
mod cluster;
mod consistency;
mod factors;
mod fairness;
mod groups;
mod in_place;
mod kvstore;
mod local;
mod numerics;
mod offences;
mod panics;
mod raw;
mod reproducible;
mod shared;
mod sites;
mod state;
mod stragglers;
mod tenants;

use paramhub_worker::Transport;

const TRANSPORTS: &[Transport] = &[Transport::Shm];
