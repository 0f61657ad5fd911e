//! The hub's interfaces: the addresses to listen on, the device of each, the cores that serve it, and whether
//! it still works.

mod assign;
mod listen;
mod shape;
mod source;
mod watch;

pub(crate) use assign::Assignment;
pub(crate) use listen::{Listening, addresses_of};
pub(crate) use shape::{describe, plan, shape};
pub(crate) use source::SourceAddress;
pub(crate) use watch::watch;
