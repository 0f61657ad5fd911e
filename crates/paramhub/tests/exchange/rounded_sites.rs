//! Sums that are rounded where they cross between racks and hosts.

use paramhub_core::composition::{BetweenSites, Reduction};
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::service::JobOptions;
use paramhub_core::settings::Settings;

use crate::cluster::{Transports, keys, sgd};
use crate::sites::{Racks, SIZES, options, shapes};

over_transports!(
    [tcp shm mixed]
    sums_cross_in_bf16_if_the_job_asks,
    sums_cross_in_fewer_bits_if_the_job_asks,
);

const STEPS: u32 = 4;

/// Gradients are a little more than 1, so that every sum is rounded to a whole number.
fn sums_cross_in_bf16_if_the_job_asks(transports: Transports) {
    let gradient = 1.0_f32 + 1.0 / 512.0;
    let elements = SIZES.iter().sum::<u64>() as f64;
    for (name, hubs, racks, reductions) in shapes() {
        let cluster = Racks::new(transports, &hubs);
        for reduction in reductions.into_iter().filter(|reduction| *reduction != Reduction::Flat) {
            for clip_norm in [None, Some(1e6)] {
                let settings =
                    Settings { optimizer: sgd(1.0, 0.0), clip_norm, ..Settings::new(keys(&SIZES)) };
                let options = JobOptions { between_sites: BetweenSites::BF16, ..options(reduction) };
                cluster.run(&racks, options, &settings, |job| {
                    let mut model: Vec<Vec<f32>> =
                        SIZES.iter().map(|&size| vec![8.0; size as usize]).collect();
                    job.broadcast(&mut model, 0).unwrap();
                    for step in 0..STEPS {
                        let handles: Vec<_> = (0..)
                            .zip(&mut model)
                            .map(|(key, values)| {
                                let own = vec![gradient; values.len()];
                                job.push_pull(key, own, std::mem::take(values)).unwrap()
                            })
                            .collect();
                        if clip_norm.is_some() {
                            let (_, norm) = job.gradient_norm(step).unwrap().wait().unwrap();
                            assert_eq!(norm, elements.sqrt(), "{name}, {reduction:?}");
                        }
                        model = handles.into_iter().map(|handle| handle.wait().unwrap().1).collect();
                        let expected = 7.0 - step as f32;
                        let is_expected = |value: &f32| *value == expected;
                        let found = model.iter().flatten().find(|value| !is_expected(value));
                        assert_eq!(found, None, "{name}, {reduction:?}, {clip_norm:?}, step {step}");
                    }
                });
            }
        }
    }
}

/// What one step loses is added to the next, so the loss does not grow from step to step.
fn sums_cross_in_fewer_bits_if_the_job_asks(transports: Transports) {
    const MANY_STEPS: u32 = 24;
    let shape = [300, 40];
    let keys = || KeyTable::new(vec![Key::new("matrix", shape), Key::new("bias", [37])]).unwrap();
    let lengths = [300 * 40, 37];
    let gradient = |rank: u32, i: usize| ((i * 7919 + rank as usize * 31) % 61) as f32 - 30.0;
    for (name, hubs, racks, reductions) in shapes() {
        let cluster = Racks::new(transports, &hubs);
        let mean = |i| {
            let ranks = racks.len() as u32;
            (0..ranks).map(|rank| gradient(rank, i)).sum::<f32>() / ranks as f32
        };
        for reduction in reductions.into_iter().filter(|reduction| *reduction != Reduction::Flat) {
            // The most that the matrix and the bias may lose. Without error feedback it would be up to half of all that is
            // exchanged: 15 a step in one bit, and 0.1 a step in a byte.
            for (between_sites, most_lost) in [
                (BetweenSites::ONE_BIT, [150.0, 1e-3]),
                (BetweenSites::TWO_BIT, [150.0, 1e-3]),
                (BetweenSites::INT8, [1.0, 1.0]),
            ] {
                let name = format!("{name}, {reduction:?}, {between_sites}");
                let settings = Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys()) };
                let options = JobOptions { between_sites, ..options(reduction) };
                let models = cluster.run(&racks, options, &settings, |job| {
                    let mut model = lengths.map(|length| vec![0.0_f32; length]).to_vec();
                    job.broadcast(&mut model, 0).unwrap();
                    let own = lengths.map(|length| (0..length).map(|i| gradient(job.rank(), i)).collect());
                    let own: [Vec<f32>; 2] = own;
                    for _ in 0..MANY_STEPS {
                        let handles: Vec<_> = (0..)
                            .zip(own.iter().zip(&mut model))
                            .map(|(key, (own, values))| {
                                job.push_pull(key, own.clone(), std::mem::take(values)).unwrap()
                            })
                            .collect();
                        model = handles.into_iter().map(|handle| handle.wait().unwrap().1).collect();
                    }
                    model
                });
                assert!(models.iter().all(|model| *model == models[0]), "{name}: the ranks' models differ");
                let lost = |key: usize, i: usize| (models[0][key][i] + MANY_STEPS as f32 * mean(i)).abs();
                for key in 0..2 {
                    let lost = (0..lengths[key]).map(|i| lost(key, i)).fold(0.0, f32::max);
                    assert!(lost < most_lost[key], "{name}: key {key} has lost {lost}");
                    // Whatever is rounded loses something.
                    assert!(lost > 1e-3 || most_lost[key] == 1e-3, "{name}: key {key} has lost only {lost}");
                }
            }
        }
    }
}
