//! What the caller of an [`Exchange`](super::Exchange) does with payloads, sums and requests.

use std::ops::Range;

/// The handling of a contribution that has arrived whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The destination of the payload.
    pub fold: Fold,
    /// The action for the sum after the fold.
    pub then: SumAction,
}

/// The destination of a contribution's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Add the payload to the sum now, then the contributions that the members of `parked` have parked, in
    /// that order.
    Sum {
        /// `true` if the sum starts with this payload instead of adding to it.
        starts_sum: bool,
        /// Members whose parked contributions are due.
        parked: Range<u32>,
    },
    /// Park the payload at the member's place until the contributions of all members before it are in the sum.
    Park,
    /// Keep the payload apart from the sum under way: it is an update of its own, which follows at once.
    Apart,
    /// Discard the payload: it is in the sum already, or its step is over.
    Drop,
}

/// The action for a chunk's sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumAction {
    /// Wait: the sum lacks contributions.
    Wait,
    /// Send the sum to the site above, whose answer [`Exchange::lower`](super::Exchange::lower) takes, or to the standby, whose
    /// acknowledgement [`Exchange::acknowledged`](super::Exchange::acknowledged) takes: it is complete here.
    Raise,
    /// Make the sum of the factors, which are all here, and then call [`Exchange::made`](super::Exchange::made).
    Make,
    /// Hold the chunk until its step is released: the sum is complete. Members that are sites are answered with it now.
    Hold,
    /// Run the optimizer on the sum.
    Update(Update),
    /// Nothing: the contribution was here before. Its answer may be due, or due again.
    Repeated,
    /// Nothing: the step is over and the contribution does not count. Its answer may be due.
    Late,
}

/// A run of the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// The step it completes: hyperparameters are those that hold at it.
    pub step: u32,
    /// Updates since the optimizer's state was zero, this one included: Adam's t.
    pub number: u64,
    /// Workers' contributions in the sum; the mean divides by this number.
    pub contributions: u32,
    /// `true` if it is of a contribution that was kept [apart](Fold::Apart), and not of the sum under way.
    pub is_apart: bool,
}

/// The way in which the hub answers a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The newest parameters, to Pull and PushPull.
    Parameters,
    /// A bare acknowledgement, to Push, Initialise and InitialiseState.
    Applied,
    /// This slot of the optimizer's state, to PullState.
    State(u8),
}
