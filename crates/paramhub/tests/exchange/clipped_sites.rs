//! Clipping by the global norm where hubs serve racks and hosts: every hub holds its chunks, and rank 0's release reaches all.

use paramhub_core::composition::{OptimizeAt, Reduction};
use paramhub_core::service::JobOptions;
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_kernels::Hyperparameters;
use paramhub_worker::Job;

use crate::cluster::{Transports, gradient, keys, sgd};
use crate::sites::{Hub, Outcome, Racks, SIZES, assert_close, options, shapes};

over_transports!(
    [tcp shm mixed]
    a_gradient_is_clipped_alike_at_every_site_and_as_at_one_hub,
    rank_zero_releases_and_skips_steps_at_every_site,
    a_job_whose_owners_optimise_cannot_clip,
);

const STEPS: u32 = 6;

/// Trains with gradients that double from step to step. Returns parameters and state, and the norm of each step.
fn train(job: &Job) -> (Outcome, Vec<f64>) {
    let mut model: Vec<Vec<f32>> =
        SIZES.iter().map(|&size| (0..size).map(|i| i as f32 / 1000.0).collect()).collect();
    job.broadcast(&mut model, 0).unwrap();
    let mut norms = Vec::new();
    for step in 0..STEPS {
        if job.rank() == 1 && step == 3 {
            let initial = job.settings().optimizer.hyperparameters.unwrap();
            job.set_hyperparameters(3, &Hyperparameters { learning_rate: 0.02, ..initial }).unwrap();
        }
        let handles: Vec<_> = (0..)
            .zip(&mut model)
            .map(|(key, values)| {
                let scale = (1_u32 << step) as f32;
                let own = gradient(job.rank(), key, step, values.len());
                let own: Vec<f32> = own.iter().map(|value| value * scale).collect();
                job.push_pull(key, own, std::mem::take(values)).unwrap()
            })
            .collect();
        model = handles.into_iter().map(|handle| handle.wait().unwrap().1).collect();
        norms.push(job.gradient_norm(step).unwrap().wait().unwrap().1);
    }
    let state = (0..)
        .zip(&model)
        .flat_map(|(key, values)| (0..job.state_slots()).map(move |slot| (key, slot, values.len())))
        .map(|(key, slot, len)| job.pull_state(key, slot, vec![f32::NAN; len]).unwrap().finish().parameters)
        .collect();
    ((model, state), norms)
}

fn a_gradient_is_clipped_alike_at_every_site_and_as_at_one_hub(transports: Transports) {
    let named = |name, hyperparameters| OptimizerChoice {
        hyperparameters: Some(hyperparameters),
        ..OptimizerChoice::named(name)
    };
    let usual = Hyperparameters { learning_rate: 0.01, ..Default::default() };
    // Gradients are clipped from the third step or so on.
    let clip_norm = 400.0;
    let jobs = [
        (sgd(0.05, 0.5), Some(clip_norm)),
        (named("adam", usual), Some(clip_norm)),
        (named("lars", Hyperparameters { learning_rate: 2.0, momentum: 0.5, ..usual }), Some(clip_norm)),
        (named("lamb", usual), None),
    ];
    for (name, hubs, racks, reductions) in shapes() {
        for (optimizer, clips) in &jobs {
            let (optimizer, clips) = (optimizer.clone(), *clips);
            let settings = Settings { optimizer, clip_norm: clips, ..Settings::new(keys(&SIZES)) };
            let flat = Racks::new(transports, &[Hub::AllWorkers(2)]).run(
                &racks,
                options(Reduction::Flat),
                &settings,
                train,
            );
            let norms = &flat[0].1;
            assert!(norms[0] < clip_norm && norms[STEPS as usize - 1] > clip_norm, "{name}: {norms:?}");
            let cluster = Racks::new(transports, &hubs);
            for &reduction in &reductions {
                let name = format!("{name}, {reduction:?}, {}", settings.optimizer.name);
                let found = cluster.run(&racks, options(reduction), &settings, train);
                for (rank, (outcome, norms)) in found.iter().enumerate() {
                    assert!(*outcome == found[0].0, "{name}: rank {rank} differs from rank 0");
                    for (found, expected) in norms.iter().zip(&flat[0].1) {
                        let difference = (found - expected).abs();
                        assert!(difference <= 1e-6 * expected, "{name}: norm {found}, not {expected}");
                    }
                }
                assert_close(&name, &found[0].0, &flat[0].0);
            }
        }
    }
}

fn rank_zero_releases_and_skips_steps_at_every_site(transports: Transports) {
    const LENGTHS: [usize; 2] = [60_011, 3];
    for (name, hubs, racks, reductions) in shapes() {
        let settings = Settings {
            optimizer: sgd(1.0, 0.0),
            two_phase: true,
            ..Settings::new(keys(&LENGTHS.map(|length| length as u64)))
        };
        let cluster = Racks::new(transports, &hubs);
        for reduction in reductions {
            cluster.run(&racks, options(reduction), &settings, |job| {
                let mut model = LENGTHS.map(|length| vec![0.0_f32; length]).to_vec();
                job.broadcast(&mut model, 7).unwrap();
                let mut expected = 0.0;
                for (step, factor) in (7..).zip([Some(1.0), None, Some(0.5), None, None, Some(0.25)]) {
                    let handles: Vec<_> = (0..)
                        .zip(&mut model)
                        .map(|(key, values)| {
                            let out = std::mem::take(values);
                            job.push_pull(key, vec![2.0_f32; out.len()], out).unwrap()
                        })
                        .collect();
                    let (_, norm) = job.gradient_norm(step).unwrap().wait().unwrap();
                    assert_eq!(norm, (60_014.0_f64 * 4.0).sqrt(), "{name}, {reduction:?}, step {step}");
                    match factor {
                        _ if job.rank() > 0 => {}
                        Some(factor) => job.release(step, factor).unwrap(),
                        None => job.skip(step).unwrap(),
                    }
                    expected -= 2.0 * factor.unwrap_or(0.0);
                    model = handles.into_iter().map(|handle| handle.wait().unwrap().1).collect();
                    let is_expected = |value: &f32| *value == expected;
                    assert!(model.iter().flatten().all(is_expected), "{name}, {reduction:?}, step {step}");
                }
            });
        }
    }
}

fn a_job_whose_owners_optimise_cannot_clip(transports: Transports) {
    let cluster = Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 1)]);
    let settings = Settings { clip_norm: Some(1.0), optimizer: sgd(0.1, 0.0), ..Settings::new(keys(&[4])) };
    let options = JobOptions { optimize_at: OptimizeAt::Owner, ..options(Reduction::Ring) };
    for outcome in cluster.try_run(&["a", "b"], options, &settings, |_| Ok(())) {
        let refused = outcome.unwrap_err().to_string();
        assert!(refused.contains("clipping by the global norm"), "{refused}");
        assert!(refused.contains("leave `optimize_at` out"), "{refused}");
    }
}
