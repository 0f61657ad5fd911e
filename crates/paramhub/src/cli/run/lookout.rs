//! Whether a job on several hosts has failed: workers that wait for others by means of their own would never hear of it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::ManagerClient;
use crate::service::{JobState, ServiceCreated};

/// How often the connection manager is asked.
const INTERVAL: Duration = Duration::from_secs(1);
/// What a job's workers get to end by themselves, as those do whom their hub has told.
const GRACE: Duration = Duration::from_secs(2);

/// Asks on a thread of its own: an answer may take as long as a call may.
pub(super) struct Lookout {
    failure: Receiver<String>,
    /// The thread ends when this does; nobody waits for it.
    _open: Sender<()>,
    failed: Option<(Instant, String)>,
}

impl Lookout {
    pub(super) fn start(client: ManagerClient, job: &ServiceCreated) -> anyhow::Result<Lookout> {
        let (tell, failure) = channel();
        let (open, closed) = channel();
        let namespace = job.namespace.to_string();
        let looks = move || {
            while let Err(RecvTimeoutError::Timeout) = closed.recv_timeout(INTERVAL) {
                // A manager that does not answer says nothing of the job, whose hubs notice what is lost.
                let Ok(status) = client.job(&namespace) else { continue };
                if status.state == JobState::Failed {
                    // A launcher that is gone needs no reason.
                    let _ = tell.send(format!("job `{}` has failed: {}", status.name, status.message));
                }
                if status.state.has_ended() {
                    return;
                }
            }
        };
        thread::Builder::new().name("run-lookout".into()).spawn(looks).context("cannot start a thread")?;
        Ok(Lookout { failure, _open: open, failed: None })
    }

    /// Why the workers have nothing left to do, if so.
    pub(super) fn failure(&mut self) -> Option<String> {
        match self.failure.try_recv() {
            Ok(reason) => self.failed = Some((Instant::now(), reason)),
            Err(TryRecvError::Empty | TryRecvError::Disconnected) => {}
        }
        let (_, reason) = self.failed.as_ref().filter(|(since, _)| since.elapsed() >= GRACE)?;
        Some(reason.clone())
    }
}
