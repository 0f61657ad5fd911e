//! This part decides how a job advances whose ranks are all there, and when hubs first probe the network
//! between racks.

use std::collections::BTreeSet;

use super::hubs::OfferedHub;
use super::job::{Job, Transition};
use super::probes::{CoreBandwidth, HubCommands, ROUND_S, RackProber, probers, serves_one_of};
use super::{Answer, CallId, LogEvent, Membership, Now, Output};
use crate::auth::Namespace;
use crate::composition::{Place, Reduction, served_racks};
use crate::placement::HubShape;
use crate::service::{ErrorCode, JobState, LinkStatus, ServiceError, refusal};

impl Membership {
    /// Every rank of the job is assigned. If the hubs that it waits for have joined too, the job advances. If
    /// the rates between its racks must be known first, their hubs probe them, and the job advances when they
    /// have.
    pub(super) fn advance_job(&mut self, namespace: Namespace, now: Now) {
        if !self.probes.are_under_way() {
            self.arrange(namespace, true, now);
        }
    }

    /// The job's ranks have waited as long as they may. They must not fail because of a probe, so the job
    /// advances without it.
    pub(super) fn advance_job_without_probing(&mut self, namespace: Namespace, now: Now) {
        self.arrange(namespace, false, now);
    }

    pub(super) fn advance_all_jobs(&mut self, now: Now) {
        let complete: Vec<Namespace> =
            self.jobs.values().filter(|job| job.is_complete()).map(|job| job.namespace).collect();
        complete.into_iter().for_each(|namespace| self.advance_job(namespace, now));
    }

    fn arrange(&mut self, namespace: Namespace, may_probe: bool, now: Now) {
        if !self.jobs.get(&namespace).is_some_and(Job::is_complete) {
            return;
        }
        let Some(core) = self.core_for(namespace, may_probe, now) else { return };
        let shapes = self.hubs_for(namespace);
        if let Some(job) = self.jobs.get_mut(&namespace) {
            let transition = job.begin_initialising(shapes, &core);
            if transition != Transition::None {
                job.choose_standbys(|hub| self.hubs.location(hub));
            }
            job.options.encrypt |= self.hubs.demand_encryption(|hub| job.is_served_by(hub));
            if transition != Transition::None && !job.reduction().is_empty() {
                let (job, reduction) = (job.name.clone(), job.reduction().to_string());
                self.outputs.push(Output::Log(LogEvent::ReductionChosen { job, reduction }));
            }
            self.follow(namespace, transition);
        }
    }

    /// The hubs that may serve a job: those with its label. Of those that serve all workers these are the ones with the fewest
    /// jobs, up to its `max_hubs`, in a job with standbys on as many machines as can be.
    pub(super) fn hubs_for(&self, namespace: Namespace) -> Vec<OfferedHub> {
        let mut hubs = self.hubs.shapes();
        let Some(options) = self.jobs.get(&namespace).map(|job| job.options) else { return hubs };
        hubs.retain(|(hub, _)| self.hubs.is_chosen(*hub, options.hub_label));
        let Some(most) = options.max_hubs else { return hubs };
        let serves_all = |(_, (_, place)): &OfferedHub| place.host.is_empty() && place.rack.is_empty();
        let has_standbys = options.has_standbys();
        let jobs_at = |hub: u32| {
            let living = self.jobs.values().filter(|job| !job.state().has_ended());
            living.filter(|job| job.has_part_at(hub)).count()
        };
        let mut free: Vec<u32> = hubs.iter().filter(|hub| serves_all(hub)).map(|(hub, _)| *hub).collect();
        let mut general: Vec<u32> = Vec::new();
        while general.len() < most as usize {
            let is_beside = |hub: u32| {
                let machine = self.hubs.machine(hub);
                let mut chosen = general.iter().map(|&chosen| self.hubs.machine(chosen));
                has_standbys && !machine.is_empty() && chosen.any(|other| other == machine)
            };
            let best = (0..free.len())
                .min_by_key(|&position| (is_beside(free[position]), jobs_at(free[position]), free[position]));
            let Some(best) = best else { break };
            general.push(free.swap_remove(best));
        }
        hubs.retain(|hub| !serves_all(hub) || general.contains(&hub.0));
        hubs
    }

    /// The core's rate for a job's reduction `auto`; `None` while it is being probed.
    fn core_for(&mut self, namespace: Namespace, may_probe: bool, now: Now) -> Option<CoreBandwidth> {
        let job = &self.jobs[&namespace];
        let hubs = self.hubs_for(namespace);
        if job.options.reduction != Reduction::Auto || job.is_rendezvous_only() || !job.suffice(&hubs) {
            return Some(CoreBandwidth::Unneeded);
        }
        let offers: Vec<(HubShape, Place)> = hubs.iter().map(|(_, offer)| offer.clone()).collect();
        let served = served_racks(&offers, job.places());
        let racks: BTreeSet<String> = served.iter().map(|rack| rack.name.to_string()).collect();
        let floor_mbit = served.iter().map(|rack| rack.mbit).min().unwrap_or(0);
        if racks.len() < 2 {
            return Some(CoreBandwidth::Unneeded);
        }
        if let Some(rate) = self.limits.core_rate {
            return Some(CoreBandwidth::given(rate));
        }
        let rounds = self.probes.rounds(&probers(&hubs, &racks), false, now);
        // Probes may take half of the time that the ranks wait for one another.
        let patience_s = job.options.rendezvous_timeout_s / 2.0;
        let in_the_way = match self.job_at(&racks) {
            _ if !may_probe => Some("its ranks could not wait for a probe to end".to_string()),
            Some(job) => Some(format!("no hub probes while job `{job}` runs at hubs of its racks")),
            None if rounds.len() as f64 * ROUND_S > patience_s => {
                Some(format!("its rendezvous timeout leaves {patience_s} s for probes, which is too little"))
            }
            None => None,
        };
        if rounds.is_empty() || in_the_way.is_some() {
            return Some(match (self.probes.core(&racks, floor_mbit, now), in_the_way) {
                (CoreBandwidth::Unknown(why), Some(reason)) => {
                    CoreBandwidth::Unknown(format!("{why}, and {reason}"))
                }
                (core, _) => core,
            });
        }
        let commands = self.probes.begin(rounds, now);
        self.send(commands);
        None
    }

    /// A job that runs at hubs of these racks, or at hubs that serve all racks: probes would slow it.
    fn job_at(&self, racks: &BTreeSet<String>) -> Option<&str> {
        let hubs = self.hubs.shapes();
        let concerned = |(_, (_, place)): &&OfferedHub| {
            serves_one_of(place, racks) || (place.host.is_empty() && place.rack.is_empty())
        };
        let concerned: Vec<u32> = hubs.iter().filter(concerned).map(|(hub, _)| *hub).collect();
        let occupies = |job: &&Job| {
            matches!(job.state(), JobState::Initialising | JobState::Running)
                && concerned.iter().any(|&hub| job.is_served_by(hub))
        };
        self.jobs.values().find(occupies).map(|job| job.name.as_str())
    }

    /// Lets the hubs of all racks probe one another, whatever is known. A probe run that is under way will
    /// do. The call that waits for its end has no deadline: each round of a probe run has one.
    ///
    /// # Errors
    /// If fewer than two racks have hubs, or a job runs at hubs that would probe.
    pub fn probe_afresh(&mut self, now: Now) -> Result<CallId, ServiceError> {
        if self.probes.are_under_way() {
            return Ok(self.wait_for_probes());
        }
        let hubs = self.hubs.shapes();
        let of_racks = hubs.iter().filter(|(_, (_, place))| place.host.is_empty() && !place.rack.is_empty());
        let racks: BTreeSet<String> = of_racks.map(|(_, (_, place))| place.rack.clone()).collect();
        if racks.len() < 2 {
            let message = format!(
                "hubs probe between racks, and {} of at least 2 have a hub: start others with `paramhub hub --rack NAME`",
                racks.len()
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        if let Some(job) = self.job_at(&racks) {
            let message = format!(
                "job `{job}` runs at hubs that would probe, and would be slowed by it: wait until it has ended, or say what \
                 the network carries with --core-rate"
            );
            return Err(refusal(ErrorCode::Busy, message));
        }
        let probers: Vec<RackProber> = probers(&hubs, &racks);
        let call = self.wait_for_probes();
        let commands = self.probes.begin(self.probes.rounds(&probers, true, now), now);
        self.send(commands);
        Ok(call)
    }

    fn wait_for_probes(&mut self) -> CallId {
        let call = self.next_call();
        self.probe_calls.push(call);
        call
    }

    /// The measured rates of the links between racks.
    pub fn link_statuses(&self, now: Now) -> Vec<LinkStatus> {
        self.probes.statuses(now)
    }

    /// Continues the probe run. At its end, answers the calls that waited for it and advances the jobs that
    /// did.
    pub(super) fn go_on_probing(&mut self, now: Now) {
        let (commands, is_last) = self.probes.step(now);
        self.outputs.extend(self.probes.take_log_events().into_iter().map(Output::Log));
        self.send(commands);
        if is_last {
            for call in std::mem::take(&mut self.probe_calls) {
                let answer = Answer::Probed(self.link_statuses(now));
                self.outputs.push(Output::Answer { call, namespace: None, answer });
            }
            self.advance_all_jobs(now);
        }
    }

    fn send(&mut self, commands: HubCommands) {
        commands.into_iter().for_each(|(hub, command)| self.command(hub, command));
    }
}
