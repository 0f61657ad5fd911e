//! What must hold of a hub's jobs after every event.

use std::time::Duration;

use paramhub_core::auth::Namespace;
use paramhub_core::job_control::{LAST_CHECKPOINT_TIMEOUT, OUTCOME_TIMEOUT, Output, READING_SHARE, RESUME};
use paramhub_core::service::{CauseKind, HubEvent, JobEnd};

use super::{INTERFACES, RENDEZVOUS, Route, Simulation, Writer};

impl Simulation {
    /// An event ends a job for this reason, unless another has ended it before.
    pub(super) fn expect_end(&mut self, namespace: Namespace, reason: &str, cause: CauseKind) {
        let is_done = self.cores_stopped;
        let job = self.job(namespace);
        if job.is_living() && job.first_cause.is_none() && !is_done {
            // The launcher has ended the rank that is now lost.
            let announced = job.announced.clone().filter(|_| cause != CauseKind::Known);
            job.first_cause = Some(announced.unwrap_or_else(|| reason.to_string()));
        }
    }

    pub(super) fn carry_out(&mut self) {
        for output in self.control.take_outputs() {
            assert!(!self.cores_stopped, "after the end of the hub: {output:?}");
            self.check(output);
        }
    }

    fn check(&mut self, output: Output) {
        match output {
            Output::Load(namespace) => {
                let now = self.now;
                let job = self.here(namespace);
                assert!(job.terms.resumes && !std::mem::replace(&mut job.is_loading, true));
                job.loading_since = Some(now);
            }
            Output::Open(namespace) => {
                let job = self.here(namespace);
                assert!(!job.is_freeing && job.routes.iter().all(|route| *route == Route::Planned));
                job.routes.fill(Route::Opening);
            }
            Output::OpenFurther { .. } => panic!("no job here has standbys"),
            Output::AdmitStreams(namespace) => {
                let now = self.now;
                let job = self.here(namespace);
                assert!(job.routes.iter().all(|route| *route == Route::Open), "a core has not allocated");
                assert_eq!(job.admitted.replace(now), None);
            }
            Output::RefuseStreams { namespace, message } => self.check_cause(namespace, &message),
            Output::Link { namespace, until } => {
                let expected = self.now + RENDEZVOUS;
                self.here(namespace);
                assert_eq!(until, expected);
            }
            Output::StartCheckpoints(namespace) => {
                let job = self.here(namespace);
                assert_eq!(std::mem::replace(&mut job.writer, Writer::Running), Writer::None);
                assert!(job.admitted.is_some() && job.terms.writes_checkpoints);
            }
            Output::TakeLastCheckpoint { namespace, before } => {
                let now = self.now;
                let job = self.here(namespace);
                assert_eq!(job.writer, Writer::Running);
                job.last_asked.push_back(before.goes_on());
                if job.have_all_left() {
                    job.finishing_since.get_or_insert(now);
                }
            }
            Output::StopCheckpoints(namespace) => {
                let job = self.here(namespace);
                assert!(!job.is_freeing, "the cores free what it copies");
                assert_eq!(std::mem::replace(&mut job.writer, Writer::Stopped), Writer::Running);
            }
            Output::Notify { namespace, core, .. } => {
                let routes = &self.here(namespace).terms.routes;
                assert!(routes.iter().any(|route| route.core == core));
            }
            Output::RefuseRank { .. }
            | Output::AdmitRank { .. }
            | Output::ChangeRank { .. }
            | Output::Rewind { .. } => {
                panic!("no rank of these jobs is replaced")
            }
            Output::ChangeRole { .. }
            | Output::NoteShares { .. }
            | Output::LinkStandbys { .. }
            | Output::SendElsewhere { .. } => {
                panic!("these jobs have no standbys")
            }
            Output::End { namespace, failure, .. } => {
                let job = self.here(namespace);
                assert_ne!(job.writer, Writer::Running, "it copies what is freed");
                assert!(failure.is_none() || job.is_refusing, "streams could still be admitted");
                job.is_freeing = true;
            }
            Output::Forget(namespace) => {
                let job = self.here(namespace);
                assert_eq!(job.ends, 1, "reports of the end of {}", job.terms.name);
                job.is_over = true;
            }
            Output::Plan(plan) => unreachable!("job {} has one part here", plan.name),
            Output::Report(event) => self.check_report(&event),
            Output::ReportEnd(report) => self.check_end(&report.end),
            Output::StopCores => self.cores_stopped = true,
            Output::Probe { .. } | Output::ReportLeaving | Output::Info(_) | Output::Warning(_) => {}
        }
    }

    /// A job that is here: nothing may happen to another.
    fn here(&mut self, namespace: Namespace) -> &mut super::SimulatedJob {
        let job = self.job(namespace);
        assert!(!job.is_over, "{} is over", job.terms.name);
        job
    }

    fn check_report(&mut self, event: &HubEvent) {
        match event {
            HubEvent::Allocated { namespace, .. } => assert!(self.here(*namespace).admitted.is_some()),
            HubEvent::Refused { namespace, .. } => {
                let now = self.now;
                let job = self.here(*namespace);
                assert!(job.admitted.is_none() && !job.is_refusing, "it was admitted, or has ended");
                job.ends += 1;
                if job.is_loading {
                    assert!(now >= job.loading_since.unwrap() + reading_limit(), "too early");
                    job.is_refused = true;
                }
            }
            HubEvent::Noticed { namespace, .. } | HubEvent::Awaited { namespace, .. } => {
                self.here(*namespace);
            }
            // The answer to a stop of a job that the hub does not know.
            HubEvent::Ended(end) => assert!(self.job(end.namespace).is_over),
            HubEvent::WorkerLost { .. }
            | HubEvent::WorkerLeft { .. }
            | HubEvent::RankExpected { .. }
            | HubEvent::RankJoined { .. } => {
                panic!("no rank of these jobs is replaced")
            }
            HubEvent::HubLost { .. } | HubEvent::StandbyReady { .. } => panic!("these jobs have no standbys"),
            HubEvent::Kept { .. } | HubEvent::Probed(_) | HubEvent::AllReported { .. } => {}
        }
    }

    /// The end of a job is decided: for the first cause, and for no other.
    fn check_cause(&mut self, namespace: Namespace, message: &str) {
        let by_time = self.due(namespace);
        let is_stopping = self.stopping.is_some();
        let job = self.here(namespace);
        assert!(!std::mem::replace(&mut job.is_refusing, true), "it ends twice");
        if message.ends_with("has finished") {
            assert!(job.have_all_left() && job.first_cause.is_none(), "{message}: {:?}", job.first_cause);
            assert!(job.writer == Writer::None || job.last_taken, "without its last checkpoint");
            job.first_cause = Some(String::new());
            return;
        }
        let causes = match &job.first_cause {
            Some(first) => vec![first.clone()],
            None if is_stopping => vec!["shutting down".to_string()],
            None => by_time,
        };
        let first = causes.into_iter().find(|cause| message.contains(cause.as_str()));
        job.first_cause = Some(first.unwrap_or_else(|| panic!("{message}, not for {:?}", job.first_cause)));
    }

    /// The reasons for which a job must have ended by now because a wait is over.
    fn due(&self, namespace: Namespace) -> Vec<String> {
        let (now, job) = (self.now, &self.jobs[&namespace]);
        let announced = |reason: &str| job.announced.clone().unwrap_or_else(|| reason.to_string());
        let mut due = Vec::new();
        if self.stopping.is_some() || !job.is_living() {
            return due;
        }
        if job.admitted.is_some_and(|since| now >= since + RENDEZVOUS) && !job.missing().is_empty() {
            due.push(announced("did not open all streams"));
        }
        if let Some((since, reason)) = &job.concluding
            && now >= *since + OUTCOME_TIMEOUT
            && !job.have_all_left()
        {
            due.push(announced(reason));
        }
        if job.is_loading && job.loading_since.is_some_and(|since| now >= since + reading_limit()) {
            due.push("a checkpoint that is still being read".into());
        }
        if job.finishing_since.is_some_and(|since| now >= since + LAST_CHECKPOINT_TIMEOUT) && !job.last_taken
        {
            due.push("its last checkpoint was not taken".into());
        }
        let is_cut = |since: Duration| {
            let is_alone = self.interfaces_down.len() == usize::from(INTERFACES);
            !job.terms.continues || is_alone || now >= since + RESUME
        };
        let counts = |port| !job.terms.continues || !job.left.contains(port);
        for (&number, &since) in &self.interfaces_down {
            if is_cut(since) && job.streams.iter().any(|(port, by)| *by == number && counts(port)) {
                due.push(format!("interface {number} is down"));
            }
        }
        due
    }

    /// No job waits for longer than it may.
    pub(super) fn check_deadlines(&self) {
        for (&namespace, job) in &self.jobs {
            let due = self.due(namespace);
            assert!(due.is_empty(), "{} still waits: {due:?}", job.terms.name);
        }
    }

    /// A job has ended: once, with its first cause, when the cores hold nothing of it.
    fn check_end(&mut self, end: &JobEnd) {
        let job = self.here(end.namespace);
        assert!(job.is_refusing && job.is_free(), "the cores hold some of it: {:?}", job.routes);
        job.ends += 1;
        let first = job.first_cause.as_deref().expect("there is a cause");
        assert_eq!(end.finished, first.is_empty());
        assert!(end.reason.contains(first), "{} instead of {first}", end.reason);
    }
}

/// How long the checkpoint of a job may take to be read.
fn reading_limit() -> Duration {
    RENDEZVOUS.mul_f64(READING_SHARE)
}
