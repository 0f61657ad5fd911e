//! Jobs that together want more of a core than there is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paramhub_core::consistency::Consistency;
use paramhub_core::service::{JobCounters, JobOptions, JobState};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_kernels::{Hyperparameters, Optimizer, Step};
use paramhub_worker::Job;

use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Transports, await_true, keys};

over_transports!(
    [tcp shm]
    a_job_with_many_streams_gets_no_more_of_a_core_than_one_with_a_single_stream,
    a_job_of_three_times_the_weight_gets_three_times_the_time,
    a_flood_of_one_job_leaves_another_right_and_at_work,
);

const CHUNK_BYTES: u32 = 16 << 10;
const CHUNK_ELEMENTS: u64 = CHUNK_BYTES as u64 / 4;
/// The time that the core must have spent on both jobs before their shares are compared.
const JUDGED: Duration = Duration::from_millis(1500);

/// An optimizer so slow that jobs wait for the core and not for their workers.
struct Dear;

impl Optimizer for Dear {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        0
    }

    fn apply(&self, _: &Step<'_>, model: &mut [f32], _: &[f32], _: &mut [f32]) {
        let until = Instant::now() + Duration::from_micros(100);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        model[0] += 1.0;
    }

    fn needs_whole_chunks(&self) -> bool {
        true
    }
}

fn cluster(transports: Transports) -> Cluster {
    Cluster::with(transports, |config| config.registry.register_optimizer("dear", Arc::new(Dear)).unwrap())
}

/// Every contribution is an update.
fn settings(tensors: usize) -> Settings {
    Settings {
        optimizer: OptimizerChoice::named("dear"),
        consistency: Consistency::Asynchronous,
        chunk_bytes: CHUNK_BYTES,
        ..Settings::new(keys(&vec![4 * CHUNK_ELEMENTS; tensors]))
    }
}

/// Keeps every tensor under way until `over` is set.
fn keep_busy(job: &Job, tensors: usize, over: &AtomicBool) {
    let mut model = vec![vec![0.0_f32; 4 * CHUNK_ELEMENTS as usize]; tensors];
    job.broadcast(&mut model, 0).unwrap();
    let push = |key, gradient, out| (key, job.push_pull(key, gradient, out).unwrap());
    let mut under_way: VecDeque<_> =
        (0..).zip(model).map(|(key, out)| push(key, vec![1.0_f32; out.len()], out)).collect();
    while let Some((key, handle)) = under_way.pop_front() {
        let (gradient, out) = handle.wait().unwrap();
        if !over.load(Ordering::SeqCst) {
            under_way.push_back(push(key, gradient, out));
        }
    }
}

/// The counters of two jobs, each with its workers, tensors and weight, that compete for one core.
fn compete(transports: Transports, jobs: [(u32, usize, u32); 2]) -> [JobCounters; 2] {
    let cluster = cluster(transports);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (number, (workers, tensors, weight)) in jobs.into_iter().enumerate() {
            let ticket =
                cluster.job_with(&number.to_string(), workers, JobOptions { weight, ..Default::default() });
            let over = &over;
            scope.spawn(move || ticket.run(&settings(tensors), |job| keep_busy(job, tensors, over)));
        }
        // One call, so that both are from the same report.
        let counters = || {
            let all = cluster.client.jobs().unwrap();
            let of = |name: &str| all.iter().find(|job| job.name == name).map(|job| job.counters);
            [of("0").unwrap(), of("1").unwrap()]
        };
        let total =
            |counted: &[JobCounters; 2]| Duration::from_nanos(counted.iter().map(|c| c.busy_ns).sum());
        let judged = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let begun = await_true("both at work", || {
                Some(counters()).filter(|counted| counted.iter().all(|job| job.updates > 100))
            });
            let done = await_true("much work", || {
                Some(counters()).filter(|now| total(now) - total(&begun) > JUDGED)
            });
            [0, 1].map(|job| JobCounters {
                busy_ns: done[job].busy_ns - begun[job].busy_ns,
                updates: done[job].updates - begun[job].updates,
                ..done[job]
            })
        }));
        over.store(true, Ordering::SeqCst);
        judged.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn a_job_with_many_streams_gets_no_more_of_a_core_than_one_with_a_single_stream(transports: Transports) {
    let [many, single] = compete(transports, [(8, 4, 1), (1, 64, 1)]);
    let ratio = many.busy_ns as f64 / single.busy_ns as f64;
    assert!((0.6..1.7).contains(&ratio), "{ratio:.2}: {many:?} beside {single:?}");
    // All updates take the same time, so the counted time must follow their number.
    let done = many.updates as f64 / single.updates as f64;
    assert!((0.6..1.7).contains(&done), "{done:.2}: {many:?} beside {single:?}");
}

fn a_job_of_three_times_the_weight_gets_three_times_the_time(transports: Transports) {
    let [light, heavy] = compete(transports, [(2, 32, 1), (2, 64, 3)]);
    let ratio = heavy.busy_ns as f64 / light.busy_ns as f64;
    assert!((1.8..4.5).contains(&ratio), "{ratio:.2}: {light:?} beside {heavy:?}");
}

fn a_flood_of_one_job_leaves_another_right_and_at_work(transports: Transports) {
    let cluster = cluster(transports);
    let over = AtomicBool::new(false);
    let flood = cluster.job("flood", 8);
    beside_a_running_job(&cluster, || {
        std::thread::scope(|scope| {
            let flooding = scope.spawn(|| flood.run(&settings(4), |job| keep_busy(job, 4, &over)));
            let updates = || cluster.client.job("bystander").unwrap().counters.updates;
            cluster.await_job("flood", |job| job.counters.updates > 500);
            let before = updates();
            await_true("the bystander's steps", || (updates() > before + 100).then_some(()));
            over.store(true, Ordering::SeqCst);
            flooding.join().unwrap();
        });
    });
    let flood = cluster.await_end("flood");
    assert_eq!(flood.state, JobState::Finished);
    let bystander = cluster.await_end("bystander").counters.busy_ns;
    assert!(bystander > 0 && flood.counters.busy_ns > bystander, "{flood:?}, the other {bystander} ns");
    let busy: u64 = cluster.hub().cores().iter().map(|core| core.busy_ns).sum();
    assert!(flood.counters.busy_ns + bystander <= busy, "jobs have more than the core: {busy} ns");
}
