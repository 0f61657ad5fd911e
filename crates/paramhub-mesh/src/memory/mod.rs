//! Collectives between ranks of one host, through memory that all of them map.
//!
//! [`Plan`] says what a rank does for a collective, [`Commons`] is the memory, and [`Pipeline`] runs plans in it. All chunks of
//! all collectives are one numbered sequence, the same on every rank, so that a small collective need not end before the next
//! begins. [`agreement`] is how ranks come to have it.

pub(crate) mod agreement;
mod commons;
mod pipeline;
mod plan;

pub(crate) use commons::Commons;
pub(crate) use pipeline::Pipeline;
pub(crate) use plan::{Plan, Room};
