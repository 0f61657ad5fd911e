//! How the ranks of a job come to a communicator: the connection manager tells them of one another, and no hub has a part in it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use paramhub_core::codec::Dtype;
use paramhub_syncer::{Meeting, Peers, Ports, SyncError};
use paramhub_worker::{Attendance, Member, Membership, Options, Transport, WorkerError};

use super::{Communicator, CommunicatorError, Native};

/// How ranks meet.
#[derive(Clone, Debug)]
pub struct MeetOptions {
    /// The worker's own: how long it waits for the others, and whether it shares memory with those of its host. It does where all
    /// are on one, unless its transport is TCP.
    pub worker: Options,
    /// Where this rank listens for the others.
    pub ports: Ports,
}

impl Default for MeetOptions {
    fn default() -> Self {
        MeetOptions { worker: Options::default(), ports: Ports::ANY }
    }
}

/// Joins a job as one of its ranks and makes a communicator of all of them.
///
/// The job may be one [without hubs](paramhub_core::service::JobOptions::hubs), or one whose hubs no rank asks for anything. It has
/// finished when all ranks have left the communicator, and a rank that ends otherwise ends it for all. Its end by somebody else
/// ends the communicator.
///
/// # Errors
/// If ranks do not come, which the manager names, or cannot reach one another.
pub fn meet(
    membership: Membership,
    options: MeetOptions,
) -> Result<Box<dyn Communicator>, CommunicatorError> {
    let MeetOptions { worker, ports } = options;
    let shares_memory = worker.transport != Transport::Tcp;
    let apart = |error: SyncError| CommunicatorError::Meeting(Arc::new(error));
    let meeting = Meeting::listen(&membership, ports).map_err(apart)?;
    let member =
        Member::connect_with(membership, Options { peer_address: Some(meeting.address()), ..worker })?;
    let (listener, mut config) = meeting.seat(&Peers::of(&member), "communicator").map_err(apart)?;
    config.shares_memory &= shares_memory;
    let native = Arc::new(Native::join(listener, config)?);
    let company = Company::default();
    company.add(&native);
    let ended = company.clone();
    let attendance = member.stay(move |error| ended.end(&error))?;
    Ok(Box::new(OfJob { native, company, attendance: Some(Mutex::new(Some(attendance))) }))
}

/// A communicator of a job's ranks.
struct OfJob {
    native: Arc<Native>,
    company: Company,
    /// The first communicator's; those made of it come and go as they like.
    attendance: Option<Mutex<Option<Attendance>>>,
}

/// All communicators that end with the job.
#[derive(Clone, Default)]
struct Company(Arc<Mutex<Vec<Weak<Native>>>>);

impl Company {
    fn add(&self, native: &Arc<Native>) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(native));
    }

    fn end(&self, error: &WorkerError) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).for_each(|native| native.abort(&error.to_string()));
    }
}

impl OfJob {
    fn take_attendance(&self) -> Option<Attendance> {
        self.attendance.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Communicator for OfJob {
    fn rank(&self) -> u32 {
        self.native.rank()
    }

    fn size(&self) -> u32 {
        self.native.size()
    }

    fn transport(&self) -> &'static str {
        self.native.transport()
    }

    fn allreduce(&self, name: &str, values: &mut [u8], dtype: Dtype) -> Result<(), CommunicatorError> {
        self.native.allreduce(name, values, dtype)
    }

    fn broadcast(&self, name: &str, bytes: &mut [u8], root: u32) -> Result<(), CommunicatorError> {
        self.native.broadcast(name, bytes, root)
    }

    fn reduce_scatter(
        &self,
        name: &str,
        values: &[u8],
        sum: &mut [u8],
        dtype: Dtype,
    ) -> Result<(), CommunicatorError> {
        self.native.reduce_scatter(name, values, sum, dtype)
    }

    fn allgather(&self, name: &str, block: &[u8], all: &mut [u8]) -> Result<(), CommunicatorError> {
        self.native.allgather(name, block, all)
    }

    fn barrier(&self) -> Result<(), CommunicatorError> {
        self.native.barrier()
    }

    fn duplicate(&self) -> Result<Box<dyn Communicator>, CommunicatorError> {
        let native = Arc::new(self.native.another()?);
        self.company.add(&native);
        Ok(Box::new(OfJob { native, company: self.company.clone(), attendance: None }))
    }

    fn abort(&self, reason: &str) {
        self.native.abort(reason);
        if let Some(attendance) = self.take_attendance() {
            // The others hear it over the communicator already; the manager may be gone.
            let _ = attendance.give_up(reason);
        }
    }

    fn leave(&self) -> Result<(), CommunicatorError> {
        self.native.leave()?;
        match self.take_attendance() {
            Some(attendance) => Ok(attendance.leave()?),
            None => Ok(()),
        }
    }

    fn failure(&self) -> Option<CommunicatorError> {
        self.native.failure()
    }
}
