//! Groups of keys with hyperparameters of their own, and the errors of invalid groups.

use paramhub_core::key::KeyTable;
use paramhub_core::service::JobState;
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_kernels::Hyperparameters;
use paramhub_worker::{Job, WorkerError};

use crate::cluster::{Cluster, Transports, gradient, keys};
use crate::numerics::expected;

over_transports!(
    [tcp shm mixed]
    each_group_runs_on_its_own_hyperparameters,
    a_group_reaches_what_a_job_of_its_own_reaches,
    a_change_of_one_group_leaves_the_others,
    a_group_that_does_not_exist_is_refused_by_number,
    ranks_that_disagree_on_a_group_get_its_number,
);

/// Sizes on both sides of the chunk size, odd ones, and one element.
const SIZES: [u64; 6] = [1, 8191, 8193, 50_001, 7, 20_000];

/// Keys that belong to these groups in turn.
fn table(sizes: &[u64], groups: u16) -> KeyTable {
    let grouped = Vec::from(keys(sizes)).into_iter().zip((0..groups).cycle());
    KeyTable::new(grouped.map(|(key, group)| key.in_group(group)).collect()).unwrap()
}

fn choice(name: &str, groups: &[Hyperparameters]) -> OptimizerChoice {
    let (first, others) = groups.split_first().unwrap();
    OptimizerChoice { name: name.into(), hyperparameters: Some(*first), groups: others.to_vec() }
}

fn rate(learning_rate: f64) -> Hyperparameters {
    Hyperparameters { learning_rate, ..Default::default() }
}

/// Trains for `steps` steps, from the parameters that [`expected`] starts from.
fn train(job: &Job, steps: u32) -> Vec<Vec<f32>> {
    let sizes = job.settings().keys.keys().iter().map(|key| key.elements().unwrap());
    let mut model: Vec<Vec<f32>> =
        sizes.map(|elements| (0..elements).map(|element| element as f32 / 1000.0).collect()).collect();
    job.broadcast(&mut model, 0).unwrap();
    for step in 0..steps {
        let handles: Vec<_> = model
            .iter_mut()
            .zip(0..)
            .map(|(out, key)| {
                let out = std::mem::take(out);
                job.push_pull(key, gradient(job.rank(), key, step, out.len()), out).unwrap()
            })
            .collect();
        for (out, handle) in model.iter_mut().zip(handles) {
            *out = handle.wait().unwrap().1;
        }
    }
    model
}

fn each_group_runs_on_its_own_hyperparameters(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let plain = Hyperparameters { weight_decay: 1e-2, ..rate(0.5) };
    let momentum = Hyperparameters { momentum: 0.9, dampening: 0.1, ..rate(0.1) };
    let nesterov = Hyperparameters { momentum: 0.5, nesterov: true, weight_decay: 1e-3, ..rate(0.01) };
    let adam = Hyperparameters { weight_decay: 1e-2, ..rate(0.01) };
    let slow = Hyperparameters { beta1: 0.5, beta2: 0.9, epsilon: 1e-4, ..rate(0.001) };
    // Any group may have the most state.
    for (number, (name, groups)) in [
        ("sgd", &[plain, momentum, nesterov][..]),
        ("sgd", &[nesterov, plain]),
        ("adam", &[adam, slow]),
        ("adamw", &[slow, adam, slow]),
    ]
    .into_iter()
    .enumerate()
    {
        let keys = table(&SIZES, groups.len() as u16);
        let optimizer = choice(name, groups);
        let settings = Settings { optimizer, reproducible: true, ..Settings::new(keys) };
        let reached = cluster.job(&format!("{name}{number}"), 3).run(&settings, |job| train(job, 4));
        let expected = expected(&settings, 3, 4);
        for (rank, model) in reached.into_iter().enumerate() {
            for (key, (model, expected)) in model.iter().zip(&expected).enumerate() {
                assert!(model == expected, "{name} {number}, rank {rank}, key {key}");
            }
        }
    }
}

fn a_group_reaches_what_a_job_of_its_own_reaches(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let groups = [Hyperparameters { momentum: 0.9, ..rate(0.1) }, rate(0.5)];
    let train_as = |name: &str, keys: KeyTable, groups: &[Hyperparameters]| {
        let optimizer = choice("sgd", groups);
        let settings = Settings { optimizer, reproducible: true, ..Settings::new(keys) };
        cluster.job(name, 2).run(&settings, |job| train(job, 3)).remove(0)
    };
    let together = train_as("together", table(&SIZES, 2), &groups);
    for group in 0..2 {
        // All keys, since gradients depend on their numbers.
        let alone = train_as(&format!("alone{group}"), keys(&SIZES), &groups[group..=group]);
        for key in (group..SIZES.len()).step_by(2) {
            assert!(together[key] == alone[key], "group {group}, key {key}");
        }
        let other = 1 - group;
        assert!(together[other] != alone[other], "group {group} differs from the other");
    }
}

fn a_change_of_one_group_leaves_the_others(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let optimizer = choice("sgd", &[rate(1.0), rate(1.0), rate(0.5)]);
    let settings = Settings { optimizer, ..Settings::new(table(&[20_000, 3, 9001], 3)) };
    cluster.job("schedules", 2).run(&settings, |job| {
        let mut model: Vec<Vec<f32>> = [20_000, 3, 9001].map(|elements| vec![0.0; elements]).into();
        job.broadcast(&mut model, 0).unwrap();
        let mut expected = [0.0_f32; 3];
        for step in 0..6_u32 {
            let halved = 1.0 / f64::from(1 << (step / 2 + 1));
            if step % 2 == 0 {
                // Any rank changes them, each for a group of its own.
                match job.rank() {
                    0 => job.set_hyperparameters(step, &rate(4.0 * halved)).unwrap(),
                    _ => job.set_group_hyperparameters(1, step, &rate(halved)).unwrap(),
                }
            }
            for (key, out) in (0..).zip(&mut model) {
                let given = std::mem::take(out);
                let gradient = vec![1.0_f32; given.len()];
                *out = job.push_pull(key, gradient, given).unwrap().wait().unwrap().1;
            }
            for (expected, rate) in expected.iter_mut().zip([4.0 * halved, halved, 0.5]) {
                *expected -= rate as f32;
            }
            for (model, expected) in model.iter().zip(expected) {
                assert!(model.iter().all(|&value| value == expected), "step {step}");
            }
        }
    });
}

fn a_group_that_does_not_exist_is_refused_by_number(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = Settings { optimizer: choice("sgd", &[rate(0.1); 2]), ..Settings::new(table(&[4, 5], 2)) };
    cluster.job("unknown", 1).run(&settings, |job| {
        let error = job.set_group_hyperparameters(2, 0, &rate(0.2)).unwrap_err();
        assert!(matches!(error, WorkerError::Misused { .. }), "{error:?}");
        assert!(error.to_string().contains("for group 2, but the job has 2, counted from 0"), "{error}");
        job.set_group_hyperparameters(1, 0, &rate(0.2)).unwrap();
    });

    let keyless = Settings { optimizer: choice("sgd", &[rate(0.1)]), ..settings.clone() };
    let error = cluster.job("keyless", 1).join(0, keyless).unwrap_err().to_string();
    assert!(error.contains("key `layer1` is in group 1, but the optimizer has 1 group"), "{error}");

    let nonsense = Hyperparameters { momentum: -0.5, ..rate(0.1) };
    let refused = Settings { optimizer: choice("sgd", &[rate(0.1), nonsense]), ..settings };
    let error = cluster.job("refused", 1).join(0, refused).unwrap_err().to_string();
    assert!(error.contains("optimizer `sgd`, group 1: momentum is -0.5"), "{error}");
}

fn ranks_that_disagree_on_a_group_get_its_number(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = |rank: u32, differs_in_table: bool| match differs_in_table {
        true => Settings {
            optimizer: choice("sgd", &[rate(0.1), rate(0.2)]),
            ..Settings::new(table(&[4, 5], 1 + rank as u16))
        },
        false => Settings {
            optimizer: choice("sgd", &[rate(0.1), rate(0.25 * f64::from(rank + 1))]),
            ..Settings::new(table(&[4, 5], 2))
        },
    };
    for (name, differs_in_table, parts) in [
        ("tables", true, ["key 1", "`layer1` f32 [5]", "in group 1"]),
        ("numbers", false, ["the hyperparameters of group 1", "0.25", "0.5"]),
    ] {
        let ticket = cluster.job(name, 2);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let ticket = &ticket;
                    scope.spawn(move || ticket.join(rank, settings(rank, differs_in_table)).unwrap_err())
                })
                .collect();
            for rank in ranks {
                let message = rank.join().unwrap().to_string();
                assert!(parts.iter().all(|part| message.contains(part)), "{message}");
            }
        });
        assert_eq!(cluster.await_end(name).state, JobState::Failed);
    }
}
