//! What is exchanged with every other rank over shared memory is as right as over TCP, and what is wrong is said.

mod bystander;
mod clipping;
mod cluster;
mod consistency;
mod factors;
mod groups;
mod in_place;
mod numerics;
mod offences;
mod panics;
mod raw;
mod reproducible;
mod sites;
mod state;
mod stragglers;
mod tenants;

use paramhub_worker::Transport;

const TRANSPORTS: &[Transport] = &[Transport::Tcp, Transport::Shm];
