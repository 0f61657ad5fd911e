//! The measurements by hubs of different racks of the network between them: a state machine without clock
//! and sockets.
//!
//! One hub of each rack takes part, the one whose interfaces carry most. Pairs of disjoint racks probe at the
//! same time, in rounds. A round ends when every hub has answered or at its deadline, and names the hubs that
//! have not answered.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::auth::{Namespace, Nonce};
use crate::composition::Place;
use crate::cost::Rate;
use crate::limits::MESSAGE_BYTES_MAX;
use crate::pairs::tournament;
use crate::placement::HubShape;
use crate::service::{HubCommand, LinkStatus, ProbeOrder, ProbeOutcome, ProbeReport};

use crate::membership::hubs::OfferedHub;
use crate::membership::{LogEvent, Now};

use crate::membership::job::job_hubs::describe_hub;

/// The time that a round may take: the most that hubs need, and as long again for commands and answers to
/// travel.
pub(crate) const ROUND_S: f64 = 2.0;
/// The most rounds of one probe run: all pairs of up to 8 racks. Of more racks, each still probes to this
/// many others.
pub(crate) const ROUNDS_MAX: usize = 7;
/// Seconds for which a result is used without probing again.
const FRESH_S: f64 = 3600.0;
/// Seconds for which a failure is used without probing again.
const FAILURE_FRESH_S: f64 = 60.0;
/// The least number of streams between two hubs: one alone does not fill a link of which both ways are full.
const STREAMS_MIN: usize = 4;
const STREAMS_MAX: usize = 16;
/// A probe that fills this share of the rate of the probing hubs' interfaces shows only that the network is
/// no slower. A twentieth goes to headers.
const FILLED: f64 = 0.85;

/// The measured links between racks, and the probe run that is under way.
pub(crate) struct Probes {
    /// The secret from which those of all probes are derived.
    secret: Nonce,
    drawn: u64,
    /// Links by the names of their racks, from and to.
    links: BTreeMap<[String; 2], ProbedLink>,
    probe_run: Option<ProbeRun>,
    /// The measurements since the last call of `take_log_events`, for people.
    log_events: Vec<LogEvent>,
}

/// One direction between two racks.
struct ProbedLink {
    /// The numbers of the sending and the receiving hub.
    hubs: [u32; 2],
    outcome: Result<Rate, String>,
    /// `true` if the measured rate is all that the hubs' interfaces carry.
    is_at_least: bool,
    /// `true` if the rate of one of the hubs' interfaces is a guess.
    is_guess: bool,
    at: Now,
}

/// Rounds of pairs. `waiting` are those that have not begun.
struct ProbeRun {
    waiting: VecDeque<Vec<[RackProber; 2]>>,
    round: Vec<RunningProbe>,
    began: Now,
}

/// A pair that probes now.
struct RunningProbe {
    probe: Namespace,
    pair: [RackProber; 2],
    answers: [Option<ProbeAnswer>; 2],
}

#[derive(Clone)]
struct ProbeAnswer {
    outcome: Result<Rate, String>,
    is_rated: bool,
}

/// The hub that probes for its rack.
#[derive(Clone, Debug)]
pub(crate) struct RackProber {
    rack: String,
    pub(crate) hub: u32,
    /// The hub's description in messages.
    name: String,
    /// The rate of its interfaces together, by their weights.
    mbit: u64,
    /// The address of each interface.
    addresses: Vec<String>,
}

/// Commands for hubs.
pub(crate) type HubCommands = Vec<(u32, HubCommand)>;

/// The rate of a rack's link to the others, if it is known.
#[derive(Debug)]
pub(crate) enum CoreBandwidth {
    /// The rate is not needed.
    Unneeded,
    /// The rate is unknown, for this reason.
    Unknown(String),
    Known {
        /// The rate, each way.
        rate: Rate,
        /// The source of the rate.
        source: String,
        /// The source of the rate of the hubs.
        hubs_source: &'static str,
    },
}

impl CoreBandwidth {
    /// The rate as the operator gave it.
    pub(crate) fn given(rate: Rate) -> CoreBandwidth {
        let source = format!("{rate} as --core-rate says");
        CoreBandwidth::Known { rate, source, hubs_source: "by their interfaces' rates" }
    }
}

/// For each of these racks, in their order, the hub whose interfaces carry most; among equal ones the hub
/// that joined first.
pub(crate) fn probers(hubs: &[OfferedHub], racks: &BTreeSet<String>) -> Vec<RackProber> {
    let mut chosen: BTreeMap<&str, &OfferedHub> = BTreeMap::new();
    for hub in hubs.iter().filter(|(_, (_, place))| serves_one_of(place, racks)) {
        let (shape, place) = &hub.1;
        let best = chosen.entry(&place.rack).or_insert(hub);
        if shape.weight() > best.1.0.weight() {
            *best = hub;
        }
    }
    chosen.values().map(|(number, (shape, place))| RackProber::new(*number, shape, place)).collect()
}

/// Returns whether a hub serves one of these racks as such.
pub(crate) fn serves_one_of(place: &Place, racks: &BTreeSet<String>) -> bool {
    place.host.is_empty() && racks.contains(&place.rack)
}

impl RackProber {
    fn new(hub: u32, shape: &HubShape, place: &Place) -> RackProber {
        let mut addresses: Vec<String> = Vec::new();
        for interface in &shape.interfaces {
            // The shape lists an interface once for each stream.
            if !addresses.contains(&interface.address) {
                addresses.push(interface.address.clone());
            }
        }
        let name = format!("{} of rack {}", describe_hub(hub, shape), place.rack);
        RackProber { rack: place.rack.clone(), hub, name, mbit: shape.weight(), addresses }
    }
}

impl Probes {
    pub(crate) fn new(secret: Nonce) -> Probes {
        Probes { secret, drawn: 0, links: BTreeMap::new(), probe_run: None, log_events: Vec::new() }
    }

    pub(crate) fn are_under_way(&self) -> bool {
        self.probe_run.is_some()
    }

    /// Rounds of those pairs of which no fresh result is known, or of all pairs with `afresh`.
    pub(crate) fn rounds(
        &self,
        probers: &[RackProber],
        afresh: bool,
        now: Now,
    ) -> VecDeque<Vec<[RackProber; 2]>> {
        let rounds = tournament(probers.len() as u32).into_iter().take(ROUNDS_MAX);
        let stale = |[one, other]: &[RackProber; 2]| {
            afresh || !(self.is_fresh(one, other, now) && self.is_fresh(other, one, now))
        };
        rounds
            .map(|round| {
                let pairs = round.into_iter().map(|pair| pair.map(|at| probers[at as usize].clone()));
                pairs.filter(&stale).collect::<Vec<_>>()
            })
            .filter(|round| !round.is_empty())
            .collect()
    }

    fn is_fresh(&self, from: &RackProber, to: &RackProber, now: Now) -> bool {
        self.links.get(&[from.rack.clone(), to.rack.clone()]).is_some_and(|link| {
            let fresh_s = if link.outcome.is_ok() { FRESH_S } else { FAILURE_FRESH_S };
            now.seconds_since(link.at) < fresh_s
        })
    }

    /// Returns the measurements by hubs since the last call.
    pub(crate) fn take_log_events(&mut self) -> Vec<LogEvent> {
        std::mem::take(&mut self.log_events)
    }

    /// Begins a probe run. None may be under way.
    pub(crate) fn begin(&mut self, waiting: VecDeque<Vec<[RackProber; 2]>>, now: Now) -> HubCommands {
        self.probe_run = Some(ProbeRun { waiting, round: Vec::new(), began: now });
        self.step(now).0
    }

    /// Takes a hub's answer. An answer to a probe that is over, or that is not this hub's, is ignored.
    pub(crate) fn record_answer(&mut self, hub: u32, report: ProbeReport) {
        let Some(probe_run) = &mut self.probe_run else { return };
        let Some(running) = probe_run.round.iter_mut().find(|running| running.probe == report.probe) else {
            return;
        };
        let outcome = match report.outcome {
            ProbeOutcome::BitsPerSecond(bits) => {
                Rate::from_bits_per_second(bits).ok_or_else(|| format!("it reports {bits} bit/s"))
            }
            ProbeOutcome::Failed(why) => Err(why[..why.floor_char_boundary(MESSAGE_BYTES_MAX)].to_string()),
        };
        if let Some(end) = running.pair.iter().position(|prober| prober.hub == hub) {
            running.answers[end].get_or_insert(ProbeAnswer { outcome, is_rated: report.is_rated });
        }
    }

    /// Ends a round that is over and begins the next. The flag says whether the probe run has ended.
    pub(crate) fn step(&mut self, now: Now) -> (HubCommands, bool) {
        let Some(mut probe_run) = self.probe_run.take() else { return (Vec::new(), false) };
        let is_answered = |running: &RunningProbe| running.answers.iter().all(Option::is_some);
        if !probe_run.round.iter().all(is_answered) && now.seconds_since(probe_run.began) < ROUND_S {
            self.probe_run = Some(probe_run);
            return (Vec::new(), false);
        }
        for running in std::mem::take(&mut probe_run.round) {
            let ends = running.pair.iter().zip(&running.answers);
            let silent: Vec<u32> =
                ends.filter(|(_, answer)| answer.is_none()).map(|(prober, _)| prober.hub).collect();
            self.record(running, now);
            // The hub would not answer in the other rounds either.
            silent.into_iter().for_each(|hub| self.skip_hub(hub, &mut probe_run.waiting, now));
        }
        probe_run.waiting.retain(|round| !round.is_empty());
        let Some(next) = probe_run.waiting.pop_front() else {
            return (Vec::new(), true);
        };
        let mut commands = HubCommands::new();
        for pair in next {
            let (running, of_pair) = self.order(pair);
            probe_run.round.push(running);
            commands.extend(of_pair);
        }
        self.probe_run = Some(ProbeRun { began: now, ..probe_run });
        (commands, false)
    }

    /// Forgets the links of a lost hub, and does not wait for its answers.
    pub(crate) fn forget(&mut self, hub: u32) {
        self.links.retain(|_, link| !link.hubs.contains(&hub));
        for running in self.probe_run.iter_mut().flat_map(|probe_run| &mut probe_run.round) {
            for (prober, answer) in running.pair.iter().zip(&mut running.answers) {
                if prober.hub == hub {
                    let lost = ProbeAnswer { outcome: Err("it was lost".into()), is_rated: false };
                    answer.get_or_insert(lost);
                }
            }
        }
    }

    fn order(&mut self, pair: [RackProber; 2]) -> (RunningProbe, HubCommands) {
        self.drawn += 1;
        let named = self.secret.derive(&format!("name of probe {}", self.drawn)).0;
        let probe = Namespace(named[..16].try_into().expect("a fixed range"));
        let nonce = self.secret.derive(&format!("secret of probe {}", self.drawn));
        let wanted = pair.iter().map(|prober| prober.addresses.len()).max().unwrap_or(1);
        let streams = wanted.clamp(STREAMS_MIN, STREAMS_MAX) as u16;
        let order = |dial: Vec<String>| HubCommand::Probe(ProbeOrder { probe, nonce, streams, dial });
        // The hub that is dialled gets its command first.
        let commands =
            vec![(pair[1].hub, order(Vec::new())), (pair[0].hub, order(pair[1].addresses.clone()))];
        (RunningProbe { probe, pair, answers: [None, None] }, commands)
    }

    /// Removes a silent hub's pairs from the rounds to come, and records that as the reason why they were not
    /// probed.
    fn skip_hub(&mut self, hub: u32, waiting: &mut VecDeque<Vec<[RackProber; 2]>>, now: Now) {
        for round in waiting {
            let (passed_over, others): (Vec<[RackProber; 2]>, Vec<[RackProber; 2]>) =
                round.drain(..).partition(|pair| pair.iter().any(|prober| prober.hub == hub));
            *round = others;
            for pair in passed_over {
                let unasked = ProbeAnswer { outcome: Err("it was not asked".into()), is_rated: true };
                let answers = pair.each_ref().map(|end| (end.hub != hub).then(|| unasked.clone()));
                self.record(RunningProbe { probe: Namespace([0; 16]), pair, answers }, now);
            }
        }
    }

    /// Records what a pair has measured.
    fn record(&mut self, running: RunningProbe, now: Now) {
        let RunningProbe { pair, answers, .. } = running;
        let carry = pair.iter().map(|prober| prober.mbit).min().unwrap_or(0) as f64 * 1e6;
        let is_guess = answers.iter().flatten().any(|answer| !answer.is_rated);
        let silent = pair.iter().zip(&answers).find(|(_, answer)| answer.is_none());
        let silent =
            silent.map(|(prober, _)| format!("{} has not answered a probe within {ROUND_S} s", prober.name));
        for (to, answer) in answers.into_iter().enumerate() {
            let (from, to) = (&pair[1 - to], &pair[to]);
            let outcome = match (answer, &silent) {
                (Some(ProbeAnswer { outcome: Ok(rate), .. }), _) => Ok(rate),
                // If one hub fails and the other is silent, the silent one is the cause.
                (_, Some(silent)) => Err(silent.clone()),
                (Some(ProbeAnswer { outcome: Err(why), .. }), None) => Err(format!("{}: {why}", to.name)),
                (None, None) => unreachable!("a hub that has not answered is silent"),
            };
            let (sender, receiver) = (from.rack.clone(), to.rack.clone());
            self.log_events.push(LogEvent::LinkProbed {
                from: sender,
                to: receiver,
                outcome: outcome.clone(),
            });
            let is_at_least = outcome.as_ref().is_ok_and(|rate| rate.bits_per_second() >= FILLED * carry);
            let link = ProbedLink { hubs: [from.hub, to.hub], outcome, is_at_least, is_guess, at: now };
            self.links.insert([from.rack.clone(), to.rack.clone()], link);
        }
    }

    /// The rate of the core between these racks, as far as it is known. The hubs of the weakest rack together
    /// carry `floor_mbit`.
    ///
    /// A link that the probing hubs have filled is not known to limit a rack's hubs, so it counts as carrying
    /// as much as they do together.
    pub(crate) fn core(&self, racks: &BTreeSet<String>, floor_mbit: u64, now: Now) -> CoreBandwidth {
        let between = |[from, to]: &[String; 2]| racks.contains(from) && racks.contains(to);
        let links: Vec<(&[String; 2], &ProbedLink)> =
            self.links.iter().filter(|(racks, _)| between(racks)).collect();
        let is_known = |rack: &&String| {
            links.iter().any(|(between, link)| between.contains(rack) && link.outcome.is_ok())
        };
        if let Some(rack) = racks.iter().find(|rack| !is_known(rack)) {
            let mut failures = links.iter().filter(|(between, _)| between.contains(rack));
            let why = failures.find_map(|(_, link)| link.outcome.as_ref().err());
            let why = why.map_or(String::new(), |why| format!(": {why}"));
            return CoreBandwidth::Unknown(format!(
                "what rack {rack}'s link to the others carries is not known{why}"
            ));
        }
        let floor = Rate::from_bits_per_second(floor_mbit as f64 * 1e6);
        let counts = |link: &ProbedLink| match (&link.outcome, floor) {
            (Ok(rate), Some(floor)) if link.is_at_least && *rate < floor => Some(floor),
            (Ok(rate), _) => Some(*rate),
            (Err(_), _) => None,
        };
        let rated = links.iter().filter_map(|&(between, link)| Some((between, link, counts(link)?)));
        let thinnest = rated.min_by(|a, b| a.2.bits_per_second().total_cmp(&b.2.bits_per_second()));
        let Some(([from, to], link, rate)) = thinnest else {
            return CoreBandwidth::Unknown("no two racks have probed one another".into());
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
        CoreBandwidth::Known { rate, source, hubs_source }
    }

    /// The links as listings show them.
    pub(crate) fn statuses(&self, now: Now) -> Vec<LinkStatus> {
        let status = |([from, to], link): (&[String; 2], &ProbedLink)| LinkStatus {
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
