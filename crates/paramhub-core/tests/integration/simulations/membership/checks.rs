//! These checks must hold after every event of a manager.

use std::collections::BTreeSet;
use std::time::Duration;

use paramhub_core::auth::{EpochSecret, Namespace};
use paramhub_core::membership::{Answer, CallId, LogEvent};
use paramhub_core::service::JobState;

use super::{
    Caller, HUB_TIMEOUT, LEASE_S, MEMORY_BYTES, SimulatedHub, Simulation, TEAM, UNHEARD_MAX, json, moment,
    rack_of,
};

impl Simulation {
    pub(super) fn answered(&mut self, call: CallId, answer: Answer) {
        let Caller { namespace, rank, deadline, .. } = self.callers[&call];
        assert!(
            deadline + self.membership.tick() >= moment(self.now).monotonic,
            "{call:?} was answered late"
        );
        self.end_call(call);
        match (answer, namespace, rank) {
            (Answer::Connected(Ok(connected)), Some(namespace), Some((rank, incarnation))) => {
                let job = self.jobs.get_mut(&namespace).unwrap();
                let holder = *job.joined.entry(rank).or_insert(incarnation);
                assert_eq!(holder, incarnation, "rank {rank} of {namespace} is there twice");
                let rack = rack_of(job, rank);
                let mut answer = connected.answer();
                let secrets = answer.secrets.take().expect("every rank here has a claim");
                assert_eq!(
                    secrets.rank,
                    EpochSecret([2; 32]).of_rank(rank),
                    "rank {rank} got another's secret"
                );
                let first = job.connected.entry(rack).or_insert_with(|| json(&answer));
                assert_eq!(*first, json(&answer), "ranks of {namespace} have joined different jobs");
            }
            (Answer::Initialised(Ok(initialised)), Some(namespace), Some((rank, _))) => {
                self.initialised(namespace, rank, json(&*initialised));
            }
            (Answer::Connected(Err(_)) | Answer::Initialised(Err(_)), Some(_), Some(_)) => {}
            (Answer::Stopped(_), Some(_), None) | (Answer::Probed(_), None, None) => {}
            (answer, ..) => panic!("{call:?} got {answer:?}"),
        }
    }

    pub(super) fn initialised(&mut self, namespace: Namespace, rank: u32, answer: String) {
        let job = self.jobs.get_mut(&namespace).unwrap();
        assert_eq!(job.joined.len() as u32, job.workers, "not every rank of {namespace} had joined");
        let rack = rack_of(job, rank);
        let first = job.initialised.entry(rack).or_insert_with(|| answer.clone());
        assert_eq!(*first, answer, "ranks of {namespace} initialised different jobs");
    }

    pub(super) fn check_log_event(&mut self, event: LogEvent) {
        match event {
            LogEvent::JobAdvanced { namespace, state: JobState::Initialising, .. } => {
                let job = self.membership.job(namespace).unwrap();
                let patience = HUB_TIMEOUT + self.membership.tick();
                for hub in job.hubs() {
                    let calls = |hub: &SimulatedHub| self.now - hub.heard < patience;
                    let here = self.hubs.get(&hub).is_some_and(|hub| !hub.leaving && calls(hub));
                    assert!(here, "{namespace} begins with hub {hub}, which is leaving or does not call");
                }
                self.jobs.get_mut(&namespace).unwrap().state = Some(JobState::Initialising);
            }
            LogEvent::JobAdvanced { namespace, state: JobState::Running, .. } => {
                self.jobs.get_mut(&namespace).unwrap().state = Some(JobState::Running);
            }
            LogEvent::JobFailed { namespace, message, .. } if message.starts_with("its lease") => {
                let silent = self.now - self.jobs[&namespace].renewed;
                assert!(silent.as_secs_f64() >= LEASE_S, "the lease of {namespace} ended after {silent:?}");
            }
            LogEvent::JobFinished { namespace, .. } => {
                let job = self.membership.job(namespace).unwrap();
                let observed = &self.jobs[&namespace];
                let by_hubs = job.hubs().all(|hub| observed.hubs_finished.contains(&hub));
                let by_ranks = observed.ranks_finished.len() as u32 == job.workers;
                assert!(by_hubs || by_ranks, "a hub or a rank has not finished {namespace}");
            }
            LogEvent::JobFailed { namespace, message, .. } if message.contains("not been heard") => {
                // It may have been forgotten, if another has ended in the same moment.
                let Ok(job) = self.membership.job(namespace) else { return };
                let observed = &self.jobs[&namespace];
                // That a hub was lost is checked where it is logged.
                let is_hub_gone = job.hubs().any(|hub| !self.hubs.contains_key(&hub));
                let ran = observed.state == Some(JobState::Running);
                assert!(
                    !ran || is_hub_gone || observed.workers_ended,
                    "{namespace} ran and ended by silence alone: {message}"
                );
            }
            LogEvent::JobFailed { namespace, message, .. } if message.contains("does not hear either") => {
                let mut lost = self.jobs[&namespace].hubs_lost.iter();
                let silent = |(hub, &at): (&u32, &Duration)| self.hubs[hub].heard <= at;
                assert!(lost.any(silent), "{namespace} ended by the loss of a hub that calls: {message}");
            }
            LogEvent::HubUnheard { message } => {
                let silent = |hub: &SimulatedHub| self.now - hub.heard >= HUB_TIMEOUT;
                assert!(self.hubs.values().any(silent), "a hub that calls is not heard: {message}");
            }
            LogEvent::HubLost { message } if message.contains("not been heard") => {
                let lost = |hub: &SimulatedHub| {
                    let silence = self.now - hub.heard;
                    silence >= UNHEARD_MAX || (hub.leaving && silence >= HUB_TIMEOUT)
                };
                assert!(self.hubs.values().any(lost), "a hub was lost too early: {message}");
            }
            _ => {}
        }
    }

    pub(super) fn check_jobs(&mut self) {
        let team = self.membership.team(TEAM).unwrap();
        assert!(team.memory_bytes <= MEMORY_BYTES, "the team has more than its quota: {team:?}");
        let mut living = BTreeSet::new();
        for job in self.membership.jobs() {
            let (state, status) = (job.state(), job.status(moment(self.now)));
            let observed = self.jobs.get_mut(&job.namespace).unwrap();
            if let Some(before) = observed.state.replace(state) {
                let order = |state: JobState| state as u8 - u8::from(state == JobState::Failed);
                assert!(order(state) >= order(before), "{} went from {before:?} to {state:?}", job.namespace);
                assert!(!before.has_ended() || before == state, "{} ended twice", job.namespace);
            }
            assert!(state.has_ended() || living.insert(job.name.clone()), "{} lives twice", job.name);
            assert!(status.connected.is_sorted() && status.connected.iter().all(|&rank| rank < job.workers));
            let waiting = self.callers.values().filter(|caller| caller.namespace == Some(job.namespace));
            assert_eq!(waiting.filter(|caller| caller.rank.is_some()).count(), job.waiting());
            assert!(
                !state.has_ended() || job.waiting() == 0,
                "ranks wait for {}, which is over",
                job.namespace
            );
            let saved = self.store[&job.namespace].status.state;
            assert_eq!(saved, state, "the store has another state of {}", job.namespace);
        }
    }
}
