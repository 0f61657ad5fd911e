//! Jobs that leave out late workers and sites: whole programs of workers at one site, or at several of which each owns some chunks,
//! in any order of arrival.

use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::consistency::Consistency;
use crate::stragglers::Quorum;

const PROGRAM_STEPS: u32 = 6;

/// A worker whose program pulls the parameters to start from, and then pushes every chunk and waits for all answers, again and
/// again.
#[derive(Clone)]
struct Program {
    rounds: u32,
    /// The version that it has of each chunk.
    has: Vec<u32>,
    /// Requests that have not arrived.
    in_flight: Vec<u32>,
    /// Answers that have not come.
    unanswered: u32,
    gone: bool,
}

/// What travels, or may happen.
#[derive(Clone, Debug, PartialEq)]
enum Event {
    /// A worker's request for a chunk reaches its site.
    Arrives(u32, u32),
    /// The parameters that a chunk starts from go from one site to another.
    Starts { from: usize, to: usize, slot: u32 },
    /// A site's sum reaches the chunk's owner.
    Rises { site: usize, slot: u32 },
    /// The owner's answer to it leaves, and is there at once.
    Sinks { site: usize, slot: u32 },
    /// A worker is answered.
    Answered(u32, u32),
    /// Time ends a step at the chunk's owner.
    Deadline(u32),
    /// A worker leaves.
    Leaves(u32),
}

/// A worker's contribution: who made it, and for which version.
type Contribution = (u32, u32);

struct Site {
    workers: Range<u32>,
    exchange: Exchange,
    /// For each slot: what is in the sum under way.
    sums: Vec<Vec<Contribution>>,
}

struct TestJob {
    sites: Vec<Site>,
    programs: Vec<Program>,
    /// For each slot: the site that owns the chunk.
    owners: Vec<usize>,
    /// For each slot: the updates that it has had.
    updates: Vec<u32>,
    pending: Vec<Event>,
    left_out: Vec<u64>,
}

impl TestJob {
    /// Sites of so many workers, and the owner of each chunk.
    fn new(sizes: &[u32], owners: Vec<usize>, quorum: Quorum) -> Self {
        let workers: u32 = sizes.iter().sum();
        let mut first = 0;
        let mut sites = Vec::new();
        for (number, &size) in sizes.iter().enumerate() {
            let others = sizes.len() as u32 - 1;
            let rules = Rules {
                workers,
                members: size + others,
                first_members: size + others,
                first_site: size,
                rank_0: (number == 0).then_some(0),
                consistency: Consistency::Synchronous,
                reproducible: false,
                has_parameters: true,
                two_phase: false,
                quorum: Some(quorum),
                rewind_every: None,
            };
            let reach = owners.iter().map(|&owner| {
                let members = if owner == number { size + others } else { size };
                ChunkReach { members, together: members, has_above: owner != number, site_first: false }
            });
            let mut exchange = Exchange::among_sites(rules, reach);
            let of_others = sizes.iter().enumerate().filter(|&(other, _)| other != number);
            exchange.set_workers_of((0..size).map(|_| 1).chain(of_others.map(|(_, &size)| size)));
            sites.push(Site { workers: first..first + size, exchange, sums: vec![Vec::new(); owners.len()] });
            first += size;
        }
        let slots = owners.len() as u32;
        let program = Program {
            rounds: 0,
            has: vec![0; slots as usize],
            in_flight: (0..slots).collect(),
            unanswered: slots,
            gone: false,
        };
        TestJob {
            sites,
            programs: vec![program; workers as usize],
            updates: vec![0; owners.len()],
            owners,
            pending: Vec::new(),
            left_out: vec![0; workers as usize],
        }
    }

    fn site_of(&self, worker: u32) -> (usize, u32) {
        let site = self.sites.iter().position(|site| site.workers.contains(&worker)).unwrap();
        (site, worker - self.sites[site].workers.start)
    }

    /// The member of `at` that is another site.
    fn member(&self, at: usize, site: usize) -> u32 {
        self.sites[at].workers.len() as u32 + (site - usize::from(site > at)) as u32
    }

    fn events(&self, clocks: bool) -> Vec<Event> {
        // A sum goes after the parameters with which its chunk begins at the owner.
        let waits_for_start = |event: &Event| match *event {
            Event::Rises { site, slot } => {
                let start = Event::Starts { from: site, to: self.owners[slot as usize], slot };
                self.pending.contains(&start)
            }
            _ => false,
        };
        let mut events: Vec<Event> =
            self.pending.iter().filter(|event| !waits_for_start(event)).cloned().collect();
        for (worker, program) in (0..).zip(&self.programs) {
            events.extend(program.in_flight.iter().map(|&slot| Event::Arrives(worker, slot)));
            if program.rounds > PROGRAM_STEPS && !program.gone {
                events.push(Event::Leaves(worker));
            }
        }
        let has_median = |slot: &u32| self.sites[self.owners[*slot as usize]].exchange.has_median(*slot);
        let slots = 0..self.owners.len() as u32;
        events.extend(slots.filter(|slot| clocks && has_median(slot)).map(Event::Deadline));
        events
    }

    fn happen(&mut self, event: Event) {
        self.pending.retain(|other| *other != event);
        match event {
            Event::Arrives(worker, slot) => self.request(worker, slot),
            Event::Starts { from, to, slot } => {
                let exchange = &mut self.sites[from].exchange;
                let step = exchange.step(slot);
                if self.owners[slot as usize] == from {
                    let member = self.member(from, to);
                    self.sites[from].exchange.catch_up(slot, member);
                }
                let of_member = self.owners[slot as usize] == to;
                let member = of_member.then(|| self.member(to, from));
                assert!(self.sites[to].exchange.initialise(slot, member, step).unwrap());
                self.pass_on_start(to, Some(from), slot);
                self.settle(to, slot);
            }
            Event::Rises { site, slot } => {
                let (owner, step) = (self.owners[slot as usize], self.sites[site].exchange.step(slot));
                let sum = std::mem::take(&mut self.sites[site].sums[slot as usize]);
                let member = self.member(owner, site);
                self.contribute(owner, slot, member, step, sum);
            }
            Event::Sinks { site, slot } => {
                let owner = self.owners[slot as usize];
                let member = self.member(owner, site);
                let version = self.sites[owner].exchange.answer_version(slot, member);
                self.sites[owner].exchange.answer_begun(slot, member);
                assert_eq!(version, self.updates[slot as usize], "what is sent is the newest");
                let then = self.sites[site].exchange.lower(slot, version - 1).unwrap();
                assert!(matches!(then, SumAction::Update(update) if update.step + 1 == version));
                assert_eq!(self.sites[site].exchange.step(slot), version);
                self.settle(site, slot);
            }
            Event::Answered(worker, slot) => {
                let (site, member) = self.site_of(worker);
                let exchange = &mut self.sites[site].exchange;
                let version = exchange.answer_version(slot, member);
                if self.owners[slot as usize] == site {
                    assert_eq!(version, self.updates[slot as usize], "what is sent is the newest");
                }
                exchange.answer_begun(slot, member);
                let program = &mut self.programs[worker as usize];
                let is_start = program.rounds == 0;
                assert!(
                    is_start || version > program.has[slot as usize],
                    "every answer brings something new"
                );
                program.has[slot as usize] = version;
                program.unanswered -= 1;
                if program.unanswered == 0 {
                    program.rounds += 1;
                    if program.rounds <= PROGRAM_STEPS {
                        program.unanswered = self.owners.len() as u32;
                        program.in_flight = (0..program.unanswered).collect();
                    }
                }
            }
            Event::Deadline(slot) => {
                let owner = self.owners[slot as usize];
                let update = self.sites[owner].exchange.end_step(slot).expect("there is a contribution");
                self.update(slot, update);
                self.settle(owner, slot);
            }
            Event::Leaves(worker) => {
                self.programs[worker as usize].gone = true;
                let (site, member) = self.site_of(worker);
                self.leave(site, member);
                if self.sites[site].workers.clone().all(|worker| self.programs[worker as usize].gone) {
                    for at in (0..self.sites.len()).filter(|&at| at != site) {
                        let member = self.member(at, site);
                        self.leave(at, member);
                    }
                }
            }
        }
    }

    fn request(&mut self, worker: u32, slot: u32) {
        let (site, member) = self.site_of(worker);
        let program = &mut self.programs[worker as usize];
        program.in_flight.retain(|&other| other != slot);
        let has = program.has[slot as usize];
        match (program.rounds, worker) {
            (0, 0) => {
                assert!(self.sites[site].exchange.initialise(slot, Some(0), 0).unwrap());
                self.pass_on_start(site, None, slot);
                self.settle(site, slot);
            }
            (0, _) => {
                self.sites[site].exchange.pull(slot, member, 0).unwrap();
                self.settle(site, slot);
            }
            _ => self.contribute(site, slot, member, has, vec![(worker, has)]),
        }
    }

    /// Sends the parameters to start from up to the owner or, from there, to all other sites.
    fn pass_on_start(&mut self, site: usize, from: Option<usize>, slot: u32) {
        let owner = self.owners[slot as usize];
        for to in (0..self.sites.len()).filter(|&to| to != site && Some(to) != from) {
            if owner == site || owner == to && from.is_none() {
                self.pending.push(Event::Starts { from: site, to, slot });
            }
        }
    }

    fn contribute(&mut self, at: usize, slot: u32, member: u32, step: u32, contributions: Vec<Contribution>) {
        let site = &mut self.sites[at];
        let is_late = step < site.exchange.step(slot);
        let arrival = site.exchange.push(slot, member, step, Answer::Parameters).unwrap();
        let sum = &mut site.sums[slot as usize];
        match &arrival.fold {
            Fold::Drop => assert!(is_late && arrival.then == SumAction::Late),
            fold => {
                assert_eq!(*fold, Fold::Sum { starts_sum: sum.is_empty(), parked: 0..0 });
                assert!(!is_late);
                sum.extend(contributions);
            }
        }
        match arrival.then {
            SumAction::Raise => self.pending.push(Event::Rises { site: at, slot }),
            SumAction::Update(update) => self.update(slot, update),
            SumAction::Wait | SumAction::Late => {}
            other => panic!("{other:?}"),
        }
        self.settle(at, slot);
    }

    fn update(&mut self, slot: u32, update: Update) {
        let owner = self.owners[slot as usize];
        let sum = std::mem::take(&mut self.sites[owner].sums[slot as usize]);
        let updates = self.updates[slot as usize];
        assert_eq!((update.step, update.number), (updates, u64::from(updates) + 1));
        assert_eq!(update.contributions as usize, sum.len(), "the mean is over the workers in the sum");
        for (worker, program) in (0..).zip(&self.programs) {
            let counted = sum.iter().filter(|&&(other, _)| other == worker).count();
            assert!(counted <= 1);
            // A site leaves when its last worker does.
            let (site, _) = self.site_of(worker);
            let mut site_mates = self.sites[site].workers.clone();
            let has_left = match site == owner {
                true => program.gone,
                false => site_mates.all(|mate| self.programs[mate as usize].gone),
            };
            self.left_out[worker as usize] += u64::from(counted == 0 && !has_left);
        }
        assert!(sum.iter().all(|&(_, version)| version == update.step), "all are of the same parameters");
        self.updates[slot as usize] += 1;
    }

    fn leave(&mut self, at: usize, member: u32) {
        let mut due = Vec::new();
        self.sites[at].exchange.leave(member, |slot, member, _| due.push((slot, member))).unwrap();
        due.into_iter().for_each(|(slot, member)| self.owe(at, slot, member));
        for slot in 0..self.owners.len() as u32 {
            if let Some(update) = self.sites[at].exchange.end_if_complete(slot) {
                self.update(slot, update);
                self.settle(at, slot);
            }
        }
    }

    fn settle(&mut self, at: usize, slot: u32) {
        let mut due = Vec::new();
        self.sites[at].exchange.mark_due_answers(slot, |member, _| due.push(member));
        due.into_iter().for_each(|member| self.owe(at, slot, member));
    }

    fn owe(&mut self, at: usize, slot: u32, member: u32) {
        let workers = self.sites[at].workers.clone();
        let event = match (member as usize).checked_sub(workers.len()) {
            None => Event::Answered(workers.start + member, slot),
            Some(site) => Event::Sinks { site: site + usize::from(site >= at), slot },
        };
        if !self.pending.contains(&event) {
            self.pending.push(event);
        }
    }

    /// How often steps ended without each worker, as the sites count.
    fn counted(&self) -> Vec<u64> {
        let mut counted = vec![0; self.programs.len()];
        for (at, site) in self.sites.iter().enumerate() {
            let own = site.workers.len();
            for (worker, missed) in site.workers.clone().zip(&site.exchange.left_out()[..own]) {
                counted[worker as usize] += missed;
            }
            let others = (0..self.sites.len()).filter(|&other| other != at);
            for (other, missed) in others.zip(&site.exchange.left_out()[own..]) {
                self.sites[other].workers.clone().for_each(|worker| counted[worker as usize] += missed);
            }
        }
        counted
    }
}

/// The workers of each site.
fn sizes() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![prop::collection::vec(1_u32..6, 1), prop::collection::vec(1_u32..4, 2..4)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn programs_end_whatever_comes_first(
        (sizes, quorum, owners) in sizes().prop_flat_map(|sizes| {
            let workers = sizes.iter().sum();
            let quorum = prop_oneof![Just(Quorum::Clock), (1..=workers).prop_map(Quorum::Count)];
            let owners = prop::collection::vec(0..sizes.len(), 1..4);
            (Just(sizes), quorum, owners)
        }),
        choices in prop::collection::vec(any::<u16>(), 0..600),
    ) {
        let mut job = TestJob::new(&sizes, owners, quorum);
        let mut choices = choices.into_iter();
        for _ in 0..20_000 {
            let events = job.events(quorum == Quorum::Clock);
            if events.is_empty() {
                break;
            }
            let choice = usize::from(choices.next().unwrap_or(0)) % events.len();
            job.happen(events[choice].clone());
        }
        prop_assert!(job.programs.iter().all(|program| program.gone), "a rank waits for ever");
        prop_assert_eq!(job.counted(), job.left_out);
    }
}
