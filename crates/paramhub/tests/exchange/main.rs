//! Workers, a hub and a manager over real sockets in one process: what is exchanged is right, and what is wrong is said.

mod bad_frames;
mod cluster;
mod consistency;
mod numerics;
mod offences;
mod raw;
mod reproducible;
mod streams;
mod tenants;
