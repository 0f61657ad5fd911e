//! Meshes of threads in one process, over real sockets on loopback and through memory that they share. What concerns
//! operations runs over TCP as well: tests/mesh_tcp.

mod collectives;
mod common;
mod joining;
mod memory;
mod point_to_point;
mod probing;

/// Whether ranks may share memory.
const SHARES_MEMORY: bool = true;
