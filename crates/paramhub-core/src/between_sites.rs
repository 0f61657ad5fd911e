//! The rules of a hub's streams to neighbours of which some are other sites: what goes once more over a stream that
//! replaces another, how long a neighbour whose stream has ended is waited for, how soon an end learns that its stream is
//! cut, and when the hub leaves the sites above.

use std::ops::Range;
use std::time::Duration;

use crate::exchange::Exchange;
use crate::liveness::{HEARTBEAT, LivenessRules};
use crate::ports::{Ports, Side};
use crate::resuming::{HubWait, ResumeTerms, StreamEnd};
use crate::wire::Operation;

/// How long a standby waits for another stream in place of one that the hub which it follows has closed.
const REPLACED_SOON: Duration = Duration::from_millis(50);

/// What goes once more to a neighbouring site, over a stream that replaces another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// The parameters with which the chunk in this slot begins.
    Start(u32),
    /// The sum of the chunk in this slot, to the site above or to the standby, which has not answered it.
    Sum(u32),
}

/// Another stream has replaced that of a port to another site. Calls `again` for everything that the old one may have lost,
/// and has the exchange expect the same of a site below. Returns the newest step of the chunks that the stream carries.
pub fn resume(exchange: &mut Exchange, ports: &Ports, port: u32, mut again: impl FnMut(Again)) -> u32 {
    let side = ports.side(port);
    let mut newest = 0;
    for slot in (0..ports.slots()).filter(|&slot| ports.carries(port, side, slot)) {
        newest = newest.max(exchange.step(slot));
        if may_lack_start(exchange, side, slot) {
            again(Again::Start(slot));
        }
        match side {
            Side::Below(member) => exchange.resume_at(slot, member),
            Side::Above | Side::Standby if exchange.is_sent_up(slot) => again(Again::Sum(slot)),
            Side::Above | Side::Standby | Side::Serving | Side::Worker(_) => {}
        }
    }
    newest
}

/// Whether the neighbour at a port with this role may lack the parameters that the chunk begins with there: it has not contributed
/// to the chunk nor, if it is the standby, acknowledged them.
pub fn may_lack_start(exchange: &Exchange, side: Side, slot: u32) -> bool {
    match side {
        Side::Standby => exchange.awaits_standby(slot),
        Side::Serving => false,
        // A site without which the chunk moves on has nothing sent to it once more.
        Side::Below(member) if exchange.moves_on_without(slot, member) => true,
        Side::Worker(_) | Side::Below(_) | Side::Above => exchange.is_at_start(slot),
    }
}

/// How long a hub waits for another stream in place of one that has ended like this at a port with this role; `None` if the
/// neighbour is lost at once.
pub fn hub_waits(terms: &ResumeTerms, side: Side, end: StreamEnd) -> Option<HubWait> {
    match (side, end) {
        // A hub closes its cut stream when it opens another, and the end of the old one may be seen first.
        (Side::Below(_), StreamEnd::Closed) => terms.hub_waits(StreamEnd::Reset),
        // The same, but the loss of a hub is to be noticed soon.
        (Side::Serving, StreamEnd::Closed) => Some(HubWait::For(REPLACED_SOON)),
        (_, end) => terms.hub_waits(end),
    }
}

/// Whether a frame may come from a neighbour that has left. Its stream was cut after the Leave, and it could not know that
/// this had arrived: over the next stream it sends once more what goes before it, and it.
pub fn repeats_after_leave(side: Side, operation: Operation) -> bool {
    match operation {
        Operation::Retune | Operation::Release | Operation::Skip | Operation::Leave => true,
        Operation::Initialise | Operation::InitialiseState => matches!(side, Side::Below(_) | Side::Serving),
        _ => false,
    }
}

/// The waiting times of a hub at a port with this role. At a site above the hub dials again, so it must learn soon that its
/// stream is cut.
pub fn liveness(terms: &ResumeTerms, side: Side, dead_after: Duration) -> LivenessRules {
    let heartbeat = match side {
        Side::Above | Side::Standby => terms.heartbeat(HEARTBEAT),
        Side::Worker(_) | Side::Below(_) | Side::Serving => HEARTBEAT,
    };
    LivenessRules::of_stream(heartbeat, dead_after)
}

/// The waiting times of all ports of a route that are the shortest: they say how often a hub looks at the clock.
pub fn shortest_liveness(terms: &ResumeTerms, ports: &Ports, dead_after: Duration) -> LivenessRules {
    let above = ports.to_sites().map(|(_, site)| site.side).find(|side| side.takes_sums());
    liveness(terms, above.unwrap_or(Side::Worker(0)), dead_after)
}

/// By which ports of a route nothing more arrives or, to sites above, leaves.
#[derive(Clone, Debug)]
pub struct Departures {
    left: Vec<bool>,
}

/// What follows from a neighbour's Leave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Departure {
    /// The member that has left by the last of its ports.
    pub member: Option<u32>,
    /// The ports of sites above which this hub leaves, since every neighbour below has left.
    pub above: Vec<u32>,
}

impl Departures {
    /// A route whose neighbours are all there but those at the ports `absent`.
    pub fn new(ports: &Ports, absent: &Range<u32>) -> Departures {
        Departures { left: (0..ports.len()).map(|port| absent.contains(&port)).collect() }
    }

    /// Returns whether the neighbour at a port has left or, if that is a site above, whether this hub has.
    pub fn has_left(&self, port: u32) -> bool {
        self.left[port as usize]
    }

    /// Notes that the worker at a port is lost, or that another process takes its place.
    pub fn set_lost(&mut self, port: u32, is_lost: bool) {
        self.left[port as usize] = is_lost;
    }

    /// Notes that all workers are lost.
    pub fn lose_workers(&mut self, ports: &Ports) {
        for port in (0..ports.len()).filter(|&port| ports.side(port).is_worker()) {
            self.left[port as usize] = true;
        }
    }

    /// Notes the Leave of the neighbour at a port.
    pub fn leave(&mut self, ports: &Ports, port: u32) -> Departure {
        self.left[port as usize] = true;
        let (Side::Worker(member) | Side::Below(member)) = ports.side(port) else {
            return Departure::default();
        };
        let (mut has_member_left, mut is_left_by_all) = (true, true);
        for port in 0..ports.len() {
            let (Side::Worker(other) | Side::Below(other)) = ports.side(port) else { continue };
            let is_here = !self.left[port as usize];
            has_member_left &= !(is_here && other == member);
            is_left_by_all &= !(is_here && ports.is_worker_or_child(other));
        }
        let above = ports.to_sites().filter(|(_, site)| is_left_by_all && site.side.takes_sums());
        let above: Vec<u32> = above.map(|(port, _)| port).filter(|&port| !self.has_left(port)).collect();
        above.iter().for_each(|&port| self.left[port as usize] = true);
        Departure { member: has_member_left.then_some(member), above }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::ChunkMap;
    use crate::composition::{BetweenSites, Composed, Composition, Crossing, OptimizeAt, Site, SiteId};
    use crate::consistency::Consistency;
    use crate::exchange::{Answer, Rules, SumAction};
    use crate::key::{Key, KeyTable};
    use crate::placement::{HubShape, InterfaceShape};

    fn hub(cores: u16) -> HubShape {
        let interface =
            InterfaceShape { address: "10.0.0.1:1".into(), cores: (0..cores).collect(), weight: 1 };
        HubShape { interfaces: vec![interface], local: None, between_hubs: None }
    }

    /// A site with one hub of so many cores.
    fn site(cores: u16, workers: &[u32], parent: Option<SiteId>) -> Site {
        Site { name: String::new(), hubs: vec![hub(cores)], workers: workers.to_vec(), parent }
    }

    /// The ports of the first route of a site, in a job with four chunks.
    fn ports(sites: Vec<Site>, at: SiteId) -> Ports {
        let composition = Composition {
            sites,
            crossing: Crossing::Sharded,
            optimize_at: OptimizeAt::EverySite,
            between_sites: BetweenSites::F32,
        };
        let table = KeyTable::new(vec![Key::new("w", [1024])]).unwrap();
        let map = ChunkMap::new(&table, 1024).unwrap();
        Ports::new(&Composed::new(&table, &map, composition).unwrap(), at, 0)
    }

    fn exchange(ports: &Ports) -> Exchange {
        let rules = Rules {
            workers: 3,
            members: ports.members(),
            first_members: ports.members(),
            first_site: ports.workers(),
            rank_0: ports.rank_0(),
            consistency: Consistency::Synchronous,
            reproducible: false,
            has_parameters: true,
            two_phase: false,
            quorum: None,
            rewind_every: None,
        };
        Exchange::among_sites(rules, ports.reach(rules.consistency))
    }

    fn again(exchange: &mut Exchange, ports: &Ports, port: u32) -> Vec<Again> {
        let mut all = Vec::new();
        resume(exchange, ports, port, |again| all.push(again));
        all
    }

    #[test]
    fn sums_that_are_not_answered_go_up_once_more_and_parameters_to_start_from_both_ways() {
        let ports = ports(vec![site(1, &[2], None), site(1, &[0, 1], Some(0))], 1);
        let mut exchange = exchange(&ports);
        let above = 2;
        assert_eq!(again(&mut exchange, &ports, above), [], "nothing has begun");
        exchange.initialise(0, Some(0), 0).unwrap();
        exchange.mark_due_answers(0, |_, _| {});
        exchange.answer_begun(0, 0);
        exchange.push(0, 0, 0, Answer::Parameters).unwrap();
        assert_eq!(again(&mut exchange, &ports, above), [Again::Start(0)]);
        assert_eq!(exchange.push(0, 1, 0, Answer::Parameters).unwrap().then, SumAction::Raise);
        assert_eq!(again(&mut exchange, &ports, above), [Again::Start(0), Again::Sum(0)]);
        exchange.lower(0, 0).unwrap();
        assert_eq!(again(&mut exchange, &ports, above), [], "the site above has moved on as well");
    }

    #[test]
    fn a_sum_of_a_site_below_may_come_once_more_over_another_stream_alone() {
        let ports = ports(vec![site(1, &[0], None), site(1, &[1, 2], Some(0))], 0);
        let mut exchange = exchange(&ports);
        let (below, member) = (1, 1);
        exchange.initialise(0, Some(0), 0).unwrap();
        exchange.push(0, member, 0, Answer::Parameters).unwrap();
        assert!(!exchange.is_repeat(0, member, 0));
        assert_eq!(again(&mut exchange, &ports, below), [Again::Start(0)]);
        assert!(exchange.is_repeat(0, member, 0) && !exchange.is_repeat(1, member, 0));
    }

    #[test]
    fn the_end_of_a_stream_from_a_hub_below_may_be_that_of_a_cut_one() {
        let grace = Duration::from_secs(1);
        let terms = ResumeTerms { redial_grace: grace, moves: false, has_standbys: false };
        let waits = |side| hub_waits(&terms, side, StreamEnd::Closed);
        let sides = [Side::Worker(0), Side::Below(1), Side::Above];
        assert_eq!(sides.map(waits), [None, Some(HubWait::For(grace)), None]);
        assert_eq!(hub_waits(&ResumeTerms::default(), Side::Below(1), StreamEnd::Closed), None);
        assert_eq!(hub_waits(&terms, Side::Above, StreamEnd::Reset), Some(HubWait::For(grace)));
    }

    #[test]
    fn a_hub_that_dials_again_learns_of_a_cut_within_the_time_for_which_the_other_waits() {
        let (grace, dead_after) = (Duration::from_millis(500), Duration::from_secs(30));
        let terms = ResumeTerms { redial_grace: grace, moves: false, has_standbys: false };
        let sites = || vec![site(1, &[0], None), site(1, &[1, 2], Some(0))];
        let [top, below] = [0, 1].map(|at| shortest_liveness(&terms, &ports(sites(), at), dead_after));
        assert_eq!((top.heartbeat, below.heartbeat), (HEARTBEAT, grace / 2));
        assert!(below.heartbeat + below.check_every() < grace);
        assert_eq!(
            liveness(&terms, Side::Below(0), dead_after),
            liveness(&terms, Side::Worker(0), dead_after)
        );
    }

    #[test]
    fn a_hub_leaves_the_sites_above_after_all_that_is_below() {
        // The child has two routes, and each of them has a stream to the route of its parent.
        let sites = vec![site(1, &[3], None), site(1, &[0], Some(0)), site(2, &[1, 2], Some(1))];
        let ports = ports(sites, 1);
        assert_eq!(ports.len(), 4, "a worker, two routes below, and one above");
        let mut departures = Departures::new(&ports, &(0..0));
        assert_eq!(departures.leave(&ports, 1), Departure::default(), "the child has another route");
        assert_eq!(departures.leave(&ports, 0), Departure { member: Some(0), above: vec![] });
        assert!(!departures.has_left(3));
        assert_eq!(departures.leave(&ports, 2), Departure { member: Some(1), above: vec![3] });
        assert!(departures.has_left(3));
        assert_eq!(departures.leave(&ports, 2), Departure { member: Some(1), above: vec![] }, "once");
    }

    #[test]
    fn a_hub_does_not_wait_for_its_peers_before_it_leaves_them() {
        let ports = ports(vec![site(1, &[0], None), site(1, &[1], None)], 0);
        let mut departures = Departures::new(&ports, &(0..0));
        assert_eq!(departures.leave(&ports, 0), Departure { member: Some(0), above: vec![2] });
        assert_eq!(departures.leave(&ports, 1), Departure { member: Some(1), above: vec![] });
    }
}
