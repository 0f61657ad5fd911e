//! What is simulated: a job, a network, and what fails when.

use std::ops::Range;
use std::time::Duration;

use paramhub_core::composition::{OptimizeAt, Place, Reduction};

use crate::network::Process;
use crate::random::Random;
use crate::world::Plant;

/// Elements of a key: two chunks and a part of one.
const KEY_ELEMENTS: u64 = 600;
/// Elements of a key of one chunk. Some hubs may have none.
const ONE_CHUNK: u64 = 100;

/// A job, a network, and what fails when. All of it follows from a seed.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The seed, also of everything that happens by chance in the run.
    pub seed: u64,
    /// Workers of the job.
    pub workers: u32,
    /// Hubs of the job.
    pub hubs: u16,
    /// Interfaces of each hub, with a core each.
    pub routes_per_hub: u16,
    /// Keys of the job.
    pub keys: u32,
    /// Elements of each key.
    pub elements: u64,
    /// Steps of the job.
    pub steps: u32,
    /// Whether streams go by other paths when theirs is broken (`--on-interface-down continue`).
    pub continues: bool,
    /// How long hubs wait for a worker whose stream was cut, and the worker dials (`--redial-grace`).
    pub redial_grace: Duration,
    /// Whether contributions are summed in the order of ranks.
    pub reproducible: bool,
    /// The least number of workers with which the job goes on, if it goes on when workers are lost
    /// (`--on-worker-loss continue`).
    pub min_workers: Option<u32>,
    /// The number of workers with which the job begins, if others join while it runs or, in a job that goes back, more or fewer
    /// may be started later. It is at least `min_workers`.
    pub start_workers: Option<u32>,
    /// The number of steps from one to which the job can go back to the next, if all its ranks go back when one is lost
    /// (`--on-worker-loss rewind`). Then `min_workers` is `None`.
    pub rewind_every: Option<u32>,
    /// The racks on which hubs and workers are spread, if the job has several sites.
    pub racks: Option<Racks>,
    /// Whether each chunk has a standby at another hub (`--replicas 1`).
    pub replicas: bool,
    /// Hubs beyond those that the job asks for.
    pub spare_hubs: u16,
    /// The silence after which a neighbour counts as dead.
    pub dead_after: Duration,
    /// How long a message takes.
    pub delay: Range<Duration>,
    /// How many streams that replace others have a first message that takes seconds, so that newer ones overtake it.
    pub late_hellos: u32,
    /// How many answers of the manager are lost because their connection breaks, so that the calls are made again.
    pub lost_answers: u32,
    /// After which time hubs and workers begin.
    pub starting: Range<Duration>,
    /// How long the manager's store takes to save.
    pub saving: Range<Duration>,
    /// How long a worker computes in a step.
    pub compute: Range<Duration>,
    /// What fails, and when.
    pub faults: Vec<(Duration, Fault)>,
    /// Whether the last fault, if it breaks streams, happens a moment after the first worker has done all steps instead. If it
    /// kills a hub that comes back, that is before the last steps, so that workers may leave while the hub becomes a standby.
    pub breaks_at_end: bool,
    /// A fault of the program itself, which the simulator must find.
    pub plant: Option<Plant>,
    /// Whether everything that happens to streams is printed.
    pub is_traced: bool,
}

/// The racks of a job of several sites, and how their sums become those of all workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Racks {
    /// How many there are. Hubs and workers are dealt to them in turn.
    pub count: u16,
    /// Whether the last hub serves all racks.
    pub has_hub_of_all: bool,
    /// The way in which sums of sites become those of all workers.
    pub reduction: Reduction,
    /// The place where the optimizer runs.
    pub optimize_at: OptimizeAt,
}

/// Something that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The path of all streams between two processes fails, and both ends learn it.
    Break(Process, Process),
    /// One stream between a hub and a worker's newest process, or another hub, is reset, or all.
    Cut {
        /// The worker or the other hub.
        neighbour: Process,
        /// The hub.
        hub: Process,
        /// Which of the streams.
        nth: Option<usize>,
        /// Who learns it at once.
        learns: Learns,
    },
    /// All streams between two processes bring nothing any more, and neither end learns it.
    Silence(Process, Process),
    /// Nothing that one process sends reaches another for a while.
    Block(Process, Process, Duration),
    /// A process stands still for a while.
    Pause(Process, Duration),
    /// A process is killed.
    Kill(Process),
    /// A hub is killed, and started again after a while.
    Reboot(u16, Duration),
    /// An operator drains a hub, and ends that after a while.
    Drain(u16, Duration),
    /// A second process of a rank opens streams to all hubs.
    Twin(u32),
    /// Nothing reaches one process from the other for a while.
    Part(Process, Process, Duration),
    /// The manager dies, and is started again with its store after a while.
    Crash {
        /// How long it is away.
        away: Duration,
        /// Whether what it is saving at that time is saved.
        keeps_last: bool,
    },
    /// The newest process of a rank is killed, and another is started for the rank after a while.
    Replace(u32, Duration),
    /// Another process of a rank is started beside the first.
    Rival(u32),
    /// All processes of workers are killed, and so many are started after a while, for the ranks from 0 on.
    Restart(u32, Duration),
}

/// Who learns at once that a stream was reset. The other end learns it when it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learns {
    /// Both ends.
    Both,
    /// The worker, or the first of two hubs, alone.
    Neighbour,
    /// The hub, or the second of two, alone.
    Hub,
}

impl Scenario {
    /// The scenario of a seed.
    pub fn new(seed: u64) -> Scenario {
        let mut random = Random::new(seed);
        let ms = Duration::from_millis;
        let workers = 1 + random.below(4) as u32;
        let hubs = 1 + random.below(2) as u16;
        let slow = random.happens(30);
        let mut scenario = Scenario {
            seed,
            workers,
            hubs,
            routes_per_hub: 1 + random.below(2) as u16,
            keys: 1 + random.below(4) as u32,
            elements: KEY_ELEMENTS,
            steps: 1 + random.below(12) as u32,
            continues: random.happens(50),
            redial_grace: match random.below(10) {
                0..4 => ms(500),
                4..9 => ms(2_000 + random.below(18_000)),
                _ => ms(0),
            },
            reproducible: random.happens(50),
            min_workers: None,
            start_workers: None,
            rewind_every: None,
            racks: None,
            replicas: false,
            spare_hubs: 0,
            dead_after: Duration::from_secs(15 + random.below(15)),
            delay: Duration::from_micros(20)..if slow { ms(400) } else { ms(2) },
            late_hellos: u32::from(random.happens(50)),
            lost_answers: random.below(3) as u32,
            starting: ms(0)..ms(1 + random.below(1000)),
            saving: ms(0)..if random.happens(20) { ms(2_000) } else { ms(30) },
            compute: ms(1)..ms(1 + random.below(1500)),
            faults: Vec::new(),
            breaks_at_end: false,
            plant: None,
            is_traced: false,
        };
        let mut loses_several = false;
        match random.below(100) {
            0..30 => {
                let least = 1 + random.below(workers.into()) as u32;
                scenario.min_workers = Some(least);
                if random.happens(40) {
                    scenario.start_workers = Some(least + random.below((workers - least + 1).into()) as u32);
                }
                scenario.continues &= random.happens(30);
                (scenario.reproducible, scenario.late_hellos) = (false, 0);
            }
            30..60 => {
                scenario.rewind_every = Some(1 + random.below(5) as u32);
                if random.happens(40) {
                    scenario.start_workers = Some(1 + random.below(workers.into()) as u32);
                }
                scenario.continues &= random.happens(30);
                scenario.late_hellos = 0;
            }
            60..80 if workers > 1 => scenario.spread_on_racks(&mut random),
            80..92 => {
                (scenario.replicas, scenario.continues) = (true, false);
                scenario.hubs = 2 + random.below(2) as u16;
                scenario.spare_hubs = u16::from(random.happens(30));
                loses_several = random.happens(50);
            }
            _ => {}
        }
        if loses_several {
            // There is time for new standbys between the losses.
            scenario.steps += 12;
            scenario.compute.end = ms(1_000 + random.below(1_500));
        }
        let hubs = scenario.hubs;
        // Ranks that gather take some seconds. What fails between workers and hubs is of interest after that.
        let span = scenario.compute.end * scenario.steps + ms(500);
        let gathering = scenario.starting.end + scenario.saving.end * 3 + scenario.delay.end * 10 + ms(200);
        if loses_several {
            scenario.lose_hubs_in_turn(gathering, &mut random);
        }
        let others = if loses_several && random.happens(60) { 0 } else { random.below(8) };
        for _ in 0..others {
            let fault = match random.happens(40) {
                _ if scenario.outlives_workers() && random.happens(45) => {
                    let length = any_length(&mut random, 90, 20_000);
                    match scenario.may_change_workers() && random.happens(60) {
                        true => Fault::Restart(1 + random.below(workers.into()) as u32, length),
                        false => Fault::Replace(random.below(workers.into()) as u32, length),
                    }
                }
                true => Fault::of_manager(&mut random, workers, hubs),
                false if scenario.racks.is_some() && random.happens(60) => {
                    Fault::between_hubs(&mut random, hubs)
                }
                false if scenario.replicas && random.happens(50) => Fault::of_hubs(&mut random, hubs),
                false => Fault::of_streams(&mut random, workers, hubs),
            };
            let is_early = random.happens(if fault.is_of_manager() { 60 } else { 15 });
            let at = match is_early {
                true => random.time(&(ms(0)..gathering)),
                false => gathering + random.time(&(ms(0)..span)),
            };
            scenario.faults.push((at, fault));
        }
        if random.happens(20) {
            scenario.elements = ONE_CHUNK;
        }
        scenario.breaks_at_end = random.happens(25);
        if loses_several && scenario.breaks_at_end {
            let hub = random.below(scenario.hubs.into()) as u16;
            let last = Fault::Reboot(hub, random.time(&(ms(50)..ms(1_500))));
            scenario.faults.push((gathering + span, last));
        }
        scenario
    }

    /// Gives the job several sites.
    fn spread_on_racks(&mut self, random: &mut Random) {
        let count = 2 + random.below(u64::from(self.workers.min(3)) - 1) as u16;
        let reductions = [Reduction::Tree, Reduction::Sharded, Reduction::Ring, Reduction::Line];
        // Ranks are dealt to racks in turn, so their order is that of racks only if each rack has one.
        let choices = if u32::from(count) == self.workers { 4 } else { 3 };
        let reduction = reductions[random.below(choices) as usize];
        let has_hub_of_all = reduction == Reduction::Tree && random.happens(50);
        let optimize_at = if random.happens(70) { OptimizeAt::EverySite } else { OptimizeAt::Owner };
        self.racks = Some(Racks { count, has_hub_of_all, reduction, optimize_at });
        self.hubs = count + u16::from(has_hub_of_all) + random.below(2) as u16;
        self.continues = false;
    }

    /// Kills or drains hubs one after the other, mostly so that each comes back in time to become a standby before the next one's
    /// turn.
    fn lose_hubs_in_turn(&mut self, gathering: Duration, random: &mut Random) {
        let ms = Duration::from_millis;
        let mut at = gathering;
        for _ in 0..2 + random.below(2) {
            at += random.time(&(ms(2_000)..ms(8_000)));
            let hub = random.below((self.hubs + self.spare_hubs).into()) as u16;
            let fault = match random.below(10) {
                0..=4 => Fault::Reboot(hub, random.time(&(ms(50)..ms(3_000)))),
                5..=7 => Fault::Drain(hub, any_length(random, 80, 20_000)),
                _ => Fault::Kill(Process::Hub(hub)),
            };
            self.faults.push((at, fault));
        }
        if random.happens(35) {
            // The manager that is started again has to know of the standbys and their copies.
            let away = any_length(random, 70, 10_000);
            let crash = Fault::Crash { away, keeps_last: random.happens(50) };
            self.faults.push((random.time(&(gathering..at + ms(3_000))), crash));
        }
    }

    /// The place of a hub.
    pub(crate) fn place_of_hub(&self, hub: u16) -> Place {
        match self.racks {
            Some(racks) if !(racks.has_hub_of_all && hub + 1 == self.hubs) => racks.place(hub.into()),
            _ => Place::default(),
        }
    }

    /// The number of the fault that happens when the first worker has done all steps, or almost all.
    pub(crate) fn fault_at_end(&self) -> Option<usize> {
        let last = self.faults.len().checked_sub(1).filter(|_| self.breaks_at_end)?;
        let breaks = match self.faults[last].1 {
            Fault::Cut { .. } | Fault::Reboot(..) => true,
            fault @ Fault::Break(..) => !fault.is_of_manager(),
            _ => false,
        };
        breaks.then_some(last)
    }

    /// Whether the job goes on when a worker is lost.
    pub(crate) fn outlives_workers(&self) -> bool {
        self.min_workers.is_some() || self.rewind_every.is_some()
    }

    /// Whether more or fewer workers than before may be started when all are started again.
    pub(crate) fn may_change_workers(&self) -> bool {
        self.rewind_every.is_some() && self.start_workers.is_some()
    }
}

impl Racks {
    /// The place of the hub or the worker of this number.
    pub(crate) fn place(&self, number: u32) -> Place {
        Place { rack: format!("r{}", number % u32::from(self.count)), host: String::new() }
    }
}

impl Fault {
    /// Something that fails in a hub, or between two.
    fn of_hubs(random: &mut Random, hubs: u16) -> Fault {
        match random.below(10) {
            0..=2 => Fault::Kill(any_hub(random, hubs)),
            3..=5 => Fault::Reboot(random.below(hubs.into()) as u16, any_length(random, 50, 20_000)),
            6..=7 => Fault::Pause(any_hub(random, hubs), any_length(random, 50, 40_000)),
            _ => Fault::between_hubs(random, hubs),
        }
    }

    /// Something that fails between two hubs.
    fn between_hubs(random: &mut Random, hubs: u16) -> Fault {
        let first = random.below(hubs.into()) as u16;
        let other = (first + 1 + random.below(u64::from(hubs) - 1) as u16) % hubs;
        let (first, other) = (Process::Hub(first), Process::Hub(other));
        match random.below(20) {
            0..=3 => Fault::Break(first, other),
            4..=13 => Fault::cut(random, first, other),
            14 => Fault::Silence(first, other),
            15..=17 => Fault::Block(first, other, any_length(random, 70, 40_000)),
            _ => Fault::Part(first, other, any_length(random, 70, 40_000)),
        }
    }

    fn cut(random: &mut Random, neighbour: Process, hub: Process) -> Fault {
        Fault::Cut {
            neighbour,
            hub,
            nth: random.happens(70).then(|| random.below(4) as usize),
            learns: match random.below(4) {
                0..=1 => Learns::Both,
                2 => Learns::Neighbour,
                _ => Learns::Hub,
            },
        }
    }

    /// Something that fails between workers and hubs, or in them.
    fn of_streams(random: &mut Random, workers: u32, hubs: u16) -> Fault {
        let (worker, hub) = (any_worker(random, workers), any_hub(random, hubs));
        let any = if random.happens(50) { worker } else { hub };
        let (from, to) = if random.happens(50) { (worker, hub) } else { (hub, worker) };
        let length = any_length(random, 70, 40_000);
        match random.below(26) {
            0..=3 => Fault::Break(worker, hub),
            4..=6 | 22..=25 => Fault::cut(random, worker, hub),
            7..=10 => Fault::Silence(worker, hub),
            11..=14 => Fault::Block(from, to, length),
            15..=17 => Fault::Pause(any, length),
            18..=19 => Fault::Twin(random.below(workers.into()) as u32),
            20 => Fault::Replace(random.below(workers.into()) as u32, length),
            _ => Fault::Kill(any),
        }
    }

    /// Something that fails between the manager and others, or in it.
    fn of_manager(random: &mut Random, workers: u32, hubs: u16) -> Fault {
        let (worker, hub) = (any_worker(random, workers), any_hub(random, hubs));
        let any = if random.happens(50) { worker } else { hub };
        let (from, to) = if random.happens(50) { (any, Process::Manager) } else { (Process::Manager, any) };
        let length = any_length(random, 70, 40_000);
        match random.below(20) {
            0..=7 => Fault::Crash { away: length, keeps_last: random.happens(50) },
            8..=11 => Fault::Break(any, Process::Manager),
            12 => Fault::Silence(any, Process::Manager),
            13..=14 => Fault::Block(from, to, length),
            15..=16 => Fault::Part(any, Process::Manager, length),
            17 => Fault::Pause(Process::Manager, length),
            _ => Fault::Rival(random.below(workers.into()) as u32),
        }
    }

    /// How long it lasts; zero if it is not over by itself.
    pub(crate) fn length(self) -> Duration {
        match self {
            Fault::Block(.., length)
            | Fault::Part(.., length)
            | Fault::Pause(_, length)
            | Fault::Reboot(_, length)
            | Fault::Drain(_, length)
            | Fault::Replace(_, length)
            | Fault::Restart(_, length) => length,
            Fault::Crash { away, .. } => away,
            Fault::Break(..)
            | Fault::Cut { .. }
            | Fault::Silence(..)
            | Fault::Kill(_)
            | Fault::Twin(_)
            | Fault::Rival(_) => Duration::ZERO,
        }
    }

    /// Whether nothing goes from one process to another while it lasts.
    pub(crate) fn stops(self, from: Process, to: Process) -> bool {
        match self {
            Fault::Block(a, b, _) => (a, b) == (from, to),
            Fault::Part(a, b, _) => (a, b) == (from, to) || (b, a) == (from, to),
            _ => false,
        }
    }

    /// Whether it is between two hubs.
    pub(crate) fn is_between_hubs(self) -> bool {
        let (a, b) = match self {
            Fault::Break(a, b) | Fault::Silence(a, b) | Fault::Block(a, b, _) | Fault::Part(a, b, _) => {
                (a, b)
            }
            Fault::Cut { neighbour, hub, .. } => (neighbour, hub),
            _ => return false,
        };
        [a, b].iter().all(|process| matches!(process, Process::Hub(_)))
    }

    /// Whether a hub is killed.
    pub(crate) fn kills_hub(self) -> bool {
        matches!(self, Fault::Kill(Process::Hub(_)) | Fault::Reboot(..))
    }

    /// Whether it is between the manager and others, or in it.
    pub(crate) fn is_of_manager(self) -> bool {
        match self {
            Fault::Break(a, b) | Fault::Silence(a, b) | Fault::Block(a, b, _) | Fault::Part(a, b, _) => {
                [a, b].contains(&Process::Manager)
            }
            Fault::Pause(process, _) => process == Process::Manager,
            Fault::Crash { .. } | Fault::Rival(_) => true,
            Fault::Cut { .. }
            | Fault::Kill(_)
            | Fault::Reboot(..)
            | Fault::Drain(..)
            | Fault::Twin(_)
            | Fault::Replace(..)
            | Fault::Restart(..) => false,
        }
    }
}

fn any_worker(random: &mut Random, workers: u32) -> Process {
    Process::Worker(random.below(workers.into()) as u32, 0)
}

fn any_hub(random: &mut Random, hubs: u16) -> Process {
    Process::Hub(random.below(hubs.into()) as u16)
}

/// A length that is short in this percentage of cases.
fn any_length(random: &mut Random, short_percent: u64, longest_ms: u64) -> Duration {
    let longest = if random.happens(short_percent) { 1_500 } else { longest_ms };
    random.time(&(Duration::from_millis(1)..Duration::from_millis(longest)))
}
