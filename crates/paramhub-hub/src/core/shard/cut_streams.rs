//! Jobs whose frames travel in any order that streams allow, and whose streams are cut at any moment, for tests: the numbers
//! stay those of an undisturbed job.

mod numbers;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use paramhub_core::composition::{Composition, SiteId};
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::norms::Norms;
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Side;
use paramhub_core::resuming::ResumeTerms;
use paramhub_core::settings::Settings;
use paramhub_core::stragglers::Stragglers;
use paramhub_core::wire::{Header, Norm, Operation, Release};
use paramhub_transport::Outgoing;

use super::Shard;
use super::tests::{header, take, wire};
use crate::core::outbox::{BATCH_FRAMES, NextFrame};
use crate::core::plan::ShardPlan;
use crate::core::stepped_hub::{floats, plan_of_route};
pub(super) use numbers::{CHUNKS, WORKERS, elements, expected, settings};
use numbers::{STEPS, factor, gradient, norm, rate, start};

type Frame = (Header, Vec<u8>);

/// One end of a stream: a rank's, to a route of its site, or that of a port of a hub. Hubs are numbered here by site and
/// route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Worker { rank: u32, route: RouteId },
    Hub { hub: u16, port: u32 },
}

/// Whether an end is at this hub.
fn is_at(end: End, hub: u16) -> bool {
    matches!(end, End::Hub { hub: other, .. } if other == hub)
}

/// One direction of a stream.
#[derive(Default)]
struct Way {
    frames: VecDeque<Frame>,
    /// The receiving end, and whether the sending end has noticed that the stream was replaced.
    to: Option<End>,
    is_open: bool,
}

/// How far a rank is with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Rank 0 has the initial parameters.
    Begins,
    Initialises,
    /// The parameters are at the hub.
    Lacks,
    Pulls,
    Has(u32),
    Pushes(u32),
}

/// A rank that exchanges all chunks, each on its own.
struct Worker {
    rank: u32,
    stages: Vec<Stage>,
    values: Vec<f32>,
    /// The first steps of the changes that rank 0 has sent.
    retuned: Vec<u32>,
    /// In two phases: the norms, the number of steps that have one, and what rank 0 released last.
    norms: Option<Norms>,
    normed: u32,
    released: Option<(u32, Option<f32>)>,
    has_left: bool,
}

pub(super) struct Job {
    random: u64,
    pub(super) shards: Vec<Shard>,
    workers: Vec<Worker>,
    /// By the sending end.
    ways: BTreeMap<End, Way>,
    pub(super) cuts: u32,
    /// A hub updates a chunk of a released step in one of so many turns.
    turns: usize,
    /// The hubs that are lost.
    pub(super) lost: BTreeSet<u16>,
    /// With standbys: the hub that serves, and its standby.
    pub(super) serving: u16,
    pub(super) standby: Option<u16>,
}

impl Job {
    pub(super) fn new(composition: &Composition, settings: &Settings, seed: u64) -> Job {
        let routes_of = |site: SiteId| {
            let plan = plan_of_route(composition.clone(), (site, 0), Stragglers::Wait, settings.clone());
            plan.placement().routes().len() as RouteId
        };
        let routes: Vec<(SiteId, RouteId)> = (0..composition.sites.len() as SiteId)
            .flat_map(|site| (0..routes_of(site)).map(move |route| (site, route)))
            .collect();
        let hub_of = |at: (SiteId, RouteId)| routes.iter().position(|&route| route == at).expect("a route");
        let resuming = ResumeTerms { redial_grace: Duration::from_secs(1), ..ResumeTerms::default() };
        let shard = |&at| {
            let plan = plan_of_route(composition.clone(), at, Stragglers::Wait, settings.clone());
            Shard::new(ShardPlan { resuming, ..plan }).unwrap()
        };
        let shards: Vec<Shard> = routes.iter().map(shard).collect();
        let mut ends = Vec::new();
        for (hub, &(site, route)) in (0..).zip(&routes) {
            let ports = shards[usize::from(hub)].plan().ports.clone();
            ends.extend(
                (0..)
                    .zip(ports.ranks())
                    .map(|(port, &rank)| (End::Worker { rank, route }, End::Hub { hub, port })),
            );
            for (port, there) in ports.to_sites().filter(|(_, there)| there.side == Side::Above) {
                let above = hub_of((there.site, there.route));
                let its_port = shards[above].plan().ports.of_site(site, route);
                let its_port = its_port.expect("the site above expects it");
                ends.push((End::Hub { hub, port }, End::Hub { hub: above as u16, port: its_port }));
            }
        }
        Job::between(shards, ends, seed)
    }

    /// Workers that exchange at the first of two shards, of which the second is the standby.
    pub(super) fn with_standby(serving: Shard, standby: Shard, seed: u64) -> Job {
        let port_of = |shard: &Shard| shard.plan().ports.counterpart().expect("it has another hub");
        let (up, down) = (port_of(&serving), port_of(&standby));
        let mut ends: Vec<(End, End)> = (0..WORKERS)
            .map(|rank| (End::Worker { rank, route: 0 }, End::Hub { hub: 0, port: rank }))
            .collect();
        ends.push((End::Hub { hub: 0, port: up }, End::Hub { hub: 1, port: down }));
        Job::between(vec![serving, standby], ends, seed)
    }

    /// Hubs and workers with streams between these ends.
    fn between(shards: Vec<Shard>, ends: Vec<(End, End)>, seed: u64) -> Job {
        let is_two_phase = shards[0].plan().settings.is_two_phase();
        let routes = |rank| {
            ends.iter()
                .filter(|(end, _)| matches!(end, End::Worker { rank: other, .. } if *other == rank))
                .count()
        };
        let worker = |rank| Worker {
            rank,
            stages: vec![if rank == 0 { Stage::Begins } else { Stage::Lacks }; CHUNKS as usize],
            values: vec![0.0; CHUNKS as usize],
            retuned: Vec::new(),
            norms: is_two_phase.then(|| Norms::new(routes(rank))),
            normed: 0,
            released: None,
            has_left: false,
        };
        let mut job = Job {
            random: seed,
            workers: (0..WORKERS).map(worker).collect(),
            shards,
            ways: BTreeMap::new(),
            cuts: 0,
            turns: [1, 40][seed as usize % 2],
            lost: BTreeSet::new(),
            serving: 0,
            standby: Some(1),
        };
        ends.into_iter().for_each(|(one, other)| job.connect(one, other));
        job
    }

    fn connect(&mut self, one: End, other: End) {
        for (from, to) in [(one, other), (other, one)] {
            self.ways.insert(from, Way { frames: VecDeque::new(), to: Some(to), is_open: true });
        }
    }

    /// Loses the hub that serves or the standby, with all streams there. The other one goes on, and workers repeat at it what
    /// was not answered.
    pub(super) fn lose(&mut self, lost: u16) {
        self.lost.insert(lost);
        self.ways.retain(|end, way| !is_at(*end, lost) && !way.to.is_some_and(|to| is_at(to, lost)));
        let standby = self.standby.take().expect("it has one");
        if lost == standby {
            return self.shards[usize::from(self.serving)].go_on_alone();
        }
        self.shards[usize::from(standby)].take_over();
        self.serving = standby;
        for rank in 0..WORKERS {
            self.connect(End::Worker { rank, route: 0 }, End::Hub { hub: standby, port: rank });
            self.repeat(rank, 0);
        }
    }

    /// Ends some of the steps for which a standby was awaited that is lost.
    pub(super) fn end_sums(&mut self) {
        let serving = &mut self.shards[usize::from(self.serving)];
        if serving.has_sums_to_end() {
            serving.end_sums(elements(0)).unwrap_or_else(|fault| panic!("{}", fault.message("it")));
        }
    }

    /// Has the hub that serves take this one as its standby.
    pub(super) fn join(&mut self, standby: Shard) {
        let (hub, serving) = (self.shards.len() as u16, self.serving);
        self.shards[usize::from(serving)].take_standby(hub, "another hub".into());
        let port_of = |shard: &Shard| shard.plan().ports.counterpart().expect("it has another hub");
        let (up, down) = (port_of(&self.shards[usize::from(serving)]), port_of(&standby));
        self.shards.push(standby);
        self.standby = Some(hub);
        self.connect(End::Hub { hub: serving, port: up }, End::Hub { hub, port: down });
    }

    /// Whether the newest standby has got its last chunk since the last call.
    pub(super) fn is_standby_ready(&mut self) -> bool {
        self.shards[usize::from(self.serving)].take_standby_ready()
    }

    /// Whether all workers have left.
    pub(super) fn has_finished(&self) -> bool {
        self.workers.iter().all(|worker| worker.has_left)
    }

    /// The parameters that each rank has of each chunk.
    pub(super) fn values(&self) -> impl Iterator<Item = (u32, &[f32])> {
        self.workers.iter().map(|worker| (worker.rank, &worker.values[..]))
    }

    /// Fails unless every hub has these parameters, by chunk.
    pub(super) fn assert_at_hubs(&self, expected: &[f32], name: &str) {
        for shard in &self.shards {
            let chunks = shard.plan().placement().chunks(shard.plan().route);
            for (slot, &chunk) in shard.slots.iter().zip(chunks) {
                let parameters = &shard.model.parameters[slot.range()];
                let elements = &parameters[..slot.elements as usize];
                let at = (shard.plan().site, shard.plan().route, chunk);
                assert!(elements.iter().all(|&value| value == expected[chunk as usize]), "{name}, {at:?}");
            }
        }
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % bound as u64) as usize
    }

    pub(super) fn is_done(&self) -> bool {
        let has_left = |(hub, shard): (u16, &Shard)| {
            let ports = 0..shard.plan().ports.len();
            // A standby has streams of workers only if it has taken over.
            let is_awaited = |&port: &u32| self.ways.contains_key(&End::Hub { hub, port });
            self.lost.contains(&hub) || ports.filter(is_awaited).all(|port| shard.has_left(port))
        };
        self.has_finished() && (0..).zip(&self.shards).all(has_left)
    }

    /// Does one thing that can happen, chosen at random; `may_cut` says whether streams may be cut.
    pub(super) fn act(&mut self, may_cut: bool) {
        let ends: Vec<End> = self.ways.keys().copied().collect();
        let end = ends[self.below(ends.len())];
        match self.below(if may_cut { 40 } else { 39 }) {
            0..6 => {
                let worker = self.below(self.workers.len());
                self.request(worker);
            }
            6..8 => {
                let shard = self.below(self.shards.len());
                // A core may have other things to do for long.
                if self.below(self.turns) == 0 {
                    self.shards[shard].update_released(1);
                }
            }
            8..20 => self.send(end),
            20..38 => self.deliver(end),
            38 => self.reopen(end),
            _ => self.cut(end),
        }
    }

    /// Loses all frames of a stream. Either end learns of it later.
    fn cut(&mut self, end: End) {
        self.cuts += 1;
        let other = self.ways[&end].to.expect("a stream has two ends");
        for end in [end, other] {
            let way = self.ways.get_mut(&end).expect("each end sends");
            way.frames.clear();
            way.is_open = false;
        }
    }

    /// Has an end go on with the stream that replaces a cut one.
    fn reopen(&mut self, end: End) {
        if self.ways[&end].is_open {
            return;
        }
        self.ways.get_mut(&end).expect("each end sends").is_open = true;
        match end {
            End::Hub { hub, port } => self.shards[usize::from(hub)].resume(port),
            End::Worker { rank, route } => self.repeat(rank, route),
        }
    }

    /// Moves what a hub has to send onto a stream; the last frame may leave in part.
    fn send(&mut self, end: End) {
        let End::Hub { hub, port } = end else { return };
        if !self.ways[&end].is_open {
            return;
        }
        let (chosen, in_part) = (self.below(BATCH_FRAMES), self.below(2));
        let shard = &mut self.shards[usize::from(hub)];
        let mut picks = [NextFrame::Message; BATCH_FRAMES];
        let count = shard.pick(port, &mut picks);
        if count == 0 {
            return;
        }
        let empty = Outgoing { header: Header::bare(Operation::Heartbeat), payload: &[] };
        let mut frames = [empty; BATCH_FRAMES];
        shard.frames(port, &picks[..count], &mut frames[..count]);
        let sent: Vec<Frame> =
            frames[..count].iter().map(|frame| (frame.header, frame.payload.to_vec())).collect();
        let headers: Vec<Header> = sent.iter().map(|(header, _)| *header).collect();
        let whole = chosen % (count + 1);
        let begun = (whole + in_part).min(count);
        shard.note_sent(port, &picks[..count], &headers, whole, begun);
        self.ways.get_mut(&end).expect("each end sends").frames.extend(sent.into_iter().take(whole));
    }

    /// Has the other end take the next frame of a stream, if it has the stream.
    fn deliver(&mut self, from: End) {
        let to = self.ways[&from].to.expect("a stream has two ends");
        if !self.ways[&to].is_open {
            return;
        }
        let Some((header, payload)) = self.ways.get_mut(&from).expect("each end sends").frames.pop_front()
        else {
            return;
        };
        match to {
            End::Hub { hub, port } => {
                let shard = &mut self.shards[usize::from(hub)];
                if let Err(fault) = take(shard, port, &header, &payload) {
                    panic!("{to:?} refuses {header:?} of {from:?}: {}", fault.message("its sender"));
                }
            }
            End::Worker { rank, route } if header.operation == Operation::Norm => {
                self.normed(rank, route, header.step, Norm::decode(&payload).expect("a norm").0);
            }
            End::Worker { rank, .. } => self.answered(rank, &header, &payload),
        }
    }

    /// Has a rank take a route's part of a norm. Rank 0 releases the step whose parts are all there.
    fn normed(&mut self, rank: u32, route: RouteId, step: u32, Norm(squares): Norm) {
        let worker = &mut self.workers[rank as usize];
        let norms = worker.norms.as_mut().expect("its steps have two phases");
        let Some(whole) = norms.part(usize::from(route), step, squares, std::iter::empty()).unwrap() else {
            return;
        };
        assert_eq!((whole.step, whole.norm), (worker.normed, norm(step)), "rank {rank}");
        worker.normed += 1;
        if rank > 0 {
            return;
        }
        let release = (step, factor(step, whole.norm));
        worker.released = Some(release);
        for route in self.routes(0) {
            self.put(0, route, vec![released(release)]);
        }
    }

    fn answered(&mut self, rank: u32, header: &Header, payload: &[u8]) {
        let worker = &mut self.workers[rank as usize];
        let chunk = header.chunk as usize;
        match (header.operation, worker.stages[chunk]) {
            (Operation::Heartbeat, _) => {}
            (Operation::Applied, Stage::Initialises) => worker.stages[chunk] = Stage::Lacks,
            (Operation::Parameters, stage @ (Stage::Pulls | Stage::Pushes(_))) => {
                let next = if let Stage::Pushes(step) = stage { step + 1 } else { 0 };
                assert_eq!(header.step, next, "rank {rank}, chunk {chunk}");
                let values = floats(payload);
                assert!(values.iter().all(|value| *value == values[0]), "a torn chunk");
                (worker.stages[chunk], worker.values[chunk]) = (Stage::Has(next), values[0]);
            }
            (operation, stage) => panic!("rank {rank} gets {operation:?} where it is at {stage:?}"),
        }
    }

    /// Has a worker make its next request for some chunk, if it waits for none.
    fn request(&mut self, worker: usize) {
        let chunk = self.below(CHUNKS as usize) as u32;
        let Worker { rank, ref mut stages, ref mut retuned, ref mut has_left, .. } = self.workers[worker];
        if stages.iter().all(|&stage| stage == Stage::Has(STEPS)) && !std::mem::replace(has_left, true) {
            return self.routes(rank).into_iter().for_each(|route| self.put(rank, route, vec![leave()]));
        }
        let stage = &mut stages[chunk as usize];
        let mut retunes = None;
        *stage = match *stage {
            Stage::Begins => Stage::Initialises,
            Stage::Lacks => Stage::Pulls,
            Stage::Has(step) if step < STEPS => {
                if rank == 0 && step > 0 && rate(step) != rate(step - 1) && !retuned.contains(&step) {
                    retuned.push(step);
                    retunes = Some(step);
                }
                Stage::Pushes(step)
            }
            _ => return,
        };
        for route in self.routes(rank) {
            self.put(rank, route, retunes.map(retune).into_iter().collect());
        }
        let request = self.due(rank, chunk);
        self.put(rank, self.route_of(rank, chunk), request.into_iter().collect());
    }

    /// The routes of a rank's site.
    fn routes(&self, rank: u32) -> Vec<RouteId> {
        let of_rank = |end: &End| match *end {
            End::Worker { rank: other, route } if other == rank => Some(route),
            _ => None,
        };
        self.ways.keys().filter_map(of_rank).collect()
    }

    /// The route of a rank's site that has a chunk.
    fn route_of(&self, rank: u32, chunk: u32) -> RouteId {
        let Some(&End::Hub { hub, .. }) = self.ways[&End::Worker { rank, route: 0 }].to.as_ref() else {
            unreachable!("a worker's stream goes to a hub")
        };
        let placement = self.shards[usize::from(hub)].plan().placement();
        placement.locate(chunk).expect("every site has every chunk").0
    }

    /// The request of a rank for a chunk that is not answered.
    fn due(&self, rank: u32, chunk: u32) -> Option<Frame> {
        let of = |operation, step, value| {
            let payload = wire(&vec![value; elements(chunk)]);
            Some((header(operation, chunk, step, &payload), payload))
        };
        match self.workers[rank as usize].stages[chunk as usize] {
            Stage::Initialises => of(Operation::Initialise, 0, start(chunk)),
            Stage::Pulls => Some((header(Operation::Pull, chunk, 0, &[]), Vec::new())),
            Stage::Pushes(step) => of(Operation::PushPull, step, gradient(rank, chunk, step)),
            Stage::Begins | Stage::Lacks | Stage::Has(_) => None,
        }
    }

    /// Has a worker send again by a new stream what was not answered.
    fn repeat(&mut self, rank: u32, route: RouteId) {
        let worker = &mut self.workers[rank as usize];
        if let Some(norms) = &mut worker.norms {
            norms.resume(usize::from(route));
        }
        let mut frames: Vec<Frame> = worker.retuned.iter().map(|&step| retune(step)).collect();
        frames.extend(worker.released.map(released));
        let chunks = (0..CHUNKS).filter(|&chunk| self.route_of(rank, chunk) == route);
        frames.extend(chunks.filter_map(|chunk| self.due(rank, chunk)));
        frames.extend(self.workers[rank as usize].has_left.then(leave));
        self.put(rank, route, frames);
    }

    fn put(&mut self, rank: u32, route: RouteId, frames: Vec<Frame>) {
        let way = self.ways.get_mut(&End::Worker { rank, route }).expect("a worker sends");
        // What is sent while the stream is cut is lost, and repeated.
        if way.is_open {
            way.frames.extend(frames);
        }
    }
}

fn leave() -> Frame {
    (Header::bare(Operation::Leave), Vec::new())
}

fn retune(step: u32) -> Frame {
    let next = Hyperparameters { learning_rate: rate(step), ..Default::default() };
    let payload = next.to_wire().to_vec();
    (header(Operation::Retune, 0, step, &payload), payload)
}

/// The end of a held step: a release with a factor, or none.
fn released((step, factor): (u32, Option<f32>)) -> Frame {
    let (operation, payload) = match factor {
        Some(factor) => (Operation::Release, Release(factor).encode().to_vec()),
        None => (Operation::Skip, Vec::new()),
    };
    (header(operation, 0, step, &payload), payload)
}
