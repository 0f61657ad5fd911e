//! Synchronous, asynchronous and bounded-staleness jobs as workers see them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paramhub_core::consistency::Consistency;
use paramhub_core::settings::Settings;
use paramhub_worker::Job;

use crate::cluster::{Cluster, Transports, keys, sgd};

over_transports!(
    [tcp shm mixed]
    asynchronous_workers_see_their_own_contribution_and_all_of_them_count,
    an_asynchronous_worker_goes_on_while_another_stands_still,
    bounded_staleness_holds_the_fast_back_by_exactly_its_bound,
);

const ELEMENTS: usize = 40_000;

/// Every contribution of ones lowers each parameter by exactly one.
fn settings(consistency: Consistency) -> Settings {
    Settings { optimizer: sgd(1.0, 0.0), consistency, ..Settings::new(keys(&[ELEMENTS as u64])) }
}

fn start(job: &Job) -> Vec<f32> {
    let mut model = vec![vec![0.0f32; ELEMENTS]];
    job.broadcast(&mut model, 0).unwrap();
    model.remove(0)
}

/// The number of contributions to each chunk of a model. Every element of a chunk must show the same.
fn contributions(model: &[f32], chunk_elements: usize) -> Vec<u32> {
    let count = |chunk: &[f32]| {
        assert!(chunk.iter().all(|&value| value == chunk[0]), "a chunk torn between two updates");
        -chunk[0] as u32
    };
    model.chunks(chunk_elements).map(count).collect()
}

fn asynchronous_workers_see_their_own_contribution_and_all_of_them_count(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = settings(Consistency::Asynchronous);
    let finished = AtomicU32::new(0);
    let (steps, workers) = (30, 3);
    cluster.job("async", workers).run(&settings, |job| {
        let mut model = start(job);
        let mut before = vec![0; ELEMENTS.div_ceil(8192)];
        for step in 1..=steps {
            // The ranks have different paces: the fast one must not wait for the slow one.
            std::thread::sleep(Duration::from_micros(u64::from(job.rank()) * 500));
            model = job.push_pull(0, vec![1.0f32; ELEMENTS], model).unwrap().wait().unwrap().1;
            let seen = contributions(&model, 8192);
            for (&now, &before) in seen.iter().zip(&before) {
                assert!(now > before && now >= step && now <= workers * steps, "step {step}: {seen:?}");
            }
            before = seen;
        }
        finished.fetch_add(1, Ordering::SeqCst);
        while finished.load(Ordering::SeqCst) < workers {
            std::thread::sleep(Duration::from_millis(1));
        }
        let model = job.pull(0, model).unwrap().wait().unwrap().1;
        assert!(contributions(&model, 8192).iter().all(|&count| count == workers * steps));
    });
}

fn an_asynchronous_worker_goes_on_while_another_stands_still(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = settings(Consistency::Asynchronous);
    let fast_is_done = AtomicU32::new(0);
    cluster.job("alone", 2).run(&settings, |job| {
        let mut model = start(job);
        if job.rank() == 1 {
            while fast_is_done.load(Ordering::SeqCst) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            return;
        }
        for _ in 0..20 {
            model = job.push_pull(0, vec![1.0f32; ELEMENTS], model).unwrap().wait().unwrap().1;
        }
        assert!(contributions(&model, 8192).iter().all(|&count| count == 20));
        fast_is_done.store(1, Ordering::SeqCst);
    });
}

fn bounded_staleness_holds_the_fast_back_by_exactly_its_bound(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for bound in [0, 2] {
        let settings = settings(Consistency::BoundedStaleness(bound));
        let slow_step = AtomicU32::new(0);
        let furthest_ahead = AtomicU32::new(0);
        let steps = 12;
        cluster.job(&format!("stale{bound}"), 2).run(&settings, |job| {
            let mut model = start(job);
            for step in 1..=steps {
                if job.rank() == 1 {
                    std::thread::sleep(Duration::from_millis(15));
                    // Stored before the push: the hub has at least this many pushes of the slow rank, less
                    // one.
                    slow_step.store(step, Ordering::SeqCst);
                }
                model = job.push_pull(0, vec![1.0f32; ELEMENTS], model).unwrap().wait().unwrap().1;
                if job.rank() == 0 {
                    let slow = slow_step.load(Ordering::SeqCst);
                    assert!(
                        step <= slow + bound,
                        "step {step} was passed when the slow one had not begun {slow}"
                    );
                    furthest_ahead.fetch_max(step.saturating_sub(slow), Ordering::SeqCst);
                }
            }
        });
        assert_eq!(furthest_ahead.load(Ordering::SeqCst), bound, "the bound is used up");
    }
}
