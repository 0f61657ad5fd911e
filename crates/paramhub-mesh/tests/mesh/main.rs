//! Meshes of threads in one process, over real sockets on loopback.

mod collectives;
mod common;
mod joining;
mod point_to_point;
mod probing;
