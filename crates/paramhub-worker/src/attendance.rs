//! Being in a job that no hub serves.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::WorkerError;
use crate::member::{Member, manager_error};

/// How often the manager hears of a rank, and a rank of the job's end.
const SIGN: Duration = Duration::from_secs(2);

/// A rank's stay in a job whose ranks exchange among themselves. Dropped without having left, it ends the job for all.
#[derive(Debug)]
pub struct Attendance {
    member: Arc<Mutex<Member>>,
    /// Ends the thread by its end.
    stays: Option<Sender<()>>,
    signs: Option<JoinHandle<()>>,
}

impl Attendance {
    pub(crate) fn new(
        member: Member,
        on_end: impl FnOnce(WorkerError) + Send + 'static,
    ) -> Result<Attendance, WorkerError> {
        let who = member.who();
        // Several signs within a lease.
        let lease = member.lease();
        let every = SIGN.min(lease / 4);
        let member = Arc::new(Mutex::new(member));
        let (stays, left) = channel::<()>();
        let heard = Arc::clone(&member);
        let signs = move || {
            let mut answered = Instant::now();
            while left.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                let mut member = heard.lock().unwrap_or_else(PoisonError::into_inner);
                let Err(error) = member.call_again() else {
                    answered = Instant::now();
                    continue;
                };
                // A manager that is out of reach for a while is no reason to stop what needs it not.
                if error.code().is_none() && answered.elapsed() < lease {
                    continue;
                }
                member.has_left();
                let error = manager_error(member.who(), "ConnectService", error);
                drop(member);
                return on_end(error);
            }
        };
        let thread = std::thread::Builder::new().name("paramhub-attendance".into()).spawn(signs);
        let signs = thread.map_err(|error| WorkerError::System {
            who,
            what: "start a thread",
            reason: error.to_string().into(),
        })?;
        Ok(Attendance { member, stays: Some(stays), signs: Some(signs) })
    }

    /// Says that this rank's work is done. The job has finished when every rank's is.
    ///
    /// # Errors
    /// If the manager cannot be told.
    pub fn leave(self) -> Result<(), WorkerError> {
        self.tell(String::new(), true)
    }

    /// Ends the job for all, for a reason that they are told.
    ///
    /// # Errors
    /// If the manager cannot be told.
    pub fn give_up(self, reason: &str) -> Result<(), WorkerError> {
        self.tell(reason.to_owned(), false)
    }

    fn tell(mut self, reason: String, finished: bool) -> Result<(), WorkerError> {
        self.rest();
        let mut member = self.member.lock().unwrap_or_else(PoisonError::into_inner);
        member.has_left();
        let told = member.tell_leave(reason, finished);
        told.map_err(|cause| manager_error(member.who(), "LeaveService", cause))
    }

    /// Gives no further sign.
    fn rest(&mut self) {
        self.stays = None;
        if let Some(signs) = self.signs.take() {
            // It has no panic of its own, and a listener's is not this caller's.
            let _ = signs.join();
        }
    }
}

impl Drop for Attendance {
    fn drop(&mut self) {
        self.rest();
    }
}
