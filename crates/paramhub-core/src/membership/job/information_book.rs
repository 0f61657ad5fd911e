//! A job's information book: what the manager fills in at InitService.

use std::collections::HashMap;
use std::sync::Arc;

use crate::scheme::{HubEntry, HubPlace, InformationBook, Roster, WorkerEntry, addresses};
use crate::service::{ErrorCode, ServiceError};

use super::Job;
use super::job_hubs::JobHub;
use crate::service::refusal;

impl Job {
    /// The workers and hubs of the job, once every rank has connected. `machines` are those of its hubs, in
    /// the same order.
    pub fn roster<'a>(&self, machines: impl Iterator<Item = (u32, &'a str)>) -> Roster {
        let is_beside_worker =
            |machine: &str| !machine.is_empty() && self.places.iter().any(|place| place.host == machine);
        let hub = |(job_hub, (_, machine)): (&JobHub, (u32, &str))| HubEntry {
            addresses: addresses(&job_hub.shape),
            site: job_hub.site,
            is_beside_worker: is_beside_worker(machine),
        };
        let hubs: Vec<HubEntry> = self.job_hubs.iter().zip(machines).map(hub).collect();
        let is_any_beside_worker = hubs.iter().any(|hub| hub.is_beside_worker);
        let place = match self.has_several_sites() {
            true => HubPlace::Sites,
            false => {
                HubPlace::of_hubs(self.job_hubs.iter().map(|job_hub| &job_hub.shape), is_any_beside_worker)
            }
        };
        // Equal names are one machine. Each rank with an unknown machine counts as one of its own.
        let mut known: HashMap<&str, u32> = HashMap::new();
        let mut count = 0;
        let mut machine_of = |rank: u32| {
            let identity = self.places.get(rank as usize).map_or("", |place| &place.host);
            let machine = known.get(identity).copied().unwrap_or(count);
            if machine == count {
                count += 1;
                if !identity.is_empty() {
                    known.insert(identity, machine);
                }
            }
            machine
        };
        let worker = |rank: u32| WorkerEntry {
            rank,
            host: self.assignments.host(rank).to_owned(),
            address: self.peer_addresses.get(rank as usize).copied().flatten(),
            machine: machine_of(rank),
        };
        Roster { workers: (0..self.workers).map(worker).collect(), hubs, place }
    }

    /// The information book of a job, once its placement is made.
    pub fn information_book(&self) -> Result<Arc<InformationBook>, ServiceError> {
        self.information_book.clone().ok_or_else(|| match self.state.has_ended() {
            true => self.ended_refusal(),
            false => refusal(
                ErrorCode::Missing,
                format!(
                    "job `{}` has no information book yet: its ranks have yet to call InitService",
                    self.name
                ),
            ),
        })
    }
}
