//! What a member does against the rules, and whom others wait for in vain.

use thiserror::Error;

use crate::limits::STATE_UPDATES_MAX;

/// A request against the rules: the sender is at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Offence {
    /// A step that is over, or that this member has contributed to already.
    #[error("step {got} was pushed, but step {expected} is due: a step is pushed once and in order")]
    StepBehind {
        /// The step due.
        expected: u32,
        /// The step pushed.
        got: u32,
    },
    /// A step that has not begun.
    #[error("step {got} was asked for, but step {expected} is under way: wait for it first")]
    StepAhead {
        /// The step under way.
        expected: u32,
        /// The step asked for.
        got: u32,
    },
    /// The step after which versions could not be counted any more.
    #[error("step {} was pushed, but a run ends before it: start a new one from these parameters", u32::MAX)]
    StepsExhausted,
    /// The member has a request for this chunk that is not answered.
    #[error("a second request came before the first was answered")]
    Unanswered,
    /// Parameters were pushed to or asked to be replaced before rank 0 had sent any.
    #[error("a gradient came before rank 0 had sent the parameters to start from")]
    NotInitialised,
    /// Parameters came twice, or from another rank than 0, or to a job that has none.
    #[error("parameters to start from come once, from rank 0, and only to a job with an optimizer")]
    Initialised,
    /// Parameters at another version than the first: in a job whose steps are in two phases all chunks go in step.
    #[error(
        "parameters to start from came with version {got}, but in two phases all start from one version, here {expected}"
    )]
    Versions {
        /// Of the first.
        expected: u32,
        /// Of these.
        got: u32,
    },
    /// A release from another rank than 0, of another step than the one whose norm was told last, or once too often.
    #[error("step {0} was released, but a step is released by rank 0, once, after its norm was told")]
    Released(u32),
    /// Optimizer state came when somebody may already have contributed, or from another rank than 0.
    #[error("optimizer state to start from comes from rank 0, before its parameters to start from")]
    StateInitialised,
    /// The site above answered what it was not asked.
    #[error("the sum of step {0} came from above, but it is not awaited")]
    NotAwaited(u32),
    /// A gradient of a chunk whose layer goes by its factors.
    #[error("a gradient was pushed, but the layer goes by its factors")]
    ByFactors,
    /// More samples than the layer was declared with.
    #[error("factors of {got} samples came, but the layer has {most} at most: say so in the job's settings")]
    Samples {
        /// Declared.
        most: u32,
        /// Announced.
        got: u32,
    },
    /// Pieces of one block that disagree.
    #[error("a piece of a block of {got} samples came, but the block under way has {expected}")]
    OtherSamples {
        /// In the block's first piece.
        expected: u32,
        /// In this one.
        got: u32,
    },
    /// A piece that was here before, or ahead of another.
    #[error("piece {got} of its factors came, but piece {expected} is due: pieces come once and in order")]
    Piece {
        /// The one due.
        expected: u32,
        /// The one that came.
        got: u32,
    },
    /// A piece of another length than the block's cut says.
    #[error("piece {piece} of its factors came with {got} numbers, but it has {expected}")]
    PieceElements {
        /// Which.
        piece: u32,
        /// What it has.
        expected: usize,
        /// What came.
        got: usize,
    },
    /// Optimizer state that has had more updates than can be counted on from.
    #[error(
        "optimizer state to start from has had {0} updates, more than the {STATE_UPDATES_MAX} it may have had"
    )]
    StateUpdates(u64),
}

/// Members wait for what another one will never send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("left the job, but other ranks wait for {awaited}")]
pub struct Stranded {
    /// Who left, for the caller to name.
    pub member: u32,
    /// What will not come.
    pub awaited: Awaited,
}

/// What members wait for in vain.
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
    /// The step that it is of, if it is of one.
    pub fn step(self) -> Option<u32> {
        match self {
            Awaited::Parameters => None,
            Awaited::Contribution(step) | Awaited::Release(step) => Some(step),
        }
    }
}
