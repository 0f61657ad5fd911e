//! The hub's two conversations with its connection manager: commands in, events and counters out.

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

use crate::checkpoint::Board;
use crate::core::CoreHandle;
use crate::steward::{Letter, News};

/// How long one poll for commands may take; it bounds how late a stopping hub's thread notices.
const POLL_S: f64 = 1.0;
/// How often counters are reported.
const REPORT: Duration = Duration::from_secs(1);
/// Events kept for a manager that cannot be reached; older ones are forgotten.
const UNDELIVERED_MAX: usize = 1024;
/// Pause after the manager could not be reached, and before the first attempt to join it again.
const RETRY: Duration = Duration::from_millis(500);
/// Longest pause of one that does not answer: it counts a hub as lost after ten seconds of silence, and may be back any moment.
const AWAY_MAX: Duration = Duration::from_secs(2);
/// Longest pause between attempts to join again, each twice the one before.
const RETRY_MAX: Duration = Duration::from_secs(8);
/// A manager that forgets a hub sooner than this after it had joined is not one that was just restarted.
const BRIEF: Duration = Duration::from_secs(10);
/// How often in a row that may happen before the hub gives up.
const BRIEF_MAX: u32 = 3;

/// What both conversations share.
#[derive(Clone)]
pub(crate) struct Link {
    client: ManagerClient,
    offer: RegisterHub,
    /// As what the manager knows this hub; replaced when the hub has joined again.
    registered: Arc<Mutex<Arc<HubRegistered>>>,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<String>>>,
    absence: Arc<Absence>,
}

impl Link {
    /// Joins the manager.
    pub(crate) fn join(
        client: ManagerClient,
        offer: RegisterHub,
        stop: Arc<AtomicBool>,
        failure: Arc<Mutex<Option<String>>>,
    ) -> Result<Link, ControlError> {
        let registered = client.register_hub(&offer)?;
        info!("joined {} as hub {}", client.url(), registered.hub);
        let registered = Arc::new(Mutex::new(Arc::new(registered)));
        Ok(Link { client, offer, registered, stop, failure, absence: Arc::default() })
    }

    pub(crate) fn absence(&self) -> Arc<Absence> {
        Arc::clone(&self.absence)
    }

    /// Takes commands to the steward until stopped, and joins a manager again that has forgotten this hub.
    pub(crate) fn take_commands(self, letters: &SyncSender<Letter>) {
        let mut acknowledged = 0;
        let mut stay = Stay::begin();
        while !self.stop.load(Ordering::Acquire) {
            let registered = self.registered();
            let asked = Instant::now();
            match self.client.poll_commands(&registered, &PollCommands { acknowledged, wait_s: POLL_S }) {
                Ok(answer) => {
                    self.absence.end(Conversation::Commands, self.client.url());
                    for numbered in answer.commands {
                        if numbered.sequence > acknowledged {
                            acknowledged = numbered.sequence;
                            if letters.send(Letter::Command(numbered.command)).is_err() {
                                return;
                            }
                        }
                    }
                }
                Err(error) if has_forgotten(&error) => {
                    if !self.join_again(&mut stay, &error) {
                        return;
                    }
                    // Another count of commands has begun.
                    acknowledged = 0;
                }
                Err(error) => self.bear(Conversation::Commands, &error, asked),
            }
        }
    }

    /// Reports events as they come and counters every second, until the steward is gone and all is told.
    pub(crate) fn report(self, news: &Receiver<News>, cores: &[CoreHandle], board: &Board) {
        let mut report = HubReport::default();
        let mut undelivered: Vec<(HubEvent, Instant)> = Vec::new();
        let mut ended: Vec<HubJobCounters> = Vec::new();
        let mut last_report = Instant::now();
        loop {
            let patience = (last_report + REPORT).saturating_duration_since(Instant::now());
            let gone = match news.recv_timeout(patience) {
                Ok(first) => {
                    for news in std::iter::once(first).chain(news.try_iter()) {
                        match news {
                            News::Event(event) => undelivered.push((event, Instant::now())),
                            News::Ended(end, since, counters) => {
                                undelivered.push((HubEvent::Ended(end), since));
                                ended.push(counters);
                            }
                            News::Leaving => report.presence = Presence::Leaving,
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
            forget_oldest(&mut undelivered);
            forget_oldest(&mut ended);
            report.events = undelivered.iter().map(|(event, since)| aged(event, *since)).collect();
            (report.cores, report.jobs) = counters(cores);
            report.jobs.retain(|living| ended.iter().all(|ended| ended.namespace != living.namespace));
            report.jobs.extend(ended.iter().cloned());
            report.checkpoints = board.read();
            let asked = Instant::now();
            match self.client.report(&self.registered(), &report) {
                // Events that were not delivered go with the next report. Counters of jobs that a restarted manager
                // does not know go there, too: it answers with commands to end them.
                Err(error) if !gone => self.bear(Conversation::Reports, &error, asked),
                answer => {
                    if answer.is_ok() {
                        self.absence.end(Conversation::Reports, self.client.url());
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

    /// Joins a manager that has forgotten this hub, however long it cannot be reached. False once the hub has stopped, or
    /// has failed because it is not wanted there.
    fn join_again(&self, stay: &mut Stay, forgotten: &ControlError) -> bool {
        let mut pause = stay.end();
        if stay.brief > BRIEF_MAX {
            self.fail(format!(
                "the connection manager at {} has forgotten this hub {BRIEF_MAX} times within {} s of its joining: does \
                 another hub join it with the same address? It says: {forgotten}",
                self.client.url(),
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
                    self.absence.end(Conversation::Commands, self.client.url());
                    info!("joined {} again, as hub {}", self.client.url(), registered.hub);
                    *self.registered.lock().expect("no panic while holding it") = Arc::new(registered);
                    *stay = Stay { began: Instant::now(), ..*stay };
                    return true;
                }
                // `Internal` is what a manager answers that is stopping.
                Err(error) if !matches!(error.code(), None | Some(ErrorCode::Internal)) => {
                    self.fail(format!(
                        "the connection manager at {} has forgotten this hub and does not let it join again: {error}",
                        self.client.url()
                    ));
                    return false;
                }
                Err(error) => {
                    self.absence.note(Conversation::Commands, &error, asked);
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

    /// The manager cannot be reached for now, or the other conversation is about to join it again.
    fn bear(&self, conversation: Conversation, error: &ControlError, asked: Instant) {
        if self.stop.load(Ordering::Acquire) {
            return;
        }
        let pause = if has_forgotten(error) { RETRY } else { self.absence.note(conversation, error, asked) };
        std::thread::sleep(pause);
    }
}

/// One of the two threads that speak with the manager.
#[derive(Clone, Copy)]
enum Conversation {
    Commands,
    Reports,
}

/// A time during which the manager does not answer. Both conversations notice it: the log hears once that it began, and once, when
/// both are answered, that it is over, however long it lasts.
#[derive(Default)]
pub(crate) struct Absence {
    current: Mutex<Option<Away>>,
}

struct Away {
    since: Instant,
    /// By conversation: whether its last call failed.
    is_failing: [bool; 2],
    /// Before the next attempt.
    pause: Duration,
}

impl Absence {
    /// When the manager was first asked in vain, if it has not answered since.
    pub(crate) fn since(&self) -> Option<Instant> {
        self.current.lock().expect("no panic while holding it").as_ref().map(|away| away.since)
    }

    /// Notes that the manager, which was asked then, has not answered, and says how long to wait before it is asked again.
    fn note(&self, conversation: Conversation, error: &ControlError, asked: Instant) -> Duration {
        let mut current = self.current.lock().expect("no panic while holding it");
        let is_news = current.is_none();
        let away =
            current.get_or_insert_with(|| Away { since: asked, is_failing: [false; 2], pause: RETRY / 2 });
        away.is_failing[conversation as usize] = true;
        away.pause = (away.pause * 2).min(AWAY_MAX);
        if is_news {
            warn!("{error} Jobs that run go on; this hub asks again until it is answered");
        }
        away.pause
    }

    /// It has answered.
    fn end(&self, conversation: Conversation, url: &str) {
        let mut current = self.current.lock().expect("no panic while holding it");
        let Some(away) = &mut *current else { return };
        away.is_failing[conversation as usize] = false;
        if !away.is_failing.contains(&true) {
            let seconds = away.since.elapsed().as_secs_f64();
            *current = None;
            warn!("the connection manager at {url} answers again, after {seconds:.1} s");
        }
    }
}

/// One time of belonging to a manager, and how many brief ones came before it.
struct Stay {
    began: Instant,
    brief: u32,
}

impl Stay {
    fn begin() -> Stay {
        Stay { began: Instant::now(), brief: 0 }
    }

    /// Counts it, and says how long to wait before the next.
    fn end(&mut self) -> Duration {
        self.brief = if self.began.elapsed() < BRIEF { self.brief + 1 } else { 0 };
        (RETRY * 2u32.saturating_pow(self.brief.saturating_sub(1))).min(RETRY_MAX)
    }
}

/// Whether the manager restarted, or has not heard this hub for too long.
fn has_forgotten(error: &ControlError) -> bool {
    matches!(error.code(), Some(ErrorCode::Unauthorized | ErrorCode::NotFound))
}

/// An event, with how long ago it was.
fn aged(event: &HubEvent, since: Instant) -> HubEvent {
    match event {
        HubEvent::Ended(end) => {
            HubEvent::Ended(JobEnd { ago_s: since.elapsed().as_secs_f64(), ..end.clone() })
        }
        other => other.clone(),
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
