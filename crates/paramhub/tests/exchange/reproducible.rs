//! Reproducible mode: the same bits from run to run, whatever the cores and the chunk size, and however late
//! a rank is. With sites in a line they are those of one hub.

use std::time::Duration;

use paramhub_core::composition::{OptimizeAt, Reduction};
use paramhub_core::service::JobOptions;
use paramhub_core::settings::Settings;
use paramhub_worker::Job;

use crate::cluster::{Cluster, Transports, gradient, keys, sgd};
use crate::sites::{Hub, Racks, options};

over_transports!(
    [tcp shm mixed]
    bits_do_not_depend_on_runs_cores_chunk_sizes_or_late_ranks,
    sites_in_a_line_have_the_bits_of_one_hub,
    ranks_that_interleave_make_no_line,
);

const SIZES: [u64; 4] = [300_000, 1, 8193, 65_536];

fn begin(job: &Job) -> Vec<Vec<f32>> {
    let mut model: Vec<Vec<f32>> =
        SIZES.iter().zip(0..).map(|(&n, key)| gradient(9, key, 0, n as usize)).collect();
    job.broadcast(&mut model, 0).unwrap();
    model
}

/// Exchanges all keys, the last one first.
fn exchange(job: &Job, step: u32, model: &mut [Vec<f32>], late_by_ms: u64) {
    std::thread::sleep(Duration::from_millis(late_by_ms));
    let handles: Vec<_> = (0..SIZES.len() as u32)
        .rev()
        .map(|key| {
            let out = std::mem::take(&mut model[key as usize]);
            job.push_pull(key, gradient(job.rank(), key, step, out.len()), out).unwrap()
        })
        .collect();
    for (handle, key) in handles.into_iter().zip((0..SIZES.len()).rev()) {
        model[key] = handle.wait().unwrap().1;
    }
}

/// Trains three ranks that push at different times. Returns the final parameters as bits.
fn train(cluster: &Cluster, name: &str, chunk_bytes: u32, lateness_ms: [u64; 3]) -> Vec<Vec<u32>> {
    let settings = Settings {
        optimizer: sgd(0.05, 0.9),
        reproducible: true,
        chunk_bytes,
        ..Settings::new(keys(&SIZES))
    };
    let models = cluster.job(name, 3).run(&settings, |job| {
        let mut model = begin(job);
        (0..4).for_each(|step| exchange(job, step, &mut model, lateness_ms[job.rank() as usize]));
        model
    });
    assert!(models.windows(2).all(|pair| pair[0] == pair[1]), "all ranks hold the same parameters");
    models[0].iter().map(|key| key.iter().map(|value| value.to_bits()).collect()).collect()
}

fn bits_do_not_depend_on_runs_cores_chunk_sizes_or_late_ranks(transports: Transports) {
    let (one, two) = (Cluster::new(transports, 1), Cluster::new(transports, 2));
    let reference = train(&one, "reference", 32 << 10, [0, 0, 0]);
    for (cluster, cores) in [(&one, 1), (&two, 2)] {
        for chunk_bytes in [4 << 10, 32 << 10, 1 << 20] {
            for lateness_ms in [[0, 0, 0], [6, 3, 0]] {
                let name =
                    format!("c{cores}-{chunk_bytes}-{lateness_ms:?}").replace(['[', ']', ' ', ','], "_");
                let reached = train(cluster, &name, chunk_bytes, lateness_ms);
                assert_eq!(
                    reached, reference,
                    "{cores} cores, chunks of {chunk_bytes}, late by {lateness_ms:?} ms"
                );
            }
        }
    }
}

/// The workers of a rack or host add their gradients to the sum of those before them, however late some are.
fn sites_in_a_line_have_the_bits_of_one_hub(transports: Transports) {
    use Hub::{AllWorkers, Host, Rack};
    let racks = ["a", "a", "b", "c", "c", "c"];
    let hosts = ["b", "workstation in a", "workstation in a", "workstation in a", "a", "elsewhere"];
    for (name, hubs, places) in [
        ("racks", vec![Rack("c", 1), Rack("a", 2), Rack("b", 1), Rack("c", 2)], racks),
        ("a host", vec![Rack("a", 2), Host("a", 1), AllWorkers(1), Rack("b", 1)], hosts),
    ] {
        let cluster = Racks::new(transports, &hubs);
        let bits = |options: JobOptions, clip_norm, late_ranks: [u64; 2]| {
            let settings = Settings {
                optimizer: sgd(0.05, 0.9),
                reproducible: true,
                clip_norm,
                ..Settings::new(keys(&SIZES))
            };
            let models = cluster.run(&places, options, &settings, |job| {
                let mut model = begin(job);
                for step in 0..3 {
                    let is_late = late_ranks.contains(&u64::from(job.rank()));
                    exchange(job, step, &mut model, if is_late { 10 } else { 0 });
                }
                model
            });
            assert!(models.windows(2).all(|pair| pair[0] == pair[1]), "all ranks hold the same parameters");
            models.into_iter().next().unwrap().concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        for clip_norm in [None, Some(1e9)] {
            let flat = bits(options(Reduction::Flat), clip_norm, [0, 0]);
            for (optimize_at, late_ranks) in [
                (OptimizeAt::EverySite, [0, 1]),
                (OptimizeAt::EverySite, [2, 5]),
                (OptimizeAt::Owner, [3, 4]),
            ] {
                // Clipping needs the sum at every site.
                if clip_norm.is_some() && optimize_at == OptimizeAt::Owner {
                    continue;
                }
                let line = JobOptions { optimize_at, ..options(Reduction::Line) };
                let reached = bits(line, clip_norm, late_ranks);
                let differing = reached.iter().zip(&flat).filter(|(line, flat)| line != flat).count();
                assert_eq!(differing, 0, "{name}, {optimize_at:?}, {clip_norm:?}, late: {late_ranks:?}");
            }
        }
        // Sums of sums are rounded otherwise.
        assert_ne!(
            bits(options(Reduction::Tree), None, [0, 0]),
            bits(options(Reduction::Flat), None, [0, 0])
        );
    }
}

fn ranks_that_interleave_make_no_line(transports: Transports) {
    let cluster = Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 1)]);
    let settings = Settings { reproducible: true, ..Settings::new(keys(&SIZES)) };
    for outcome in cluster.try_run(&["a", "b", "a"], options(Reduction::Line), &settings, |_| Ok(())) {
        let refused = outcome.unwrap_err().to_string();
        assert!(refused.contains("rack a has rank 2 but not rank 1"), "{refused}");
        assert!(refused.contains("number ranks host by host"), "{refused}");
    }
}
