//! Hubs that the manager does not hear, and what ranks say of hubs that they have lost.
//!
//! The network to the manager may be cut while workers and hubs reach one another, so silence alone ends no job that runs.
//! A hub that has been silent for too long is unheard: it gets no new jobs, jobs that open there fail, and those that run
//! go on. A job that runs there ends when something shows that the hub is gone: its launcher says that the workers have
//! ended, another of its hubs reports the end, another hub has joined at the hub's address, a rank has lost the hub, too,
//! or the hub had said that it shuts down. At last, after [`UNHEARD_MAX`], the hub counts as lost.

use std::time::Duration;

use super::hubs::Contact;
use super::job::Transition;
use super::job::cause::Cause;
use super::job::job_hubs::describe_hub;
use super::{Job, LogEvent, Membership, Now, Output};
use crate::auth::Namespace;
use crate::service::{CauseKind, JobState};

/// The time after which a hub that is not heard is lost, with the jobs that run there. Networks and managers are mended
/// in less.
pub const UNHEARD_MAX: Duration = Duration::from_secs(3600);

impl Membership {
    /// Looks for hubs that have been silent for too long, and for those that ranks have lost.
    pub(super) fn check_silence(&mut self, now: Now) {
        let timeout_s = self.limits.hub_timeout.as_secs_f64();
        let lost_after_s = self.limits.unheard_max.max(self.limits.hub_timeout).as_secs_f64();
        for hub in self.hubs.silent(lost_after_s, now) {
            let what = format!(
                "was lost: it has not been heard for {lost_after_s} s. Look at its machine, its log and the network between"
            );
            self.lose_hub(hub, &what, now);
        }
        for hub in self.hubs.silent(timeout_s, now) {
            if self.hubs.is_leaving(hub) {
                let what =
                    format!("was lost: it was shutting down, and has not been heard for {timeout_s} s");
                self.lose_hub(hub, &what, now);
            } else if let Some(last_call) = self.hubs.fell_silent(hub) {
                let silence = format!("has not been heard for {timeout_s} s");
                self.hub_fell_silent(hub, last_call, &silence, now);
            }
        }
        self.check_losses(now);
    }

    fn hub_fell_silent(&mut self, hub: u32, last_call: Now, silence: &str, now: Now) {
        let Some(name) = self.hubs.shape(hub).map(|shape| describe_hub(hub, shape)) else { return };
        let silence = format!("{name} {silence}");
        let advice = "Look at its machine, its log and the network between; where such pauses are normal, start the \
                      connection manager with a longer --hub-dead-after";
        let served = self.served_by(hub);
        let runs = |namespace: &&Namespace| self.jobs[*namespace].state() == JobState::Running;
        let running = served.iter().filter(runs).count();
        let message = format!("{silence}: it gets no new jobs, and running ones go on ({running}). {advice}");
        self.outputs.push(Output::Log(LogEvent::HubUnheard { message }));
        let message = format!("{silence}. {advice}");
        let cause = Cause { kind: CauseKind::HubLost, rank: None, began: last_call, message };
        for namespace in served {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                let notice = format!("{silence}; the job goes on while its workers reach it");
                let transition = job.hub_fell_silent(hub, cause.clone(), notice, now);
                self.follow(namespace, transition);
            }
        }
        // Jobs are arranged without it.
        self.advance_all_jobs(now);
    }

    /// A hub has called. Returns whether it takes jobs from now on, which it did not before.
    pub(super) fn hear(&mut self, hub: u32, now: Now) -> bool {
        match self.hubs.came_back(hub) {
            Contact::Heard => return false,
            Contact::Expected => {}
            Contact::Unheard { last_call } => self.hub_heard_again(hub, last_call, now),
        }
        true
    }

    fn hub_heard_again(&mut self, hub: u32, last_call: Now, now: Now) {
        let Some(name) = self.hubs.shape(hub).map(|shape| describe_hub(hub, shape)) else { return };
        let message = format!("{name} is heard again, after {:.0} s", now.seconds_since(last_call));
        for namespace in self.served_by(hub) {
            if let Some(job) = self.jobs.get_mut(&namespace) {
                job.hub_heard_again(hub, &message);
            }
        }
        self.outputs.push(Output::Log(LogEvent::HubHeardAgain { message }));
    }

    /// A hub has hung up while its call waited for commands. If nothing more is heard of it, and others report that it is lost,
    /// it is.
    pub fn hub_hung_up(&mut self, hub: u32, now: Now) {
        self.hubs.hung_up(hub);
        self.check_losses(now);
    }

    /// Fails jobs whose ranks have lost a hub that the manager does not hear either, and replaces hubs that their standbys have
    /// lost.
    pub(super) fn check_losses(&mut self, now: Now) {
        for namespace in std::mem::take(&mut self.losses_to_check) {
            let Some(job) = self.jobs.get_mut(&namespace) else { continue };
            let replaced = job.check_suspected_hubs(|hub| self.hubs.last_contact(hub), now);
            let failed = job.check_losses(|hub| self.hubs.last_contact(hub), now);
            if job.has_losses_to_check() || job.has_suspected_hubs() {
                self.losses_to_check.insert(namespace);
            }
            for transition in [replaced, failed] {
                self.follow_loss(namespace, transition, now);
            }
        }
    }

    /// Has jobs begin again whose ranks go back to an earlier step, and of which a hub is gone.
    pub(super) fn check_hubs_to_go_back(&mut self, namespace: Namespace, now: Now) {
        let Some(job) = self.jobs.get_mut(&namespace) else { return };
        let transition = job.check_hubs_to_go_back(|hub| self.hubs.last_contact(hub), now);
        self.follow_loss(namespace, transition, now);
    }

    /// A job that begins again waits until the hubs that had it before have ended their parts. Those that are gone get no jobs before
    /// they call again, so that it is not arranged for them.
    pub(super) fn check_former_hubs(&mut self, namespace: Namespace, now: Now) {
        let Some(job) = self.jobs.get(&namespace).filter(|job| job.is_complete()) else { return };
        let is_gone = |&hub: &u32| self.hubs.last_contact(hub).is_some_and(|contact| contact.is_gone(now));
        let gone: Vec<u32> = job.former_hubs().into_iter().filter(is_gone).collect();
        for hub in gone {
            if let Some(last_call) = self.hubs.fell_silent(hub) {
                let silence = "is gone: a job begins again for which it is to end its part, and it has not called since";
                self.hub_fell_silent(hub, last_call, silence, now);
            }
        }
    }

    /// Applies the consequences of the loss of a hub, which gets no jobs before it calls again.
    fn follow_loss(&mut self, namespace: Namespace, transition: Transition, now: Now) {
        if let Transition::BeganAgain { lost: Some(hub), .. } = transition
            && let Some(last_call) = self.hubs.fell_silent(hub)
        {
            self.hub_fell_silent(
                hub,
                last_call,
                "is gone: a job has lost it, and it has not called since",
                now,
            );
        }
        if transition != Transition::None {
            self.follow(namespace, transition);
        }
    }

    /// If as many hubs have joined as there can be, loses one that is not heard and serves no job, since hubs that start
    /// anew at other addresses would be refused for an hour otherwise.
    pub(super) fn make_room_for_a_hub(&mut self, now: Now) {
        let serves =
            |hub: u32| self.jobs.values().any(|job: &Job| !job.state().has_ended() && job.is_served_by(hub));
        let idle = self.hubs.unheard_if_full().into_iter().find(|&hub| !serves(hub));
        if let Some(hub) = idle {
            self.lose_hub(hub, "was lost: it is not heard, and another hub needs its place", now);
        }
    }
}
