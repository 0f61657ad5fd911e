//! Exchanges factors over real connections between threads, and compares with the dense sum.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use half::bf16;
use paramhub_core::codec::Codec;
use paramhub_core::combinations::Caller;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_kernels::{Optimizer, Registry, Step};
use paramhub_mesh::{MeshConfig, MeshListener, Nonce};
use paramhub_syncer::{FactorConfig, FactorExchange, FactorLayer, LayerFactors, Outputs, SyncError};
use paramhub_transport::ReceiveRegion;

const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs `work` at every rank of a mesh, each on a thread of its own and as if on a host of its own.
fn at_ranks<T: Send>(
    workers: usize,
    layers: &[FactorLayer],
    optimizer: &str,
    hyperparameters: &[Hyperparameters],
    work: impl Fn(usize, FactorExchange) -> T + Sync,
) -> Vec<T> {
    let hosts: Vec<u32> = (0..workers as u32).collect();
    at_ranks_of(&hosts, layers, optimizer, hyperparameters, work)
}

/// [`at_ranks`] with these hosts.
fn at_ranks_of<T: Send>(
    hosts: &[u32],
    layers: &[FactorLayer],
    optimizer: &str,
    hyperparameters: &[Hyperparameters],
    work: impl Fn(usize, FactorExchange) -> T + Sync,
) -> Vec<T> {
    let workers = hosts.len();
    let listeners: Vec<_> =
        (0..workers).map(|_| MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap()).collect();
    let addresses: Vec<_> = listeners.iter().map(MeshListener::address).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                let (addresses, work) = (addresses.clone(), &work);
                scope.spawn(move || {
                    let mesh =
                        listener.join(MeshConfig::new(rank as u32, Nonce([3; 32]), addresses)).unwrap();
                    let optimizer = Registry::with_builtins().optimizer(optimizer).unwrap();
                    // The ranks have unlike numbers of threads, which must change nothing.
                    let config = FactorConfig {
                        mesh,
                        optimizer,
                        hyperparameters: hyperparameters.to_vec(),
                        threads: rank + 1,
                        hosts: hosts.to_vec(),
                        reject_non_finite: false,
                        abort_handle: None,
                    };
                    work(rank, FactorExchange::new(config, layers.to_vec()).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Exchanges one step of a layer and waits for it.
fn exchange(
    exchange: &FactorExchange,
    layer: usize,
    factors: LayerFactors<'_>,
) -> Result<(Vec<f32>, Vec<f32>), SyncError> {
    let FactorLayer { shape: (rows, columns), has_bias, .. } = exchange.layers()[layer];
    let outputs = Outputs {
        weight: ReceiveRegion::owned(vec![f32::NAN; rows * columns]),
        bias: has_bias.then(|| ReceiveRegion::owned(vec![f32::NAN; rows])),
    };
    let (sender, receiver) = sync_channel(1);
    exchange.push(layer, factors, outputs, move |updated| sender.send(updated).unwrap())?;
    let outputs = receiver.recv_timeout(WAIT_TIMEOUT).expect("it ends")?;
    let bias = outputs.bias.map_or(Vec::new(), |bias| bias.into_owned().unwrap());
    Ok((outputs.weight.into_owned().unwrap(), bias))
}

/// Numbers between -1 and 1, derived from the seeds.
fn numbers(count: usize, seeds: [usize; 3]) -> Vec<f32> {
    let mut state = seeds.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |state, &seed| {
        (state ^ seed as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    });
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The factors of a rank in a step: unlike numbers of samples, at some ranks none.
fn factors_of(
    rank: usize,
    step: usize,
    (rows, columns): (usize, usize),
    most: usize,
) -> (Vec<f32>, Vec<f32>) {
    let samples = (rank + step) % (most + 1);
    (numbers(samples * columns, [rank, step, 1]), numbers(samples * rows, [rank, step, 2]))
}

/// The sum of all ranks' gradients, of weight and bias, in f64.
fn dense(factors: &[(Vec<f32>, Vec<f32>)], (rows, columns): (usize, usize)) -> (Vec<f32>, Vec<f32>) {
    let (mut weight, mut bias) = (vec![0.0_f64; rows * columns], vec![0.0_f64; rows]);
    for (inputs, gradients) in factors {
        for (input, gradient) in inputs.chunks(columns).zip(gradients.chunks(rows)) {
            for (r, &g) in gradient.iter().enumerate() {
                bias[r] += f64::from(g);
                for (c, &x) in input.iter().enumerate() {
                    weight[r * columns + c] += f64::from(g) * f64::from(x);
                }
            }
        }
    }
    let rounded = |values: Vec<f64>| values.into_iter().map(|value| value as f32).collect();
    (rounded(weight), rounded(bias))
}

#[track_caller]
fn assert_close(got: &[f32], expected: &[f32]) {
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((got - expected).abs() < 1e-5, "element {index}: {got}, not {expected}");
    }
}

#[test]
fn every_rank_gets_the_dense_step_with_the_same_bits() {
    const STEPS: usize = 4;
    // More rows and columns than a tile, and a row narrower than one.
    let shapes = [(70, 4100), (301, 5)];
    let layers = [
        FactorLayer { groups: [0, 1], ..FactorLayer::new("fc1", shapes[0], 3).with_bias() },
        FactorLayer::new("fc2", shapes[1], 3),
    ];
    for (optimizer, workers) in [("sgd", 3), ("adam", 2), ("mean", 4), ("sgd", 1)] {
        let registry = Registry::with_builtins();
        let kernel = registry.optimizer(optimizer).unwrap();
        let mut first = kernel.defaults();
        (first.learning_rate, first.momentum) = (0.1, 0.9);
        let second = Hyperparameters { learning_rate: 0.01, weight_decay: 0.1, ..first };
        let begin = |layer: usize| (numbers(shapes[layer].0 * shapes[layer].1, [9, 9, layer]), vec![0.5; 70]);

        let results = at_ranks(workers, &layers, optimizer, &[first, second], |rank, exchanged| {
            for (layer, bias) in [(0, 70), (1, 0)] {
                exchanged.initialise(layer, &begin(layer).0, &begin(layer).1[..bias], 0).unwrap();
            }
            let mut last = Vec::new();
            for step in 0..STEPS {
                // The last layer first.
                last = [1, 0]
                    .map(|layer| {
                        let (inputs, gradients) = factors_of(rank, step, shapes[layer], 3);
                        exchange(&exchanged, layer, LayerFactors::of_f32(&inputs, &gradients)).unwrap()
                    })
                    .into();
            }
            let statistics = exchanged.statistics();
            assert_eq!(statistics.updates, 2 * STEPS as u64);
            assert_eq!(statistics.bytes_sent, statistics.bytes_received);
            assert_eq!(statistics.bytes_sent == 0, workers == 1);
            let (weight, bias, updates) = exchanged.parameters(0).unwrap();
            assert_eq!((updates, &(weight, bias)), (STEPS as u64, &last[1]), "what is kept is what is given");
            exchanged.leave(WAIT_TIMEOUT).unwrap();
            last
        });
        assert!(
            results.iter().all(|of_rank| *of_rank == results[0]),
            "{optimizer}: other bits at another rank"
        );

        for layer in 0..2 {
            let (mut weight, mut bias) = begin(layer);
            let slots = kernel.state_slots(&first);
            let (mut state, mut bias_state) = (vec![0.0; slots * weight.len()], vec![0.0; slots * 70]);
            for step in 0..STEPS {
                let of_ranks: Vec<_> =
                    (0..workers).map(|rank| factors_of(rank, step, shapes[layer], 3)).collect();
                let (gradient, bias_gradient) = dense(&of_ranks, shapes[layer]);
                let step = |hyperparameters| Step {
                    hyperparameters,
                    number: step as u64 + 1,
                    contributions: workers as u32,
                    factor: 1.0,
                    tensor: None,
                };
                kernel.apply(&step(&first), &mut weight, &gradient, &mut state);
                if layer == 0 {
                    kernel.apply(&step(&second), &mut bias, &bias_gradient, &mut bias_state);
                }
            }
            let (got, got_bias) = &results[0][1 - layer];
            assert_close(got, &weight);
            if layer == 0 {
                assert_close(got_bias, &bias);
            }
        }
    }
}

#[test]
fn hosts_change_the_senders_and_receivers_and_no_bit() {
    let shape = (60, 300);
    let layer = FactorLayer::new("fc", shape, 3).with_bias();
    let learn = |hosts: &[u32]| {
        at_ranks_of(
            hosts,
            std::slice::from_ref(&layer),
            "mean",
            &[Hyperparameters::default()],
            |rank, exchanged| {
                let mut last = Vec::new();
                for step in 0..3 {
                    let (inputs, gradients) = factors_of(rank, step, shape, 3);
                    last.push(exchange(&exchanged, 0, LayerFactors::of_f32(&inputs, &gradients)).unwrap());
                }
                let statistics = exchanged.statistics();
                exchanged.leave(WAIT_TIMEOUT).unwrap();
                (last, statistics.bytes_sent, statistics.bytes_received)
            },
        )
    };
    let apart = learn(&[0, 1, 2, 3, 4]);
    // Divide by four peers and three steps.
    let bytes = apart[0].1 / 4 / 3;
    assert!(bytes > 0 && apart.iter().all(|rank| (rank.1, rank.2) == (12 * bytes, 12 * bytes)));
    let together = learn(&[8, 8, 3, 3, 8]);
    for (rank, (apart, together)) in apart.iter().zip(&together).enumerate() {
        assert!(apart.0 == together.0, "rank {rank}: other bits");
        assert_eq!(together.2, apart.2, "every rank gets the factors of all");
    }
    // Ranks 0, 1 and 4 send their own factors to two peers and to the other host; 4 passes 2's on, and 0
    // passes 3's on. Ranks 2 and 3 send to one peer and to the other host, and pass on two blocks and one.
    let copies: Vec<u64> = together.iter().map(|rank| rank.1 / 3 / bytes).collect();
    assert_eq!(copies, [3 + 2, 3, 2 + 2, 2 + 1, 3 + 2]);
}

#[test]
fn half_precision_factors_are_half_the_bytes_and_summed_in_f32() {
    let shape = (33, 70);
    let layer =
        FactorLayer { codec: Codec::BF16, parameter_codec: Codec::BF16, ..FactorLayer::new("fc", shape, 2) };
    let half = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect()
    };
    let rounded = |values: Vec<f32>| -> Vec<f32> {
        values.into_iter().map(|value| bf16::from_f32(value).to_f32()).collect()
    };
    let results = at_ranks(2, &[layer], "mean", &[Hyperparameters::default()], |rank, exchanged| {
        let (inputs, gradients) = (numbers(140, [rank, 0, 1]), numbers(66, [rank, 0, 2]));
        let factors = LayerFactors { inputs: &half(&inputs), output_gradients: &half(&gradients) };
        let (sender, receiver) = sync_channel(1);
        let outputs = Outputs { weight: ReceiveRegion::owned(vec![0_u16; 33 * 70]), bias: None };
        exchanged.push(0, factors, outputs, move |updated| sender.send(updated).unwrap()).unwrap();
        let weight: Vec<u16> =
            receiver.recv_timeout(WAIT_TIMEOUT).unwrap().unwrap().weight.into_owned().unwrap();
        let header = exchanged.statistics().bytes_sent - 2 * 2 * (33 + 70);
        assert!(header < 1000, "{header} bytes beside the factors");
        exchanged.leave(WAIT_TIMEOUT).unwrap();
        weight
    });
    assert_eq!(results[0], results[1]);
    let of_ranks =
        [0, 1].map(|rank| (rounded(numbers(140, [rank, 0, 1])), rounded(numbers(66, [rank, 0, 2]))));
    for (&got, sum) in results[0].iter().zip(dense(&of_ranks, shape).0) {
        let (got, mean) = (bf16::from_bits(got).to_f32(), sum / 2.0);
        assert!((got - mean).abs() <= mean.abs() / 128.0 + 1e-6, "{got}, not {mean}");
    }
}

#[test]
fn hyperparameters_of_rank_0_hold_for_all_ranks() {
    let layer = FactorLayer::new("fc", (2, 2), 1);
    let rate = |learning_rate| Hyperparameters { learning_rate, ..Hyperparameters::default() };
    let results = at_ranks(3, &[layer], "sgd", &[rate(1.0)], |rank, exchanged| {
        if rank == 0 {
            exchanged.set_hyperparameters(0, 1, rate(0.5)).unwrap();
        }
        let mut weights = Vec::new();
        for _ in 0..3 {
            let factors = LayerFactors::of_f32(&[1.0, 1.0], &[1.0, 1.0]);
            weights.push(exchange(&exchanged, 0, factors).unwrap().0[0]);
        }
        exchanged.leave(WAIT_TIMEOUT).unwrap();
        weights
    });
    assert!(results.iter().all(|weights| *weights == [-1.0, -1.5, -2.0]), "{results:?}");
}

/// Compares two steps, then a move of everything to a fresh exchange, then two more, with four steps at once.
#[test]
fn a_layer_goes_on_elsewhere_from_its_parameters_and_state() {
    let shape = (70, 2100);
    let layers = [FactorLayer::new("fc", shape, 2).with_bias()];
    let hyperparameters = [Registry::with_builtins().optimizer("adam").unwrap().defaults()];
    let steps = |rank: usize, exchanged: &FactorExchange, steps: std::ops::Range<usize>| {
        for step in steps {
            let (inputs, gradients) = factors_of(rank, step, shape, 2);
            exchange(exchanged, 0, LayerFactors::of_f32(&inputs, &gradients)).unwrap();
        }
    };
    let at_once = at_ranks(2, &layers, "adam", &hyperparameters, |rank, exchanged| {
        steps(rank, &exchanged, 0..4);
        exchanged.leave(WAIT_TIMEOUT).unwrap();
        exchanged.parameters(0).unwrap()
    });
    let halfway = at_ranks(2, &layers, "adam", &hyperparameters, |rank, exchanged| {
        steps(rank, &exchanged, 0..2);
        exchanged.leave(WAIT_TIMEOUT).unwrap();
        let states = [0, 1].map(|slot| exchanged.state(0, slot).unwrap());
        (exchanged.parameters(0).unwrap(), states)
    });
    let resumed = at_ranks(2, &layers, "adam", &hyperparameters, |rank, exchanged| {
        let ((weight, bias, updates), states) = &halfway[rank];
        exchanged.initialise(0, weight, bias, 2).unwrap();
        for (slot, (weight, bias)) in states.iter().enumerate() {
            exchanged.restore_state(0, slot, weight, bias, *updates).unwrap();
        }
        steps(rank, &exchanged, 2..4);
        exchanged.leave(WAIT_TIMEOUT).unwrap();
        exchanged.parameters(0).unwrap()
    });
    assert!(resumed == at_once, "it went on otherwise");
    assert_ne!(halfway[0].0.0, at_once[0].0);
}

#[test]
fn ranks_at_unlike_steps_are_refused() {
    let layers = [FactorLayer::new("fc6", (4, 4), 1)];
    let failures = at_ranks(2, &layers, "sgd", &[Hyperparameters::default()], |rank, exchanged| {
        exchanged.initialise(0, &[0.0; 16], &[], rank as u32).unwrap();
        let factors = LayerFactors::of_f32(&[1.0; 4], &[1.0; 4]);
        let first = exchange(&exchanged, 0, factors).unwrap_err().to_string();
        let again = exchange(&exchanged, 0, factors).unwrap_err().to_string();
        (first, again)
    });
    for (first, again) in &failures {
        // The rank that notices first reports it to the other.
        assert!(first.contains("layer `fc6`: rank ") && first.contains("is at step"), "{first}");
        assert_eq!(first, again, "and nothing goes on after it");
    }
}

#[test]
fn a_rank_that_dies_is_named_to_the_others() {
    let layers = [FactorLayer::new("fc6", (64, 64), 8)];
    let failures = at_ranks(3, &layers, "sgd", &[Hyperparameters::default()], |rank, exchanged| {
        let (inputs, gradients) = (numbers(512, [rank, 0, 1]), numbers(512, [rank, 0, 2]));
        let factors = LayerFactors::of_f32(&inputs, &gradients);
        if rank == 1 {
            // This rank drops the exchange without leaving, perhaps before the others have ended the same step.
            exchange(&exchanged, 0, factors).unwrap();
            return String::new();
        }
        let failure = loop {
            match exchange(&exchanged, 0, factors) {
                Ok(_) => continue,
                Err(failure) => break failure,
            }
        };
        failure.to_string()
    });
    assert!(failures[0].contains("rank 1") && failures[2].contains("rank 1"), "{failures:?}");
}

/// An optimizer that needs the whole chunk.
struct Whole;

impl Optimizer for Whole {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        0
    }

    fn apply(&self, _: &Step<'_>, _: &mut [f32], _: &[f32], _: &mut [f32]) {}

    fn needs_whole_chunks(&self) -> bool {
        true
    }
}

#[test]
fn an_optimizer_of_whole_chunks_is_refused_with_the_reason_of_the_table() {
    let mut registry = Registry::with_builtins();
    registry.register_optimizer("whole", Arc::new(Whole)).unwrap();
    let kernel = registry.optimizer("whole").unwrap();
    let listener = MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap();
    let addresses = vec![listener.address()];
    let mesh = listener.join(MeshConfig::new(0, Nonce([7; 32]), addresses)).unwrap();
    let config = FactorConfig::new(mesh, kernel, Hyperparameters::default());
    let refused =
        FactorExchange::new(config, vec![FactorLayer::new("fc", (3, 2), 1)]).unwrap_err().to_string();
    for rule in Caller::FactorExchange.rules() {
        assert!(refused.ends_with(&format!("{}; {}", rule.why, rule.remedy)), "{refused}");
    }
}

#[test]
fn factors_that_do_not_fit_are_refused_before_anything_is_sent() {
    let layers = [FactorLayer::new("fc6", (4, 3), 2)];
    at_ranks(1, &layers, "sgd", &[Hyperparameters::default()], |_, exchanged| {
        let refused = |factors| exchange(&exchanged, 0, factors).unwrap_err().to_string();
        let message = refused(LayerFactors::of_f32(&[0.0; 9], &[0.0; 12]));
        assert!(message.contains("layer `fc6`: takes 2 samples a step at most, not 3"), "{message}");
        let message = refused(LayerFactors::of_f32(&[0.0; 6], &[0.0; 4]));
        assert!(message.contains("rows of 3 inputs and as many of 4 output gradients"), "{message}");
        let message = exchanged.initialise(0, &[0.0; 11], &[], 0).unwrap_err().to_string();
        assert!(message.contains("takes 12 and 0 initial parameters, not 11 and 0"), "{message}");
        let message = exchanged.state(0, 0).unwrap_err().to_string();
        assert!(message.contains("none numbered 0"), "{message}");
        // The exchange goes on.
        exchange(&exchanged, 0, LayerFactors::of_f32(&[0.0; 6], &[0.0; 8])).unwrap();
    });
}
