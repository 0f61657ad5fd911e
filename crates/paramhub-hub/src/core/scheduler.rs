//! This decides which job a core serves next: each job has its share of the core's time, however much work
//! it has.
//!
//! Start-time fair queueing (Goyal, Vin and Cheng, 1996), in units of time: the next job is the one that has
//! used the least time for its weight. A job that is being served goes on until it is [`LEAD_MAX`] ahead. The
//! cost of a unit of work is known when it is done, which is enough for this rule.

use std::collections::VecDeque;
use std::time::Duration;

use paramhub_core::auth::Namespace;

use super::table::Table;

/// The time by which a job that is being served may get ahead of the others before they are served, at a
/// weight of 1. Meanwhile its chunks stay in cache: if all workers' contributions to a chunk come soon
/// after each other, the sum is still there.
const LEAD_MAX: Duration = Duration::from_micros(300);

/// Work that a core does without a break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WorkUnit {
    /// A turn of a stream, by its lane's token.
    Lane(u64),
    /// Some chunks of a released step, by the shard's index.
    UpdateReleased(usize),
    /// Some chunks for a snapshot, by the shard's index.
    CopySnapshot(usize),
    /// Some chunks whose steps end without members that are lost, by the shard's index.
    ChangeMembers(usize),
    /// A part of a gradient that is made of factors, by the shard's index.
    SumFactors(usize),
    /// Some memory of a shard that opens or closes, by the shard's index.
    Memory(usize),
    /// A shard whose standby is lost ends the next sums that have waited for it.
    EndSums(usize),
}

/// The work of all jobs of a core.
#[derive(Debug, Default)]
pub(super) struct JobScheduler {
    jobs: Table<ScheduledJob>,
    /// The jobs with work, in the order in which they got it.
    waiting: Vec<usize>,
    /// Number of units of all jobs.
    units: usize,
    /// Number of jobs here, with or without work.
    job_count: usize,
    /// The virtual time of the job that was furthest behind when the newest unit began.
    virtual_now_ns: u64,
    /// The job of that unit.
    current_job: usize,
}

/// A job on its core.
#[derive(Debug)]
struct ScheduledJob {
    namespace: Namespace,
    weight: u64,
    shards: usize,
    lanes: usize,
    units: VecDeque<WorkUnit>,
    /// The virtual time at which its next unit begins: the time used, divided by its weight. A job that had no
    /// work begins at the current virtual time.
    start_ns: u64,
    busy: Duration,
}

impl JobScheduler {
    /// Notes that a shard of this job was opened, and returns the number of the job here.
    pub(super) fn add_shard(&mut self, namespace: Namespace, weight: u32) -> usize {
        let job = self.jobs.position(|job| job.namespace == namespace).unwrap_or_else(|| {
            self.job_count += 1;
            self.jobs.insert_index(ScheduledJob {
                namespace,
                weight: u64::from(weight.max(1)),
                shards: 0,
                lanes: 0,
                units: VecDeque::new(),
                start_ns: 0,
                busy: Duration::ZERO,
            })
        });
        self.waiting.reserve(self.job_count - self.waiting.len());
        let scheduled = self.jobs.index_mut(job);
        scheduled.shards += 1;
        scheduled.make_room();
        job
    }

    /// Notes that a shard of the job has closed. If it was the last, returns the time that the job has used
    /// here.
    pub(super) fn remove_shard(&mut self, job: usize, shard: usize) -> Option<Duration> {
        self.remove_unit(job, WorkUnit::UpdateReleased(shard));
        self.remove_unit(job, WorkUnit::ChangeMembers(shard));
        self.remove_unit(job, WorkUnit::CopySnapshot(shard));
        self.remove_unit(job, WorkUnit::SumFactors(shard));
        self.remove_unit(job, WorkUnit::EndSums(shard));
        self.remove_unit(job, WorkUnit::Memory(shard));
        let scheduled = self.jobs.index_mut(job);
        scheduled.shards -= 1;
        if scheduled.shards > 0 {
            return None;
        }
        debug_assert_eq!((scheduled.lanes, scheduled.units.len()), (0, 0), "a lane's shard outlives it");
        self.job_count -= 1;
        self.jobs.remove_index(job).map(|scheduled| scheduled.busy)
    }

    /// Notes that the job has one more stream here, which needs room to wait.
    pub(super) fn add_lane(&mut self, job: usize) {
        let scheduled = self.jobs.index_mut(job);
        scheduled.lanes += 1;
        scheduled.make_room();
    }

    /// Notes that the job has one stream less.
    pub(super) fn remove_lane(&mut self, job: usize, token: u64) {
        self.jobs.index_mut(job).lanes -= 1;
        self.remove_unit(job, WorkUnit::Lane(token));
    }

    /// Adds a unit of work of the job, which must not wait already.
    pub(super) fn add(&mut self, job: usize, unit: WorkUnit) {
        let scheduled = self.jobs.index_mut(job);
        debug_assert!(!scheduled.units.contains(&unit), "a unit waits once");
        if scheduled.units.is_empty() {
            // Time in which a job had no work gives it no credit for later.
            scheduled.start_ns = scheduled.start_ns.max(self.virtual_now_ns);
            self.waiting.push(job);
        }
        scheduled.units.push_back(unit);
        self.units += 1;
    }

    /// The next unit of work and its job.
    pub(super) fn next(&mut self) -> Option<(usize, WorkUnit)> {
        let start_of = |job: usize| self.jobs.index(job).start_ns;
        let starts = self.waiting.iter().map(|&job| start_of(job));
        // Among equals the first has waited longest.
        let (behind, least_ns) = starts.enumerate().min_by_key(|&(_, start_ns)| start_ns)?;
        self.virtual_now_ns = least_ns;
        let ahead_ns = least_ns + LEAD_MAX.as_nanos() as u64;
        let goes_on = |job: usize| job == self.current_job && start_of(job) < ahead_ns;
        let position = self.waiting.iter().position(|&job| goes_on(job)).unwrap_or(behind);
        let job = self.waiting[position];
        self.current_job = job;
        let scheduled = self.jobs.index_mut(job);
        let unit = scheduled.units.pop_front().expect("a waiting job has work");
        self.units -= 1;
        if scheduled.units.is_empty() {
            self.waiting.remove(position);
        }
        Some((job, unit))
    }

    /// Charges a job the time of its work. The job may be gone by now.
    pub(super) fn add_time(&mut self, job: usize, time: Duration) {
        if self.jobs.contains_index(job) {
            let scheduled = self.jobs.index_mut(job);
            scheduled.busy += time;
            scheduled.start_ns += time.as_nanos() as u64 / scheduled.weight;
        }
    }

    /// Number of units that wait.
    pub(super) fn len(&self) -> usize {
        self.units
    }

    /// Returns whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.units == 0
    }

    /// Returns whether several jobs share the core.
    pub(super) fn is_shared(&self) -> bool {
        self.job_count > 1
    }

    /// Returns whether nothing waits for this job.
    pub(super) fn has_no_work(&self, job: usize) -> bool {
        self.jobs.index(job).units.is_empty()
    }

    /// The time that each job has used.
    pub(super) fn times(&self) -> impl Iterator<Item = (Namespace, Duration)> {
        self.jobs.values().map(|scheduled| (scheduled.namespace, scheduled.busy))
    }

    fn remove_unit(&mut self, job: usize, unit: WorkUnit) {
        let scheduled = self.jobs.index_mut(job);
        let Some(position) = scheduled.units.iter().position(|&waits| waits == unit) else { return };
        scheduled.units.remove(position);
        self.units -= 1;
        if scheduled.units.is_empty() {
            self.waiting.retain(|&other| other != job);
        }
    }
}

impl ScheduledJob {
    /// Makes room for everything that may wait at once, so that the data path allocates nothing.
    fn make_room(&mut self) {
        // A shard has one unit of each kind but `Lane`.
        let most = self.lanes + 4 * self.shards;
        self.units.reserve(most.saturating_sub(self.units.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(scheduler: &mut JobScheduler, number: u8, weight: u32, lanes: u64) -> usize {
        let job = scheduler.add_shard(Namespace([number; 16]), weight);
        for lane in 0..lanes {
            scheduler.add_lane(job);
            scheduler.add(job, WorkUnit::Lane(lane));
        }
        job
    }

    /// Serves jobs that always have work until `total`; a unit of each costs the given microseconds. Returns
    /// the time of each.
    fn serve(scheduler: &mut JobScheduler, costs: &[(usize, u64)], total: Duration) -> Vec<u64> {
        let mut used = vec![0; costs.len()];
        while Duration::from_micros(used.iter().sum()) < total {
            let (job, unit) = scheduler.next().expect("all are backlogged");
            let position = costs.iter().position(|&(other, _)| other == job).unwrap();
            used[position] += costs[position].1;
            scheduler.add_time(job, Duration::from_micros(costs[position].1));
            scheduler.add(job, unit);
        }
        used
    }

    #[test]
    fn jobs_have_equal_time_whatever_their_streams_and_units() {
        let mut scheduler = JobScheduler::default();
        let (many, few) = (admit(&mut scheduler, 1, 1, 64), admit(&mut scheduler, 2, 1, 1));
        let costly = admit(&mut scheduler, 3, 1, 3);
        let used = serve(&mut scheduler, &[(many, 3), (few, 60), (costly, 500)], Duration::from_millis(300));
        for time in &used {
            // No job is ahead of another by more than the lead and a unit of each.
            assert!(time.abs_diff(used[0]) <= 300 + 560, "{used:?}");
        }
    }

    #[test]
    fn time_follows_weights() {
        let mut scheduler = JobScheduler::default();
        let (one, three) = (admit(&mut scheduler, 1, 1, 9), admit(&mut scheduler, 2, 3, 1));
        let used = serve(&mut scheduler, &[(one, 50), (three, 50)], Duration::from_millis(400));
        assert!(used[1].abs_diff(3 * used[0]) <= 3 * 300 + 4 * 50, "{used:?}");
    }

    #[test]
    fn a_job_that_wakes_is_soon_served_and_saves_nothing_up() {
        let mut scheduler = JobScheduler::default();
        let busy = admit(&mut scheduler, 1, 1, 64);
        let quiet = admit(&mut scheduler, 2, 1, 0);
        scheduler.add_lane(quiet);
        serve(&mut scheduler, &[(busy, 100)], Duration::from_secs(1));
        scheduler.add(quiet, WorkUnit::Lane(7));
        let soon = serve(&mut scheduler, &[(busy, 100), (quiet, 100)], LEAD_MAX + Duration::from_micros(100));
        assert!(soon[1] > 0, "{soon:?}");
        let used = serve(&mut scheduler, &[(busy, 100), (quiet, 100)], Duration::from_millis(10));
        assert!(used[0].abs_diff(used[1]) <= 2 * 300 + 200, "{used:?}");
    }

    #[test]
    fn streams_of_a_job_take_turns() {
        let mut scheduler = JobScheduler::default();
        let job = admit(&mut scheduler, 1, 1, 3);
        let order: Vec<WorkUnit> = (0..6)
            .map(|_| {
                let (_, unit) = scheduler.next().unwrap();
                scheduler.add(job, unit);
                unit
            })
            .collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2].map(WorkUnit::Lane));
    }

    #[test]
    fn a_job_goes_on_for_a_while_so_that_its_chunks_stay_in_cache() {
        let mut scheduler = JobScheduler::default();
        let jobs = [admit(&mut scheduler, 1, 1, 2), admit(&mut scheduler, 2, 1, 2)];
        let mut order = Vec::new();
        for _ in 0..600 {
            let (job, unit) = scheduler.next().unwrap();
            scheduler.add_time(job, Duration::from_micros(50));
            scheduler.add(job, unit);
            order.push(job);
        }
        let changes = order.windows(2).filter(|two| two[0] != two[1]).count();
        assert!((600 / 14..=600 / 6).contains(&changes), "{changes} changes between {jobs:?}");
    }

    #[test]
    fn a_job_that_has_gone_is_not_served() {
        let mut scheduler = JobScheduler::default();
        let (first, second) = (admit(&mut scheduler, 1, 1, 2), admit(&mut scheduler, 2, 1, 1));
        assert!(scheduler.is_shared());
        scheduler.add(second, WorkUnit::UpdateReleased(5));
        scheduler.add_time(second, Duration::from_micros(9));
        scheduler.remove_lane(second, 0);
        assert!(!scheduler.has_no_work(second));
        assert_eq!(scheduler.remove_shard(second, 5), Some(Duration::from_micros(9)));
        assert!(!scheduler.is_shared());
        // The time of its last unit may still be charged.
        scheduler.add_time(second, Duration::from_micros(1));
        scheduler.remove_lane(first, 0);
        assert_eq!((scheduler.len(), scheduler.next()), (1, Some((first, WorkUnit::Lane(1)))));
        assert!(scheduler.is_empty() && scheduler.next().is_none());
    }

    #[test]
    fn a_job_keeps_its_number_for_all_its_shards() {
        let mut scheduler = JobScheduler::default();
        let job = admit(&mut scheduler, 1, 1, 0);
        assert_eq!(admit(&mut scheduler, 1, 1, 0), job);
        assert!(!scheduler.is_shared());
        assert_eq!(scheduler.remove_shard(job, 0), None);
        assert_eq!(scheduler.remove_shard(job, 1), Some(Duration::ZERO));
    }
}
