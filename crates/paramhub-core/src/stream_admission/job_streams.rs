//! The streams of one job at a hub: which are admitted, and to which place.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::{StaleStream, StreamSecrets, check_attempt};
use crate::auth::Incarnation;
use crate::composition::{Composed, Neighbour, SiteId};
use crate::placement::RouteId;
use crate::ports::{Ports, Side};
use crate::standbys::Role;
use crate::wire::{Caller, Hello, Refusal};

/// What a hub knows of a job before its streams come.
#[derive(Clone, Debug)]
pub struct StreamTerms {
    /// The job's name.
    pub name: String,
    /// With what its streams are proved.
    pub secrets: StreamSecrets,
    /// The job's sites; the hub's place among them is in `site`, `ports` and the placements.
    pub composed: Arc<Composed>,
    /// The number of workers that are there from the beginning, counted from rank 0. The other ranks are lost until a
    /// process takes them.
    pub first_workers: u32,
    /// The hub's site.
    pub site: SiteId,
    /// The hub's position in the job.
    pub position: u16,
    /// The ports of each of the hub's routes.
    pub ports: HashMap<RouteId, Arc<Ports>>,
    /// Routes with chunks, by interface and core number.
    pub routes: HashMap<(u16, u16), RouteId>,
    /// The interface and the core of each route for which the hub is the standby.
    pub standby_routes: HashMap<RouteId, (u16, u16)>,
    /// What the hub is for each route, in a job with standbys; otherwise empty.
    pub roles: HashMap<RouteId, Role>,
    /// Whether another stream may take the place of one that was cut.
    pub resumes: bool,
    /// Whether streams over TCP must be encrypted.
    pub encrypts: bool,
}

/// The streams of a job that a hub has admitted.
#[derive(Clone, Debug)]
pub struct JobStreams {
    terms: StreamTerms,
    /// The process that holds each rank.
    incarnations: HashMap<u32, Incarnation>,
    /// The epoch since which each rank is lost, or has been another process's than at first.
    changed: BTreeMap<u32, u64>,
    /// The ranks that are lost.
    lost: BTreeSet<u32>,
    /// The ports that have their stream.
    taken: HashMap<(RouteId, u32), TakenPort>,
}

/// A port's stream.
#[derive(Clone, Copy, Debug)]
struct TakenPort {
    /// The interface; `None` for a stream over shared memory. A port keeps one of the two kinds for the life
    /// of the job: the shard keeps a port's tensors in an arena or sends them, never both.
    by: Option<u16>,
    /// The stream's number among those of its caller.
    attempt: u32,
}

/// The origin of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamOrigin {
    /// A listener that stands for these interfaces, and whether the stream is encrypted.
    Interfaces {
        /// The interfaces.
        interfaces: Range<u16>,
        /// Whether the stream is encrypted.
        is_encrypted: bool,
    },
    /// A process of this host, which shares memory.
    Local,
}

/// The place of an admitted stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPlace {
    /// The route.
    pub route: RouteId,
    /// The port.
    pub port: u32,
    /// The stream's number among those of its caller. An older stream must not displace a newer one.
    pub attempt: u32,
    /// The job's epoch.
    pub epoch: u64,
    /// The interface over which the stream resumes the port's; `None` for a new stream.
    pub resumed_by: Option<u16>,
}

impl JobStreams {
    /// A job without streams.
    pub fn new(terms: StreamTerms) -> JobStreams {
        let lost = (terms.first_workers..terms.composed.composition.workers()).collect();
        JobStreams {
            terms,
            incarnations: HashMap::new(),
            changed: BTreeMap::new(),
            lost,
            taken: HashMap::new(),
        }
    }

    /// With what its streams are proved.
    pub fn secrets(&self) -> &StreamSecrets {
        &self.terms.secrets
    }

    /// The name of a caller for people.
    pub fn name_of(&self, caller: Caller) -> String {
        match caller {
            Caller::Worker { rank, .. } => format!("rank {rank}"),
            Caller::Hub { site, .. } => self.terms.composed.composition.name(site),
            Caller::Prober => "a probe".to_string(),
        }
    }

    /// The job's name.
    pub fn job_name(&self) -> &str {
        &self.terms.name
    }

    /// Notes that a rank is lost since `epoch`. Streams of its process are refused from now on.
    pub fn lose_rank(&mut self, rank: u32, epoch: u64) {
        self.begin_epoch(rank, epoch);
        self.lost.insert(rank);
        self.incarnations.remove(&rank);
        let ports = &self.terms.ports;
        self.taken.retain(|(route, port), _| ports[route].of_rank(rank) != Some(*port));
    }

    /// Notes that another process has a lost rank since `epoch`. Its streams are admitted from now on.
    pub fn admit_rank(&mut self, rank: u32, epoch: u64) {
        self.begin_epoch(rank, epoch);
        self.lost.remove(&rank);
    }

    /// Notes that the hub is the standby of a route from now on, which it has at this interface and core, and with which it had
    /// nothing to do.
    pub fn add_standby_route(&mut self, route: RouteId, at: (u16, u16), ports: Arc<Ports>) {
        self.terms.ports.insert(route, ports);
        self.terms.standby_routes.insert(route, at);
        self.terms.roles.insert(route, Role::StandsBy);
        self.taken.retain(|&(of, _), _| of != route);
    }

    /// Notes what the hub is for a route from now on. Streams of the callers that it has to do with no more are forgotten.
    pub fn change_role(&mut self, route: RouteId, role: Role) {
        let Some(held) = self.terms.roles.get_mut(&route) else { return };
        *held = role;
        let ports = &self.terms.ports[&route];
        let is_kept = |port: u32| match ports.side(port) {
            Side::Worker(_) => matches!(role, Role::Serves { .. }),
            _ => role == Role::StandsBy,
        };
        self.taken.retain(|&(of, port), _| of != route || is_kept(port));
    }

    fn begin_epoch(&mut self, rank: u32, epoch: u64) {
        self.changed.insert(rank, epoch);
        let newest = &mut self.terms.secrets.newest_epoch;
        *newest = epoch.max(*newest);
    }

    /// Returns the workers by rank, then the sites, that lack a stream on some route. It leaves out lost ranks, and
    /// the sites above, because this hub dials them.
    pub fn missing(&self) -> Vec<Neighbour> {
        let mut missing = BTreeSet::new();
        let is_lost = |neighbour: &Neighbour| neighbour.rank().is_some_and(|rank| self.lost.contains(&rank));
        for (&route, ports) in &self.terms.ports {
            let open = (0..ports.len()).filter(|&port| !self.taken.contains_key(&(route, port)));
            missing.extend(
                open.filter(|&port| {
                    !ports.side(port).takes_sums() && self.is_awaited(route, ports.side(port))
                })
                .map(|port| ports.neighbour(port))
                .filter(|neighbour| !is_lost(neighbour)),
            );
        }
        missing.into_iter().collect()
    }

    /// Returns whether a stream is to come to a port with this role.
    fn is_awaited(&self, route: RouteId, side: Side) -> bool {
        match (self.terms.roles.get(&route), side) {
            (None, _) => true,
            (Some(Role::Serves { .. }), side) => matches!(side, Side::Worker(_)),
            (Some(Role::StandsBy), side) => side == Side::Serving,
            (Some(Role::None), _) => false,
        }
    }

    /// Returns the streams that use an interface, each as its route, its port and the neighbour at the other end.
    pub fn through(&self, interface: u16) -> Vec<(RouteId, u32, Neighbour)> {
        let through = self.taken.iter().filter(|(_, taken)| taken.by == Some(interface));
        through.map(|(&(route, port), _)| (route, port, self.terms.ports[&route].neighbour(port))).collect()
    }

    /// Finds the place of a worker, or of a hub of another site, that has proved its stream. The place is the stream's
    /// once it is [taken](Self::take).
    ///
    /// # Errors
    /// The reason for which the stream is refused.
    pub fn place(&mut self, hello: &Hello, origin: &StreamOrigin) -> Result<StreamPlace, (Refusal, String)> {
        let terms = &self.terms;
        let refused = |refusal, message: String| Err((refusal, message));
        if hello.caller == Caller::Prober {
            return refused(Refusal::Route, "a probe takes part in no job".to_string());
        }
        let (name, who) = (&terms.name, self.name_of(hello.caller));
        let expected = match hello.caller {
            Caller::Worker { .. } => terms.composed.placements[usize::from(terms.site)].hash(),
            Caller::Hub { .. } | Caller::Prober => terms.composed.hash(),
        };
        if let Caller::Worker { rank, .. } = hello.caller
            && rank >= terms.composed.composition.workers()
        {
            let last = terms.composed.composition.workers() - 1;
            let why = format!("{who} is not in job `{name}`, whose last rank is {last}");
            return refused(Refusal::Rank, why);
        }
        if hello.placement != *expected.as_bytes() {
            let why =
                "the two ends computed different placements: use the same release of paramhub on both ends";
            return refused(Refusal::Placement, format!("{who} of job `{name}`: {why}"));
        }
        if terms.encrypts && matches!(origin, StreamOrigin::Interfaces { is_encrypted: false, .. }) {
            let why = format!(
                "{who} of job `{name}` does not encrypt its stream, and the job's streams are encrypted: use a release of \
                 paramhub that can, on this end"
            );
            return refused(Refusal::Capability, why);
        }
        let resumes = resumes(hello);
        if resumes && !terms.resumes {
            let why =
                format!("{who} of job `{name}` resumes a stream, and no stream of this job can be resumed");
            return refused(Refusal::Route, why);
        }
        // Hubs may have a link of their own, and an address there that is none of the interfaces.
        let is_hub = matches!(hello.caller, Caller::Hub { .. });
        let at = (hello.interface, hello.core);
        let route = match hello.standby_route {
            None => terms.routes.get(&at).copied(),
            Some(route) => terms.standby_routes.get(&route).filter(|&&held| held == at).map(|_| route),
        };
        let route = route.filter(|_| match origin {
            // The interface differs, the route is the same.
            StreamOrigin::Interfaces { .. } if resumes || is_hub => true,
            StreamOrigin::Interfaces { interfaces, .. } => interfaces.contains(&hello.interface),
            StreamOrigin::Local if resumes => false,
            // A process of this host needs no interface: it names one to identify the route.
            StreamOrigin::Local => true,
        });
        let Some(route) = route else {
            let (at, core) = (hello.interface, hello.core);
            let why = format!("job `{name}` has no chunks at core {core} of interface {at} here");
            return refused(Refusal::Route, why);
        };
        let port = match hello.caller {
            Caller::Worker { rank, .. } => terms.ports[&route].of_rank(rank),
            Caller::Hub { site, route: theirs } => terms.ports[&route].of_site(site, theirs),
            Caller::Prober => None,
        };
        let Some(port) = port else {
            let why = format!("{who} of job `{name}` exchanges elsewhere, not at this hub");
            return refused(Refusal::Rank, why);
        };
        match (terms.roles.get(&route), hello.caller) {
            (None | Some(Role::Serves { .. }), Caller::Worker { .. })
            | (None | Some(Role::StandsBy), Caller::Hub { .. }) => {}
            // The worker asks again, here and at the other hub.
            (_, Caller::Worker { .. }) => {
                let why = format!("this hub does not serve these chunks of job `{name}`, or not yet");
                return refused(Refusal::Busy, why);
            }
            (_, Caller::Hub { .. } | Caller::Prober) => {
                let why = format!("this hub is not the standby of these chunks of job `{name}` any more");
                return refused(Refusal::Stale, why);
            }
        }
        if let Caller::Worker { rank, .. } = hello.caller
            && self.lost.contains(&rank)
        {
            let why = format!(
                "{who} of job `{name}` is lost since epoch {}: another process may take the rank, which begins with \
                 ConnectService",
                self.epoch_of(hello.caller)
            );
            return refused(Refusal::Stale, why);
        }
        let epoch = self.epoch_of(hello.caller);
        // A former process of the rank must not be taken for the present one before that has come.
        if let Err(stale @ StaleStream::Epoch { .. }) = check_attempt(epoch, None, hello.attempt) {
            return refused(Refusal::Stale, format!("{who} of job `{name}`: {stale}"));
        }
        let is_other = match hello.caller {
            Caller::Worker { rank, .. } => {
                *self.incarnations.entry(rank).or_insert(hello.incarnation) != hello.incarnation
            }
            Caller::Hub { .. } | Caller::Prober => false,
        };
        let taken = self.taken.get(&(route, port));
        if is_other || (taken.is_some() && !resumes) {
            let why = format!("{who} of job `{name}` is connected already: two processes have the same rank");
            return refused(Refusal::RankTaken, why);
        }
        // The hub that serves may still dial an earlier standby, at whose address another process has become one since.
        let is_for_standby = is_hub && hello.standby_route.is_some();
        let fitting = [Incarnation::NONE, Incarnation::of_standby(terms.position)];
        if is_for_standby && !fitting.contains(&hello.incarnation) {
            let why = format!(
                "{who} of job `{name}` calls an earlier standby of these chunks, which was at this address"
            );
            return refused(Refusal::Stale, why);
        }
        let attempt = match check_attempt(epoch, taken.map(|taken| taken.attempt), hello.attempt) {
            Ok(attempt) => attempt,
            Err(stale) => return refused(Refusal::Stale, format!("{who} of job `{name}`: {stale}")),
        };
        // The tensors of such a stream are in shared memory, and it cannot be cut.
        if resumes && taken.is_some_and(|taken| taken.by.is_none()) {
            let why = format!(
                "{who} of job `{name}` resumes a stream over shared memory: only a stream over TCP can be resumed, by another one"
            );
            return refused(Refusal::Route, why);
        }
        if *origin == StreamOrigin::Local && !matches!(hello.caller, Caller::Worker { .. }) {
            return refused(Refusal::Route, "hubs reach one another over interfaces".to_string());
        }
        let by = by(hello, origin);
        Ok(StreamPlace { route, port, attempt, epoch, resumed_by: by.filter(|_| taken.is_some()) })
    }

    /// The epoch since which a caller is in the job.
    fn epoch_of(&self, caller: Caller) -> u64 {
        let changed = match caller {
            Caller::Worker { rank, .. } => self.changed.get(&rank).copied(),
            Caller::Hub { .. } | Caller::Prober => None,
        };
        changed.unwrap_or(self.terms.secrets.epoch.number)
    }

    /// The stream has its place from now on.
    pub fn take(&mut self, place: &StreamPlace, hello: &Hello, origin: &StreamOrigin) {
        let taken = TakenPort { by: by(hello, origin), attempt: place.attempt };
        self.taken.insert((place.route, place.port), taken);
    }
}

/// Whether a worker, or a hub of another site, replaces a stream by another.
fn resumes(hello: &Hello) -> bool {
    matches!(hello.caller, Caller::Worker { .. } | Caller::Hub { .. }) && hello.attempt.resumes()
}

/// The interface over which a stream comes; `None` over shared memory.
fn by(hello: &Hello, origin: &StreamOrigin) -> Option<u16> {
    match origin {
        StreamOrigin::Interfaces { interfaces, .. } => {
            let named = Some(hello.interface).filter(|named| !resumes(hello) && interfaces.contains(named));
            named.or(Some(interfaces.start))
        }
        StreamOrigin::Local => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::{Epoch, EpochSecret, Namespace, Nonce};
    use crate::chunk::ChunkMap;
    use crate::composition::Composition;
    use crate::key::{Key, KeyTable};
    use crate::placement::{HubShape, InterfaceShape};
    use crate::wire::{Attempt, Capabilities};

    const ROUTE: RouteId = 0;
    const SERVES: Role = Role::Serves { has_standby: false };

    /// The streams of a job of one rank at the standby of route 0, whose core is 5 there.
    fn at_standby() -> JobStreams {
        let interface = InterfaceShape { address: "10.0.0.1:1".into(), cores: vec![0], weight: 1 };
        let hubs = vec![HubShape { interfaces: vec![interface], local: None, between_hubs: None }; 2];
        let table = KeyTable::new(vec![Key::new("w", [4096])]).unwrap();
        let map = ChunkMap::new(&table, 4096).unwrap();
        let composed = Arc::new(Composed::new(&table, &map, Composition::flat(hubs, 1)).unwrap());
        let ports = Ports::new(&composed, 0, ROUTE).with_counterpart(Side::Serving, 0, ROUTE);
        let epoch = Epoch { number: 1, secret: EpochSecret([3; 32]) };
        let nonce = Nonce([2; 32]);
        JobStreams::new(StreamTerms {
            name: "digits".into(),
            secrets: StreamSecrets { nonce, epoch, newest_epoch: 1, version_1_ranks: Vec::new() },
            composed,
            first_workers: 1,
            site: 0,
            position: 1,
            ports: [(ROUTE, Arc::new(ports))].into(),
            routes: HashMap::new(),
            standby_routes: [(ROUTE, (0, 5))].into(),
            roles: [(ROUTE, Role::StandsBy)].into(),
            resumes: true,
            encrypts: false,
        })
    }

    fn hello(streams: &JobStreams, caller: Caller, number: u32) -> Hello {
        let composed = &streams.terms.composed;
        let placement = match caller {
            Caller::Worker { .. } => composed.placements[0].hash(),
            _ => composed.hash(),
        };
        Hello {
            caller,
            interface: 0,
            core: 5,
            standby_route: Some(ROUTE),
            offered: Capabilities::default(),
            required: Capabilities::default(),
            attempt: Attempt::Numbered { epoch: 1, number },
            namespace: Namespace([1; 16]),
            incarnation: match caller {
                Caller::Worker { .. } => Incarnation([2; 16]),
                _ => Incarnation::of_standby(1),
            },
            placement: *placement.as_bytes(),
            challenge: [4; 32],
        }
    }

    #[test]
    fn a_hub_that_becomes_the_standby_of_a_route_again_admits_new_streams_of_the_hub_that_serves_it() {
        let mut streams = at_standby();
        let origin = StreamOrigin::Interfaces { interfaces: 0..1, is_encrypted: false };
        let call = hello(&streams, Caller::Hub { site: 0, route: ROUTE }, 4);
        let place = streams.place(&call, &origin).unwrap();
        streams.take(&place, &call, &origin);
        streams.change_role(ROUTE, Role::None);
        assert_eq!(streams.place(&call, &origin).unwrap_err().0, Refusal::Stale);
        let ports = streams.terms.ports[&ROUTE].clone();
        streams.add_standby_route(ROUTE, (0, 5), ports);
        assert_eq!(streams.missing(), [Neighbour::Counterpart(ROUTE)]);
        let first = hello(&streams, Caller::Hub { site: 0, route: ROUTE }, 0);
        assert_eq!(streams.place(&first, &origin).unwrap().resumed_by, None);
        let worker = hello(&streams, Caller::Worker { rank: 0, shares_parameters: false }, 1);
        assert_eq!(streams.place(&worker, &origin).unwrap_err().0, Refusal::Busy);
    }

    #[test]
    fn a_standby_admits_the_hub_that_it_follows_until_it_takes_over_and_then_the_workers() {
        let mut streams = at_standby();
        let origin = StreamOrigin::Interfaces { interfaces: 0..1, is_encrypted: false };
        let [worker, hub] =
            [Caller::Worker { rank: 0, shares_parameters: false }, Caller::Hub { site: 0, route: ROUTE }];
        let place = |streams: &mut JobStreams, caller, number| {
            let hello = hello(streams, caller, number);
            let placed = streams.place(&hello, &origin);
            placed.as_ref().ok().into_iter().for_each(|place| streams.take(place, &hello, &origin));
            placed.map(|place| (place.port, place.resumed_by.is_some())).map_err(|(refusal, _)| refusal)
        };
        assert_eq!(streams.missing(), [Neighbour::Counterpart(ROUTE)]);
        let former = Hello { incarnation: Incarnation::of_standby(0), ..hello(&streams, hub, 4) };
        let refused = streams.place(&former, &origin).map_err(|(refusal, _)| refusal);
        assert_eq!(refused, Err(Refusal::Stale), "it takes this hub for an earlier standby");
        assert_eq!(place(&mut streams, hub, 0), Ok((1, false)));
        assert!(streams.missing().is_empty());
        assert_eq!(place(&mut streams, worker, 1), Err(Refusal::Busy));
        assert_eq!(place(&mut streams, hub, 1), Ok((1, true)));

        streams.change_role(ROUTE, SERVES);
        assert_eq!(streams.missing(), [Neighbour::Worker(0)]);
        assert_eq!(place(&mut streams, hub, 2), Err(Refusal::Stale), "the hub that served is too late");
        assert_eq!(place(&mut streams, worker, 3), Ok((0, false)));
        streams.change_role(ROUTE, Role::None);
        assert_eq!(place(&mut streams, worker, 4), Err(Refusal::Busy));
        assert!(streams.missing().is_empty());
        let elsewhere = Hello { core: 4, ..hello(&streams, worker, 5) };
        assert_eq!(streams.place(&elsewhere, &origin).unwrap_err().0, Refusal::Route);
    }

    #[test]
    fn hubs_come_over_a_link_of_their_own_and_workers_do_not() {
        let mut streams = at_standby();
        let link = StreamOrigin::Interfaces { interfaces: 1..2, is_encrypted: false };
        let call = hello(&streams, Caller::Hub { site: 0, route: ROUTE }, 0);
        let place = streams.place(&call, &link).unwrap();
        streams.take(&place, &call, &link);
        assert_eq!(streams.through(0), [], "the interface of the route may go down");
        assert_eq!(streams.through(1), [(ROUTE, place.port, Neighbour::Counterpart(ROUTE))]);

        streams.change_role(ROUTE, SERVES);
        let worker = hello(&streams, Caller::Worker { rank: 0, shares_parameters: false }, 0);
        assert_eq!(streams.place(&worker, &link).unwrap_err().0, Refusal::Route);
        let interface = StreamOrigin::Interfaces { interfaces: 0..1, is_encrypted: false };
        assert!(streams.place(&worker, &interface).is_ok());
    }
}
