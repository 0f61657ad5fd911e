//! Whose work a core does next: each job has its share of the core's time, whatever it asks for.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, 1996), in units of time: the job that has had least of the core, by its
//! weight, is served next. What a unit of work costs is known when it is done, which is all the rule needs.

use std::collections::VecDeque;
use std::time::Duration;

use paramhub_core::auth::Namespace;

use super::table::Table;

/// How far a job that is being served may get ahead of the others before it is their turn, at a weight of 1. Its chunks stay in
/// cache meanwhile: where all its workers' contributions to one come soon after each other, the sum is still there.
const GRAIN: Duration = Duration::from_micros(300);

/// What a core does without a break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// A stream's turn, by its lane's token.
    Lane(u64),
    /// Some chunks of a released step, by the shard's place.
    Release(usize),
    /// Some chunks for a snapshot, by the shard's place.
    Copy(usize),
    /// A part of a gradient that is made of factors, by the shard's place.
    Make(usize),
    /// Some of the memory of a shard that opens or closes, by the shard's place.
    Memory(usize),
}

/// The work of all jobs of a core.
#[derive(Debug, Default)]
pub(super) struct Turns {
    jobs: Table<Tenant>,
    /// Jobs with work, in the order in which they came by it.
    waiting: Vec<usize>,
    /// Units of all of them.
    units: usize,
    /// Jobs served here, with work or without.
    hosted: usize,
    /// The virtual time of the job that was furthest behind when the newest unit began.
    clock_ns: u64,
    /// Whose that unit was.
    newest: usize,
}

/// A job, as its core sees it.
#[derive(Debug)]
struct Tenant {
    namespace: Namespace,
    weight: u64,
    shards: usize,
    lanes: usize,
    units: VecDeque<Unit>,
    /// The virtual time at which its next unit begins: what it has used, over its weight.
    start_ns: u64,
    busy: Duration,
}

impl Turns {
    /// A shard of this job has been opened. Says which number the job has here.
    pub(super) fn admit(&mut self, namespace: Namespace, weight: u32) -> usize {
        let job = self.jobs.position(|job| job.namespace == namespace).unwrap_or_else(|| {
            self.hosted += 1;
            self.jobs.insert_index(Tenant {
                namespace,
                weight: u64::from(weight.max(1)),
                shards: 0,
                lanes: 0,
                units: VecDeque::new(),
                start_ns: 0,
                busy: Duration::ZERO,
            })
        });
        self.waiting.reserve(self.hosted - self.waiting.len());
        let tenant = self.jobs.index_mut(job);
        tenant.shards += 1;
        tenant.make_room();
        job
    }

    /// A shard of the job has closed: the time that the job has used here, if it was the last.
    pub(super) fn dismiss(&mut self, job: usize, shard: usize) -> Option<Duration> {
        self.forget(job, Unit::Release(shard));
        self.forget(job, Unit::Copy(shard));
        self.forget(job, Unit::Make(shard));
        self.forget(job, Unit::Memory(shard));
        let tenant = self.jobs.index_mut(job);
        tenant.shards -= 1;
        if tenant.shards > 0 {
            return None;
        }
        debug_assert_eq!((tenant.lanes, tenant.units.len()), (0, 0), "a lane's shard outlives it");
        self.hosted -= 1;
        self.jobs.remove_index(job).map(|tenant| tenant.busy)
    }

    /// The job has one more stream here, which needs a place to wait.
    pub(super) fn add_lane(&mut self, job: usize) {
        let tenant = self.jobs.index_mut(job);
        tenant.lanes += 1;
        tenant.make_room();
    }

    /// The job has one stream less.
    pub(super) fn remove_lane(&mut self, job: usize, token: u64) {
        self.jobs.index_mut(job).lanes -= 1;
        self.forget(job, Unit::Lane(token));
    }

    /// The job has something more to do, which does not wait already.
    pub(super) fn add(&mut self, job: usize, unit: Unit) {
        let tenant = self.jobs.index_mut(job);
        debug_assert!(!tenant.units.contains(&unit), "a unit waits once");
        if tenant.units.is_empty() {
            // Time in which it had nothing to do is nothing it may ask for later.
            tenant.start_ns = tenant.start_ns.max(self.clock_ns);
            self.waiting.push(job);
        }
        tenant.units.push_back(unit);
        self.units += 1;
    }

    /// What to do next, and for which job.
    pub(super) fn next(&mut self) -> Option<(usize, Unit)> {
        let start_of = |job: usize| self.jobs.index(job).start_ns;
        let starts = self.waiting.iter().map(|&job| start_of(job));
        // The first of equals has waited longest.
        let (behind, least_ns) = starts.enumerate().min_by_key(|&(_, start_ns)| start_ns)?;
        self.clock_ns = least_ns;
        let ahead_ns = least_ns + GRAIN.as_nanos() as u64;
        let goes_on = |job: usize| job == self.newest && start_of(job) < ahead_ns;
        let position = self.waiting.iter().position(|&job| goes_on(job)).unwrap_or(behind);
        let job = self.waiting[position];
        self.newest = job;
        let tenant = self.jobs.index_mut(job);
        let unit = tenant.units.pop_front().expect("a waiting job has work");
        self.units -= 1;
        if tenant.units.is_empty() {
            self.waiting.remove(position);
        }
        Some((job, unit))
    }

    /// What was done for a job took so long. The job may be gone by now.
    pub(super) fn charge(&mut self, job: usize, time: Duration) {
        if self.jobs.contains_index(job) {
            let tenant = self.jobs.index_mut(job);
            tenant.busy += time;
            tenant.start_ns += time.as_nanos() as u64 / tenant.weight;
        }
    }

    /// Units that wait.
    pub(super) fn len(&self) -> usize {
        self.units
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.units == 0
    }

    /// Whether there are others whose share is to be kept.
    pub(super) fn is_shared(&self) -> bool {
        self.hosted > 1
    }

    /// Whether nothing waits for this job.
    pub(super) fn rests(&self, job: usize) -> bool {
        self.jobs.index(job).units.is_empty()
    }

    /// The time that every job has used.
    pub(super) fn times(&self) -> impl Iterator<Item = (Namespace, Duration)> {
        self.jobs.values().map(|tenant| (tenant.namespace, tenant.busy))
    }

    fn forget(&mut self, job: usize, unit: Unit) {
        let tenant = self.jobs.index_mut(job);
        let Some(position) = tenant.units.iter().position(|&waits| waits == unit) else { return };
        tenant.units.remove(position);
        self.units -= 1;
        if tenant.units.is_empty() {
            self.waiting.retain(|&other| other != job);
        }
    }
}

impl Tenant {
    /// For everything that may wait at once, so that the data path allocates nothing.
    fn make_room(&mut self) {
        let most = self.lanes + 4 * self.shards;
        self.units.reserve(most.saturating_sub(self.units.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(turns: &mut Turns, number: u8, weight: u32, lanes: u64) -> usize {
        let job = turns.admit(Namespace([number; 16]), weight);
        for lane in 0..lanes {
            turns.add_lane(job);
            turns.add(job, Unit::Lane(lane));
        }
        job
    }

    /// Serves backlogged jobs until `total`; a unit of each costs so many microseconds. What each has had.
    fn serve(turns: &mut Turns, costs: &[(usize, u64)], total: Duration) -> Vec<u64> {
        let mut used = vec![0; costs.len()];
        while Duration::from_micros(used.iter().sum()) < total {
            let (job, unit) = turns.next().expect("all are backlogged");
            let position = costs.iter().position(|&(other, _)| other == job).unwrap();
            used[position] += costs[position].1;
            turns.charge(job, Duration::from_micros(costs[position].1));
            turns.add(job, unit);
        }
        used
    }

    #[test]
    fn jobs_have_equal_time_whatever_their_streams_and_units() {
        let mut turns = Turns::default();
        let (many, few) = (admit(&mut turns, 1, 1, 64), admit(&mut turns, 2, 1, 1));
        let dear = admit(&mut turns, 3, 1, 3);
        let used = serve(&mut turns, &[(many, 3), (few, 60), (dear, 500)], Duration::from_millis(300));
        for time in &used {
            // None is ahead of another by more than a grain and a unit of each.
            assert!(time.abs_diff(used[0]) <= 300 + 560, "{used:?}");
        }
    }

    #[test]
    fn time_follows_weights() {
        let mut turns = Turns::default();
        let (one, three) = (admit(&mut turns, 1, 1, 9), admit(&mut turns, 2, 3, 1));
        let used = serve(&mut turns, &[(one, 50), (three, 50)], Duration::from_millis(400));
        assert!(used[1].abs_diff(3 * used[0]) <= 3 * 300 + 4 * 50, "{used:?}");
    }

    #[test]
    fn a_job_that_wakes_is_soon_served_and_saves_nothing_up() {
        let mut turns = Turns::default();
        let busy = admit(&mut turns, 1, 1, 64);
        let quiet = admit(&mut turns, 2, 1, 0);
        turns.add_lane(quiet);
        serve(&mut turns, &[(busy, 100)], Duration::from_secs(1));
        turns.add(quiet, Unit::Lane(7));
        let soon = serve(&mut turns, &[(busy, 100), (quiet, 100)], GRAIN + Duration::from_micros(100));
        assert!(soon[1] > 0, "{soon:?}");
        let used = serve(&mut turns, &[(busy, 100), (quiet, 100)], Duration::from_millis(10));
        assert!(used[0].abs_diff(used[1]) <= 2 * 300 + 200, "{used:?}");
    }

    #[test]
    fn streams_of_a_job_take_turns() {
        let mut turns = Turns::default();
        let job = admit(&mut turns, 1, 1, 3);
        let order: Vec<Unit> = (0..6)
            .map(|_| {
                let (_, unit) = turns.next().unwrap();
                turns.add(job, unit);
                unit
            })
            .collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2].map(Unit::Lane));
    }

    #[test]
    fn a_job_goes_on_for_a_while_so_that_its_chunks_stay_in_cache() {
        let mut turns = Turns::default();
        let jobs = [admit(&mut turns, 1, 1, 2), admit(&mut turns, 2, 1, 2)];
        let mut order = Vec::new();
        for _ in 0..600 {
            let (job, unit) = turns.next().unwrap();
            turns.charge(job, Duration::from_micros(50));
            turns.add(job, unit);
            order.push(job);
        }
        let changes = order.windows(2).filter(|two| two[0] != two[1]).count();
        assert!((600 / 14..=600 / 6).contains(&changes), "{changes} changes between {jobs:?}");
    }

    #[test]
    fn what_has_gone_is_not_served() {
        let mut turns = Turns::default();
        let (first, second) = (admit(&mut turns, 1, 1, 2), admit(&mut turns, 2, 1, 1));
        assert!(turns.is_shared());
        turns.add(second, Unit::Release(5));
        turns.charge(second, Duration::from_micros(9));
        turns.remove_lane(second, 0);
        assert!(!turns.rests(second));
        assert_eq!(turns.dismiss(second, 5), Some(Duration::from_micros(9)));
        assert!(!turns.is_shared());
        // It may be charged for what its last unit took.
        turns.charge(second, Duration::from_micros(1));
        turns.remove_lane(first, 0);
        assert_eq!((turns.len(), turns.next()), (1, Some((first, Unit::Lane(1)))));
        assert!(turns.is_empty() && turns.next().is_none());
    }

    #[test]
    fn a_job_keeps_its_number_for_all_its_shards() {
        let mut turns = Turns::default();
        let job = admit(&mut turns, 1, 1, 0);
        assert_eq!(admit(&mut turns, 1, 1, 0), job);
        assert!(!turns.is_shared());
        assert_eq!(turns.dismiss(job, 0), None);
        assert_eq!(turns.dismiss(job, 1), Some(Duration::ZERO));
    }
}
