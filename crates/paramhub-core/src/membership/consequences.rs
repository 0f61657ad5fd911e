//! What follows from an event at a job: commands for hubs, records to save, and what the log says.

use super::job::Transition;
use super::{LogEvent, Membership, Output, forgotten};
use crate::auth::Namespace;
use crate::service::{HubCommand, JobState, StopWhen};

impl Membership {
    /// Applies the consequences of a job's transition.
    pub(super) fn follow(&mut self, namespace: Namespace, transition: Transition) {
        self.follow_with(namespace, transition, false);
    }

    /// Does the same as [`follow`](Self::follow). `was_logged` is set for a failure that a hub has reported
    /// and logged already.
    pub(super) fn follow_with(&mut self, namespace: Namespace, transition: Transition, was_logged: bool) {
        self.touched.insert(namespace);
        let Some(job) = self.jobs.get(&namespace) else { return };
        let name = job.name.clone();
        match transition {
            Transition::None => {}
            Transition::Advanced => {
                let (state, links) = (job.state(), job.is_linked());
                self.outputs.push(Output::Log(LogEvent::JobAdvanced { job: name, namespace, state }));
                if state == JobState::Running && links {
                    let hubs: Vec<u32> = job.hubs().collect();
                    hubs.into_iter().for_each(|hub| self.command(hub, HubCommand::Link { namespace }));
                }
                self.outputs.push(Output::Save(namespace));
            }
            Transition::MembershipChanged { changes, epoch, message } => {
                let hubs: Vec<u32> = job.hubs_of_members().collect();
                self.outputs.push(Output::Log(LogEvent::RankChanged {
                    job: name,
                    namespace,
                    epoch,
                    message,
                }));
                self.outputs.push(Output::Save(namespace));
                for hub in hubs.into_iter().filter(|&hub| self.hubs.has(hub)) {
                    for change in &changes {
                        let command = change.command(namespace);
                        self.outputs.push(Output::ChangeMembership { hub, namespace, command });
                    }
                }
            }
            Transition::SharesChanged { message, told_later } => {
                let (hubs, command) = (job.hubs_told_of_shares(), job.shares_command());
                if let Some(message) = message {
                    let is_whole = job
                        .standby_counts()
                        .is_none_or(|counts| counts.ready + counts.copying == counts.shares);
                    let event = LogEvent::SharesChanged { job: name, namespace, message, is_whole };
                    self.outputs.extend([Output::Log(event), Output::Save(namespace)]);
                }
                // A hub that has no share any more hears it, too: it ends its part.
                let is_told = |hub: &u32| self.hubs.has(*hub) && told_later != Some(*hub);
                for hub in hubs.into_iter().filter(is_told) {
                    let command = command.clone();
                    self.outputs.push(Output::ChangeMembership { hub, namespace, command });
                }
            }
            Transition::BeganAgain { hubs, change, epoch, reason, message, .. } => {
                let event = LogEvent::RankChanged { job: name, namespace, epoch, message };
                self.outputs.extend([Output::Log(event), Output::Save(namespace)]);
                for hub in hubs.into_iter().filter(|&hub| self.hubs.has(hub)) {
                    for command in
                        [change.command(namespace), stop_command(namespace, reason.clone(), StopWhen::Now)]
                    {
                        self.outputs.push(Output::ChangeMembership { hub, namespace, command });
                    }
                }
            }
            // The hub may not have heard yet that it has no other part any more: that is sent when it is saved.
            Transition::AskHubs { hubs, reason, when: StopWhen::Now } => {
                for hub in hubs.into_iter().filter(|&hub| self.hubs.has(hub)) {
                    let command = stop_command(namespace, reason.clone(), StopWhen::Now);
                    self.outputs.push(Output::ChangeMembership { hub, namespace, command });
                }
            }
            Transition::AskHubs { hubs, reason, when } => {
                for hub in hubs {
                    self.command(hub, stop_command(namespace, reason.clone(), when));
                }
            }
            Transition::Explained => {
                let message = job.message().to_string();
                self.outputs.push(Output::Log(LogEvent::JobExplained { job: name, namespace, message }));
                self.outputs.push(Output::Save(namespace));
            }
            Transition::Ended { stop } => {
                let message = job.message().to_string();
                let event = match job.state() {
                    JobState::Failed => {
                        let (job, message) = (name.clone(), message.clone());
                        LogEvent::JobFailed { job, namespace, message, was_logged }
                    }
                    _ => LogEvent::JobFinished { job: name.clone(), namespace },
                };
                self.outputs.push(Output::Log(event));
                // If it has finished, the hub is one that was about to become a standby.
                let reason = match message.is_empty() {
                    true => "it has finished at its other hubs".to_owned(),
                    false => message,
                };
                for hub in stop {
                    self.command(hub, stop_command(namespace, reason.clone(), StopWhen::Now));
                }
                if self.living.get(&name) == Some(&namespace) {
                    self.living.remove(&name);
                }
                self.outputs.push(Output::Save(namespace));
                self.ended.push_back(namespace);
                self.prune();
            }
        }
    }

    pub(super) fn prune(&mut self) {
        while self.ended.len() > self.limits.ended_jobs_max {
            let Some(oldest) = self.ended.pop_front() else { return };
            let Some(job) = self.jobs.remove(&oldest) else { continue };
            for (call, answer) in job.refuse_calls(&forgotten()) {
                self.calls.remove(&call);
                self.outputs.push(Output::Answer { call, namespace: None, answer });
            }
            self.outputs.push(Output::Remove(oldest));
        }
    }

    /// Sends a command to a hub. A hub that is gone gets none.
    pub(super) fn command(&mut self, hub: u32, command: HubCommand) {
        self.send_command(hub, command, false);
    }

    /// Does the same as [`command`](Self::command), unless the same command waits already.
    pub(super) fn command_once(&mut self, hub: u32, command: HubCommand) {
        self.send_command(hub, command, true);
    }

    pub(super) fn send_command(&mut self, hub: u32, command: HubCommand, unless_queued: bool) {
        if self.hubs.has(hub) {
            self.outputs.push(Output::Command { hub, command, unless_queued });
        }
    }
}

pub(super) fn stop_command(namespace: Namespace, reason: String, when: StopWhen) -> HubCommand {
    HubCommand::Stop { namespace, reason, when }
}
