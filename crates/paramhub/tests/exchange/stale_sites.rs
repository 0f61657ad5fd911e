//! Racks and hosts that do not wait for one another: their workers step together, and their contributions are updates of
//! their own.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use paramhub_core::composition::{BetweenSites, Reduction};
use paramhub_core::consistency::Consistency;
use paramhub_core::service::JobOptions;
use paramhub_core::settings::Settings;
use paramhub_worker::Job;

use crate::cluster::{Transports, keys, sgd};
use crate::sites::{Hub, Racks, SIZES, options, shapes};

over_transports!(
    [tcp shm mixed]
    every_site_contributes_by_itself_and_all_contributions_count,
    a_site_goes_on_while_another_stands_still,
    bounded_staleness_holds_the_fast_site_back_by_exactly_its_bound,
);

const STEPS: u32 = 6;

/// An update with a mean of ones lowers each parameter by exactly one, however many workers have contributed.
fn settings(consistency: Consistency) -> Settings {
    Settings { optimizer: sgd(1.0, 0.0), consistency, ..Settings::new(keys(&SIZES)) }
}

fn start(job: &Job) -> Vec<Vec<f32>> {
    let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&size| vec![0.0; size as usize]).collect();
    job.broadcast(&mut model, 0).unwrap();
    model
}

/// Exchanges a gradient of ones, and returns the model.
fn step(job: &Job, model: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let handles: Vec<_> = (0..)
        .zip(model)
        .map(|(key, values)| job.push_pull(key, vec![1.0_f32; values.len()], values).unwrap())
        .collect();
    handles.into_iter().map(|handle| handle.wait().unwrap().1).collect()
}

/// The smallest and the largest number of updates that a chunk of the model has had.
fn updates(model: &[Vec<f32>]) -> (u32, u32) {
    let counts = || model.iter().flatten().map(|&value| -value as u32);
    assert!(model.iter().flatten().all(|value| value.fract() == 0.0));
    (counts().min().unwrap(), counts().max().unwrap())
}

/// The number of sites that do not wait for one another, in each of the [`shapes`] and the reductions that serve such jobs.
fn sites_of(shape: &str, reduction: Reduction) -> Option<u32> {
    match (shape, reduction) {
        (_, Reduction::Ring | Reduction::Line | Reduction::Flat) => None,
        ("three racks, rank 0 in the last" | "a parent hub with a worker of its own", _) => Some(3),
        // The rack that is above the other one has that one, a host, and a worker of its own.
        ("a host below a rack beside another", Reduction::Tree) => Some(3),
        _ => Some(2),
    }
}

fn every_site_contributes_by_itself_and_all_contributions_count(transports: Transports) {
    for (name, hubs, racks, reductions) in shapes() {
        let cluster = Racks::new(transports, &hubs);
        let together = Barrier::new(racks.len());
        for reduction in reductions {
            // Such a job must say by which sites.
            let reduction = if reduction == Reduction::Auto { Reduction::Tree } else { reduction };
            let Some(sites) = sites_of(name, reduction) else { continue };
            for between_sites in [BetweenSites::F32, BetweenSites::BF16] {
                let options = JobOptions { between_sites, ..options(reduction) };
                for consistency in [Consistency::Asynchronous, Consistency::BoundedStaleness(1)] {
                    let name = format!("{name}, {reduction}, {between_sites}, {consistency}");
                    let models = cluster.run(&racks, options, &settings(consistency), |job| {
                        let mut model = start(job);
                        for step_number in 1..=STEPS {
                            // The ranks have different paces.
                            std::thread::sleep(Duration::from_micros(u64::from(job.rank()) * 300));
                            model = step(job, model);
                            let (least, most) = updates(&model);
                            assert!(least >= step_number && most <= sites * STEPS, "{name}: {least}, {most}");
                            if consistency != Consistency::Asynchronous {
                                let of_others = (sites - 1) * step_number.saturating_sub(1);
                                assert!(least >= step_number + of_others, "{name}: {step_number}: {least}");
                            }
                        }
                        together.wait();
                        let model = step(job, model);
                        let (least, most) = updates(&model);
                        assert!(
                            least > sites * STEPS && most <= sites * (STEPS + 1),
                            "{name}: {least}, {most}"
                        );
                        model
                    });
                    // The workers of the topmost hub read its parameters one after the other, between the updates of others.
                    let top = if name.starts_with("a parent") { "" } else { "a" };
                    let below_top = racks.iter().enumerate().filter(|(_, rack)| **rack != top);
                    for (rank, rack) in below_top.filter(|_| reduction == Reduction::Tree) {
                        let first = racks.iter().position(|other| other == rack).unwrap();
                        assert!(models[rank] == models[first], "{name}: rank {rank} and rank {first} differ");
                    }
                }
            }
        }
    }
}

fn a_site_goes_on_while_another_stands_still(transports: Transports) {
    let hubs = [Hub::Rack("a", 1), Hub::Rack("b", 2)];
    let cluster = Racks::new(transports, &hubs);
    for reduction in [Reduction::Sharded, Reduction::Tree] {
        for fast in ["a", "b"] {
            let done = AtomicU32::new(0);
            let racks = ["a", "b", "b", "a"];
            let settings = settings(Consistency::Asynchronous);
            cluster.run(&racks, options(reduction), &settings, |job| {
                let mut model = start(job);
                if racks[job.rank() as usize] == fast {
                    for number in 1..=20 {
                        model = step(job, model);
                        assert_eq!(updates(&model), (number, number), "{reduction}, {fast}");
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                } else {
                    while done.load(Ordering::SeqCst) < 2 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    assert_eq!(updates(&step(job, model)), (21, 21), "{reduction}, {fast}");
                }
            });
        }
    }
}

fn bounded_staleness_holds_the_fast_site_back_by_exactly_its_bound(transports: Transports) {
    let cluster = Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 2)]);
    let racks = ["a", "b", "b", "a"];
    for (reduction, slow) in [(Reduction::Sharded, "a"), (Reduction::Tree, "a"), (Reduction::Tree, "b")] {
        for bound in [0, 2] {
            let slow_step = AtomicU32::new(0);
            let furthest_ahead = AtomicU32::new(0);
            let settings = settings(Consistency::BoundedStaleness(bound));
            cluster.run(&racks, options(reduction), &settings, |job| {
                let mut model = start(job);
                let is_slow = racks[job.rank() as usize] == slow;
                for number in 1..=12 {
                    if is_slow {
                        std::thread::sleep(Duration::from_millis(15));
                        // It is stored before the push, so the hub has at least so many of the slow site less one.
                        slow_step.fetch_max(number, Ordering::SeqCst);
                    }
                    model = step(job, model);
                    if !is_slow {
                        let slow = slow_step.load(Ordering::SeqCst);
                        assert!(number <= slow + bound, "{reduction}: {number} was passed at {slow}");
                        furthest_ahead.fetch_max(number.saturating_sub(slow), Ordering::SeqCst);
                    }
                }
            });
            assert_eq!(furthest_ahead.load(Ordering::SeqCst), bound, "{reduction}: the bound is used up");
        }
    }
}
