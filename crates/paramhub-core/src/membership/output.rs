//! The outputs of the membership to the rest of the manager: answers, commands, records and events for the
//! log.

use std::sync::Arc;
use std::time::Duration;

use crate::auth::{Epoch, Namespace};
use crate::cost::Rate;
use crate::service::{
    HubCommand, JobState, JobStatus, LinkStatus, RankSecrets, ServiceConnected, ServiceError,
    ServiceInitialised,
};

/// The number of a call that waits. No two calls of one manager have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub(super) u64);

/// A call that waits for its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingCall {
    /// The number under which the answer comes.
    pub call: CallId,
    /// The time at which the caller must report that the call [has expired](super::Membership::expire), on
    /// the clock of [`Now::monotonic`](super::Now::monotonic).
    pub deadline: Duration,
}

/// The answer to a call that has waited. Ranks of one site share theirs.
#[derive(Clone, Debug)]
pub enum Answer {
    /// To ConnectService.
    Connected(Result<Connected, ServiceError>),
    /// To InitService.
    Initialised(Result<Arc<ServiceInitialised>, ServiceError>),
    /// To StopService.
    Stopped(Result<Box<JobStatus>, ServiceError>),
    /// To a call that lets hubs probe: what is known of the links between racks.
    Probed(Vec<LinkStatus>),
}

/// The answer to a rank's ConnectService: what the ranks of a site share, and what only this rank gets.
#[derive(Clone, Debug)]
pub struct Connected {
    pub(super) shared: Arc<ServiceConnected>,
    pub(super) rank: u32,
    /// The job's first epoch and the one since which the process has the rank, if the rank gets its own secret.
    pub(super) secret: Option<(Epoch, u64)>,
}

impl Connected {
    /// The answer with the rank's secrets. It grows with the number of ranks, so it is made when it is sent.
    pub fn answer(&self) -> ServiceConnected {
        let (rank, addresses) = (self.rank, &self.shared.peer_addresses);
        let listens = addresses.get(rank as usize).is_some_and(Option::is_some);
        let secrets = self.secret.map(|(epoch, since)| {
            let pair = |(other, address): (u32, &Option<_>)| {
                (other != rank && address.is_some()).then(|| epoch.secret.of_pair(rank, other))
            };
            let pairs = match listens {
                true => (0..).zip(addresses).map(pair).collect(),
                false => Vec::new(),
            };
            RankSecrets { rank: epoch.of_rank(rank, since), pairs }
        });
        let epoch = self.secret.map_or(self.shared.epoch, |(_, since)| since);
        ServiceConnected { secrets, epoch, ..ServiceConnected::clone(&self.shared) }
    }
}

/// A consequence of an event, for the caller to carry out. Consequences are in order.
#[derive(Clone, Debug)]
pub enum Output {
    /// A call is to be answered. Each call gets one answer, unless its caller hangs up.
    Answer {
        /// The call.
        call: CallId,
        /// The job that the answer tells about. If its record is still to be saved, the answer waits for that, so that
        /// nobody knows more of the job than a manager that restarts.
        namespace: Option<Namespace>,
        /// Its answer.
        answer: Answer,
    },
    /// A hub has joined: its record is to be saved, and commands for it are to be kept until it acknowledges them.
    HubJoined {
        /// The hub's number.
        hub: u32,
    },
    /// A hub of an earlier manager is expected to go on calling; commands for it are to be kept until it acknowledges
    /// them.
    HubRestored {
        /// The hub's number.
        hub: u32,
    },
    /// A hub is forgotten, with its record and all commands for it. Its calls are to be answered at once.
    HubForgotten {
        /// The hub's number.
        hub: u32,
    },
    /// The record of a hub has changed and is to be saved.
    SaveHub {
        /// The hub's number.
        hub: u32,
    },
    /// A hub is to receive a command.
    Command {
        /// The hub's number.
        hub: u32,
        /// The command.
        command: HubCommand,
        /// `true` to leave the command out if the same is already waiting for the hub.
        unless_queued: bool,
    },
    /// The membership of a job has changed, and a hub is to receive a command about it. If the job's record is still to
    /// be saved, the command waits for that, so that no hub knows a membership that a manager which restarts does not.
    ChangeMembership {
        /// The hub's number.
        hub: u32,
        /// The job.
        namespace: Namespace,
        /// The command.
        command: HubCommand,
    },
    /// The record of a job has changed and is to be saved.
    Save(Namespace),
    /// A job is forgotten, and its record is to be removed.
    Remove(Namespace),
    /// Something has changed that people should know.
    Log(LogEvent),
}

/// Something that people should know. It goes to the manager's log.
#[derive(Clone, Debug, PartialEq)]
pub enum LogEvent {
    /// A job was created.
    JobCreated {
        /// The job's name.
        job: String,
        /// The job.
        namespace: Namespace,
        /// Its number of workers.
        workers: u32,
    },
    /// It is decided how a job's sites reduce.
    ReductionChosen {
        /// The job's name.
        job: String,
        /// The reduction and the reason.
        reduction: String,
    },
    /// A job has come further.
    JobAdvanced {
        /// The job's name.
        job: String,
        /// The job.
        namespace: Namespace,
        /// Its new state.
        state: JobState,
    },
    /// A job has finished.
    JobFinished {
        /// The job's name.
        job: String,
        /// The job.
        namespace: Namespace,
    },
    /// A job has failed.
    JobFailed {
        /// The job's name.
        job: String,
        /// The job.
        namespace: Namespace,
        /// The reason why it failed.
        message: String,
        /// `true` if a hub has reported the failure and has logged it itself.
        was_logged: bool,
    },
    /// It is known better why a job has failed.
    JobExplained {
        /// The job's name.
        job: String,
        /// The job.
        namespace: Namespace,
        /// The reason why it failed.
        message: String,
    },
    /// A rank is lost, or another process has taken it.
    RankChanged {
        /// The job's name.
        job: String,
        /// The job.
        namespace: Namespace,
        /// The epoch that begins with this.
        epoch: u64,
        /// What has happened, and what follows.
        message: String,
    },
    /// Other hubs have the shares of a job.
    SharesChanged {
        /// The job's name.
        job: String,
        /// The job.
        namespace: Namespace,
        /// What has happened, and what follows.
        message: String,
        /// Whether every share has a standby again, or is about to.
        is_whole: bool,
    },
    /// A hub is not heard any more. It gets no new jobs.
    HubUnheard {
        /// The hub, how long it has been silent, and what to look at.
        message: String,
    },
    /// A hub that was not heard calls again.
    HubHeardAgain {
        /// The hub, and how long it was silent.
        message: String,
    },
    /// A hub was lost.
    HubLost {
        /// The hub, and the reason why it counts as lost.
        message: String,
    },
    /// An operator drains a hub, or no longer does.
    HubDrained {
        /// The hub's number.
        hub: u32,
        /// Whether it is drained from now on.
        drained: bool,
    },
    /// A hub has shut down.
    HubLeft {
        /// The hub's number.
        hub: u32,
    },
    /// A hub reports something about a job that goes on.
    HubNoticed {
        /// The job's name.
        job: String,
        /// The hub's number.
        hub: u32,
        /// The report.
        message: String,
    },
    /// A hub reports that ranks keep the others waiting, or that they no longer do.
    RanksAwaited {
        /// The job's name.
        job: String,
        /// The hub's number.
        hub: u32,
        /// The report.
        message: String,
    },
    /// Hubs have probed the link from one rack to another.
    LinkProbed {
        /// The rack that sent.
        from: String,
        /// The rack that received.
        to: String,
        /// The rate, or why there is none.
        outcome: Result<Rate, String>,
    },
}
