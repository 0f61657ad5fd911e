//! Streams of workers and between sites that are cut at any moment: the numbers stay those of an undisturbed job.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use paramhub_core::composition::{Composition, Crossing, OptimizeAt, Site, SiteId};
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::ports::Side;
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::stragglers::Stragglers;
use paramhub_core::wire::{Header, Operation};
use paramhub_transport::Outgoing;

use super::Shard;
use super::tests::{header, take, wire};
use crate::core::outbox::{BATCH_FRAMES, NextFrame};
use crate::core::stepped_hub::{floats, one_core, plan_at};

const STEPS: u32 = 12;
pub(super) const CHUNKS: u32 = 3;
const CHUNK_ELEMENTS: usize = 256;
pub(super) const WORKERS: u32 = 4;
const SEEDS: u64 = 60;

/// The learning rate of a step. Rank 0 sends it before it contributes to the step.
fn rate(step: u32) -> f64 {
    [0.5, 2.0, 1.0, 0.25][step as usize / 2 % 4]
}

/// What a rank contributes: with the others' a sum whose mean is exact.
fn gradient(rank: u32, chunk: u32, step: u32) -> f32 {
    (rank * rank + 3 * chunk + 5 * step) as f32 * 4.0
}

fn start(chunk: u32) -> f32 {
    100.0 + chunk as f32
}

/// A chunk's parameters after all steps.
pub(super) fn expected(chunk: u32) -> f32 {
    (0..STEPS).fold(start(chunk), |value, step| {
        let sum: f32 = (0..WORKERS).map(|rank| gradient(rank, chunk, step)).sum();
        value - rate(step) as f32 * (sum / WORKERS as f32)
    })
}

/// The settings of these jobs.
pub(super) fn settings() -> Settings {
    let mut settings = Settings::new(KeyTable::new(vec![Key::new("w", [700])]).unwrap());
    settings.chunk_bytes = CHUNK_ELEMENTS as u32 * 4;
    // Nobody sends step 0's rate as a change.
    let first = Hyperparameters { learning_rate: rate(0), ..Default::default() };
    settings.optimizer = OptimizerChoice { hyperparameters: Some(first), ..OptimizerChoice::named("sgd") };
    settings
}

type Frame = (Header, Vec<u8>);

/// One end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Worker(u32),
    Hub { site: SiteId, port: u32 },
}

/// Whether an end is at this hub.
fn is_at(end: End, hub: SiteId) -> bool {
    matches!(end, End::Hub { site, .. } if site == hub)
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
    has_left: bool,
}

pub(super) struct Job {
    random: u64,
    pub(super) shards: Vec<Shard>,
    workers: Vec<Worker>,
    /// By the sending end.
    ways: BTreeMap<End, Way>,
    pub(super) cuts: u32,
    /// The hubs that are lost.
    pub(super) lost: BTreeSet<SiteId>,
    /// With standbys: the hub that serves, and its standby.
    pub(super) serving: SiteId,
    pub(super) standby: Option<SiteId>,
}

impl Job {
    fn new(composition: &Composition, seed: u64) -> Job {
        let plan = |site| plan_at(composition.clone(), site, Stragglers::Wait, settings());
        let sites = 0..composition.sites.len() as SiteId;
        let shards: Vec<Shard> = sites.clone().map(|site| Shard::new(plan(site)).unwrap()).collect();
        let mut ends = Vec::new();
        for site in sites {
            let ports = shards[usize::from(site)].plan().ports.clone();
            ends.extend(
                (0..).zip(ports.ranks()).map(|(port, &rank)| (End::Worker(rank), End::Hub { site, port })),
            );
            for (port, there) in ports.to_sites().filter(|(_, there)| there.side == Side::Above) {
                let above = &shards[usize::from(there.site)].plan().ports;
                let its_port = above.of_site(site, 0).expect("the site above expects it");
                ends.push((End::Hub { site, port }, End::Hub { site: there.site, port: its_port }));
            }
        }
        Job::between(shards, ends, seed)
    }

    /// Workers that exchange at the first of two shards, of which the second is the standby.
    pub(super) fn with_standby(serving: Shard, standby: Shard, seed: u64) -> Job {
        let port_of = |shard: &Shard| shard.plan().ports.counterpart().expect("it has another hub");
        let (up, down) = (port_of(&serving), port_of(&standby));
        let mut ends: Vec<(End, End)> =
            (0..WORKERS).map(|rank| (End::Worker(rank), End::Hub { site: 0, port: rank })).collect();
        ends.push((End::Hub { site: 0, port: up }, End::Hub { site: 1, port: down }));
        Job::between(vec![serving, standby], ends, seed)
    }

    /// Hubs and workers with streams between these ends.
    fn between(shards: Vec<Shard>, ends: Vec<(End, End)>, seed: u64) -> Job {
        let worker = |rank| Worker {
            rank,
            stages: vec![if rank == 0 { Stage::Begins } else { Stage::Lacks }; CHUNKS as usize],
            values: vec![0.0; CHUNKS as usize],
            retuned: Vec::new(),
            has_left: false,
        };
        let mut job = Job {
            random: seed,
            shards,
            workers: (0..WORKERS).map(worker).collect(),
            ways: BTreeMap::new(),
            cuts: 0,
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
    pub(super) fn lose(&mut self, lost: SiteId) {
        self.lost.insert(lost);
        self.ways.retain(|end, way| !is_at(*end, lost) && !way.to.is_some_and(|to| is_at(to, lost)));
        let standby = self.standby.take().expect("it has one");
        if lost == standby {
            return self.shards[usize::from(self.serving)].go_on_alone();
        }
        self.shards[usize::from(standby)].take_over();
        self.serving = standby;
        for rank in 0..WORKERS {
            self.connect(End::Worker(rank), End::Hub { site: standby, port: rank });
            self.repeat(rank);
        }
    }

    /// Ends some of the steps for which a standby was awaited that is lost.
    pub(super) fn end_sums(&mut self) {
        let serving = &mut self.shards[usize::from(self.serving)];
        if serving.has_sums_to_end() {
            serving.end_sums(CHUNK_ELEMENTS).unwrap_or_else(|fault| panic!("{}", fault.message("it")));
        }
    }

    /// Has the hub that serves take this one as its standby.
    pub(super) fn join(&mut self, standby: Shard) {
        let (site, serving) = (self.shards.len() as SiteId, self.serving);
        self.shards[usize::from(serving)].take_standby(site, "another hub".into());
        let port_of = |shard: &Shard| shard.plan().ports.counterpart().expect("it has another hub");
        let (up, down) = (port_of(&self.shards[usize::from(serving)]), port_of(&standby));
        self.shards.push(standby);
        self.standby = Some(site);
        self.connect(End::Hub { site: serving, port: up }, End::Hub { site, port: down });
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

    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % bound as u64) as usize
    }

    pub(super) fn is_done(&self) -> bool {
        let has_left = |(site, shard): (SiteId, &Shard)| {
            let ports = 0..shard.plan().ports.len();
            // A standby has streams of workers only if it has taken over.
            let is_awaited = |&port: &u32| self.ways.contains_key(&End::Hub { site, port });
            self.lost.contains(&site) || ports.filter(is_awaited).all(|port| shard.has_left(port))
        };
        self.has_finished() && (0..).zip(&self.shards).all(has_left)
    }

    /// Does one thing that can happen, chosen at random; `may_cut` says whether streams may be cut.
    pub(super) fn act(&mut self, may_cut: bool) {
        let ends: Vec<End> = self.ways.keys().copied().collect();
        let end = ends[self.below(ends.len())];
        match self.below(if may_cut { 40 } else { 39 }) {
            0..8 => {
                let worker = self.below(self.workers.len());
                self.request(worker);
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
            End::Hub { site, port } => self.shards[usize::from(site)].resume(port),
            End::Worker(rank) => self.repeat(rank),
        }
    }

    /// Moves what a hub has to send onto a stream; the last frame may leave in part.
    fn send(&mut self, end: End) {
        let End::Hub { site, port } = end else { return };
        if !self.ways[&end].is_open {
            return;
        }
        let (chosen, in_part) = (self.below(BATCH_FRAMES), self.below(2));
        let shard = &mut self.shards[usize::from(site)];
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
            End::Hub { site, port } => {
                let shard = &mut self.shards[usize::from(site)];
                if let Err(fault) = take(shard, port, &header, &payload) {
                    panic!("{to:?} refuses {header:?} of {from:?}: {}", fault.message("its sender"));
                }
            }
            End::Worker(rank) => self.answered(rank, &header, &payload),
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
            return self.put(rank, vec![leave()]);
        }
        let stage = &mut stages[chunk as usize];
        let mut frames = Vec::new();
        *stage = match *stage {
            Stage::Begins => Stage::Initialises,
            Stage::Lacks => Stage::Pulls,
            Stage::Has(step) if step < STEPS => {
                if rank == 0 && step > 0 && rate(step) != rate(step - 1) && !retuned.contains(&step) {
                    retuned.push(step);
                    frames.push(retune(step));
                }
                Stage::Pushes(step)
            }
            _ => return,
        };
        frames.extend(self.due(rank, chunk));
        self.put(rank, frames);
    }

    /// The request of a rank for a chunk that is not answered.
    fn due(&self, rank: u32, chunk: u32) -> Option<Frame> {
        let elements = if chunk + 1 == CHUNKS { 700 % CHUNK_ELEMENTS } else { CHUNK_ELEMENTS };
        let of = |operation, step, value| {
            let payload = wire(&vec![value; elements]);
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
    fn repeat(&mut self, rank: u32) {
        let mut frames: Vec<Frame> =
            self.workers[rank as usize].retuned.iter().map(|&step| retune(step)).collect();
        frames.extend((0..CHUNKS).filter_map(|chunk| self.due(rank, chunk)));
        frames.extend(self.workers[rank as usize].has_left.then(leave));
        self.put(rank, frames);
    }

    fn put(&mut self, rank: u32, frames: Vec<Frame>) {
        let way = self.ways.get_mut(&End::Worker(rank)).expect("a worker sends");
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

fn site(workers: &[u32], parent: Option<SiteId>) -> Site {
    Site { name: String::new(), hubs: vec![one_core()], workers: workers.to_vec(), parent }
}

fn compositions() -> Vec<(&'static str, Composition)> {
    let of = |sites, crossing, optimize_at| Composition { sites, crossing, optimize_at };
    let peers = || vec![site(&[1, 2], None), site(&[0], None), site(&[3], None)];
    let tree = || vec![site(&[3], None), site(&[0, 1], Some(0)), site(&[2], Some(1))];
    let mut all = Vec::new();
    for optimize_at in [OptimizeAt::EverySite, OptimizeAt::Owner] {
        all.push(("tree", of(tree(), Crossing::Sharded, optimize_at)));
        all.push(("sharded", of(peers(), Crossing::Sharded, optimize_at)));
        all.push(("ring", of(peers(), Crossing::Ring, optimize_at)));
    }
    all
}

#[test]
fn streams_between_sites_that_are_cut_at_any_moment_change_no_number() {
    let mut cuts = 0;
    for (name, composition) in compositions() {
        for seed in 0..SEEDS {
            let mut job = Job::new(&composition, seed);
            let mut acts = 0;
            while !job.is_done() {
                // A job whose streams are cut for ever need not end.
                job.act(acts < 20_000);
                acts += 1;
                assert!(acts < 2_000_000, "{name}, seed {seed}: the job is stuck");
            }
            let expected: Vec<f32> = (0..CHUNKS).map(expected).collect();
            for (rank, values) in job.values() {
                assert_eq!(values, expected, "{name}, seed {seed}, rank {rank}");
            }
            cuts += job.cuts;
        }
    }
    assert!(cuts > 2_000, "{cuts} cuts only");
}
