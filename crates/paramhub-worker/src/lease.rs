//! The lease of a rank in a job that no hub serves: the manager ends a job of which no rank renews its lease.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use paramhub_control::ControlError;
use paramhub_core::lease::LeaseRenewal;
use paramhub_core::service::ErrorCode;

use crate::error::WorkerError;
use crate::member::{Member, manager_error};

/// A rank's lease in a job whose ranks exchange among themselves. A thread renews it until the rank leaves.
/// Dropping a lease that was not left ends the job for all ranks.
#[derive(Debug)]
pub struct JobLease {
    member: Arc<Mutex<Member>>,
    /// The thread ends when this is dropped.
    stop: Option<Sender<()>>,
    renewals: Option<JoinHandle<()>>,
}

impl JobLease {
    pub(crate) fn new(
        member: Member,
        on_end: impl FnOnce(WorkerError) + Send + 'static,
    ) -> Result<JobLease, WorkerError> {
        let who = member.who();
        let mut renewal = LeaseRenewal::new(member.lease_duration());
        let member = Arc::new(Mutex::new(member));
        let (stop, stopped) = channel::<()>();
        let renewed = Arc::clone(&member);
        let renewals = move || {
            while stopped.recv_timeout(renewal.pause()) == Err(RecvTimeoutError::Timeout) {
                let mut member = renewed.lock().unwrap_or_else(PoisonError::into_inner);
                let error = match member.renew() {
                    Ok(()) => {
                        renewal.renewed();
                        continue;
                    }
                    // The ranks exchange by themselves, whether the manager answers or not.
                    Err(error) if !ends_the_job(&error) => {
                        renewal.not_answered();
                        continue;
                    }
                    Err(error) => error,
                };
                member.has_left();
                let error = manager_error(member.who(), "ConnectService", error);
                drop(member);
                return on_end(error);
            }
        };
        let thread = std::thread::Builder::new().name("paramhub-lease".into()).spawn(renewals);
        let renewals = thread.map_err(|error| WorkerError::System {
            who,
            what: "start a thread",
            reason: error.to_string().into(),
        })?;
        Ok(JobLease { member, stop: Some(stop), renewals: Some(renewals) })
    }

    /// Reports to the manager that this rank's work is done. The job has finished when all ranks have
    /// reported this.
    ///
    /// # Errors
    /// If the manager cannot be reached.
    pub fn leave(self) -> Result<(), WorkerError> {
        self.end(String::new(), true)
    }

    /// Ends the job for all ranks, which receive the reason.
    ///
    /// # Errors
    /// If the manager cannot be reached.
    pub fn abort(self, reason: &str) -> Result<(), WorkerError> {
        self.end(reason.to_owned(), false)
    }

    fn end(mut self, reason: String, finished: bool) -> Result<(), WorkerError> {
        self.stop_renewing();
        let mut member = self.member.lock().unwrap_or_else(PoisonError::into_inner);
        member.has_left();
        let sent = member.send_leave(reason, finished);
        sent.map_err(|cause| manager_error(member.who(), "LeaveService", cause))
    }

    /// Ends the renewals.
    fn stop_renewing(&mut self) {
        self.stop = None;
        if let Some(renewals) = self.renewals.take() {
            // The thread itself does not panic, and a listener's panic is not for this caller.
            let _ = renewals.join();
        }
    }
}

/// Whether a renewal failed because the manager knows the job no more, or knows that it has ended. A manager that does not
/// answer, is stopping or has no place for the call says nothing of the job.
fn ends_the_job(error: &ControlError) -> bool {
    !matches!(error.code(), None | Some(ErrorCode::Internal | ErrorCode::Missing))
}

impl Drop for JobLease {
    fn drop(&mut self) {
        self.stop_renewing();
    }
}
