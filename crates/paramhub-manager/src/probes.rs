//! What hubs of different racks have found out about the network between them: a state machine without clock and sockets.
//!
//! One hub of each rack takes part, the one whose interfaces carry most. Pairs of disjoint racks probe at once, in rounds; a
//! round ends when every hub has answered, or at its deadline, whoever is silent then being named.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use paramhub_core::auth::{Namespace, Nonce};
use paramhub_core::composition::Place;
use paramhub_core::cost::Rate;
use paramhub_core::limits::MESSAGE_BYTES_MAX;
use paramhub_core::pairs::tournament;
use paramhub_core::placement::HubShape;
use paramhub_core::service::{HubCommand, LinkStatus, ProbeOrder, ProbeOutcome, ProbeReport};
use tokio::sync::watch;

use crate::clock::Now;
use crate::hubs::OfferedHub;
use crate::job::members::describe_hub;

/// How long a round may take: what hubs need at most, and as long for orders and answers to travel.
pub(crate) const ROUND_S: f64 = 2.0;
/// Rounds of one campaign: all pairs of up to 8 racks. Of more, each rack still meets so many others.
pub(crate) const ROUNDS_MAX: usize = 7;
/// How long a result is used without probing again.
const FRESH_S: f64 = 3600.0;
/// How long a failure is.
const FAILURE_FRESH_S: f64 = 60.0;
/// Streams between two hubs: one alone does not fill a link of which both ways are full.
const STREAMS_MIN: usize = 4;
const STREAMS_MAX: usize = 16;
/// A probe that fills this much of what the probing hubs' interfaces carry says of the network only that it is no thinner. A
/// twentieth goes to headers.
const FILLED: f64 = 0.85;

/// What is known of the links between racks, and the campaign that is under way.
pub(crate) struct Probes {
    /// What the secrets of all probes are derived from.
    secret: Nonce,
    drawn: u64,
    /// By the names of the racks, from and to.
    links: BTreeMap<[String; 2], Link>,
    campaign: Option<Campaign>,
    /// How many campaigns have ended.
    ended: watch::Sender<u64>,
}

/// One direction between two racks.
struct Link {
    /// Numbers of the sending and the receiving hub.
    hubs: [u32; 2],
    outcome: Result<Rate, String>,
    /// Whether the hubs' interfaces carry no more than that.
    is_at_least: bool,
    /// Whether the rate of an interface of theirs is a guess.
    is_guess: bool,
    at: Now,
}

/// Rounds of pairs; those not yet begun wait.
struct Campaign {
    waiting: VecDeque<Vec<[Delegate; 2]>>,
    round: Vec<Running>,
    began: Now,
}

/// A pair that probes now.
struct Running {
    probe: Namespace,
    pair: [Delegate; 2],
    told: [Option<Told>; 2],
}

#[derive(Clone)]
struct Told {
    outcome: Result<Rate, String>,
    is_rated: bool,
}

/// The hub that probes for its rack.
#[derive(Clone, Debug)]
pub(crate) struct Delegate {
    rack: String,
    pub(crate) hub: u32,
    /// As messages call it.
    name: String,
    /// What its interfaces carry together, by their weights.
    mbit: u64,
    /// One each interface.
    addresses: Vec<String>,
}

/// Commands for hubs.
pub(crate) type Orders = Vec<(u32, HubCommand)>;

/// What a rack's link to the others carries, as far as anybody knows.
#[derive(Debug)]
pub(crate) enum Core {
    /// Nobody needs to know.
    Unneeded,
    /// Why it is not known.
    Unknown(String),
    Known {
        /// Each way.
        rate: Rate,
        /// Where that comes from.
        source: String,
        /// Where what hubs carry comes from.
        hubs_source: &'static str,
    },
}

impl Core {
    /// As the operator said.
    pub(crate) fn given(rate: Rate) -> Core {
        let source = format!("{rate} as --core-rate says");
        Core::Known { rate, source, hubs_source: "by their interfaces' rates" }
    }
}

/// The hub of each of these racks whose interfaces carry most, in the racks' order; of equal ones that which joined first.
pub(crate) fn delegates(hubs: &[OfferedHub], racks: &BTreeSet<String>) -> Vec<Delegate> {
    let mut chosen: BTreeMap<&str, &OfferedHub> = BTreeMap::new();
    for hub in hubs.iter().filter(|(_, (_, place))| serves_one_of(place, racks)) {
        let (shape, place) = &hub.1;
        let best = chosen.entry(&place.rack).or_insert(hub);
        if shape.weight() > best.1.0.weight() {
            *best = hub;
        }
    }
    chosen.values().map(|(number, (shape, place))| Delegate::new(*number, shape, place)).collect()
}

/// Whether a hub serves one of these racks as such.
pub(crate) fn serves_one_of(place: &Place, racks: &BTreeSet<String>) -> bool {
    place.host.is_empty() && racks.contains(&place.rack)
}

impl Delegate {
    fn new(hub: u32, shape: &HubShape, place: &Place) -> Delegate {
        let mut addresses: Vec<String> = Vec::new();
        for interface in &shape.interfaces {
            // An interface is listed once a stream.
            if !addresses.contains(&interface.address) {
                addresses.push(interface.address.clone());
            }
        }
        let name = format!("{} of rack {}", describe_hub(hub, shape), place.rack);
        Delegate { rack: place.rack.clone(), hub, name, mbit: shape.weight(), addresses }
    }
}

impl Probes {
    pub(crate) fn new(secret: Nonce) -> Probes {
        let ended = watch::channel(0).0;
        Probes { secret, drawn: 0, links: BTreeMap::new(), campaign: None, ended }
    }

    pub(crate) fn are_under_way(&self) -> bool {
        self.campaign.is_some()
    }

    /// Lets a caller wait for the end of the campaign.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.ended.subscribe()
    }

    /// Rounds of those pairs of which nothing fresh is known; of all with `afresh`.
    pub(crate) fn rounds(
        &self,
        delegates: &[Delegate],
        afresh: bool,
        now: Now,
    ) -> VecDeque<Vec<[Delegate; 2]>> {
        let rounds = tournament(delegates.len() as u32).into_iter().take(ROUNDS_MAX);
        let stale = |[one, other]: &[Delegate; 2]| {
            afresh || !(self.is_fresh(one, other, now) && self.is_fresh(other, one, now))
        };
        rounds
            .map(|round| {
                let pairs = round.into_iter().map(|pair| pair.map(|at| delegates[at as usize].clone()));
                pairs.filter(&stale).collect::<Vec<_>>()
            })
            .filter(|round| !round.is_empty())
            .collect()
    }

    fn is_fresh(&self, from: &Delegate, to: &Delegate, now: Now) -> bool {
        self.links.get(&[from.rack.clone(), to.rack.clone()]).is_some_and(|link| {
            let fresh_s = if link.outcome.is_ok() { FRESH_S } else { FAILURE_FRESH_S };
            now.seconds_since(link.at) < fresh_s
        })
    }

    /// Begins a campaign; there must be none.
    pub(crate) fn begin(&mut self, waiting: VecDeque<Vec<[Delegate; 2]>>, now: Now) -> Orders {
        self.campaign = Some(Campaign { waiting, round: Vec::new(), began: now });
        self.step(now).0
    }

    /// Takes what a hub has found out. A probe that is over, or none of that hub's, is nobody's.
    pub(crate) fn hear(&mut self, hub: u32, report: ProbeReport) {
        let Some(campaign) = &mut self.campaign else { return };
        let Some(running) = campaign.round.iter_mut().find(|running| running.probe == report.probe) else {
            return;
        };
        let outcome = match report.outcome {
            ProbeOutcome::BitsPerSecond(bits) => {
                Rate::from_bits_per_second(bits).ok_or_else(|| format!("it reports {bits} bit/s"))
            }
            ProbeOutcome::Failed(why) => Err(why[..why.floor_char_boundary(MESSAGE_BYTES_MAX)].to_string()),
        };
        if let Some(end) = running.pair.iter().position(|delegate| delegate.hub == hub) {
            running.told[end].get_or_insert(Told { outcome, is_rated: report.is_rated });
        }
    }

    /// Ends a round that is over and begins the next; says whether that was the last.
    pub(crate) fn step(&mut self, now: Now) -> (Orders, bool) {
        let Some(mut campaign) = self.campaign.take() else { return (Vec::new(), false) };
        let is_told = |running: &Running| running.told.iter().all(Option::is_some);
        if !campaign.round.iter().all(is_told) && now.seconds_since(campaign.began) < ROUND_S {
            self.campaign = Some(campaign);
            return (Vec::new(), false);
        }
        for running in std::mem::take(&mut campaign.round) {
            let ends = running.pair.iter().zip(&running.told);
            let silent: Vec<u32> =
                ends.filter(|(_, told)| told.is_none()).map(|(delegate, _)| delegate.hub).collect();
            self.note(running, now);
            // It would be as silent in every other round.
            silent.into_iter().for_each(|hub| self.pass_over(hub, &mut campaign.waiting, now));
        }
        campaign.waiting.retain(|round| !round.is_empty());
        let Some(next) = campaign.waiting.pop_front() else {
            self.ended.send_modify(|ended| *ended += 1);
            return (Vec::new(), true);
        };
        let mut orders = Orders::new();
        for pair in next {
            let (running, of_pair) = self.order(pair);
            campaign.round.push(running);
            orders.extend(of_pair);
        }
        self.campaign = Some(Campaign { began: now, ..campaign });
        (orders, false)
    }

    /// Forgets what a hub that is lost had to do with, and does not wait for it.
    pub(crate) fn forget(&mut self, hub: u32) {
        self.links.retain(|_, link| !link.hubs.contains(&hub));
        for running in self.campaign.iter_mut().flat_map(|campaign| &mut campaign.round) {
            for (delegate, told) in running.pair.iter().zip(&mut running.told) {
                if delegate.hub == hub {
                    let lost = Told { outcome: Err("it was lost".into()), is_rated: false };
                    told.get_or_insert(lost);
                }
            }
        }
    }

    fn order(&mut self, pair: [Delegate; 2]) -> (Running, Orders) {
        self.drawn += 1;
        let named = self.secret.derive(&format!("name of probe {}", self.drawn)).0;
        let probe = Namespace(named[..16].try_into().expect("a fixed range"));
        let nonce = self.secret.derive(&format!("secret of probe {}", self.drawn));
        let wanted = pair.iter().map(|delegate| delegate.addresses.len()).max().unwrap_or(1);
        let streams = wanted.clamp(STREAMS_MIN, STREAMS_MAX) as u16;
        let order = |dial: Vec<String>| HubCommand::Probe(ProbeOrder { probe, nonce, streams, dial });
        // The one that is dialled hears of it first.
        let orders = vec![(pair[1].hub, order(Vec::new())), (pair[0].hub, order(pair[1].addresses.clone()))];
        (Running { probe, pair, told: [None, None] }, orders)
    }

    /// Takes a silent hub's pairs out of the rounds to come, as not probed for this reason.
    fn pass_over(&mut self, hub: u32, waiting: &mut VecDeque<Vec<[Delegate; 2]>>, now: Now) {
        for round in waiting {
            let (passed_over, others): (Vec<[Delegate; 2]>, Vec<[Delegate; 2]>) =
                round.drain(..).partition(|pair| pair.iter().any(|delegate| delegate.hub == hub));
            *round = others;
            for pair in passed_over {
                let unasked = Told { outcome: Err("it was not asked".into()), is_rated: true };
                let told = pair.each_ref().map(|end| (end.hub != hub).then(|| unasked.clone()));
                self.note(Running { probe: Namespace([0; 16]), pair, told }, now);
            }
        }
    }

    /// Keeps what a pair has found out.
    fn note(&mut self, running: Running, now: Now) {
        let Running { pair, told, .. } = running;
        let carry = pair.iter().map(|delegate| delegate.mbit).min().unwrap_or(0) as f64 * 1e6;
        let is_guess = told.iter().flatten().any(|told| !told.is_rated);
        let silent = pair.iter().zip(&told).find(|(_, told)| told.is_none());
        let silent = silent
            .map(|(delegate, _)| format!("{} has not answered a probe within {ROUND_S} s", delegate.name));
        for (to, told) in told.into_iter().enumerate() {
            let (from, to) = (&pair[1 - to], &pair[to]);
            let outcome = match (told, &silent) {
                (Some(Told { outcome: Ok(rate), .. }), _) => Ok(rate),
                // Of two that fail, the one that says nothing is the cause.
                (_, Some(silent)) => Err(silent.clone()),
                (Some(Told { outcome: Err(why), .. }), None) => Err(format!("{}: {why}", to.name)),
                (None, None) => unreachable!("who has told nothing is silent"),
            };
            match &outcome {
                Ok(rate) => tracing::info!("from rack {} to rack {} go {rate}", from.rack, to.rack),
                Err(why) => {
                    tracing::warn!("not probed from rack {} to rack {}: {why}", from.rack, to.rack);
                }
            }
            let is_at_least = outcome.as_ref().is_ok_and(|rate| rate.bits_per_second() >= FILLED * carry);
            let link = Link { hubs: [from.hub, to.hub], outcome, is_at_least, is_guess, at: now };
            self.links.insert([from.rack.clone(), to.rack.clone()], link);
        }
    }

    /// What is known of the core between these racks, whose weakest has hubs that carry `floor_mbit`.
    ///
    /// A link that the probing hubs have filled is no limit to a rack's hubs, as far as anybody knows: it counts as carrying as
    /// much as they do together.
    pub(crate) fn core(&self, racks: &BTreeSet<String>, floor_mbit: u64, now: Now) -> Core {
        let between = |[from, to]: &[String; 2]| racks.contains(from) && racks.contains(to);
        let links: Vec<(&[String; 2], &Link)> =
            self.links.iter().filter(|(racks, _)| between(racks)).collect();
        let is_known = |rack: &&String| {
            links.iter().any(|(between, link)| between.contains(rack) && link.outcome.is_ok())
        };
        if let Some(rack) = racks.iter().find(|rack| !is_known(rack)) {
            let mut failures = links.iter().filter(|(between, _)| between.contains(rack));
            let why = failures.find_map(|(_, link)| link.outcome.as_ref().err());
            let why = why.map_or(String::new(), |why| format!(": {why}"));
            return Core::Unknown(format!("what rack {rack}'s link to the others carries is not known{why}"));
        }
        let floor = Rate::from_bits_per_second(floor_mbit as f64 * 1e6);
        let counts = |link: &Link| match (&link.outcome, floor) {
            (Ok(rate), Some(floor)) if link.is_at_least && *rate < floor => Some(floor),
            (Ok(rate), _) => Some(*rate),
            (Err(_), _) => None,
        };
        let rated = links.iter().filter_map(|&(between, link)| Some((between, link, counts(link)?)));
        let thinnest = rated.min_by(|a, b| a.2.bits_per_second().total_cmp(&b.2.bits_per_second()));
        let Some(([from, to], link, rate)) = thinnest else {
            return Core::Unknown("no two racks have probed one another".into());
        };
        let probed = link.outcome.as_ref().expect("it has a rate");
        let age = age(now.seconds_since(link.at));
        let source = match link.is_at_least {
            true => format!(
                "at least {rate}: the hubs' own interfaces limited the probe, which carried {probed} from rack {from} to \
                 rack {to} {age} ago"
            ),
            false => format!("{rate}, probed {age} ago from rack {from} to rack {to}"),
        };
        let hubs_source = match links.iter().any(|(_, link)| link.is_guess) {
            true => "by their interfaces' rates, of which some are guesses: --interface-rate names them",
            false => "by their interfaces' rates",
        };
        Core::Known { rate, source, hubs_source }
    }

    /// What listings show.
    pub(crate) fn statuses(&self, now: Now) -> Vec<LinkStatus> {
        let status = |([from, to], link): (&[String; 2], &Link)| LinkStatus {
            from: from.clone(),
            to: to.clone(),
            hubs: link.hubs,
            rate: link.outcome.as_ref().ok().copied(),
            is_at_least: link.is_at_least,
            problem: link.outcome.as_ref().err().cloned().unwrap_or_default(),
            age_s: now.seconds_since(link.at),
        };
        self.links.iter().map(status).collect()
    }
}

fn age(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s => format!("{:.0} min", s / 60.0),
    }
}
