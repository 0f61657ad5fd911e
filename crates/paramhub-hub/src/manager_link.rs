//! The hub's two calls with its connection manager: commands in, events and counters out.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use paramhub_control::{ControlError, ManagerClient};
use paramhub_core::service::{
    CoreCounters, ErrorCode, HubEvent, HubJobCounters, HubRegistered, HubReport, JobCounters, JobEnd,
    PollCommands, Presence, RegisterHub, add_by_rank,
};
use tracing::{info, warn};

use crate::checkpoint::CheckpointStatuses;
use crate::core::CoreHandle;
use crate::events::{ControllerEvent, ReportEvent};

/// How long one poll for commands may take; it bounds the delay with which a stopping hub's thread notices
/// the stop.
const POLL_S: f64 = 1.0;
/// How often the hub reports counters.
const REPORT: Duration = Duration::from_secs(1);
/// Events kept for a manager that cannot be reached; older ones are dropped.
const UNDELIVERED_MAX: usize = 1024;
/// Pause after a failed call to the manager, and before the first attempt to join it again.
const RETRY: Duration = Duration::from_millis(500);
/// The longest pause before the next call to a manager that does not answer: it gives no jobs to a hub after ten
/// seconds of silence, and may be back at any time.
const UNANSWERED_RETRY_MAX: Duration = Duration::from_secs(2);
/// The longest pause between attempts to join again; each pause is twice the one before.
const RETRY_MAX: Duration = Duration::from_secs(8);
/// A manager that forgets a hub sooner than this after it joined was not just restarted.
const BRIEF: Duration = Duration::from_secs(10);
/// How often in a row this may happen before the hub gives up.
const BRIEF_MAX: u32 = 3;

/// What the two calls share.
#[derive(Clone)]
pub(crate) struct ManagerLink {
    client: ManagerClient,
    offer: RegisterHub,
    /// The hub's registration at the manager; replaced when the hub has joined again.
    registered: Arc<Mutex<Arc<HubRegistered>>>,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<String>>>,
    outage: Arc<ManagerOutage>,
}

impl ManagerLink {
    /// Joins the manager.
    pub(crate) fn join(
        client: ManagerClient,
        offer: RegisterHub,
        stop: Arc<AtomicBool>,
        failure: Arc<Mutex<Option<String>>>,
    ) -> Result<ManagerLink, ControlError> {
        let registered = client.register_hub(&offer)?;
        info!("joined {} as hub {}", client.url(), registered.hub);
        let registered = Arc::new(Mutex::new(Arc::new(registered)));
        // From here on the two calls are patient by themselves, and look between attempts whether the hub stops.
        let client = client.with_retry_timeout(Duration::ZERO);
        Ok(ManagerLink { client, offer, registered, stop, failure, outage: Arc::default() })
    }

    pub(crate) fn outage(&self) -> Arc<ManagerOutage> {
        Arc::clone(&self.outage)
    }

    /// Passes commands to the job controller until stopped, and joins again a manager that has forgotten this
    /// hub.
    pub(crate) fn take_commands(self, controller: &SyncSender<ControllerEvent>) {
        let mut acknowledged = 0;
        let mut registration = Registration::begin();
        while !self.stop.load(Ordering::Acquire) {
            let registered = self.registered();
            let asked = Instant::now();
            match self.client.poll_commands(&registered, &PollCommands { acknowledged, wait_s: POLL_S }) {
                Ok(answer) => {
                    self.outage.end(ManagerCall::Commands, self.client.url());
                    for numbered in answer.commands {
                        if numbered.sequence > acknowledged {
                            acknowledged = numbered.sequence;
                            if controller.send(ControllerEvent::Command(numbered.command)).is_err() {
                                return;
                            }
                        }
                    }
                }
                Err(error) if has_forgotten(&error) => {
                    if !self.join_again(&mut registration, &error) {
                        return;
                    }
                    // A new registration has a new count of commands.
                    acknowledged = 0;
                }
                Err(error) => self.await_retry(ManagerCall::Commands, &error, asked),
            }
        }
    }

    /// Reports events as they come and counters every second, until the job controller is gone and everything
    /// is reported.
    pub(crate) fn report(
        self,
        events: &Receiver<ReportEvent>,
        cores: &[CoreHandle],
        checkpoint_statuses: &CheckpointStatuses,
    ) {
        let mut report = HubReport::default();
        let mut undelivered: Vec<(HubEvent, Instant)> = Vec::new();
        let mut ended: Vec<HubJobCounters> = Vec::new();
        let mut last_report = Instant::now();
        loop {
            let patience = (last_report + REPORT).saturating_duration_since(Instant::now());
            let gone = match events.recv_timeout(patience) {
                Ok(first) => {
                    for event in std::iter::once(first).chain(events.try_iter()) {
                        match event {
                            ReportEvent::Event(event) => undelivered.push((event, Instant::now())),
                            ReportEvent::Ended(end, since, counters) => {
                                undelivered.push((HubEvent::Ended(end), since));
                                ended.push(counters);
                            }
                            ReportEvent::Leaving => report.presence = Presence::Leaving,
                        }
                    }
                    false
                }
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => true,
            };
            if gone {
                report.presence = Presence::Gone;
            }
            forget_notices(&mut undelivered);
            forget_oldest(&mut undelivered);
            forget_oldest(&mut ended);
            report.events = undelivered.iter().map(|(event, since)| aged(event, *since)).collect();
            (report.cores, report.jobs) = counters(cores);
            report.jobs.retain(|living| ended.iter().all(|ended| ended.namespace != living.namespace));
            report.jobs.extend(ended.iter().cloned());
            report.checkpoints = checkpoint_statuses.read();
            let asked = Instant::now();
            match self.client.report(&self.registered(), &report) {
                // Events that were not delivered go with the next report. Counters of jobs that a restarted
                // manager does not know go there, too; it answers with commands to end these jobs.
                Err(error) if !gone => self.await_retry(ManagerCall::Reports, &error, asked),
                answer => {
                    if answer.is_ok() {
                        self.outage.end(ManagerCall::Reports, self.client.url());
                    }
                    undelivered.clear();
                    ended.clear();
                }
            }
            if gone {
                return;
            }
            last_report = Instant::now();
        }
    }

    /// Joins a manager that has forgotten this hub, however long it cannot be reached. `false` once the hub
    /// has stopped, or has failed because the manager refuses it.
    fn join_again(&self, registration: &mut Registration, forgotten: &ControlError) -> bool {
        let mut pause = registration.end();
        if registration.brief_in_a_row > BRIEF_MAX {
            self.fail(format!(
                "the connection manager at {} has forgotten this hub {} times in a row within {} s of its joining: does \
                 another hub join it with the same address? It says: {forgotten}",
                self.client.url(),
                registration.brief_in_a_row,
                BRIEF.as_secs()
            ));
            return false;
        }
        if !self.stop.load(Ordering::Acquire) {
            warn!(
                "the connection manager has forgotten this hub, which joins it again; jobs end: {forgotten}"
            );
        }
        loop {
            std::thread::sleep(pause);
            if self.stop.load(Ordering::Acquire) {
                return false;
            }
            let asked = Instant::now();
            match self.client.register_hub(&self.offer) {
                Ok(registered) => {
                    self.outage.end(ManagerCall::Commands, self.client.url());
                    info!("joined {} again, as hub {}", self.client.url(), registered.hub);
                    *self.registered.lock().expect("no panic while holding it") = Arc::new(registered);
                    *registration = Registration { began: Instant::now(), ..*registration };
                    return true;
                }
                // A manager that is stopping answers `Internal`.
                Err(error) if !matches!(error.code(), None | Some(ErrorCode::Internal)) => {
                    self.fail(format!(
                        "the connection manager at {} has forgotten this hub and does not let it join again: {error}",
                        self.client.url()
                    ));
                    return false;
                }
                Err(error) => {
                    self.outage.note(ManagerCall::Commands, &error, asked);
                }
            }
            pause = (pause * 2).min(RETRY_MAX);
        }
    }

    fn registered(&self) -> Arc<HubRegistered> {
        self.registered.lock().expect("no panic while holding it").clone()
    }

    fn fail(&self, reason: String) {
        self.failure.lock().expect("no panic while holding it").get_or_insert(reason);
    }

    /// Waits before the next call: the manager cannot be reached for now, or the other call is about to join
    /// it again.
    fn await_retry(&self, call: ManagerCall, error: &ControlError, asked: Instant) {
        if self.stop.load(Ordering::Acquire) {
            return;
        }
        let pause = if has_forgotten(error) { RETRY } else { self.outage.note(call, error, asked) };
        std::thread::sleep(pause);
    }
}

/// One of the two threads that call the manager.
#[derive(Clone, Copy)]
enum ManagerCall {
    Commands,
    Reports,
}

/// A time during which the manager does not answer. Both calls notice it. However long it lasts, the log has
/// one line when it begins, and one when both calls are answered again.
#[derive(Default)]
pub(crate) struct ManagerOutage {
    current: Mutex<Option<Outage>>,
}

struct Outage {
    since: Instant,
    /// For each call: whether its last attempt failed.
    is_failing: [bool; 2],
    /// The pause before the next attempt.
    pause: Duration,
}

impl ManagerOutage {
    /// When the first call without an answer began, if the manager has not answered since.
    pub(crate) fn since(&self) -> Option<Instant> {
        self.current
            .lock()
            .expect("no panic while holding it")
            .as_ref()
            .map(|current_outage| current_outage.since)
    }

    /// Notes that the manager has not answered a call, and returns how long to wait before the next.
    fn note(&self, call: ManagerCall, error: &ControlError, asked: Instant) -> Duration {
        let mut current = self.current.lock().expect("no panic while holding it");
        let is_news = current.is_none();
        let current_outage =
            current.get_or_insert_with(|| Outage { since: asked, is_failing: [false; 2], pause: RETRY / 2 });
        current_outage.is_failing[call as usize] = true;
        current_outage.pause = (current_outage.pause * 2).min(UNANSWERED_RETRY_MAX);
        if is_news {
            warn!("{error} Jobs that run go on; this hub asks again until it is answered");
        }
        current_outage.pause
    }

    /// Notes that the manager has answered.
    fn end(&self, call: ManagerCall, url: &str) {
        let mut current = self.current.lock().expect("no panic while holding it");
        let Some(current_outage) = &mut *current else { return };
        current_outage.is_failing[call as usize] = false;
        if !current_outage.is_failing.contains(&true) {
            let seconds = current_outage.since.elapsed().as_secs_f64();
            *current = None;
            warn!("the connection manager at {url} answers again, after {seconds:.1} s");
        }
    }
}

/// One registration at a manager, and how many brief ones came before it in a row.
struct Registration {
    began: Instant,
    brief_in_a_row: u32,
}

impl Registration {
    fn begin() -> Registration {
        Registration { began: Instant::now(), brief_in_a_row: 0 }
    }

    /// Counts the registration, and returns how long to wait before the next.
    fn end(&mut self) -> Duration {
        self.brief_in_a_row = if self.began.elapsed() < BRIEF { self.brief_in_a_row + 1 } else { 0 };
        (RETRY * 2u32.saturating_pow(self.brief_in_a_row.saturating_sub(1))).min(RETRY_MAX)
    }
}

/// Whether the manager was restarted, or has not heard from this hub for too long.
fn has_forgotten(error: &ControlError) -> bool {
    matches!(error.code(), Some(ErrorCode::Unauthorized | ErrorCode::NotFound))
}

/// An event with its age.
fn aged(event: &HubEvent, since: Instant) -> HubEvent {
    match event {
        HubEvent::Ended(end) => {
            HubEvent::Ended(JobEnd { ago_s: since.elapsed().as_secs_f64(), ..end.clone() })
        }
        other => other.clone(),
    }
}

/// Drops the oldest notices beyond the events that are kept. What says how a job has ended stays for longer, since nobody
/// else may be there to say it.
fn forget_notices(undelivered: &mut Vec<(HubEvent, Instant)>) {
    let surplus = undelivered.len().saturating_sub(UNDELIVERED_MAX);
    let mut dropped = 0;
    undelivered.retain(|(event, _)| {
        let is_notice = matches!(event, HubEvent::Noticed { .. } | HubEvent::Awaited { .. });
        let is_dropped = is_notice && dropped < surplus;
        dropped += usize::from(is_dropped);
        !is_dropped
    });
    if dropped > 0 {
        warn!("the connection manager will not hear of {dropped} notices: it has not answered for too long");
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
                    jobs.push(HubJobCounters { namespace, counters, left_out: Vec::new() });
                }
            }
        }
        for &(namespace, rank, updates) in &report.left_out {
            if let Some(job) = jobs.iter_mut().find(|job| job.namespace == namespace) {
                let mut counted = vec![0; rank as usize + 1];
                counted[rank as usize] = updates;
                add_by_rank(&mut job.left_out, &counted);
            }
        }
    }
    (times, jobs)
}
