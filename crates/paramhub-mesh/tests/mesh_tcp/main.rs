//! The operations of tests/mesh once more, for ranks that share no memory, as those of several hosts.

#[path = "../mesh/collectives.rs"]
mod collectives;
#[path = "../mesh/common.rs"]
mod common;
#[path = "../mesh/point_to_point.rs"]
mod point_to_point;

/// Whether ranks may share memory.
const SHARES_MEMORY: bool = false;
