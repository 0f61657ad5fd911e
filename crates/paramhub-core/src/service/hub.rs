//! The calls of hubs: a hub registers, polls for commands, and reports.

use serde::{Deserialize, Serialize};

use super::{
    CoreCounters, HubEvent, HubLabel, JobCounters, JobOptions, ProbeOrder, StopWhen, TeamAllowance,
    is_default,
};
use crate::auth::{Epoch, Namespace, Nonce};
use crate::checkpoint::CheckpointStatus;
use crate::composition::{Composition, Place, SiteId};
use crate::placement::HubShape;
use crate::scheme::Cluster;
use crate::settings::Settings;
use crate::standbys::Share;

/// `POST /v1/hubs`: a hub joins the manager.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RegisterHub {
    /// The newest protocol version that the hub speaks. A hub of the first release does not say it.
    #[serde(default = "version_1")]
    pub protocol: u16,
    /// Interfaces and cores that the hub offers.
    pub shape: HubShape,
    /// The workers that the hub serves: with a host those on that host, otherwise with a rack those of that
    /// rack, otherwise all.
    #[serde(default)]
    pub place: Place,
    /// The id that distinguishes the hub's machine from all others, as a worker's [`Place::host`] does; empty
    /// if unknown. It serves only to find workers on the same machine.
    #[serde(default)]
    pub machine: String,
    /// `true` if the hub has a folder for checkpoints; `None` if unknown. Where all hubs that have joined say
    /// that they have none, CreateService refuses a job with `checkpoint_every` or `resume`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeps_checkpoints: Option<bool>,
    /// Whether the jobs that the hub serves must encrypt their streams between hosts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub encrypt: bool,
    /// The labels by which jobs choose the hub, at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<HubLabel>,
}

fn version_1() -> u16 {
    1
}

/// Answer to [`RegisterHub`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubRegistered {
    /// The hub's number from now on.
    pub hub: u32,
    /// Bearer token of the hub's later calls.
    pub token: String,
}

/// `POST /v1/hubs/{hub}/drain`: has all jobs leave a hub that can go on at others, and gives it no new ones; or ends that.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DrainHub {
    /// Whether the hub is drained from now on.
    pub drained: bool,
}

/// `POST /v1/hubs/{hub}/poll`: waits for commands. The manager forgets commands up to `acknowledged` and
/// repeats later ones until they are acknowledged, so a lost answer loses no command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PollCommands {
    /// Sequence number of the last command that the hub has taken; 0 at first.
    pub acknowledged: u64,
    /// Seconds to wait if there is no command; the manager caps it at 10, and at a third of the time after
    /// which it counts a silent hub as lost.
    pub wait_s: f64,
}

/// Answer to [`PollCommands`], oldest first; empty when the wait ran out.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Commands {
    /// The commands, numbered from 1 without gaps.
    pub commands: Vec<NumberedCommand>,
}

/// A command with its position in the hub's sequence.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NumberedCommand {
    /// The command's number: from 1, without gaps.
    pub sequence: u64,
    /// The command itself.
    pub command: HubCommand,
}

/// A command of the manager to a hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum HubCommand {
    /// Allocate a job's buffers and expect its workers. The hub answers with [`HubEvent::Allocated`] or
    /// [`HubEvent::Refused`], also if it has allocated the job before.
    Allocate(Box<JobPlan>),
    /// All hubs of the job have allocated, and its workers are told so: open the streams to the sites above,
    /// and expect those of the workers soon. Only in jobs of several sites, and in those that go on when
    /// workers are lost.
    Link {
        /// The job.
        namespace: Namespace,
    },
    /// End a job. The hub answers with [`HubEvent::Ended`], and first with [`HubEvent::Kept`] if its workers
    /// are about to end. A job whose ranks have all left has finished, whatever stop comes after that.
    Stop {
        /// The job.
        namespace: Namespace,
        /// The reason, which the hub sends to the job's workers.
        reason: String,
        /// The event that the hub waits for.
        #[serde(default, skip_serializing_if = "is_default")]
        when: StopWhen,
    },
    /// Send the ranks that exchange here a notice of something that another hub has noticed.
    Tell {
        /// The job.
        namespace: Namespace,
        /// The rank that the notice is about, if any.
        rank: Option<u32>,
        /// The text of the notice.
        message: String,
    },
    /// A rank of a job that goes on without lost workers is lost: the hub closes its streams, and steps end without it.
    LoseRank {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch that begins with this.
        epoch: u64,
        /// What has happened to the rank, beginning with its name.
        reason: String,
    },
    /// A rank is lost, and all ranks of the job go back to an earlier step: the hub closes all streams of the job. Each rank
    /// is then taken by a process. If another hub is lost, there is no rank, and the job ends at this hub by a further command.
    Rewind {
        /// The job.
        namespace: Namespace,
        /// The rank that is lost, if one is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rank: Option<u32>,
        /// The epoch that begins with this.
        epoch: u64,
        /// What has happened to the rank or the hub, beginning with its name.
        reason: String,
    },
    /// Another process takes a lost rank: the hub answers with [`HubEvent::RankExpected`].
    ExpectRank {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch that begins with this.
        epoch: u64,
    },
    /// The process that takes a rank contributes from this step on, which the hubs of the job have named: the latest of
    /// theirs or, in a job that goes back, the earliest. The hub answers with [`HubEvent::RankJoined`].
    JoinRank {
        /// The job.
        namespace: Namespace,
        /// The rank.
        rank: u32,
        /// The epoch since which the process has the rank.
        epoch: u64,
        /// The step; `None` if the process begins like the first ones. In a job that goes back, all ranks then begin anew.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        step: Option<u32>,
    },
    /// The hubs of a job's shares have changed: a hub is lost, two of them do not reach each other, or another hub becomes a
    /// standby. A hub that knows the change ignores it.
    ChangeShares {
        /// The job.
        namespace: Namespace,
        /// The number of the change, from 1.
        number: u32,
        /// The shares from now on.
        shares: Vec<Share>,
        /// The hubs that the job has got since it began. Their positions follow those of the composition's hubs.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        later_hubs: Vec<HubShape>,
        /// What has happened, for people.
        reason: String,
    },
    /// All workers of a job that goes on without lost workers have left another of its hubs: the job has finished here, too,
    /// whichever rank is lost or is being taken.
    Finish {
        /// The job.
        namespace: Namespace,
    },
    /// Measure with another hub what the network between the two carries. The hub answers with
    /// [`HubEvent::Probed`] within a second.
    Probe(ProbeOrder),
    /// Report every job: the manager has restarted. The hub answers with [`HubEvent::Allocated`] for each job that it
    /// has, [`HubEvent::Ended`] for those that have ended lately, and [`HubEvent::AllReported`].
    ReportJobs {
        /// A number that this manager has drawn, which the answer repeats.
        question: u32,
    },
}

impl HubCommand {
    /// The job that it concerns, if it concerns one.
    pub fn namespace(&self) -> Option<Namespace> {
        match self {
            HubCommand::Allocate(plan) => Some(plan.namespace),
            HubCommand::Link { namespace }
            | HubCommand::Stop { namespace, .. }
            | HubCommand::Tell { namespace, .. }
            | HubCommand::LoseRank { namespace, .. }
            | HubCommand::Rewind { namespace, .. }
            | HubCommand::ExpectRank { namespace, .. }
            | HubCommand::JoinRank { namespace, .. }
            | HubCommand::ChangeShares { namespace, .. }
            | HubCommand::Finish { namespace } => Some(*namespace),
            HubCommand::Probe(_) | HubCommand::ReportJobs { .. } => None,
        }
    }
}

/// Shares whose standby a hub is to become that has a part in the job already.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FurtherShares {
    /// The number of the last change of the shares. With the next change the hub becomes their standby, or gives them up.
    pub number: u32,
    /// The shares.
    pub shares: Vec<u16>,
}

/// All that a hub must know of a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobPlan {
    /// The job's name, for messages.
    pub name: String,
    /// The job.
    pub namespace: Namespace,
    /// The job's secret.
    pub nonce: Nonce,
    /// The job's epoch, from whose secret those of its ranks and hubs are derived.
    pub epoch: Epoch,
    /// The ranks whose workers speak protocol version 1, ascending: their streams are proved with the nonce.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub version_1_ranks: Vec<u32>,
    /// Waits and lifetimes.
    pub options: JobOptions,
    /// Every rank and every hub of the job, by site.
    pub composition: Composition,
    /// The receiver's site.
    pub site: SiteId,
    /// The receiver's position among the hubs of its site, of which the later ones follow the first.
    pub hub: u32,
    /// The hubs of each share of the chunks, if they have [standbys](crate::standbys).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Share>,
    /// The hubs that a job with standbys has got since it began.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub later_hubs: Vec<HubShape>,
    /// Set if the receiver has a part in the job already, and is to allocate further shares. A hub of an earlier release does not
    /// know it, and answers that it has the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub further: Option<FurtherShares>,
    /// The cluster for which the [plan](crate::scheme::Plan) of schemes is made.
    pub cluster: Cluster,
    /// The settings on which the ranks agreed.
    pub settings: Settings,
    /// What the job's team may still have; nothing is set if the job is of no team.
    #[serde(default, skip_serializing_if = "is_default")]
    pub team: TeamAllowance,
}

impl JobPlan {
    /// The hub at this position of the receiver's site.
    pub fn hub_at(&self, position: usize) -> Option<&HubShape> {
        let first = &self.composition.sites.get(usize::from(self.site))?.hubs;
        first.get(position).or_else(|| self.later_hubs.get(position.checked_sub(first.len())?))
    }
}

/// `POST /v1/hubs/{hub}/events`: what a hub reports to its manager. The manager takes the counters before the
/// events, so the report with a job's [`HubEvent::Ended`] carries the job's last counters.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct HubReport {
    /// The events, oldest first.
    pub events: Vec<HubEvent>,
    /// Each core's time, in core order.
    pub cores: Vec<CoreCounters>,
    /// The counters of each living job on this hub. A hub that has joined again names here the jobs that it
    /// still serves.
    pub jobs: Vec<HubJobCounters>,
    /// The checkpoints of jobs that write any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<HubJobCheckpoints>,
    /// The availability of the hub, which may be about to stop.
    #[serde(skip_serializing_if = "is_default")]
    pub presence: Presence,
}

/// The availability of a hub for jobs. `here`: it is. `leaving`: it shuts down, and the manager must not
/// give it further jobs. `gone`: it has shut down, and this is its last report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// The hub is available.
    #[default]
    Here,
    /// The hub shuts down: the manager must not give it further jobs.
    Leaving,
    /// It has shut down, and this is its last report.
    Gone,
}

/// One job's checkpoints on one hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubJobCheckpoints {
    /// The job.
    pub namespace: Namespace,
    /// The status of the reporting hub's part.
    pub status: CheckpointStatus,
}

/// One job's counters on one hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HubJobCounters {
    /// The job.
    pub namespace: Namespace,
    /// Its counters on the reporting hub.
    pub counters: JobCounters,
    /// For each rank, how many updates of chunks on this hub left it out because it was late; shorter if the
    /// last ranks were never left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<u64>,
}
