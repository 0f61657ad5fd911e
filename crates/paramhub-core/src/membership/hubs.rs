//! The hubs that have joined: which may join, which hub calls, and which is not heard.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::composition::Place;
use crate::limits::HUBS_MAX;
use crate::membership::Now;
use crate::membership::job::LastContact;
use crate::membership::job::job_hubs::describe_hub;
use crate::placement::HubShape;
use crate::service::{
    CoreCounters, ErrorCode, HubLabel, HubStatus, LABELS_MAX, RegisterHub, ServiceError, refusal,
};
use crate::standbys::HubLocation;
use crate::tokens;
use crate::wire::VERSION;

/// The most bytes of an interface's address.
const ADDRESS_BYTES_MAX: usize = 255;

/// The most bytes of a rack's or host's name.
const PLACE_BYTES_MAX: usize = 128;

/// A hub's number, what it offers and the workers that it serves.
pub(crate) type OfferedHub = (u32, (HubShape, Place));

/// All hubs that have joined and are not lost, by number.
#[derive(Default)]
pub(crate) struct Hubs {
    hubs: BTreeMap<u32, Hub>,
    next: u32,
}

/// The record of a hub, which the store keeps: the hub goes on calling a manager that restarts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HubRecord {
    /// The hub's number.
    pub hub: u32,
    /// The hash of its token.
    token_hash: String,
    /// What it offers.
    offer: RegisterHub,
    /// Whether an operator drains it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    drained: bool,
}

/// One hub.
pub(crate) struct Hub {
    offer: RegisterHub,
    token_hash: String,
    pub(crate) cores: Vec<CoreCounters>,
    heard: Now,
    /// Whether the connection of its last call has ended since, although it was not answered.
    has_hung_up: bool,
    /// `true` if the hub is about to stop. It takes no further jobs then.
    pub(crate) is_leaving: bool,
    /// `true` if an operator drains the hub. It takes no further jobs, and those leave it that can go on elsewhere.
    drained: bool,
    contact: Contact,
}

/// Whether the manager hears a hub. One that it does not hear takes no jobs before it calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contact {
    /// It calls.
    Heard,
    /// It has joined and not called under its number: one that joined an earlier manager may be gone, and one that
    /// has not heard that it has joined joins again.
    Expected,
    /// It has been silent for too long, since this call.
    Unheard { last_call: Now },
}

impl Hubs {
    /// Lets a hub join under a token.
    pub(crate) fn register(
        &mut self,
        offer: RegisterHub,
        token: &str,
        now: Now,
    ) -> Result<u32, ServiceError> {
        let hub = self.next;
        if offer.protocol < VERSION {
            let message = format!(
                "the hub speaks protocol version {} and this connection manager needs version {VERSION}: use the \
                 same release of paramhub for both; workers may be of the release before",
                offer.protocol
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        check_shape(hub, &offer.shape)?;
        check_place(&offer.place)?;
        check_place(&Place { host: offer.machine.clone(), ..Place::default() })?;
        if offer.labels.len() > LABELS_MAX {
            let message = format!("the hub has {} labels: {LABELS_MAX} are possible", offer.labels.len());
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        if self.hubs.len() >= HUBS_MAX {
            let message = format!("{HUBS_MAX} hubs have joined already, the most there can be");
            return Err(refusal(ErrorCode::DoesNotFit, message));
        }
        self.add(HubRecord { hub, token_hash: tokens::hash(token), offer, drained: false }, now);
        Ok(hub)
    }

    /// Restores a hub that joined an earlier manager. Its time to call begins now.
    pub(crate) fn restore(&mut self, record: HubRecord, now: Now) {
        self.add(record, now);
    }

    fn add(&mut self, record: HubRecord, now: Now) {
        let HubRecord { hub, token_hash, offer, drained } = record;
        self.next = self.next.max(hub + 1);
        let joined = Hub {
            offer,
            token_hash,
            cores: Vec::new(),
            heard: now,
            has_hung_up: false,
            is_leaving: false,
            drained,
            contact: Contact::Expected,
        };
        self.hubs.insert(hub, joined);
    }

    /// The record that the store keeps of a hub.
    pub(crate) fn record(&self, hub: u32) -> Option<HubRecord> {
        let Hub { offer, token_hash, drained, .. } = self.hubs.get(&hub)?;
        Some(HubRecord { hub, token_hash: token_hash.clone(), offer: offer.clone(), drained: *drained })
    }

    /// Hubs that claim an address of this shape. They must be gone, since only one process can listen on an
    /// address.
    pub(crate) fn at_addresses_of(&self, shape: &HubShape) -> Vec<u32> {
        let claims = |hub: &Hub| {
            let addresses = || hub.offer.shape.interfaces.iter().map(|interface| &interface.address);
            shape.interfaces.iter().any(|interface| addresses().any(|address| *address == interface.address))
        };
        self.hubs.iter().filter(|(_, hub)| claims(hub)).map(|(&number, _)| number).collect()
    }

    /// The hub that calls, if its token is right. The call counts as a sign of life.
    pub(crate) fn admit(
        &mut self,
        hub: u32,
        token: Option<&str>,
        now: Now,
    ) -> Result<&mut Hub, ServiceError> {
        let Some(joined) = self.hubs.get_mut(&hub) else {
            let message = format!(
                "hub {hub} is not registered here: it was silent too long, another hub has joined at its address, or the \
                 connection manager restarted and does not keep its state. Register again"
            );
            return Err(refusal(ErrorCode::NotFound, message));
        };
        let matches = token.is_some_and(|token| tokens::is_same(&tokens::hash(token), &joined.token_hash));
        if !matches {
            let message = format!(
                "this is not the token that hub {hub} was given when it registered. If the connection manager restarted \
                 since, register again"
            );
            return Err(refusal(ErrorCode::Unauthorized, message));
        }
        (joined.heard, joined.has_hung_up) = (now, false);
        Ok(joined)
    }

    /// Notes that a hub has called, and can take jobs from now on. Returns whether it was heard before.
    pub(crate) fn came_back(&mut self, hub: u32) -> Contact {
        let joined = self.hubs.get_mut(&hub);
        joined.map_or(Contact::Heard, |joined| std::mem::replace(&mut joined.contact, Contact::Heard))
    }

    /// Notes that a hub has been silent for too long. Returns its last call, unless that is known already.
    pub(crate) fn fell_silent(&mut self, hub: u32) -> Option<Now> {
        let joined = self.hubs.get_mut(&hub)?;
        let unheard = Contact::Unheard { last_call: joined.heard };
        match std::mem::replace(&mut joined.contact, unheard) {
            Contact::Heard | Contact::Expected => Some(joined.heard),
            known @ Contact::Unheard { .. } => {
                joined.contact = known;
                None
            }
        }
    }

    /// Whether the manager hears a hub.
    pub(crate) fn is_heard(&self, hub: u32) -> bool {
        self.hubs.get(&hub).is_some_and(|joined| !joined.is_unheard())
    }

    /// Whether a hub has said that it shuts down.
    pub(crate) fn is_leaving(&self, hub: u32) -> bool {
        self.hubs.get(&hub).is_some_and(|joined| joined.is_leaving)
    }

    /// Drains a hub, or ends that. Returns whether that is a change.
    pub(crate) fn drain(&mut self, hub: u32, drained: bool) -> bool {
        let joined = self.hubs.get_mut(&hub);
        joined.is_some_and(|joined| std::mem::replace(&mut joined.drained, drained) != drained)
    }

    /// Whether an operator drains a hub.
    pub(crate) fn is_drained(&self, hub: u32) -> bool {
        self.hubs.get(&hub).is_some_and(|joined| joined.drained)
    }

    /// The first hub that an operator drains, for messages.
    pub(crate) fn first_drained(&self) -> Option<String> {
        let (&hub, joined) = self.hubs.iter().find(|(_, joined)| joined.drained)?;
        Some(describe_hub(hub, &joined.offer.shape))
    }

    /// The hubs that are not heard, those first that have been silent for longest, if no further hub can join.
    pub(crate) fn unheard_if_full(&self) -> Vec<u32> {
        if self.hubs.len() < HUBS_MAX {
            return Vec::new();
        }
        let unheard = self.hubs.iter().filter(|(_, joined)| joined.is_unheard());
        let mut unheard: Vec<(u32, &Hub)> = unheard.map(|(&number, joined)| (number, joined)).collect();
        unheard.sort_by_key(|(_, joined)| joined.heard.monotonic);
        unheard.into_iter().map(|(number, _)| number).collect()
    }

    /// Returns whether a hub of this number has joined and is not lost.
    pub(crate) fn has(&self, hub: u32) -> bool {
        self.hubs.contains_key(&hub)
    }

    /// Returns whether no hub that could serve a job keeps checkpoints: `awaited` hubs have joined, one of
    /// them serves all racks, and all report that they keep none.
    pub(crate) fn keep_no_checkpoints(&self, awaited: u32) -> bool {
        let heard = || self.hubs.values().filter(|hub| !hub.is_unheard());
        heard().count() >= awaited.max(1) as usize
            && heard().any(|hub| hub.offer.place == Place::default())
            && heard().all(|hub| hub.offer.keeps_checkpoints == Some(false))
    }

    /// Forgets a hub. Returns its description for messages and when it last called.
    pub(crate) fn remove(&mut self, hub: u32) -> Option<(String, Now)> {
        self.hubs.remove(&hub).map(|joined| (describe_hub(hub, &joined.offer.shape), joined.heard))
    }

    /// A hub's interfaces.
    pub(crate) fn shape(&self, hub: u32) -> Option<&HubShape> {
        self.hubs.get(&hub).map(|joined| &joined.offer.shape)
    }

    /// Hubs that have not called for `timeout_s`.
    pub(crate) fn silent(&self, timeout_s: f64, now: Now) -> Vec<u32> {
        let silent = |hub: &Hub| now.seconds_since(hub.heard) >= timeout_s;
        self.hubs.iter().filter(|(_, hub)| silent(hub)).map(|(&number, _)| number).collect()
    }

    /// Counts every hub as having called just now, after a pause of the manager itself.
    pub(crate) fn forgive(&mut self, now: Now) {
        self.hubs.values_mut().for_each(|hub| hub.heard = now);
    }

    /// All hubs that take jobs, and the workers that they serve, in the order in which they joined.
    pub(crate) fn shapes(&self) -> Vec<OfferedHub> {
        let takes_jobs = |hub: &Hub| !hub.is_leaving && !hub.drained && hub.contact == Contact::Heard;
        let here = self.hubs.iter().filter(|(_, hub)| takes_jobs(hub));
        here.map(|(&number, hub)| (number, (hub.offer.shape.clone(), hub.offer.place.clone()))).collect()
    }

    /// Whether one of a job's hubs demands that its streams are encrypted.
    pub(crate) fn demand_encryption(&self, is_of_job: impl Fn(u32) -> bool) -> bool {
        self.hubs.iter().any(|(&number, hub)| hub.offer.encrypt && is_of_job(number))
    }

    /// The machine that a hub runs on; empty if unknown.
    pub(crate) fn machine(&self, hub: u32) -> &str {
        self.hubs.get(&hub).map_or("", |hub| &hub.offer.machine)
    }

    /// The workers that a hub serves.
    pub(crate) fn place(&self, hub: u32) -> Option<&Place> {
        self.hubs.get(&hub).map(|joined| &joined.offer.place)
    }

    /// Whether jobs that choose hubs by this label may have a hub. One that serves a single host belongs to a job as its workers
    /// do.
    pub(crate) fn is_chosen(&self, hub: u32, label: Option<HubLabel>) -> bool {
        let Some((label, joined)) = label.zip(self.hubs.get(&hub)) else { return true };
        !joined.offer.place.host.is_empty() || joined.offer.labels.contains(&label)
    }

    /// Where a hub is.
    pub(crate) fn location(&self, hub: u32) -> HubLocation {
        let offer = |joined: &Hub| HubLocation {
            machine: joined.offer.machine.clone(),
            rack: joined.offer.place.rack.clone(),
        };
        self.hubs.get(&hub).map(offer).unwrap_or_default()
    }

    /// Notes that a hub has hung up while its call waited for commands.
    pub(crate) fn hung_up(&mut self, hub: u32) {
        if let Some(joined) = self.hubs.get_mut(&hub) {
            joined.has_hung_up = true;
        }
    }

    /// What is known of a hub from its calls.
    pub(crate) fn last_contact(&self, hub: u32) -> Option<LastContact> {
        self.hubs.get(&hub).map(|joined| LastContact { call: joined.heard, has_hung_up: joined.has_hung_up })
    }

    /// The hubs as listings show them. `jobs` says how many jobs have a part at a hub.
    pub(crate) fn statuses(&self, jobs: impl Fn(u32) -> u32, now: Now) -> Vec<HubStatus> {
        let status = |(&hub, joined): (&u32, &Hub)| HubStatus {
            hub,
            shape: joined.offer.shape.clone(),
            place: joined.offer.place.clone(),
            cores: joined.cores.clone(),
            silent_s: now.seconds_since(joined.heard),
            unheard: joined.is_unheard(),
            drained: joined.drained,
            labels: joined.offer.labels.clone(),
            jobs: jobs(hub),
        };
        self.hubs.iter().map(status).collect()
    }
}

impl Hub {
    fn is_unheard(&self) -> bool {
        matches!(self.contact, Contact::Unheard { .. })
    }
}

/// Checks the place that a hub or a worker reports, since it appears in messages.
pub(crate) fn check_place(place: &Place) -> Result<(), ServiceError> {
    for (what, name) in [("rack", &place.rack), ("host", &place.host)] {
        if name.len() > PLACE_BYTES_MAX || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            let message = format!(
                "the {what} {:?} must be a name of at most {PLACE_BYTES_MAX} printable ASCII characters without spaces",
                &name[..name.floor_char_boundary(PLACE_BYTES_MAX)]
            );
            return Err(refusal(ErrorCode::BadRequest, message));
        }
    }
    Ok(())
}

fn check_shape(hub: u32, shape: &HubShape) -> Result<(), ServiceError> {
    shape.check(hub as usize).map_err(|wrong| refusal(ErrorCode::BadRequest, wrong.to_string()))?;
    for interface in &shape.interfaces {
        let address = &interface.address;
        let dialable = address
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
        let plain = address.bytes().all(|byte| byte.is_ascii_graphic());
        if !dialable || !plain || address.len() > ADDRESS_BYTES_MAX {
            let message = format!("interface address {address:?} is not of the form host:port");
            return Err(refusal(ErrorCode::BadRequest, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::membership::time::at;
    use crate::placement::InterfaceShape;

    fn shape(address: &str) -> HubShape {
        let interface = InterfaceShape { address: address.into(), cores: vec![0], weight: 1 };
        HubShape { interfaces: vec![interface], local: None, between_hubs: None }
    }

    fn offer(shape: HubShape) -> RegisterHub {
        RegisterHub {
            protocol: VERSION,
            shape,
            place: Place::default(),
            machine: String::new(),
            keeps_checkpoints: None,
            encrypt: false,
            labels: Vec::new(),
        }
    }

    #[test]
    fn only_the_hub_itself_is_admitted() {
        let (mut hubs, now) = (Hubs::default(), at(0.0));
        let number = hubs.register(offer(shape("127.0.0.1:1")), "secret", now).unwrap();
        for wrong in [None, Some(""), Some("secre"), Some("Secret")] {
            assert_eq!(hubs.admit(number, wrong, now).err().unwrap().code, ErrorCode::Unauthorized);
        }
        assert_eq!(hubs.admit(7, Some("secret"), now).err().unwrap().code, ErrorCode::NotFound);
    }

    #[test]
    fn addresses_must_be_dialable() {
        let mut hubs = Hubs::default();
        for address in ["", "host", ":1", "host:0", "host:port", "ho st:1", "host:1\n"] {
            let refused = hubs.register(offer(shape(address)), "", at(0.0)).unwrap_err();
            assert!(refused.message.contains("host:port"), "{}", refused.message);
        }
        hubs.register(offer(shape("[::1]:80")), "", at(0.0)).unwrap();
        assert_eq!(hubs.at_addresses_of(&shape("[::1]:80")), [0]);
        assert_eq!(hubs.at_addresses_of(&shape("[::1]:81")), [] as [u32; 0]);
    }
}
