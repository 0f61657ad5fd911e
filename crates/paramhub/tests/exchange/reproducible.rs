//! Reproducible mode: the same bits from run to run, whatever the cores and the chunk size, and however late
//! a rank is.

use std::time::Duration;

use paramhub_core::settings::Settings;

use crate::cluster::{Cluster, Transports, gradient, keys, sgd};

over_transports!(
    [tcp shm mixed]
    bits_do_not_depend_on_runs_cores_chunk_sizes_or_late_ranks,
);

const SIZES: [u64; 4] = [300_000, 1, 8193, 65_536];

/// Trains three ranks that push at different times. Returns the final parameters as bits.
fn train(cluster: &Cluster, name: &str, chunk_bytes: u32, lateness_ms: [u64; 3]) -> Vec<Vec<u32>> {
    let settings = Settings {
        optimizer: sgd(0.05, 0.9),
        reproducible: true,
        chunk_bytes,
        ..Settings::new(keys(&SIZES))
    };
    let models = cluster.job(name, 3).run(&settings, |job| {
        let mut model: Vec<Vec<f32>> =
            SIZES.iter().zip(0..).map(|(&n, key)| gradient(9, key, 0, n as usize)).collect();
        job.broadcast(&mut model, 0).unwrap();
        for step in 0..4 {
            std::thread::sleep(Duration::from_millis(lateness_ms[job.rank() as usize]));
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
