//! What is simulated: a job, a network, and what fails when.

use std::ops::Range;
use std::time::Duration;

use crate::network::Process;
use crate::random::Random;
use crate::world::Plant;

/// Outages of this length together are survived: a worker tries for 10 s to open a stream again.
const BRIEF: Duration = Duration::from_millis(6_500);
/// What a handshake costs whose stream is silent, or late: the time after which the worker dials once more.
const SILENT_HANDSHAKE: Duration = Duration::from_secs(4);

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
    /// Steps of the job.
    pub steps: u32,
    /// Whether broken streams are replaced (`--on-interface-down continue`).
    pub continues: bool,
    /// Whether contributions are summed in the order of ranks.
    pub reproducible: bool,
    /// The silence after which a neighbour counts as dead.
    pub dead_after: Duration,
    /// How long a message takes.
    pub delay: Range<Duration>,
    /// How many streams that replace others have a first message that takes seconds, so that newer ones overtake it.
    pub late_hellos: u32,
    /// How long a worker computes in a step.
    pub compute: Range<Duration>,
    /// What fails, and when.
    pub faults: Vec<(Duration, Fault)>,
    /// A fault of the program itself, which the simulator must find.
    pub plant: Option<Plant>,
    /// Whether everything that happens to streams is printed.
    pub is_traced: bool,
}

/// Something that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All streams between two processes break, and both ends learn it.
    Break(Process, Process),
    /// All streams between two processes bring nothing any more, and neither end learns it.
    Silence(Process, Process),
    /// Nothing that one process sends reaches another for a while.
    Block(Process, Process, Duration),
    /// A process stands still for a while.
    Pause(Process, Duration),
    /// A process is killed.
    Kill(Process),
    /// A second process of a rank opens streams to all hubs.
    Twin(u32),
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
            steps: 1 + random.below(12) as u32,
            continues: random.happens(80),
            reproducible: random.happens(50),
            dead_after: Duration::from_secs(10 + random.below(20)),
            delay: Duration::from_micros(20)..if slow { ms(400) } else { ms(2) },
            late_hellos: u32::from(random.happens(50)),
            compute: ms(1)..ms(1 + random.below(1500)),
            faults: Vec::new(),
            plant: None,
            is_traced: false,
        };
        let span = scenario.compute.end * scenario.steps + ms(500);
        for _ in 0..random.below(8) {
            let at = random.time(&(Duration::ZERO..span));
            let (worker, hub) = (
                Process::Worker(random.below(workers.into()) as u32),
                Process::Hub(random.below(hubs.into()) as u16),
            );
            let any = if random.happens(50) { worker } else { hub };
            let (from, to) = if random.happens(50) { (worker, hub) } else { (hub, worker) };
            let longest = if random.happens(70) { 1_500 } else { 40_000 };
            let length = random.time(&(ms(1)..ms(longest)));
            let fault = match random.below(22) {
                0..=6 => Fault::Break(worker, hub),
                7..=10 => Fault::Silence(worker, hub),
                11..=14 => Fault::Block(from, to, length),
                15..=17 => Fault::Pause(any, length),
                18..=19 => Fault::Twin(random.below(workers.into()) as u32),
                _ => Fault::Kill(any),
            };
            scenario.faults.push((at, fault));
        }
        scenario
    }

    /// Whether the job must go through whatever else happens: nothing dies, all outages together are shorter than any time
    /// after which something gives up, and all streams were open (`connected`) before the first fault.
    pub(crate) fn must_finish(&self, connected: Option<Duration>) -> bool {
        let lengths: Duration = self.faults.iter().map(|&(_, fault)| fault.length()).sum();
        let silences = self.faults.iter().filter(|(_, fault)| matches!(fault, Fault::Silence(..))).count();
        // The first silence makes the worker dial; others may hit the handshakes that follow.
        let outages = lengths + SILENT_HANDSHAKE * ((silences as u32).saturating_sub(1) + self.late_hellos);
        let is_survived = |fault: Fault| match fault {
            Fault::Break(..) | Fault::Silence(..) => self.continues,
            Fault::Block(..) | Fault::Pause(..) | Fault::Twin(_) => true,
            Fault::Kill(_) => false,
        };
        outages <= BRIEF
            && self
                .faults
                .iter()
                .all(|&(at, fault)| is_survived(fault) && connected.is_some_and(|connected| at > connected))
    }
}

impl Fault {
    /// How long it lasts; zero if it is not over by itself.
    pub(crate) fn length(self) -> Duration {
        match self {
            Fault::Block(.., length) | Fault::Pause(_, length) => length,
            Fault::Break(..) | Fault::Silence(..) | Fault::Kill(_) | Fault::Twin(_) => Duration::ZERO,
        }
    }
}
