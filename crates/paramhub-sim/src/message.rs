//! What processes send one another. A tensor's numbers are replaced by what the simulator knows of them.

use std::sync::Arc;

use paramhub_core::wire::{Failure, Header, Hello, Notice, Refusal};

use crate::call::{Answer, Request};

/// A message on a stream.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// A worker, or a hub of another site, opens a stream; the proofs are left out.
    Hello(Box<Hello>),
    /// The hub has admitted the stream.
    Welcome,
    /// The hub does not admit the stream.
    Refused(Refusal, String),
    /// A frame.
    Frame(Frame),
    /// A call to the manager.
    Call(Arc<Request>),
    /// The manager answers a call.
    Answer(Answer),
}

/// A frame.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    /// Its header, as it travels.
    pub header: Header,
    /// What its payload stands for.
    pub content: Content,
}

/// What a payload stands for.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// There is no payload.
    Nothing,
    /// The gradient of a rank at a step.
    Gradient(Contribution),
    /// The gradients that a site has summed.
    Sum(Vec<Contribution>),
    /// Parameters, with a digest of all that ever went into them.
    Parameters(u64),
    /// Why all ranks go back to an earlier step.
    Rewound(Notice),
    /// Why a job is over.
    Failure(Failure),
}

/// One rank's part of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Contribution {
    /// The step.
    pub step: u32,
    /// The rank.
    pub rank: u32,
    /// The epoch since which its process has the rank.
    pub epoch: u64,
}
