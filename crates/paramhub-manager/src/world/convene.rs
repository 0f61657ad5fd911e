//! How a job gets on whose ranks are all there, and when hubs probe the network between racks first.

use std::collections::BTreeSet;

use axum::body::Bytes;
use paramhub_core::auth::Namespace;
use paramhub_core::composition::{Place, Reduction, served_racks};
use paramhub_core::placement::HubShape;
use paramhub_core::service::{ErrorCode, JobState, LinkStatus, ServiceCreated, ServiceError};
use tokio::sync::watch;

use super::World;
use crate::clock::Now;
use crate::error::refusal;
use crate::hubs::OfferedHub;
use crate::job::Job;
use crate::probes::{Core, Delegate, Orders, ROUND_S, delegates, serves_one_of};

impl World {
    /// What a launcher on a further host needs to take part in a job that is still being assembled.
    pub(crate) fn membership(&self, name: &str) -> Result<ServiceCreated, ServiceError> {
        let Some(job) = self.living.get(name).and_then(|namespace| self.jobs.get(namespace)) else {
            return Err(refusal(ErrorCode::NotFound, format!("no job that lives is called `{name}`")));
        };
        if job.state() != JobState::Connecting {
            let message = format!(
                "job `{name}` has begun, and all its ranks are there: end it with `paramhub jobs stop {name}`, or choose \
                 another name"
            );
            return Err(refusal(ErrorCode::NameTaken, message));
        }
        Ok(ServiceCreated { namespace: job.namespace, nonce: job.nonce })
    }

    /// Every rank of the job is seated: if the hubs it waits for are there too, the job gets on. Where it must be known first
    /// what the network between its racks carries, their hubs probe it, and the job gets on when they have.
    pub(crate) fn convene(&mut self, namespace: Namespace, now: Now) {
        if !self.probes.are_under_way() {
            self.arrange(namespace, true, now);
        }
    }

    /// The job's ranks have waited as long as they do. Nobody's probe is a reason for them to fail: the job gets on without.
    pub(crate) fn convene_at_last(&mut self, namespace: Namespace, now: Now) {
        self.arrange(namespace, false, now);
    }

    pub(super) fn convene_all(&mut self, now: Now) {
        let complete: Vec<Namespace> =
            self.jobs.values().filter(|job| job.is_complete()).map(|job| job.namespace).collect();
        complete.into_iter().for_each(|namespace| self.convene(namespace, now));
    }

    fn arrange(&mut self, namespace: Namespace, may_probe: bool, now: Now) {
        if !self.jobs.get(&namespace).is_some_and(Job::is_complete) {
            return;
        }
        let Some(core) = self.core_for(namespace, may_probe, now) else { return };
        let shapes = self.hubs.shapes();
        if let Some(job) = self.jobs.get_mut(&namespace) {
            let transition = job.convene(shapes, &core);
            self.follow(namespace, transition);
        }
    }

    /// What a job's reduction `auto` has to know. None while that is being probed.
    fn core_for(&mut self, namespace: Namespace, may_probe: bool, now: Now) -> Option<Core> {
        let job = &self.jobs[&namespace];
        let hubs = self.hubs.shapes();
        if job.options.reduction != Reduction::Auto || job.only_meets() || !job.suffice(&hubs) {
            return Some(Core::Unneeded);
        }
        let offers: Vec<(HubShape, Place)> = hubs.iter().map(|(_, offer)| offer.clone()).collect();
        let served = served_racks(&offers, job.places());
        let racks: BTreeSet<String> = served.iter().map(|rack| rack.name.to_string()).collect();
        let floor_mbit = served.iter().map(|rack| rack.mbit).min().unwrap_or(0);
        if racks.len() < 2 {
            return Some(Core::Unneeded);
        }
        if let Some(rate) = self.core_rate {
            return Some(Core::given(rate));
        }
        let rounds = self.probes.rounds(&delegates(&hubs, &racks), false, now);
        // Half of the time that its ranks wait for one another is not for probes.
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
                (Core::Unknown(why), Some(reason)) => Core::Unknown(format!("{why}, and {reason}")),
                (core, _) => core,
            });
        }
        let orders = self.probes.begin(rounds, now);
        self.send(orders);
        None
    }

    /// A job that runs at hubs of these racks, or at those that serve everybody: probes would take from it.
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

    /// Lets the hubs of all racks probe one another, whatever is known; an ongoing campaign is as good.
    pub(crate) fn probe_afresh(&mut self, now: Now) -> Result<watch::Receiver<u64>, ServiceError> {
        let ended = self.probes.subscribe();
        if self.probes.are_under_way() {
            return Ok(ended);
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
        let delegates: Vec<Delegate> = delegates(&hubs, &racks);
        let orders = self.probes.begin(self.probes.rounds(&delegates, true, now), now);
        self.send(orders);
        Ok(ended)
    }

    /// What is known of the links between racks.
    pub(crate) fn link_statuses(&self, now: Now) -> Vec<LinkStatus> {
        self.probes.statuses(now)
    }

    /// Lets the probes go on, and the jobs that waited for their end.
    pub(super) fn go_on_probing(&mut self, now: Now) {
        let (orders, is_last) = self.probes.step(now);
        self.send(orders);
        if is_last {
            self.convene_all(now);
        }
    }

    fn send(&mut self, orders: Orders) {
        for (hub, order) in orders {
            let command = serde_json::to_vec(&order).expect("commands are plain data");
            self.hubs.command(hub, Bytes::from(command));
        }
    }
}
