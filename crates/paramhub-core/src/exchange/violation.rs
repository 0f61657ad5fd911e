//! Requests that violate the protocol, and departures of members that others wait for.

use thiserror::Error;

use crate::limits::STATE_UPDATES_MAX;

/// A request against the rules: the sender is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ProtocolViolation {
    /// A push to a step that is over, or that this member has already contributed to.
    #[error("step {got} was pushed, but step {expected} is due: a step is pushed once and in order")]
    StepBehind {
        /// The step that is due.
        expected: u32,
        /// The step pushed.
        got: u32,
    },
    /// A push to, or a pull of, a step that has not begun.
    #[error("step {got} was asked for, but step {expected} is under way: wait for it first")]
    StepAhead {
        /// The step under way.
        expected: u32,
        /// The step asked for.
        got: u32,
    },
    /// A push to the step after which versions could not be counted any more.
    #[error("step {} was pushed, but a run ends before it: start a new one from these parameters", u32::MAX)]
    StepsExhausted,
    /// A request for a chunk while the member's last one for it is not answered.
    #[error("a second request came before the first was answered")]
    Unanswered,
    /// A push before rank 0 has sent the initial parameters.
    #[error("a gradient came before rank 0 had sent the parameters to start from")]
    NotInitialised,
    /// Initial parameters that came twice, or from another rank than 0, or to a job that has none.
    #[error("parameters to start from come once, from rank 0, and only to a job with an optimizer")]
    Initialised,
    /// Initial parameters at another version than the first ones. In a two-phase job all chunks have the same
    /// version.
    #[error(
        "parameters to start from came with version {got}, but in two phases all start from one version, here {expected}"
    )]
    Versions {
        /// The version of the first parameters.
        expected: u32,
        /// The version of these.
        got: u32,
    },
    /// A release from another rank than 0, of another step than the one whose norm was sent last, or a second
    /// one.
    #[error("step {0} was released, but a step is released by rank 0, once, after its norm was sent")]
    Released(u32),
    /// Optimizer state from another rank than 0, or when members may already have contributed.
    #[error("optimizer state to start from comes from rank 0, before its parameters to start from")]
    StateInitialised,
    /// An answer of the site above to a sum that it was not sent.
    #[error("the sum of step {0} came from above, but it is not awaited")]
    NotAwaited(u32),
    /// A gradient of a chunk whose layer is exchanged by factors.
    #[error("a gradient was pushed, but the layer goes by its factors")]
    ByFactors,
    /// More samples than the layer's settings declare.
    #[error("factors of {got} samples came, but the layer has {most} at most: say so in the job's settings")]
    Samples {
        /// The number declared.
        most: u32,
        /// The number announced.
        got: u32,
    },
    /// A piece that announces another number of samples than its block's first piece.
    #[error("a piece of a block of {got} samples came, but the block under way has {expected}")]
    OtherSamples {
        /// The number in the block's first piece.
        expected: u32,
        /// The number in this piece.
        got: u32,
    },
    /// A piece that came before, or ahead of another.
    #[error("piece {got} of its factors came, but piece {expected} is due: pieces come once and in order")]
    Piece {
        /// The piece that is due.
        expected: u32,
        /// The one that came.
        got: u32,
    },
    /// A piece of another length than the cut of its block requires.
    #[error("piece {piece} of its factors came with {got} numbers, but it has {expected}")]
    PieceElements {
        /// The piece.
        piece: u32,
        /// The elements that it must have.
        expected: usize,
        /// The elements that came.
        got: usize,
    },
    /// Optimizer state with more updates than the count allows.
    #[error(
        "optimizer state to start from has had {0} updates, more than the {STATE_UPDATES_MAX} it may have had"
    )]
    StateUpdates(u64),
}

/// Members wait for something that a member which has left will never send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("left the job, but other ranks wait for {awaited}")]
pub struct LeftWhileAwaited {
    /// The member that left; the caller names it.
    pub member: u32,
    /// The part that it will not send.
    pub awaited: Awaited,
}

/// The chunks of a route cannot go back to a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("it is at step {version} and its copy is {}, so that it cannot go back to step {step}", OfStep(*kept))]
pub struct CannotRewind {
    /// The slot of the chunk that cannot.
    pub slot: u32,
    /// The step to go back to.
    pub step: u32,
    /// The chunk's version.
    pub version: u32,
    /// The version of its copy, if it has one.
    pub kept: Option<u32>,
}

/// The step of a copy, for people.
struct OfStep(Option<u32>);

impl std::fmt::Display for OfStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(step) => write!(f, "of step {step}"),
            None => f.write_str("missing"),
        }
    }
}

/// The event that members wait for at a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Awaited {
    /// Rank 0's parameters.
    #[error("the parameters to start from")]
    Parameters,
    /// A contribution to this step.
    #[error("its contribution to step {0}")]
    Contribution(u32),
    /// Rank 0's release of this step.
    #[error("its release of step {0}")]
    Release(u32),
}

impl Awaited {
    /// The step, if the wait is for something of a step.
    pub fn step(self) -> Option<u32> {
        match self {
            Awaited::Parameters => None,
            Awaited::Contribution(step) | Awaited::Release(step) => Some(step),
        }
    }
}
