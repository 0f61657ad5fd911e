//! Collectives between ranks of one host, through memory that all of them map.
//!
//! [`Plan`] lists the steps of a rank for a collective, [`SharedSegment`] is the memory, and [`Pipeline`]
//! runs plans in it. All chunks of all collectives are one numbered sequence, the same on every rank, so that
//! a small collective need not end before the next begins. In [`agreement`] the ranks agree to use the
//! memory.

pub(crate) mod agreement;
mod pipeline;
mod plan;
mod shared_segment;

pub(crate) use pipeline::Pipeline;
pub(crate) use plan::{Plan, SlotLayout};
pub(crate) use shared_segment::SharedSegment;
