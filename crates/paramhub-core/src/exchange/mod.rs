//! These are the rules of Push, Pull and PushPull for the chunks of one route.
//!
//! One [`Exchange`] keeps the state of the chunks that one core owns for one job on one route. It never sees
//! a byte of data, a socket or a clock. The core reports each frame that has arrived whole. The exchange
//! answers what to do with the payload, whether to run the optimizer, and which ranks may be answered.
//! Synchronous, asynchronous and bounded-staleness jobs share this code: they differ in how many members of a
//! chunk step together, and in when [`Exchange::mark_due_answers`] lets an answer leave.
//!
//! The *version* of a chunk is the number of updates that its parameters have had: an update is a synchronous
//! step, or one contribution. A worker's push of `step` t contributes to the update that makes version t + 1.
//! A member may not request a chunk again until the hub has answered its last request for it, so no queue is
//! ever needed.
//!
//! If a member's stream is cut and another replaces it, the member repeats every request that was not
//! answered whole. The hub drops contributions that it has already taken, and answers again what it has
//! already answered; see [`Exchange::resume`].
//!
//! In a two-phase step a complete chunk is held instead of updated. When all chunks are held, the hub sends
//! their norm, and rank 0 releases the step. The chunks are then updated one after the other, and may
//! meanwhile take contributions to the next step. Among sites each hub holds a chunk with the total of all workers, and a
//! release comes from other sites as well as from rank 0; see [`Exchange::release`].
//!
//! In a job that leaves out [stragglers](crate::stragglers), a synchronous step ends without late members.
//! The hub drops a late contribution whole and answers its sender at once; the sender then contributes to the
//! step whose parameters it has received.
//!
//! In a job that goes on when members are lost, a step ends with the contributions of those that remain. Another
//! process may take a lost member's place, from a step on that no contribution of the former process can reach;
//! see [`Exchange::rejoin`].
//!
//! In a job that goes [back](Exchange::rewind) when a member is lost, all members begin again at an earlier step, of which
//! the hub has kept the parameters.
//!
//! In a job with [standbys](crate::standbys) a complete sum goes to the standby of the chunk first, and answers wait for its
//! acknowledgement; see [`Exchange::follow`] and [`Exchange::acknowledged`].
//!
//! If the [factors](crate::factors) of a layer come instead of its gradient, [`Gathering`] keeps the state of
//! their pieces. All chunks of the layer become complete at once, and the hub makes their sums one after the
//! other.
//!
//! In a job of several [sites](crate::composition), members are workers and sites alike. A sum that is
//! complete here goes to the site above, if there is one, and the step continues with that site's answer. In an asynchronous
//! job, and one with bounded staleness, only the members of a site [step together](ChunkReach::together), and another site's
//! contribution is an update of its own.

mod actions;
mod answers;
mod awaiting;
mod contributions;
mod gathering;
mod leaving;
mod losses;
mod releases;
mod rewind;
mod rules;
mod standby;
mod start;
mod state;
mod stragglers;
mod violation;

pub use actions::{Answer, Arrival, Fold, SumAction, Update};
pub use gathering::{Gathered, GatheredLayer, Gathering};
pub use rewind::RewoundTo;
pub use rules::{ChunkReach, Rules};
pub use state::Exchange;
pub use violation::{Awaited, CannotRewind, LeftWhileAwaited, ProtocolViolation};

#[cfg(test)]
mod gathering_tests;
#[cfg(test)]
mod interleaving_tests;
#[cfg(test)]
mod loss_tests;
#[cfg(test)]
mod resume_tests;
#[cfg(test)]
mod rewind_tests;
#[cfg(test)]
mod straggler_programs_tests;
#[cfg(test)]
mod straggler_tests;
#[cfg(test)]
mod tests;
