//! The messages between launcher and processes.

use std::net::SocketAddr;
use std::time::Duration;

use paramhub::service::ServiceCreated;
use paramhub_core::auth::Nonce;
use paramhub_core::key::KeyTable;
use paramhub_harness::exchange::numbers::Verdict;
use serde::{Deserialize, Serialize};

use super::scenario::{KeyOrder, Scenario};
use super::timeline::Timeline;
use crate::profile::Passes;
use crate::training::TrainSection;

/// The specification of a rank.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct RankSpec {
    pub(super) scenario: Scenario,
    pub(super) ranks: u32,
    /// For concom: keys between two barriers.
    pub(super) outstanding: usize,
    /// `true` if the ranks of one host exchange through shared memory.
    pub(super) shares_memory: bool,
    /// `true` if its timeline will be asked for.
    pub(super) is_traced: bool,
    pub(super) work: Work,
}

/// The source of the gradients.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    /// A model whose computation is simulated by sleeping.
    Play(Workload),
    /// A real network.
    Train(Box<TrainSection>),
}

/// A model to be simulated.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Workload {
    pub(super) keys: KeyTable,
    /// The layers, front layers first.
    pub(super) layers: Vec<WorkloadLayer>,
    /// Steps of a turn, beside the leading one.
    pub(super) steps: u32,
}

/// One layer.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct WorkloadLayer {
    pub(super) name: String,
    pub(super) keys: Vec<u32>,
    pub(super) passes: Passes,
}

/// A message from the launcher.
#[derive(Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase")]
pub(crate) enum ScenarioCommand {
    /// Be this rank. Ranks reach one another by the interface that reaches the manager at `url`. Ranks that
    /// exchange through hubs have a job. Answered by [`ScenarioReply::Listening`].
    Enter { rank_spec: Box<RankSpec>, rank: u32, url: String, job: Option<ServiceCreated> },
    /// The ranks of a native communicator listen at these addresses. Answered by [`ScenarioReply::Joined`].
    Meet { addresses: Vec<SocketAddr>, secret: Nonce },
    /// Call each key's collective alone, one after the other, from this instant of the monotonic clock on. Answered by
    /// [`ScenarioReply::Alone`].
    Alone { start: Duration },
    /// Play steps whose computation takes `stretch` times as long as in the workload. Answered by
    /// [`ScenarioReply::Played`].
    Play { key_order: KeyOrder, stretch: f64, is_traced: bool, start: Duration },
    /// Send the timeline of the last turn that was traced. Answered by [`ScenarioReply::Timeline`].
    Show,
    /// Compare the sums of the last step with the expected ones. Answered by [`ScenarioReply::Checked`].
    Verify,
    /// Train. Answered by [`ScenarioReply::Trained`].
    Train { start: Duration },
}

/// A message to the launcher.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "reply", content = "content", rename_all = "lowercase")]
pub(crate) enum ScenarioReply {
    /// The address on which a rank of a native communicator listens.
    Listening(Option<SocketAddr>),
    Joined,
    Alone(IsolatedTimes),
    Played(TurnTimes),
    Timeline(Timeline),
    Checked(Verdict),
    Trained(TrainingTimes),
}

/// Seconds of collectives while nothing else runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct IsolatedTimes {
    /// The seconds of each key.
    pub(super) keys: Vec<f64>,
    /// The seconds of a barrier.
    pub(super) barrier: f64,
}

/// A turn of one rank. Seconds are the mean per step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TurnTimes {
    pub(super) seconds: f64,
    /// Seconds in which an operation computed.
    pub(super) computing: f64,
    /// Seconds in which a key was under way.
    pub(super) in_flight: f64,
    /// Seconds in which both held.
    pub(super) hidden: f64,
    /// Processor time of the whole process.
    pub(super) cpu: f64,
}

/// A training of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainingTimes {
    /// Seconds of an epoch.
    pub(super) seconds: f64,
    pub(super) computing: f64,
    /// The share of the time with a key under way in which something computed.
    pub(super) hidden_share: f64,
    pub(super) loss: f64,
}

impl IsolatedTimes {
    /// The seconds of all keys, one after the other.
    pub(super) fn seconds(&self) -> f64 {
        self.keys.iter().sum()
    }
}
