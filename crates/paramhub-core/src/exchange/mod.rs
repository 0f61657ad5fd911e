//! What a hub may do with a chunk next: the rules of Push, Pull and PushPull for one route's chunks.
//!
//! One [`Exchange`] keeps the books of the chunks that one core owns for one job on one route. It never sees a byte of
//! data, a socket or a clock. The core tells it what has arrived, whole; it answers what to do with the payload, whether
//! to run the optimizer, and which ranks may be answered. Synchronous, asynchronous and bounded-staleness jobs differ in
//! a few lines of [`Exchange::push`] and [`Exchange::settle`], not in machinery.
//!
//! A chunk's *version* counts the updates its parameters have seen: a synchronous step, or one contribution. A worker's
//! push of `step` t contributes to the update that makes version t + 1. Between a member's request for a chunk and the
//! hub's answer it may not ask for that chunk again; so no queue is ever needed.
//!
//! Where a member's stream was cut and another takes its place, it asks again for all that was not answered whole. What the hub
//! has taken before it drops, and what it has answered it answers again; see [`Exchange::resume`].
//!
//! In two phases a complete chunk is held instead of updated. When all are, their norm is told, and rank 0 releases the step:
//! chunks then have their updates one after the other, and may meanwhile take contributions to the next step.
//!
//! Where [stragglers](crate::stragglers) are left out, a synchronous step ends without those that are late. A late contribution
//! is dropped whole, and its sender is answered at once and contributes to the step that it then has the parameters of.
//!
//! Where a layer's [factors](crate::factors) come instead of its gradient, [`Gathering`] keeps the books of their pieces, and the
//! layer's chunks, complete all at once, are made one after the other.
//!
//! In a job of several [sites](crate::composition) members are workers and sites alike. A sum that is complete here is raised
//! to the site above, if there is one, and the step goes on with its answer.

mod awaiting;
mod gathering;
mod offence;
mod rules;
mod stragglers;

pub use gathering::{Gathered, GatheredLayer, Gathering};
pub use offence::{Awaited, Offence, Stranded};
pub use rules::{Answer, Arrival, Exchange, Fold, Reach, Rules, Then, Update};

#[cfg(test)]
mod gathering_tests;
#[cfg(test)]
mod resume_tests;
#[cfg(test)]
mod straggler_tests;
#[cfg(test)]
mod tests;
