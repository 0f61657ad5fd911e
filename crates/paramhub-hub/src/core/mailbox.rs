//! What the rest of the hub asks of a core, and what a core tells it. Rare things only: nothing here is per chunk.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;
use paramhub_core::service::{CauseKind, CoreCounters, JobCounters};
use paramhub_core::wire::{Failure, Notice};
use paramhub_transport::Waker;

use super::plan::ShardPlan;
use super::ports::Neighbour;
use super::shard::{AwaitedNews, Late};
use super::snapshot::{Snapshot, Wanted};
use crate::local::LocalMemory;

/// Commands a core may have waiting; who sends more waits.
const MAILBOX_COMMANDS: usize = 1024;

/// Asked of a core.
#[derive(Debug)]
pub(crate) enum CoreCommand {
    /// Allocate a route's chunks; answered by [`CoreEvent::Opened`], unless the job ends before.
    Open(Box<ShardPlan>),
    /// Serve a stream whose handshake is done. One that was `resumed_by` an interface takes the place of the port's stream.
    Adopt {
        namespace: Namespace,
        route: RouteId,
        port: u32,
        socket: OwnedFd,
        memory: Option<LocalMemory>,
        resumed_by: Option<u16>,
    },
    /// Tell a rank something.
    Notify { namespace: Namespace, rank: u32, notice: Notice },
    /// Tell all ranks something.
    NotifyAll { namespace: Namespace, notice: Notice },
    /// Take a snapshot of a route's chunks; answered by [`CoreEvent::Snapshot`], unless the job ends.
    Arm { namespace: Namespace, wanted: Wanted, snapshot: Box<Snapshot> },
    /// Call it off, if it is still being taken.
    Disarm { namespace: Namespace, route: RouteId },
    /// Free all of a job and close its streams, telling them why if it failed; answered by [`CoreEvent::Closed`], a route.
    End { namespace: Namespace, failure: Option<Failure> },
    /// End the thread.
    Stop,
}

/// What a fault says of where the trouble began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// As the connection manager is told.
    Kind(CauseKind),
    /// The culprit is not heard any more: it may be this hub that is cut off.
    Silence,
}

/// Told by a core.
#[derive(Debug)]
pub(crate) enum CoreEvent {
    /// A route's chunks are allocated, with memory for snapshots where there are to be any, or do not fit.
    Opened { namespace: Namespace, missing_bytes: Option<u64>, snapshot: Option<Box<Snapshot>> },
    /// A snapshot is complete, or will not be.
    Snapshot { namespace: Namespace, snapshot: Box<Snapshot> },
    /// A job cannot go on, through the fault of `culprit`.
    Faulted { namespace: Namespace, culprit: Neighbour, message: String, cause: Cause },
    /// The core panicked and has nothing of a job any more; [`CoreEvent::Closed`] follows for each of its routes.
    Panicked { namespace: Namespace, reason: String },
    /// Nothing more will come by a port of a route, or, to a site above, go out.
    Left { namespace: Namespace, route: RouteId, port: u32 },
    /// Somebody has not been heard for a while on some stream, or is heard again.
    Silence { namespace: Namespace, who: Neighbour, seconds: Option<f64> },
    /// A stream goes on by this interface.
    Moved { namespace: Namespace, who: Neighbour, by: u16 },
    /// Steps end without this rank.
    Late { namespace: Namespace, late: Late },
    /// A rank or a site keeps the others waiting at a route, or does no more.
    Awaited { namespace: Namespace, route: RouteId, news: AwaitedNews },
    /// A route is freed and its streams are closed. Of every rank, how many updates it was `left_out` of.
    Closed { namespace: Namespace, counters: JobCounters, left_out: Vec<u64> },
}

/// A core's other end.
#[derive(Clone, Debug)]
pub(crate) struct CoreHandle {
    commands: SyncSender<CoreCommand>,
    waker: Waker,
    pub(crate) report: Arc<Mutex<CoreReport>>,
}

/// What a core has counted; written a few times a second.
#[derive(Clone, Debug, Default)]
pub(crate) struct CoreReport {
    pub(crate) time: CoreCounters,
    pub(crate) jobs: Vec<(Namespace, JobCounters)>,
    /// Ranks that were left out, and of how many updates of chunks.
    pub(crate) left_out: Vec<(Namespace, u32, u64)>,
}

/// Takes a core's event to whoever decides, without waiting; gives it back where there is no room for now.
pub(crate) type Tell = Box<dyn FnMut(CoreEvent) -> Option<CoreEvent> + Send>;

/// The core's end of its mailbox.
pub(crate) struct Mailbox {
    pub(crate) commands: Receiver<CoreCommand>,
    pub(crate) waker: Waker,
    pub(crate) report: Arc<Mutex<CoreReport>>,
    tell: Tell,
    /// What there was no room for; as long as there are streams and shards at most, since each is told of once.
    unsent: VecDeque<CoreEvent>,
}

/// A core's mailbox, both ends.
pub(crate) fn mailbox(tell: Tell) -> io::Result<(CoreHandle, Mailbox)> {
    let (sender, commands) = sync_channel(MAILBOX_COMMANDS);
    let waker = Waker::new()?;
    let report = Arc::new(Mutex::new(CoreReport::default()));
    let handle = CoreHandle { commands: sender, waker: waker.clone(), report: report.clone() };
    Ok((handle, Mailbox { commands, waker, report, tell, unsent: VecDeque::new() }))
}

impl CoreHandle {
    /// Queues a command; waits if the core has very many. A core that has ended takes none.
    pub(crate) fn send(&self, command: CoreCommand) {
        if self.commands.send(command).is_ok() {
            self.waker.wake();
        }
    }
}

impl Mailbox {
    /// Tells who decides, without ever waiting.
    pub(crate) fn tell(&mut self, event: CoreEvent) {
        self.unsent.push_back(event);
        self.retry();
    }

    /// Sends what could not be sent before.
    pub(crate) fn retry(&mut self) {
        while let Some(event) = self.unsent.pop_front() {
            if let Some(event) = (self.tell)(event) {
                self.unsent.push_front(event);
                return;
            }
        }
    }
}
