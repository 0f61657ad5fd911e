//! Training without a hub: it learns, it repeats itself to the bit, and it sums in rank order.

use paramhub_kernels::{Hyperparameters, Registry};
use paramhub_train::data::{Data, DataSource, EpochOrder};
use paramhub_train::exchange::{Exchange, ExchangeError};
use paramhub_train::local::LocalExchange;
use paramhub_train::net::{LayerGradient, NetError, NetKind, Network};
use paramhub_train::trainer::{Evaluate, Progress, Report, TrainConfig, TrainError, train};

const SEED: u64 = 1;

fn digits() -> Data {
    DataSource::Digits.load().unwrap()
}

fn local(network: &Network, workers: usize, optimizer: &str, learning_rate: f64) -> LocalExchange {
    let registry = Registry::with_builtins();
    let optimizer = registry.optimizer(optimizer).unwrap();
    let hyperparameters = Hyperparameters { learning_rate, momentum: 0.9, ..optimizer.defaults() };
    let aggregator = registry.aggregator("sum").unwrap();
    LocalExchange::new(network.keys(), workers, aggregator, optimizer, hyperparameters)
}

struct Run {
    kind: NetKind,
    workers: usize,
    batch: usize,
    epochs: usize,
    optimizer: &'static str,
    learning_rate: f64,
}

impl Run {
    fn report(&self, data: &Data, on_progress: &mut dyn FnMut(&Progress)) -> Result<Report, TrainError> {
        let config =
            TrainConfig { epochs: self.epochs, batch: self.batch, seed: SEED, evaluate: Evaluate::AtEnd };
        let mut network = Network::new(self.kind, data.train.geometry(), SEED)?;
        let mut exchange = local(&network, self.workers, self.optimizer, self.learning_rate);
        train(&config, data, &mut network, &mut exchange, on_progress)
    }
}

const LENET: Run =
    Run { kind: NetKind::Lenet, workers: 4, batch: 16, epochs: 6, optimizer: "sgd", learning_rate: 0.02 };

#[test]
fn lenet_and_mlp_learn_the_digits() {
    let data = digits();
    for run in [
        LENET,
        Run { kind: NetKind::Mlp, epochs: 10, ..LENET },
        Run { kind: NetKind::Mlp, epochs: 10, optimizer: "adamw", learning_rate: 2e-3, ..LENET },
    ] {
        let mut seen = Vec::new();
        let report = run.report(&data, &mut |progress| seen.push(*progress)).unwrap();
        let accuracy = report.accuracy.unwrap();
        println!("{} {}: {accuracy} in {:.1} s (seed {SEED})", run.kind, run.optimizer, report.seconds);
        assert!(accuracy >= 0.95, "{}: {accuracy}", run.kind);
        assert_eq!(report.steps, run.epochs * (1437 / 64));
        assert!(seen.iter().map(|progress| progress.step).eq(1..=report.steps));
        assert!(seen.iter().all(|progress| progress.of == report.steps && progress.loss.is_finite()));
        assert!(report.loss < seen[0].loss / 5.0, "{} after {}", report.loss, seen[0].loss);
        let whole = report.compute_seconds + report.wait_seconds;
        assert!((whole - report.seconds).abs() < 1e-6, "{whole} of {}", report.seconds);
    }
}

#[test]
fn cifar_quick_trains_on_any_geometry() {
    let run = Run { kind: NetKind::CifarQuick, epochs: 4, ..LENET };
    let mut losses = Vec::new();
    run.report(&digits(), &mut |progress| losses.push(progress.loss)).unwrap();
    assert!(losses[losses.len() - 1] < losses[0] / 2.0, "{losses:?}");
}

#[test]
fn two_runs_are_bit_equal() {
    let data = digits();
    for kind in NetKind::ALL {
        let run = Run { kind, epochs: 1, ..LENET };
        let bits = || -> Vec<u32> {
            let report = run.report(&data, &mut |_| {}).unwrap();
            report.parameters.iter().flatten().map(|value| value.to_bits()).collect()
        };
        assert!(bits() == bits(), "{kind} (seed {SEED})");
    }
}

/// One worker among others in the same process. It records the gradients pushed and returns given parameters.
struct Recorder {
    rank: usize,
    workers: usize,
    pushed: Vec<Vec<f32>>,
}

impl Exchange for Recorder {
    fn workers(&self) -> usize {
        self.workers
    }

    fn ranks(&self) -> std::ops::Range<usize> {
        self.rank..self.rank + 1
    }

    fn push(&mut self, key: usize, gradient: Vec<f32>) -> Result<(), ExchangeError> {
        self.pushed[key] = gradient;
        Ok(())
    }

    fn parameters(&mut self, _key: usize, _parameters: &mut Vec<f32>) -> Result<(), ExchangeError> {
        Ok(())
    }

    fn statistics(&self) -> paramhub_train::exchange::ExchangeStatistics {
        Default::default()
    }
}

/// The gradients of one rank in the first step, computed as the rank's own process would.
fn first_gradients(data: &Data, rank: usize, workers: usize, batch: usize) -> Vec<Vec<f32>> {
    let mut network = Network::new(NetKind::Lenet, data.train.geometry(), SEED).unwrap();
    let order = EpochOrder::new(&data.train, SEED, 0, workers, batch);
    let (mut images, mut labels) = (Vec::new(), Vec::new());
    data.train.batch(order.shard(0, rank), &mut images, &mut labels);
    let logits = network.forward(images, |_, _| Ok::<(), NetError>(())).unwrap();
    let (_, gradient) = network.loss(logits, &labels);
    let mut recorder = Recorder { rank, workers, pushed: vec![Vec::new(); network.keys().len()] };
    network
        .backward(
            gradient,
            |_| false,
            |weight, gradient| {
                let LayerGradient::Dense([of_weight, of_bias]) = gradient else {
                    panic!("this layer takes no factors")
                };
                recorder.push(weight, of_weight)?;
                recorder.push(weight + 1, of_bias).map_err(TrainError::from)
            },
        )
        .unwrap();
    recorder.pushed
}

#[test]
fn a_local_step_is_the_rank_ordered_sum_of_what_separate_workers_compute() {
    let data = digits();
    let (workers, batch, rate) = (4, 16, 0.05f32);
    let gradients: Vec<_> = (0..workers).map(|rank| first_gradients(&data, rank, workers, batch)).collect();
    let initial = Network::new(NetKind::Lenet, data.train.geometry(), SEED).unwrap().all_parameters();
    let stepped = |order: [usize; 4]| -> Vec<Vec<f32>> {
        (0..initial.len())
            .map(|key| {
                let updated = initial[key].iter().enumerate().map(|(at, parameter)| {
                    let sum = order
                        .iter()
                        .skip(1)
                        .fold(gradients[order[0]][key][at], |s, &r| s + gradients[r][key][at]);
                    parameter - rate * (sum * 0.25)
                });
                updated.collect()
            })
            .collect()
    };

    let mut network = Network::new(NetKind::Lenet, data.train.geometry(), SEED).unwrap();
    let mut exchange = local(&network, workers, "sgd", f64::from(rate));
    for key in 0..initial.len() {
        for gradients in &gradients {
            exchange.push(key, gradients[key].clone()).unwrap();
        }
        network.lend_parameters(key, |parameters| exchange.parameters(key, parameters)).unwrap().unwrap();
    }
    let found = network.all_parameters();
    assert!(found == stepped([0, 1, 2, 3]), "not the sum in rank order");
    assert!(found != stepped([3, 2, 1, 0]), "any order gives the same bits, so this test shows nothing");
}

#[test]
fn the_mean_of_the_shards_is_the_gradient_of_the_global_batch() {
    let data = digits();
    let whole = first_gradients(&data, 0, 1, 64);
    let shards: Vec<_> = (0..4).map(|rank| first_gradients(&data, rank, 4, 16)).collect();
    for (key, whole) in whole.iter().enumerate() {
        for (at, &expected) in whole.iter().enumerate() {
            let mean = shards.iter().map(|shard| shard[key][at]).sum::<f32>() / 4.0;
            assert!((mean - expected).abs() < 1e-5, "key {key}[{at}]: {mean} for {expected} (seed {SEED})");
        }
    }
}

#[test]
fn a_training_that_cannot_work_is_refused() {
    let data = digits();
    let refused = Run { workers: 100, ..LENET }.report(&data, &mut |_| {}).unwrap_err().to_string();
    assert!(refused.contains("1600") && refused.contains("1437"), "{refused}");
    assert!(matches!(Run { batch: 0, ..LENET }.report(&data, &mut |_| {}), Err(TrainError::EmptyBatch)));

    let network = Network::new(NetKind::Mlp, data.train.geometry(), SEED).unwrap();
    let mut exchange = local(&network, 2, "sgd", 0.1);
    let wrong_length = exchange.push(0, vec![0.0; 3]).unwrap_err();
    assert!(
        matches!(wrong_length, ExchangeError::Length { key: 0, expected: 8192, found: 3 }),
        "{wrong_length}"
    );
    assert!(matches!(exchange.push(6, vec![]), Err(ExchangeError::Sequence { key: 6, .. })));
    exchange.push(5, vec![0.0; 10]).unwrap();
    assert!(matches!(
        exchange.parameters(5, &mut vec![0.0; 10]),
        Err(ExchangeError::Sequence { key: 5, .. })
    ));
    exchange.push(5, vec![0.0; 10]).unwrap();
    assert!(matches!(exchange.push(5, vec![0.0; 10]), Err(ExchangeError::Sequence { key: 5, .. })));
}

#[test]
fn no_epochs_leave_the_initial_parameters() {
    let data = digits();
    let report = Run { epochs: 0, ..LENET }.report(&data, &mut |_| {}).unwrap();
    let initial = Network::new(NetKind::Lenet, data.train.geometry(), SEED).unwrap();
    assert_eq!(report.parameters, initial.all_parameters());
    assert_eq!((report.steps, report.hidden_fraction), (0, 0.0));
}
