//! The hub's two conversations with its connection manager: commands in, events and counters out.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use paramhub_control::{ControlError, ManagerClient};
use paramhub_core::service::{
    CoreCounters, ErrorCode, HubJobCounters, HubRegistered, HubReport, JobCounters, PollCommands,
};
use tracing::warn;

use crate::core::CoreHandle;
use crate::steward::{Letter, News};

/// How long one poll for commands may take; it bounds how late a stopping hub's thread notices.
const POLL_S: f64 = 1.0;
/// How often counters are reported.
const REPORT: Duration = Duration::from_secs(1);
/// Events kept for a manager that cannot be reached; older ones are forgotten.
const UNDELIVERED_MAX: usize = 1024;
/// Pause after the manager could not be reached.
const RETRY: Duration = Duration::from_millis(500);

/// What both conversations share.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) client: ManagerClient,
    pub(crate) registered: Arc<HubRegistered>,
    pub(crate) stop: Arc<AtomicBool>,
    pub(crate) failure: Arc<Mutex<Option<String>>>,
}

impl Link {
    /// Takes commands to the steward until stopped.
    pub(crate) fn take_commands(self, letters: &SyncSender<Letter>) {
        let mut acknowledged = 0;
        while !self.stop.load(Ordering::Acquire) {
            match self.client.poll_commands(&self.registered, &PollCommands { acknowledged, wait_s: POLL_S })
            {
                Ok(answer) => {
                    for numbered in answer.commands {
                        if numbered.sequence > acknowledged {
                            acknowledged = numbered.sequence;
                            if letters.send(Letter::Command(numbered.command)).is_err() {
                                return;
                            }
                        }
                    }
                }
                Err(error) => self.bear(&error),
            }
        }
    }

    /// Reports events as they come and counters every second, until the steward is gone and all is told.
    pub(crate) fn report(self, news: &Receiver<News>, cores: &[CoreHandle]) {
        let mut report = HubReport::default();
        let mut ended: Vec<HubJobCounters> = Vec::new();
        let mut last_report = Instant::now();
        loop {
            let patience = (last_report + REPORT).saturating_duration_since(Instant::now());
            let gone = match news.recv_timeout(patience) {
                Ok(first) => {
                    for news in std::iter::once(first).chain(news.try_iter()) {
                        report.events.push(news.event);
                        ended.extend(news.last_counters);
                    }
                    false
                }
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => true,
            };
            forget_oldest(&mut report.events);
            forget_oldest(&mut ended);
            (report.cores, report.jobs) = counters(cores);
            report.jobs.retain(|living| ended.iter().all(|ended| ended.namespace != living.namespace));
            report.jobs.extend(&ended);
            match self.client.report(&self.registered, &report) {
                // Events that were not delivered go with the next report.
                Err(error) if !gone => self.bear(&error),
                _ => {
                    report.events.clear();
                    ended.clear();
                }
            }
            if gone {
                return;
            }
            last_report = Instant::now();
        }
    }

    /// The manager cannot be reached for now, or has forgotten this hub for good.
    fn bear(&self, error: &ControlError) {
        if self.stop.load(Ordering::Acquire) {
            return;
        }
        warn!("{error}");
        if matches!(error.code(), Some(ErrorCode::Unauthorized | ErrorCode::NotFound)) {
            let reason = format!("the connection manager does not know this hub any more: {error}");
            self.failure.lock().expect("no panic while holding it").get_or_insert(reason);
        }
        std::thread::sleep(RETRY);
    }
}

fn forget_oldest<T>(undelivered: &mut Vec<T>) {
    let surplus = undelivered.len().saturating_sub(UNDELIVERED_MAX);
    if surplus > 0 {
        warn!("the connection manager will not hear of {surplus} events: it has not answered for too long");
        undelivered.drain(..surplus);
    }
}

fn counters(cores: &[CoreHandle]) -> (Vec<CoreCounters>, Vec<HubJobCounters>) {
    let mut jobs: Vec<HubJobCounters> = Vec::new();
    let mut times = Vec::with_capacity(cores.len());
    for core in cores {
        let report = core.report.lock().expect("no panic while counting");
        times.push(report.time);
        for &(namespace, counted) in &report.jobs {
            match jobs.iter_mut().find(|job| job.namespace == namespace) {
                Some(job) => job.counters += counted,
                None => {
                    let mut counters = JobCounters::default();
                    counters += counted;
                    jobs.push(HubJobCounters { namespace, counters });
                }
            }
        }
    }
    (times, jobs)
}
