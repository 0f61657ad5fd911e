//! What launcher and processes say to one another.

use std::net::SocketAddr;
use std::time::Duration;

use paramhub_core::auth::Nonce;
use paramhub_core::key::KeyTable;
use serde::{Deserialize, Serialize};

use super::contestant::{Contestant, KeyOrder};
use super::timeline::Timeline;
use crate::cli::bench::numbers::Verdict;
use crate::cli::bench::profile::Passes;
use crate::config::TrainSection;
use crate::service::ServiceCreated;

/// What a process plays.
#[derive(Clone, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Part {
    pub(super) contestant: Contestant,
    pub(super) ranks: u32,
    /// Of concom.
    pub(super) outstanding: usize,
    /// Whether the ranks of one host exchange through memory that they share.
    pub(super) shares_memory: bool,
    /// Whether its timeline will be asked for.
    pub(super) is_traced: bool,
    pub(super) work: Work,
}

/// What is exchanged.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    /// A model whose computation is slept.
    Play(Score),
    /// A real network.
    Train(Box<TrainSection>),
}

/// A model to be played.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Score {
    pub(super) keys: KeyTable,
    /// Front layers first.
    pub(super) layers: Vec<ScoreLayer>,
    /// Of a turn, beside the one that leads in.
    pub(super) steps: u32,
}

/// One layer.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct ScoreLayer {
    pub(super) name: String,
    pub(super) keys: Vec<u32>,
    pub(super) passes: Passes,
}

/// From the launcher.
#[derive(Serialize, Deserialize)]
#[serde(tag = "cue", rename_all = "lowercase")]
pub(in crate::cli::bench) enum Cue {
    /// Be this rank. Ranks reach one another where they reach the manager at `url`; those that exchange through hubs have a job.
    /// Answered by [`Heard::Listening`].
    Enter { part: Box<Part>, rank: u32, url: String, job: Option<ServiceCreated> },
    /// The ranks of a native communicator listen there. Answered by [`Heard::Joined`].
    Meet { addresses: Vec<SocketAddr>, secret: Nonce },
    /// Call each key's collective alone, one after the other, from this instant of the monotonic clock on. Answered by
    /// [`Heard::Alone`].
    Alone { start: Duration },
    /// Play steps, computing for so many times as long as the score says. Answered by [`Heard::Played`].
    Play { key_order: KeyOrder, stretch: f64, is_traced: bool, start: Duration },
    /// Say what ran when in the last turn that was traced. Answered by [`Heard::Timeline`].
    Show,
    /// Compare the sums of the last step with what they must be. Answered by [`Heard::Checked`].
    Verify,
    /// Train. Answered by [`Heard::Trained`].
    Train { start: Duration },
}

/// To the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "heard", content = "with", rename_all = "lowercase")]
pub(in crate::cli::bench) enum Heard {
    /// Where, if it is a rank of a native communicator.
    Listening(Option<SocketAddr>),
    Joined,
    Alone(Alone),
    Played(Performed),
    Timeline(Timeline),
    Checked(Verdict),
    Trained(Trained),
}

/// Seconds of collectives that nothing else goes on beside.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Alone {
    /// Of each key.
    pub(super) keys: Vec<f64>,
    /// Of a barrier.
    pub(super) barrier: f64,
}

/// A turn of one rank. Seconds are a step's, on average.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Performed {
    pub(super) seconds: f64,
    /// With an operation that computes.
    pub(super) computing: f64,
    /// With a key under way.
    pub(super) in_flight: f64,
    /// With both.
    pub(super) hidden: f64,
    /// Processor time of the whole process.
    pub(super) cpu: f64,
}

/// A training of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Trained {
    /// Of an epoch.
    pub(super) seconds: f64,
    pub(super) computing: f64,
    /// Of the time with a key under way.
    pub(super) hidden_share: f64,
    pub(super) loss: f64,
}

impl Alone {
    /// Of all keys, one after the other.
    pub(super) fn seconds(&self) -> f64 {
        self.keys.iter().sum()
    }
}
