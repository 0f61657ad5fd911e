//! What a hub says to its manager: it joins, waits for commands and reports, as the product's `manager_link` does.

use std::collections::VecDeque;
use std::time::Duration;

use paramhub_core::job_control::EndReport;
use paramhub_core::service::{
    ErrorCode, HubCommand, HubEvent, HubJobCounters, HubRegistered, HubReport, JobEnd, PollCommands,
    RegisterHub,
};

use crate::call::{Answer, CallError, Caller, Line, Request};
use crate::network::{Arrival, Process, StreamId};
use crate::world::{Context, Wake};

/// How long one poll for commands waits.
const POLL: Duration = Duration::from_secs(1);
/// How often the hub reports.
const REPORT: Duration = Duration::from_secs(1);
/// The pause after a failed call, and before the first attempt to join again.
const RETRY: Duration = Duration::from_millis(500);
/// The longest pause before the next call to a manager that does not answer.
const UNANSWERED_RETRY_MAX: Duration = Duration::from_secs(2);
/// The longest pause between attempts to join.
const RETRY_MAX: Duration = Duration::from_secs(8);
/// How long a call may take that waits for nothing.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// What a poll may take beyond the time that it waits.
const POLL_MARGIN: Duration = Duration::from_secs(10);

/// The two calls of a hub with its manager, which production makes on a thread each.
pub(super) struct ManagerLink {
    process: Process,
    offer: RegisterHub,
    registered: Option<HubRegistered>,
    /// The last command that was taken.
    acknowledged: u64,
    /// The pause before the next attempt to join.
    join_pause: Duration,
    commands: Caller,
    reports: Caller,
    /// Events that came since the last report was made.
    fresh: VecDeque<(HubEvent, Duration, Option<HubJobCounters>)>,
    /// Events in reports that were not taken yet, each with the time at which it happened.
    undelivered: Vec<(HubEvent, Duration)>,
    /// The last counters of jobs that have ended.
    ended: Vec<HubJobCounters>,
    /// When the next report is made.
    next_report: Duration,
    /// A report that failed is not repeated before.
    not_before: Duration,
    outage: Outage,
}

/// A time during which the manager does not answer.
#[derive(Default)]
struct Outage {
    since: Option<Duration>,
    /// For polls and for reports, whether the last attempt failed.
    is_failing: [bool; 2],
    pause: Duration,
}

impl ManagerLink {
    /// A hub that joins after a while.
    pub(super) fn new(process: Process, offer: RegisterHub, context: &mut Context<'_>) -> ManagerLink {
        let wait = context.random.time(&context.starting.clone());
        context.wake_in(process, wait, Wake::Resume(Line::Commands));
        ManagerLink {
            process,
            offer,
            registered: None,
            acknowledged: 0,
            join_pause: RETRY / 2,
            commands: Caller::new(process, Line::Commands, Duration::ZERO),
            reports: Caller::new(process, Line::Reports, Duration::ZERO),
            fresh: VecDeque::new(),
            undelivered: Vec::new(),
            ended: Vec::new(),
            next_report: Duration::ZERO,
            not_before: Duration::ZERO,
            outage: Outage::default(),
        }
    }

    /// When the first call without an answer began, if the manager has not answered since.
    pub(super) fn lost_since(&self) -> Option<Duration> {
        self.outage.since
    }

    /// Whether the manager has taken everything that there was to report.
    pub(super) fn has_reported(&self) -> bool {
        self.fresh.is_empty() && self.undelivered.is_empty()
    }

    /// Reports an event soon.
    pub(super) fn report(&mut self, event: HubEvent, context: &mut Context<'_>) {
        self.fresh.push_back((event, context.agenda.now(), None));
        self.report_soon(context);
    }

    /// Reports soon how a job has ended.
    pub(super) fn report_end(&mut self, report: EndReport, context: &mut Context<'_>) {
        let EndReport { end, since, counters } = report;
        self.fresh.push_back((HubEvent::Ended(end), since, Some(counters)));
        self.report_soon(context);
    }

    fn report_soon(&mut self, context: &mut Context<'_>) {
        if self.registered.is_some() && !self.reports.is_calling() {
            self.report_at(context.agenda.now(), context);
        }
    }

    fn report_at(&mut self, at: Duration, context: &mut Context<'_>) {
        self.next_report = at.max(self.not_before);
        let wait = self.next_report.saturating_sub(context.agenda.now());
        context.wake_in(self.process, wait, Wake::Resume(Line::Reports));
    }

    /// A pause is over, or it is time for a report. `living` are the jobs that the hub's cores have.
    pub(super) fn resume(&mut self, line: Line, living: Vec<HubJobCounters>, context: &mut Context<'_>) {
        match (line, self.registered.clone()) {
            (Line::Commands, _) if self.commands.is_calling() => {}
            (Line::Commands, None) => {
                let request = Request::Register(self.offer.clone());
                self.commands.call(request, CALL_TIMEOUT, context);
            }
            (Line::Commands, Some(registered)) => {
                let poll = PollCommands { acknowledged: self.acknowledged, wait_s: POLL.as_secs_f64() };
                self.commands.call(Request::Poll(registered, poll), POLL + POLL_MARGIN, context);
            }
            (_, Some(registered)) => {
                if self.next_report <= context.agenda.now() && !self.reports.is_calling() {
                    let report = self.next_report(living, context);
                    self.reports.call(Request::Report(registered, report), CALL_TIMEOUT, context);
                }
            }
            (_, None) => {}
        }
    }

    fn next_report(&mut self, living: Vec<HubJobCounters>, context: &mut Context<'_>) -> HubReport {
        // The thread that reports may run before all events are there.
        let taken = if context.random.happens(50) { self.fresh.len() } else { 1 };
        for _ in 0..taken {
            let Some((event, since, counters)) = self.fresh.pop_front() else { break };
            self.undelivered.push((event, since));
            self.ended.extend(counters);
        }
        let now = context.agenda.now();
        let has_ended = |job: &HubJobCounters| self.ended.iter().any(|end| end.namespace == job.namespace);
        let living = living.into_iter().filter(|job| !has_ended(job));
        HubReport {
            events: self.undelivered.iter().map(|(event, since)| aged(event, *since, now)).collect(),
            jobs: living.chain(self.ended.iter().cloned()).collect(),
            ..HubReport::default()
        }
    }

    /// A stream learns something. Returns the commands that came with it.
    pub(super) fn arrived(
        &mut self,
        stream: StreamId,
        arrival: &Arrival,
        context: &mut Context<'_>,
    ) -> Vec<HubCommand> {
        if let Some(ended) = self.commands.arrived(stream, arrival, context) {
            return self.commands_ended(ended, context);
        }
        if let Some(ended) = self.reports.arrived(stream, arrival, context) {
            self.report_ended(&ended, context);
        }
        Vec::new()
    }

    /// A time has come for which a call has waited.
    pub(super) fn call_woken(&mut self, line: Line, awaited: u64, context: &mut Context<'_>) {
        match line {
            Line::Commands => {
                if let Some(ended) = self.commands.woken(awaited, context) {
                    // No commands come with it.
                    let _ = self.commands_ended(ended, context);
                }
            }
            _ => {
                if let Some(ended) = self.reports.woken(awaited, context) {
                    self.report_ended(&ended, context);
                }
            }
        }
    }

    fn commands_ended(
        &mut self,
        ended: Result<Answer, CallError>,
        context: &mut Context<'_>,
    ) -> Vec<HubCommand> {
        let mut taken = Vec::new();
        let pause = match ended {
            Ok(Answer::Registered(registered)) => {
                self.outage.end(0);
                // A new registration has a new count of commands.
                (self.registered, self.acknowledged, self.join_pause) = (Some(registered), 0, RETRY / 2);
                self.report_soon(context);
                Duration::ZERO
            }
            Ok(Answer::Commands(commands)) => {
                self.outage.end(0);
                for numbered in commands {
                    if numbered.sequence > self.acknowledged {
                        self.acknowledged = numbered.sequence;
                        taken.push(numbered.command);
                    }
                }
                Duration::ZERO
            }
            Err(error) if has_forgotten(&error) => {
                context.trace(|| format!("{:?} is forgotten: {error}", self.process));
                self.registered = None;
                self.join_again()
            }
            Err(CallError::Away(_)) if self.registered.is_none() => {
                self.outage.note(0, context.agenda.now());
                self.join_again()
            }
            Err(CallError::Away(_)) => self.outage.note(0, context.agenda.now()),
            other => {
                context.ledger.violate(|| format!("{:?} is answered with {other:?}", self.process));
                RETRY_MAX
            }
        };
        context.wake_in(self.process, pause, Wake::Resume(Line::Commands));
        taken
    }

    fn join_again(&mut self) -> Duration {
        self.join_pause = (self.join_pause * 2).min(RETRY_MAX);
        self.join_pause
    }

    fn report_ended(&mut self, ended: &Result<Answer, CallError>, context: &mut Context<'_>) {
        let now = context.agenda.now();
        let pause = match ended {
            Ok(_) => {
                self.outage.end(1);
                self.undelivered.clear();
                self.ended.clear();
                Duration::ZERO
            }
            Err(error) if has_forgotten(error) => RETRY,
            Err(_) => self.outage.note(1, now),
        };
        self.not_before = now + pause;
        let wait = if self.fresh.is_empty() { REPORT } else { Duration::ZERO };
        self.report_at(self.not_before + wait, context);
    }
}

impl Outage {
    /// Notes that a call had no answer, and returns how long to wait before the next.
    fn note(&mut self, call: usize, now: Duration) -> Duration {
        if self.since.is_none() {
            (self.since, self.pause) = (Some(now), RETRY / 2);
        }
        self.is_failing[call] = true;
        self.pause = (self.pause * 2).min(UNANSWERED_RETRY_MAX);
        self.pause
    }

    /// Notes that the manager has answered a call.
    fn end(&mut self, call: usize) {
        self.is_failing[call] = false;
        if self.is_failing == [false; 2] {
            self.since = None;
        }
    }
}

/// Whether the manager does not know the hub.
fn has_forgotten(error: &CallError) -> bool {
    matches!(error, CallError::Refused(refusal) if matches!(refusal.code, ErrorCode::Unauthorized | ErrorCode::NotFound))
}

/// An event with its age.
fn aged(event: &HubEvent, since: Duration, now: Duration) -> HubEvent {
    match event {
        HubEvent::Ended(end) => {
            HubEvent::Ended(JobEnd { ago_s: now.saturating_sub(since).as_secs_f64(), ..end.clone() })
        }
        other => other.clone(),
    }
}
