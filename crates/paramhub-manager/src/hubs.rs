//! The hubs that have joined, and the commands that wait for each.

use std::collections::{BTreeMap, VecDeque};

use axum::body::Bytes;
use paramhub_core::composition::Place;
use paramhub_core::limits::HUBS_MAX;
use paramhub_core::placement::HubShape;
use paramhub_core::service::{CoreCounters, ErrorCode, HubStatus, RegisterHub, ServiceError};
use subtle::ConstantTimeEq;
use tokio::sync::watch;

use crate::clock::Now;
use crate::error::refusal;
use crate::job::members::describe_hub;

/// Bytes of commands in one answer, where there is more than one: a hub takes the rest with its next poll.
const ANSWER_BYTES: usize = 16 << 20;
/// Bytes of an interface's address.
const ADDRESS_BYTES_MAX: usize = 255;

/// Bytes of a rack's or host's name.
const PLACE_BYTES_MAX: usize = 128;

/// A hub's number, what it offers and whom it serves.
pub(crate) type OfferedHub = (u32, (HubShape, Place));

/// All living hubs, by number.
#[derive(Default)]
pub(crate) struct Hubs {
    hubs: BTreeMap<u32, Hub>,
    next: u32,
}

/// One hub.
pub(crate) struct Hub {
    shape: HubShape,
    place: Place,
    /// The machine it runs on; empty where nobody knows.
    machine: String,
    /// None where nobody knows.
    keeps_checkpoints: Option<bool>,
    token: String,
    pub(crate) cores: Vec<CoreCounters>,
    heard: Now,
    /// It is about to stop, and takes no further jobs.
    pub(crate) is_leaving: bool,
    /// Not yet acknowledged, as JSON, because one plan can be megabytes and is sent to several hubs.
    commands: VecDeque<(u64, Bytes)>,
    /// Number of the newest command; those who poll wait for it to grow.
    newest: watch::Sender<u64>,
}

impl Hubs {
    /// Lets a hub join under a token.
    pub(crate) fn register(
        &mut self,
        offer: RegisterHub,
        token: String,
        now: Now,
    ) -> Result<u32, ServiceError> {
        let RegisterHub { shape, place, machine, keeps_checkpoints } = offer;
        let hub = self.next;
        check_shape(hub, &shape)?;
        check_place(&place)?;
        check_place(&Place { host: machine.clone(), ..Place::default() })?;
        if self.hubs.len() >= HUBS_MAX {
            let message = format!("{HUBS_MAX} hubs have joined already, the most there can be");
            return Err(refusal(ErrorCode::DoesNotFit, message));
        }
        self.next += 1;
        let newest = watch::channel(0).0;
        let joined = Hub {
            shape,
            place,
            machine,
            keeps_checkpoints,
            token,
            cores: Vec::new(),
            heard: now,
            is_leaving: false,
            commands: VecDeque::new(),
            newest,
        };
        self.hubs.insert(hub, joined);
        Ok(hub)
    }

    /// Hubs that claim an address of this shape: they must be gone, since only one process can listen there.
    pub(crate) fn at_addresses_of(&self, shape: &HubShape) -> Vec<u32> {
        let claims = |hub: &Hub| {
            let addresses = || hub.shape.interfaces.iter().map(|interface| &interface.address);
            shape.interfaces.iter().any(|interface| addresses().any(|address| *address == interface.address))
        };
        self.hubs.iter().filter(|(_, hub)| claims(hub)).map(|(&number, _)| number).collect()
    }

    /// The hub of a call, if its token is right. The call counts as a sign of life.
    pub(crate) fn admit(
        &mut self,
        hub: u32,
        token: Option<&str>,
        now: Now,
    ) -> Result<&mut Hub, ServiceError> {
        let Some(joined) = self.hubs.get_mut(&hub) else {
            let message = format!(
                "hub {hub} is not registered here: it was silent too long, or the connection manager restarted. \
                 Register again"
            );
            return Err(refusal(ErrorCode::NotFound, message));
        };
        let matches = token.is_some_and(|token| token.as_bytes().ct_eq(joined.token.as_bytes()).into());
        if !matches {
            let message = format!(
                "this is not the token that hub {hub} was given when it registered. If the connection manager restarted \
                 since, register again"
            );
            return Err(refusal(ErrorCode::Unauthorized, message));
        }
        joined.heard = now;
        Ok(joined)
    }

    /// Queues a command, JSON, for a hub that may have gone.
    pub(crate) fn command(&mut self, hub: u32, command: Bytes) {
        if let Some(hub) = self.hubs.get_mut(&hub) {
            let sequence = *hub.newest.borrow() + 1;
            hub.commands.push_back((sequence, command));
            hub.newest.send_replace(sequence);
        }
    }

    /// As [`Hubs::command`], unless the very same command waits already.
    pub(crate) fn command_once(&mut self, hub: u32, command: Bytes) {
        let waits = |joined: &Hub| joined.commands.iter().any(|(_, waiting)| *waiting == command);
        if !self.hubs.get(&hub).is_some_and(waits) {
            self.command(hub, command);
        }
    }

    /// Whether no hub that could serve a job keeps checkpoints: as many have joined as it waits for, one of them for everybody, and
    /// all say that they keep none.
    pub(crate) fn keep_no_checkpoints(&self, awaited: u32) -> bool {
        self.hubs.len() >= awaited.max(1) as usize
            && self.hubs.values().any(|hub| hub.place == Place::default())
            && self.hubs.values().all(|hub| hub.keeps_checkpoints == Some(false))
    }

    /// Forgets a hub, whose polls are answered at once: what people call it, and when it was last heard.
    pub(crate) fn remove(&mut self, hub: u32) -> Option<(String, Now)> {
        self.hubs.remove(&hub).map(|joined| (describe_hub(hub, &joined.shape), joined.heard))
    }

    /// A hub's interfaces.
    pub(crate) fn shape(&self, hub: u32) -> Option<&HubShape> {
        self.hubs.get(&hub).map(|joined| &joined.shape)
    }

    /// Hubs not heard for `timeout_s`.
    pub(crate) fn silent(&self, timeout_s: f64, now: Now) -> Vec<u32> {
        let silent = |hub: &Hub| now.seconds_since(hub.heard) >= timeout_s;
        self.hubs.iter().filter(|(_, hub)| silent(hub)).map(|(&number, _)| number).collect()
    }

    /// Counts every hub as heard just now: it was the manager that slept.
    pub(crate) fn forgive(&mut self, now: Now) {
        self.hubs.values_mut().for_each(|hub| hub.heard = now);
    }

    /// All hubs that take jobs, in order of arrival, and whom they serve.
    pub(crate) fn shapes(&self) -> Vec<OfferedHub> {
        let here = self.hubs.iter().filter(|(_, hub)| !hub.is_leaving);
        here.map(|(&number, hub)| (number, (hub.shape.clone(), hub.place.clone()))).collect()
    }

    /// The machine a hub runs on; empty where nobody knows.
    pub(crate) fn machine(&self, hub: u32) -> &str {
        self.hubs.get(&hub).map_or("", |hub| &hub.machine)
    }

    /// What listings show.
    pub(crate) fn statuses(&self, now: Now) -> Vec<HubStatus> {
        let status = |(&hub, joined): (&u32, &Hub)| HubStatus {
            hub,
            shape: joined.shape.clone(),
            place: joined.place.clone(),
            cores: joined.cores.clone(),
            silent_s: now.seconds_since(joined.heard),
        };
        self.hubs.iter().map(status).collect()
    }
}

impl Hub {
    /// Forgets the commands up to `acknowledged`.
    pub(crate) fn acknowledge(&mut self, acknowledged: u64) -> Result<(), ServiceError> {
        let newest = *self.newest.borrow();
        if acknowledged > newest {
            let message =
                format!("command {acknowledged} cannot be acknowledged: the newest command is {newest}");
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        while self.commands.front().is_some_and(|(sequence, _)| *sequence <= acknowledged) {
            self.commands.pop_front();
        }
        Ok(())
    }

    /// The oldest commands that wait, as many as one answer should carry.
    pub(crate) fn waiting(&self) -> Vec<(u64, Bytes)> {
        let mut bytes = 0;
        let fits = |(_, command): &&(u64, Bytes)| {
            bytes += command.len();
            bytes <= ANSWER_BYTES || bytes == command.len()
        };
        self.commands.iter().take_while(fits).cloned().collect()
    }

    /// Lets a poll wait for further commands.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }
}

/// The JSON of [`Commands`](paramhub_core::service::Commands), put together from commands that are JSON already.
pub(crate) fn commands_json(commands: &[(u64, Bytes)]) -> Vec<u8> {
    let bytes: usize = commands.iter().map(|(_, command)| command.len() + 64).sum();
    let mut json = Vec::with_capacity(bytes + 32);
    json.extend_from_slice(b"{\"commands\":[");
    for (index, (sequence, command)) in commands.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        json.extend_from_slice(format!("{{\"sequence\":{sequence},\"command\":").as_bytes());
        json.extend_from_slice(command);
        json.push(b'}');
    }
    json.extend_from_slice(b"]}");
    json
}

/// Checks where a hub or a worker says it is: it appears in messages.
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
    use paramhub_core::placement::InterfaceShape;
    use paramhub_core::service::Commands;

    fn shape(address: &str) -> HubShape {
        let interface = InterfaceShape { address: address.into(), cores: vec![0], weight: 1 };
        HubShape { interfaces: vec![interface], local: None }
    }

    fn offer(shape: HubShape) -> RegisterHub {
        RegisterHub { shape, place: Place::default(), machine: String::new(), keeps_checkpoints: None }
    }

    fn stop() -> Bytes {
        Bytes::from(format!("{{\"stop\":{{\"namespace\":\"{}\",\"reason\":\"r\"}}}}", "0".repeat(32)))
    }

    #[test]
    fn commands_are_repeated_until_they_are_acknowledged() {
        let (mut hubs, now) = (Hubs::default(), Now::read());
        let number = hubs.register(offer(shape("127.0.0.1:1")), "secret".into(), now).unwrap();
        (0..3).for_each(|_| hubs.command(number, stop()));
        let hub = hubs.admit(number, Some("secret"), now).unwrap();
        let sequences = |hub: &Hub| hub.waiting().iter().map(|(sequence, _)| *sequence).collect::<Vec<_>>();
        hub.acknowledge(0).unwrap();
        assert_eq!(sequences(hub), [1, 2, 3]);
        hub.acknowledge(2).unwrap();
        assert_eq!(sequences(hub), [3]);
        hub.acknowledge(1).unwrap();
        assert_eq!(sequences(hub), [3]);
        assert_eq!(hub.acknowledge(4).unwrap_err().code, ErrorCode::BadRequest);
        let read: Commands = serde_json::from_slice(&commands_json(&hub.waiting())).unwrap();
        assert_eq!(read.commands[0].sequence, 3);
        let none: Commands = serde_json::from_slice(&commands_json(&[])).unwrap();
        assert!(none.commands.is_empty());
    }

    #[test]
    fn an_answer_is_bounded_but_never_empty_while_commands_wait() {
        let (mut hubs, now) = (Hubs::default(), Now::read());
        let number = hubs.register(offer(shape("127.0.0.1:1")), "secret".into(), now).unwrap();
        for bytes in [ANSWER_BYTES + 1, 10, 10, ANSWER_BYTES] {
            hubs.command(number, Bytes::from(vec![b' '; bytes]));
        }
        let hub = hubs.admit(number, Some("secret"), now).unwrap();
        assert_eq!(hub.waiting().len(), 1);
        hub.acknowledge(1).unwrap();
        assert_eq!(hub.waiting().len(), 2);
    }

    #[test]
    fn only_the_hub_itself_is_admitted() {
        let (mut hubs, now) = (Hubs::default(), Now::read());
        let number = hubs.register(offer(shape("127.0.0.1:1")), "secret".into(), now).unwrap();
        for wrong in [None, Some(""), Some("secre"), Some("Secret")] {
            assert_eq!(hubs.admit(number, wrong, now).err().unwrap().code, ErrorCode::Unauthorized);
        }
        assert_eq!(hubs.admit(7, Some("secret"), now).err().unwrap().code, ErrorCode::NotFound);
    }

    #[test]
    fn addresses_must_be_dialable() {
        let mut hubs = Hubs::default();
        for address in ["", "host", ":1", "host:0", "host:port", "ho st:1", "host:1\n"] {
            let refused = hubs.register(offer(shape(address)), String::new(), Now::read()).unwrap_err();
            assert!(refused.message.contains("host:port"), "{}", refused.message);
        }
        hubs.register(offer(shape("[::1]:80")), String::new(), Now::read()).unwrap();
        assert_eq!(hubs.at_addresses_of(&shape("[::1]:80")), [0]);
        assert_eq!(hubs.at_addresses_of(&shape("[::1]:81")), [] as [u32; 0]);
    }
}
