//! Sums, optimizers and element types, against the same arithmetic done here.

use std::sync::Arc;

use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_kernels::{Aggregator, Hyperparameters, Optimizer, Registry, Step};

use crate::cluster::{Cluster, Transports, gradient, keys, sgd};

over_transports!(
    [tcp shm mixed]
    the_mean_of_all_gradients_comes_back_for_every_key_and_step,
    the_sum_of_all_gradients_comes_back_undivided,
    push_then_pull_reaches_what_push_pull_reaches,
    each_optimizer_runs_on_the_hub_as_its_kernel_runs_here,
    a_learning_rate_holds_from_the_step_it_was_set_for,
    half_precision_travels_as_such_and_single_can_be_sent_half,
    an_optimizer_of_the_users_own_runs_by_its_name,
    an_optimizer_that_needs_whole_chunks_gets_them,
    an_aggregator_of_the_users_own_runs_by_its_name,
    twelve_thousand_keys_are_exchanged,
);

/// Sizes on both sides of the chunk size, odd ones, and one element.
const SIZES: [u64; 6] = [1, 8191, 8192, 8193, 100_003, 7];

fn zeros(settings: &Settings) -> Vec<Vec<f32>> {
    settings.keys.keys().iter().map(|key| vec![0.0; key.elements().unwrap() as usize]).collect()
}

fn the_mean_of_all_gradients_comes_back_for_every_key_and_step(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings::new(keys(&SIZES));
    let whole = |rank: u32, key: u32, step: u32, len: usize| -> Vec<f32> {
        // Small integers: their sum is exact in any order.
        gradient(rank, key, step, len).iter().map(|value| (value * 8.0).round()).collect()
    };
    let ticket = cluster.job("mean", 3);
    ticket.run(&settings, |job| {
        for step in 0..5 {
            let handles: Vec<_> = (0..SIZES.len())
                .rev()
                .map(|key| {
                    let len = SIZES[key] as usize;
                    let gradient = whole(job.rank(), key as u32, step, len);
                    job.push_pull(key as u32, gradient, vec![f32::NAN; len]).unwrap()
                })
                .collect();
            for (handle, key) in handles.into_iter().zip((0..SIZES.len() as u32).rev()) {
                let (_, mean) = handle.wait().unwrap();
                let len = mean.len();
                let all: Vec<Vec<f32>> = (0..3).map(|rank| whole(rank, key, step, len)).collect();
                for element in 0..len {
                    let sum: f32 = all.iter().map(|gradient| gradient[element]).sum();
                    assert_eq!(
                        mean[element],
                        sum * (1.0 / 3.0f32),
                        "key {key}, step {step}, element {element}"
                    );
                }
            }
        }
    });
    let status = cluster.await_end("mean");
    assert_eq!(status.message, "", "{status:?}");
}

fn the_sum_of_all_gradients_comes_back_undivided(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let optimizer = OptimizerChoice::named("sum");
    let settings = Settings { optimizer, reproducible: true, ..Settings::new(keys(&SIZES)) };
    assert!(!settings.has_parameters());
    cluster.job("sum", 3).run(&settings, |job| {
        let refused = job.broadcast(&mut zeros(&settings), 0).unwrap_err().to_string();
        assert!(refused.contains("every rank starts from its own"), "{refused}");
        for step in 0..3 {
            for (key, &len) in (0..).zip(&SIZES) {
                let len = len as usize;
                let own = gradient(job.rank(), key, step, len);
                let (_, sum) = job.push_pull(key, own, vec![f32::NAN; len]).unwrap().wait().unwrap();
                let all: Vec<Vec<f32>> = (0..3).map(|rank| gradient(rank, key, step, len)).collect();
                for (element, &sum) in sum.iter().enumerate() {
                    let expected = all[0][element] + all[1][element] + all[2][element];
                    assert_eq!(sum, expected, "key {key}, step {step}, element {element}");
                }
            }
        }
    });
}

fn push_then_pull_reaches_what_push_pull_reaches(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = Settings { optimizer: sgd(0.1, 0.9), reproducible: true, ..Settings::new(keys(&SIZES)) };
    let train = |name: &str, fused: bool| {
        cluster.job(name, 2).run(&settings, |job| {
            let mut model = zeros(&settings);
            job.broadcast(&mut model, 0).unwrap();
            for step in 0..4 {
                for key in 0..SIZES.len() as u32 {
                    let out = std::mem::take(&mut model[key as usize]);
                    let gradient = gradient(job.rank(), key, step, out.len());
                    model[key as usize] = if fused {
                        job.push_pull(key, gradient, out).unwrap().wait().unwrap().1
                    } else {
                        job.push(key, gradient).unwrap().wait().unwrap();
                        job.pull(key, out).unwrap().wait().unwrap().1
                    };
                }
            }
            model
        })
    };
    let (fused, split) = (train("fused", true), train("split", false));
    assert_eq!(fused, split);
    assert_eq!(fused[0], fused[1]);
    assert!(fused[0].iter().flatten().any(|&value| value != 0.0));
}

/// The hub's results, by the kernels, which their own crate's tests compare with torch.optim.
pub(crate) fn expected(settings: &Settings, workers: u32, steps: u32) -> Vec<Vec<f32>> {
    let optimizer = Registry::with_builtins().optimizer(&settings.optimizer.name).unwrap();
    let groups = settings.optimizer.of_groups(optimizer.defaults());
    let mut model = zeros(settings);
    for (model, key) in model.iter_mut().zip(0..) {
        let hyperparameters = groups[usize::from(settings.keys.keys()[key as usize].group)];
        model.iter_mut().enumerate().for_each(|(i, value)| *value = i as f32 / 1000.0);
        let mut state = vec![0.0; model.len() * optimizer.state_slots(&hyperparameters)];
        for step in 0..steps {
            let mut sum = vec![0.0; model.len()];
            for rank in 0..workers {
                sum.iter_mut().zip(gradient(rank, key, step, model.len())).for_each(|(sum, g)| *sum += g);
            }
            let step = Step {
                hyperparameters: &hyperparameters,
                number: u64::from(step) + 1,
                contributions: workers,
                factor: 1.0,
                tensor: None,
            };
            optimizer.apply(&step, model, &sum, &mut state);
        }
    }
    model
}

fn each_optimizer_runs_on_the_hub_as_its_kernel_runs_here(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let with = |change: fn(&mut Hyperparameters)| {
        let mut hyperparameters = Hyperparameters { learning_rate: 0.01, ..Default::default() };
        change(&mut hyperparameters);
        Some(hyperparameters)
    };
    let choices = [
        ("sgd", with(|_| {})),
        ("sgd", with(|h| (h.momentum, h.nesterov, h.weight_decay) = (0.9, true, 1e-3))),
        ("adam", with(|h| h.weight_decay = 1e-2)),
        ("adamw", with(|h| h.weight_decay = 1e-2)),
    ];
    for (index, (name, hyperparameters)) in choices.into_iter().enumerate() {
        let optimizer = OptimizerChoice { hyperparameters, ..OptimizerChoice::named(name) };
        let settings = Settings { optimizer, reproducible: true, ..Settings::new(keys(&SIZES)) };
        let reached = cluster.job(&format!("{name}{index}"), 3).run(&settings, |job| {
            let mut model = zeros(&settings);
            if job.rank() == 0 {
                for key in &mut model {
                    key.iter_mut().enumerate().for_each(|(i, value)| *value = i as f32 / 1000.0);
                }
            }
            job.broadcast(&mut model, 0).unwrap();
            for step in 0..4 {
                for key in 0..SIZES.len() as u32 {
                    let out = std::mem::take(&mut model[key as usize]);
                    let gradient = gradient(job.rank(), key, step, out.len());
                    model[key as usize] = job.push_pull(key, gradient, out).unwrap().wait().unwrap().1;
                }
            }
            model
        });
        let expected = expected(&settings, 3, 4);
        for model in reached {
            assert_eq!(model, expected, "{name} {index}");
        }
    }
}

fn a_learning_rate_holds_from_the_step_it_was_set_for(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys(&[20_000, 3])) };
    let ticket = cluster.job("schedule", 2);
    ticket.run(&settings, |job| {
        let mut model = zeros(&settings);
        job.broadcast(&mut model, 0).unwrap();
        let mut expected = 0.0f32;
        for step in 0..6u32 {
            if job.rank() == 0 && step % 2 == 0 {
                let learning_rate = 1.0 / f64::from(1 << (step / 2 + 1));
                let hyperparameters = Hyperparameters { learning_rate, ..Default::default() };
                job.set_hyperparameters(step, &hyperparameters).unwrap();
            }
            for key in 0..2 {
                let out = std::mem::take(&mut model[key as usize]);
                let gradient = vec![1.0f32; out.len()];
                model[key as usize] = job.push_pull(key, gradient, out).unwrap().wait().unwrap().1;
            }
            expected -= 1.0 / (1 << (step / 2 + 1)) as f32;
            assert!(model.iter().flatten().all(|&value| value == expected), "step {step}");
        }
    });
}

fn half_precision_travels_as_such_and_single_can_be_sent_half(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    // Small integers are exact in every type.
    let mut table: Vec<Key> =
        vec![Key::new("half", [9001]), Key::new("brain", [77]), Key::new("single", [9001])];
    (table[0].dtype, table[1].dtype) = (Dtype::F16, Dtype::BF16);
    let settings = Settings::new(KeyTable::new(table).unwrap());
    let native = cluster.job("native", 2);
    native.run(&settings, |job| {
        let value = half::f16::from_f32(f32::from(job.rank() as u16) * 2.0 + 1.0);
        let (_, mean) =
            job.push_pull(0, vec![value; 9001], vec![half::f16::ZERO; 9001]).unwrap().wait().unwrap();
        assert!(mean.iter().all(|&mean| mean == half::f16::from_f32(2.0)));
        let value = half::bf16::from_f32(f32::from(job.rank() as u16) * 4.0);
        let (_, mean) =
            job.push_pull(1, vec![value; 77], vec![half::bf16::ZERO; 77]).unwrap().wait().unwrap();
        assert!(mean.iter().all(|&mean| mean == half::bf16::from_f32(2.0)));
    });
    for codec in [Codec::F16, Codec::BF16] {
        let settings = Settings { codec: Some(codec), ..Settings::new(keys(&[50_001])) };
        let sent = cluster.job(&codec.to_string(), 2).run(&settings, |job| {
            for step in 0..3 {
                let gradient: Vec<f32> = (0..50_001).map(|i| ((i + step + job.rank()) % 64) as f32).collect();
                let (_, mean) = job.push_pull(0, gradient, vec![0.0f32; 50_001]).unwrap().wait().unwrap();
                for (i, &mean) in (0u32..).zip(&mean) {
                    assert_eq!(mean, ((i + step) % 64 + (i + step + 1) % 64) as f32 / 2.0);
                }
            }
            job.statistics().bytes_sent
        });
        let half = 3 * 50_001 * 2;
        assert!(
            sent[0] > half && sent[0] < half + half / 50,
            "{codec}: {} bytes were sent for {half}",
            sent[0]
        );
    }
}

/// A user's own optimizer from outside: it moves parameters by the sign of the mean, times a value that it
/// names itself.
struct SignDescent;

impl Optimizer for SignDescent {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        1
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        let stride = step.hyperparameters.value("stride").unwrap_or(1.0) as f32;
        for ((parameter, sum), count) in model.iter_mut().zip(sum).zip(state) {
            *parameter -= stride * (sum * step.mean_factor()).signum();
            *count += 1.0;
            assert_eq!(u64::from(*count as u32), step.number, "state is kept from step to step");
        }
    }
}

fn an_optimizer_of_the_users_own_runs_by_its_name(transports: Transports) {
    let cluster = Cluster::with(transports, |config| {
        config.registry.register_optimizer("sign", Arc::new(SignDescent)).unwrap();
    });
    let hyperparameters = Hyperparameters::default().with("stride", 0.25).unwrap();
    let optimizer =
        OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named("sign") };
    let settings = Settings { optimizer, ..Settings::new(keys(&[10_000])) };
    cluster.job("sign", 2).run(&settings, |job| {
        let mut model = zeros(&settings);
        job.broadcast(&mut model, 0).unwrap();
        let mut out = model.remove(0);
        for step in 1..=3 {
            let direction = if job.rank() == 0 { 3.0f32 } else { -1.0 };
            out = job.push_pull(0, vec![direction; 10_000], out).unwrap().wait().unwrap().1;
            assert!(out.iter().all(|&value| value == -0.25 * step as f32));
        }
    });
    let unknown = Settings { optimizer: OptimizerChoice::named("muon"), ..settings };
    let refused = cluster.job("unknown", 1).join(0, unknown).expect_err("it is not registered").to_string();
    assert!(
        refused.contains("muon") && refused.contains("adamw, lion, mean, rmsprop, sgd, sign")
            || refused.contains("adam, adamw"),
        "{refused}"
    );
}

/// Sets each parameter to the number of elements in the call, and to the mean above it.
struct Together;

impl Optimizer for Together {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        0
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], _: &mut [f32]) {
        let together = model.len() as f32;
        for (parameter, sum) in model.iter_mut().zip(sum) {
            *parameter = together + sum * step.mean_factor() * 65_536.0;
        }
    }

    fn needs_whole_chunks(&self) -> bool {
        true
    }
}

fn an_optimizer_that_needs_whole_chunks_gets_them(transports: Transports) {
    let cluster = Cluster::with(transports, |config| {
        config.registry.register_optimizer("together", Arc::new(Together)).unwrap();
    });
    for reproducible in [false, true] {
        let optimizer = OptimizerChoice::named("together");
        let settings =
            Settings { optimizer, reproducible, chunk_bytes: 4096, ..Settings::new(keys(&[2500, 3])) };
        cluster.job(&format!("together-{reproducible}"), 3).run(&settings, |job| {
            let mut model = zeros(&settings);
            job.broadcast(&mut model, 0).unwrap();
            for (key, expected) in
                [(0, [vec![1024.0_f32; 2048], vec![452.0; 452]].concat()), (1, vec![3.0; 3])]
            {
                let gradient = vec![(job.rank() * 3) as f32; expected.len()];
                let out = std::mem::take(&mut model[key as usize]);
                let (_, out) = job.push_pull(key, gradient, out).unwrap().wait().unwrap();
                // The mean of 0, 3 and 6, times the optimizer's value.
                let expected: Vec<f32> = expected
                    .into_iter()
                    .map(|together| together + 9.0 * (1.0_f32 / 3.0) * 65_536.0)
                    .collect();
                assert_eq!(out, expected, "reproducible: {reproducible}");
            }
        });
    }
}

/// A user's own aggregator from outside: the largest value of each element.
struct Largest;

impl Aggregator for Largest {
    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        sum.iter_mut().zip(contribution).for_each(|(sum, &value)| *sum = sum.max(value));
    }
}

fn an_aggregator_of_the_users_own_runs_by_its_name(transports: Transports) {
    let cluster = Cluster::with(transports, |config| {
        config.registry.register_aggregator("largest", Arc::new(Largest)).unwrap();
    });
    for reproducible in [false, true] {
        let settings =
            Settings { aggregator: "largest".into(), reproducible, ..Settings::new(keys(&[20_000])) };
        cluster.job(&format!("largest-{reproducible}"), 3).run(&settings, |job| {
            for step in 0..3 {
                let all: Vec<Vec<f32>> = (0..3).map(|rank| gradient(rank, 0, step, 20_000)).collect();
                let own = all[job.rank() as usize].clone();
                let (_, out) = job.push_pull(0, own, vec![0.0f32; 20_000]).unwrap().wait().unwrap();
                for (element, &value) in out.iter().enumerate() {
                    let largest = all.iter().map(|gradient| gradient[element]).fold(f32::MIN, f32::max);
                    // Without an optimizer the hub still divides by the number of contributions.
                    assert_eq!(value, largest * (1.0 / 3.0f32), "step {step}, element {element}");
                }
            }
        });
    }
}

fn twelve_thousand_keys_are_exchanged(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings::new(keys(&vec![5; 12_000]));
    cluster.job("many", 2).run(&settings, |job| {
        for step in 0..2 {
            let handles: Vec<_> = (0..12_000)
                .map(|key| job.push_pull(key, vec![(key + step) as f32; 5], vec![0.0f32; 5]).unwrap())
                .collect();
            for (handle, key) in handles.into_iter().zip(0u32..) {
                assert_eq!(handle.wait().unwrap().1, [(key + step) as f32; 5]);
            }
        }
    });
}
