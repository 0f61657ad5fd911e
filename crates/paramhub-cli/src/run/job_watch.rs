//! Whether a job on several hosts has failed. Workers that wait for others by their own means would not
//! notice.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use paramhub::ManagerClient;
use paramhub::service::{JobState, ServiceCreated};

/// The interval at which the launcher polls the connection manager.
const INTERVAL: Duration = Duration::from_secs(1);
/// The time that a failed job's workers get to end by themselves, as those do whose hub has notified them.
const GRACE: Duration = Duration::from_secs(2);

/// Polls on a thread of its own, since a call may take long.
pub(super) struct JobWatch {
    failure: Receiver<String>,
    /// The ranks that were lost when the manager was asked last, and not reported since.
    lost: Arc<Mutex<Vec<u32>>>,
    /// The thread ends when this is dropped; it is not joined.
    _open: Sender<()>,
    failed: Option<(Instant, String)>,
    /// Whether the job has ended.
    ended: bool,
}

impl JobWatch {
    pub(super) fn start(client: ManagerClient, job: &ServiceCreated) -> anyhow::Result<JobWatch> {
        let (failed_sender, failure) = channel();
        let (open, closed) = channel();
        let namespace = job.namespace.to_string();
        let lost = Arc::new(Mutex::new(Vec::new()));
        let newest = Arc::clone(&lost);
        let watch = move || {
            while let Err(RecvTimeoutError::Timeout) = closed.recv_timeout(INTERVAL) {
                // A manager that does not answer shows nothing about the job. The job's hubs notice what is
                // lost.
                let Ok(status) = client.job(&namespace) else { continue };
                if status.state == JobState::Failed {
                    // The launcher may have ended.
                    let _ =
                        failed_sender.send(format!("job `{}` has failed: {}", status.name, status.message));
                }
                if let Ok(mut newest) = newest.lock() {
                    *newest = status.lost;
                }
                if status.state.has_ended() {
                    return;
                }
            }
        };
        thread::Builder::new().name("run-job-watch".into()).spawn(watch).context("cannot start a thread")?;
        Ok(JobWatch { failure, lost, _open: open, failed: None, ended: false })
    }

    /// The reason to end the workers, once the job has failed and the grace period is over.
    pub(super) fn failure(&mut self) -> Option<String> {
        self.listen();
        let (_, reason) = self.failed.as_ref().filter(|(since, _)| since.elapsed() >= GRACE)?;
        Some(reason.clone())
    }

    /// A rank that was lost when the manager was asked last; each once.
    pub(super) fn take_lost(&mut self) -> Option<u32> {
        self.lost.lock().ok()?.pop()
    }

    /// Whether the job has ended, well or not, as far as the manager has said so.
    pub(super) fn has_ended(&mut self) -> bool {
        self.listen();
        self.ended
    }

    fn listen(&mut self) {
        match self.failure.try_recv() {
            Ok(reason) => (self.failed, self.ended) = (Some((Instant::now(), reason)), true),
            // The thread ends with the job.
            Err(TryRecvError::Disconnected) => self.ended = true,
            Err(TryRecvError::Empty) => {}
        }
    }
}
