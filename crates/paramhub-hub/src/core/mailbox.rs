//! The commands of the rest of the hub to a core, and the core's reports. All are rare: there are none per
//! chunk.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::composition::Neighbour;
use paramhub_core::job_control::{
    FaultCause, LateNeighbour, OverdueEvent, RankChange, Recipient, RoleChange,
};
use paramhub_core::placement::RouteId;
use paramhub_core::service::{CoreCounters, JobCounters};
use paramhub_core::wire::{Failure, Notice};
use paramhub_transport::Waker;

use super::lane::AcceptedStream;
use super::plan::ShardPlan;
use super::restored::Restored;
use super::snapshot::{Snapshot, SnapshotTarget};

/// Commands that may wait in a core's mailbox; a sender of more must wait.
const MAILBOX_COMMANDS: usize = 1024;

/// A command to a core.
#[derive(Debug)]
pub(crate) enum CoreCommand {
    /// Allocate a route's chunks, which begin with what was restored, if it is not with rank 0's parameters.
    /// The core answers with [`CoreEvent::Opened`], unless the job ends before.
    Open { plan: Box<ShardPlan>, restored: Option<Box<Restored>> },
    /// Serve a stream whose handshake is done. A stream that was `resumed_by` an interface replaces the
    /// port's stream. If the port has had a stream of a later epoch, or of the same epoch with a higher
    /// `attempt`, this one is closed, and so is a stream to a `standby`, by its position in the job, that is not the route's.
    Adopt {
        namespace: Namespace,
        route: RouteId,
        port: u32,
        stream: AcceptedStream,
        epoch: u64,
        attempt: u32,
        resumed_by: Option<u16>,
        standby: Option<u16>,
    },
    /// Send a notice to ranks.
    Notify { namespace: Namespace, to: Recipient, notice: Notice },
    /// Take a snapshot of a route's chunks. The core answers with [`CoreEvent::Snapshot`], unless the job
    /// ends.
    Arm { namespace: Namespace, target: SnapshotTarget, snapshot: Box<Snapshot> },
    /// Cancel a snapshot, if it is still being taken.
    Disarm { namespace: Namespace, route: RouteId },
    /// Change the membership of a job's chunks. The core answers with [`CoreEvent::RankExpected`] or
    /// [`CoreEvent::RankJoined`].
    ChangeRank { namespace: Namespace, rank: u32, epoch: u64, change: RankChange },
    /// Close all streams of a job, whose workers go back to an earlier step: the notice tells why. The streams of earlier
    /// epochs are refused.
    Rewind { namespace: Namespace, epoch: u64, notice: Notice },
    /// Change what this hub is for a route. `counterpart` names its new standby for people, if it gets one.
    ChangeRole { namespace: Namespace, route: RouteId, change: RoleChange, counterpart: String },
    /// Free all memory of a job and close its streams, with the reason if it failed. The core answers with
    /// [`CoreEvent::Closed`] for each route.
    End { namespace: Namespace, failure: Option<Failure> },
    /// End the thread.
    Stop,
}

/// A report of a core.
#[derive(Debug)]
pub(crate) enum CoreEvent {
    /// A route's chunks are allocated, with memory for snapshots if these are wanted, or do not fit.
    Opened { namespace: Namespace, missing_bytes: Option<u64>, snapshot: Option<Box<Snapshot>> },
    /// A snapshot is complete, or will not be completed.
    Snapshot { namespace: Namespace, snapshot: Box<Snapshot> },
    /// A job cannot go on, and `culprit` is at fault, as a stream of this route shows.
    Faulted { namespace: Namespace, route: RouteId, culprit: Neighbour, message: String, cause: FaultCause },
    /// The core cannot go on with a job, and no neighbour is at fault. If it has panicked, it has dropped everything of the
    /// job, and [`CoreEvent::Closed`] follows for each of its routes.
    CannotGoOn { namespace: Namespace, reason: String },
    /// The core has panicked, and has dropped what it had of the job.
    Panicked { namespace: Namespace, reason: String },
    /// Nothing more will arrive by a port of a route or, for a site above, leave.
    Left { namespace: Namespace, route: RouteId, port: u32 },
    /// A neighbour has been silent for a while on some stream, or is heard again.
    Silence { namespace: Namespace, neighbour: Neighbour, seconds: Option<f64> },
    /// The new standby of a route has all chunks.
    Copied { namespace: Namespace, route: RouteId },
    /// A neighbour's stream continues over this interface.
    Moved { namespace: Namespace, route: RouteId, neighbour: Neighbour, by: u16 },
    /// The stream to a site above was cut. Another one, with this number, may replace it until the time given.
    CutFromAbove { namespace: Namespace, route: RouteId, port: u32, attempt: u32, until: Option<Instant> },
    /// The chunks of this core expect the process that takes a rank; `step` is the first to which it may contribute
    /// here.
    RankExpected { namespace: Namespace, rank: u32, epoch: u64, step: Option<u32> },
    /// The process that takes a rank has its step at all chunks of this core.
    RankJoined { namespace: Namespace, rank: u32, epoch: u64 },
    /// Steps end without this rank or site.
    Late { namespace: Namespace, late: LateNeighbour },
    /// A rank or a site keeps the others waiting at a route, or no longer does.
    Awaited { namespace: Namespace, route: RouteId, event: OverdueEvent },
    /// A route is freed and its streams are closed. `left_out` has for each rank how many updates left it
    /// out.
    Closed { namespace: Namespace, counters: JobCounters, left_out: Vec<u64> },
}

/// The other end of a core's mailbox.
#[derive(Clone, Debug)]
pub(crate) struct CoreHandle {
    commands: SyncSender<CoreCommand>,
    waker: Waker,
    pub(crate) report: Arc<Mutex<CoreReport>>,
}

/// The counters of a core, written a few times a second.
#[derive(Clone, Debug, Default)]
pub(crate) struct CoreReport {
    pub(crate) time: CoreCounters,
    pub(crate) jobs: Vec<(Namespace, JobCounters)>,
    /// The ranks that were left out, and the number of updates without each.
    pub(crate) left_out: Vec<(Namespace, u32, u64)>,
}

/// Passes a core's event to the job controller without waiting, and returns it if there is no room for now.
pub(crate) type EventSender = Box<dyn FnMut(CoreEvent) -> Option<CoreEvent> + Send>;

/// The core's end of its mailbox.
pub(crate) struct Mailbox {
    pub(crate) commands: Receiver<CoreCommand>,
    pub(crate) waker: Waker,
    pub(crate) report: Arc<Mutex<CoreReport>>,
    send: EventSender,
    /// Events for which there was no room. There are no more than streams and shards, since each is reported
    /// once.
    unsent: VecDeque<CoreEvent>,
}

/// Both ends of a core's mailbox.
pub(crate) fn mailbox(send: EventSender) -> io::Result<(CoreHandle, Mailbox)> {
    let (sender, commands) = sync_channel(MAILBOX_COMMANDS);
    let waker = Waker::new()?;
    let report = Arc::new(Mutex::new(CoreReport::default()));
    let handle = CoreHandle { commands: sender, waker: waker.clone(), report: report.clone() };
    Ok((handle, Mailbox { commands, waker, report, send, unsent: VecDeque::new() }))
}

impl CoreHandle {
    /// Queues a command, and waits if the core has very many. A core that has ended takes none.
    pub(crate) fn send(&self, command: CoreCommand) {
        if self.commands.send(command).is_ok() {
            self.waker.wake();
        }
    }
}

impl Mailbox {
    /// Sends an event to the job controller without ever waiting.
    pub(crate) fn send_event(&mut self, event: CoreEvent) {
        self.unsent.push_back(event);
        self.retry();
    }

    /// Sends the events that could not be sent before.
    pub(crate) fn retry(&mut self) {
        while let Some(event) = self.unsent.pop_front() {
            if let Some(event) = (self.send)(event) {
                self.unsent.push_front(event);
                return;
            }
        }
    }
}
