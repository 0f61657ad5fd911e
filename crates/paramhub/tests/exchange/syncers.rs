//! Layers that are exchanged by factors and layers through a hub, in one job and one training loop.

use paramhub_core::key::{Key, KeyTable};
use paramhub_core::scheme::{LayerSettings, Scheme, SchemeChoice};
use paramhub_core::service::{JobOptions, JobState, OnInterfaceDown};
use paramhub_core::settings::Settings;
use paramhub_kernels::{Hyperparameters, Registry};
use paramhub_syncer::{LayerFactors, SyncError, Syncers};
use paramhub_worker::Options;

use crate::cluster::{Cluster, Ticket, Transports, gradient, sgd};
use crate::sites::{Racks, options, shapes};

const RANKS: u32 = 3;
/// M, N and K of the fully connected layer.
const SHAPE: [usize; 3] = [96, 64, 2];
/// The positions of the layers' keys. Key 0 is in no layer.
const WEIGHT: u32 = 1;
const BIAS: u32 = 2;
const WHOLE: u32 = 3;
const SENT_WEIGHT: u32 = 4;
const SENT_BIAS: u32 = 5;
const KEYS: u32 = 6;

/// A key in no layer; a layer by factors, with a bias; a layer that could go by factors, but goes through the
/// hub; and one whose factors go to the hub.
fn settings() -> Settings {
    let [outputs, inputs, samples] = SHAPE.map(|size| size as u64);
    let keys = vec![
        Key::new("conv", [5000]),
        Key::new("fc.weight", [outputs, inputs]),
        Key::new("fc.bias", [outputs]),
        Key::new("whole.weight", [outputs, inputs]),
        Key::new("sent.weight", [outputs, inputs]),
        Key::new("sent.bias", [outputs]),
    ];
    let whole = LayerSettings::fully_connected("whole", [WHOLE], [outputs, inputs, samples]);
    let sent = LayerSettings::fully_connected("sent", [SENT_WEIGHT, SENT_BIAS], [outputs, inputs, samples]);
    let layers = vec![
        LayerSettings::fully_connected("fc", [WEIGHT, BIAS], [outputs, inputs, samples]),
        whole.by(SchemeChoice::Only(Scheme::Hub)),
        sent.by(SchemeChoice::Only(Scheme::FactorsToHub)),
    ];
    let scheme = SchemeChoice::Auto;
    Settings { layers, scheme, optimizer: sgd(0.1, 0.5), ..Settings::new(KeyTable::new(keys).unwrap()) }
}

/// Joins as every rank at once.
fn as_every_rank<T: Send>(ticket: &Ticket, work: impl Fn(Syncers) -> T + Sync) -> Vec<T> {
    as_every_rank_with(ticket, &settings(), |joined| work(joined.unwrap()))
}

/// Like [`as_every_rank`]. The job may end through one rank's work before another rank has joined it.
fn as_every_rank_with<T: Send>(
    ticket: &Ticket,
    settings: &Settings,
    work: impl Fn(Result<Syncers, SyncError>) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let work = &work;
                scope.spawn(move || {
                    let transport = ticket.transports.of_rank(rank);
                    let options = Options { transport, ..Default::default() };
                    let registry = Registry::with_builtins();
                    let membership = ticket.membership(rank);
                    work(Syncers::join(membership, options, settings.clone(), &registry, 1))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn elements(key: u32) -> usize {
    settings().keys.keys()[key as usize].elements().unwrap() as usize
}

/// Inputs and output gradients of one rank's samples in a step.
fn factors(rank: u32, step: u32) -> [Vec<f32>; 2] {
    let [outputs, inputs, samples] = SHAPE;
    [(100, inputs), (101, outputs)].map(|(seed, width)| gradient(rank, seed, step, samples * width))
}

/// One rank's gradient of any key, multiplied out for the keys of the layer that goes by factors.
fn dense(rank: u32, key: u32, step: u32) -> Vec<f32> {
    let [outputs, inputs, samples] = SHAPE;
    let [x, dy] = factors(rank, step);
    match key {
        WEIGHT | SENT_WEIGHT => (0..outputs * inputs)
            .map(|at| (0..samples).map(|k| dy[k * outputs + at / inputs] * x[k * inputs + at % inputs]).sum())
            .collect(),
        BIAS | SENT_BIAS => {
            (0..outputs).map(|row| (0..samples).map(|k| dy[k * outputs + row]).sum()).collect()
        }
        _ => gradient(rank, key, step, elements(key)),
    }
}

#[test]
fn layers_by_factors_and_through_the_hub_learn_as_one() {
    const STEPS: u32 = 5;
    /// The step from which on the learning rate is another.
    const SLOWER: u32 = 3;
    let slower = Hyperparameters { learning_rate: 0.01, momentum: 0.5, ..Default::default() };

    let cluster = Cluster::new(Transports::tcp(), 2);
    let learnt = as_every_rank(&cluster.job("mixed", RANKS), |mut syncers| {
        let rank = syncers.job().rank();
        assert_eq!(syncers.len(), 4, "three layers and the key in none");
        assert_eq!(syncers.of_key(WEIGHT), syncers.of_key(BIAS));
        let by_factors = [WEIGHT, SENT_WEIGHT].map(|key| syncers.of_key(key));
        assert!((0..4).all(|layer| syncers.takes_factors(layer) == by_factors.contains(&layer)));
        // Rank 0's initial parameters count.
        let mut model: Vec<Vec<f32>> = (0..KEYS).map(|key| vec![rank as f32; elements(key)]).collect();
        for (key, parameters) in (0..).zip(&mut model) {
            assert!(!syncers.has_begun(key));
            syncers.begin(key, parameters).unwrap();
            assert!(syncers.has_begun(key) && parameters.iter().all(|&value| value == 0.0));
        }
        for step in 0..STEPS {
            if step == SLOWER {
                syncers.set_hyperparameters(0, step, &slower).unwrap();
            }
            syncers.send(WHOLE, dense(rank, WHOLE, step)).unwrap();
            let [x, dy] = factors(rank, step);
            for layer in by_factors {
                syncers.send_factors(layer, LayerFactors::of_f32(&x, &dy)).unwrap();
            }
            syncers.send(0, dense(rank, 0, step)).unwrap();
            syncers.wait().unwrap();
            assert!((0..4).all(|layer| syncers.is_complete(layer)));
            for (key, parameters) in (0..).zip(&mut model) {
                let gradient = syncers.move_out(key, parameters);
                let lent = if [0, WHOLE].contains(&key) { elements(key) } else { 0 };
                assert_eq!(gradient.len(), lent, "the memory of the gradient comes back");
            }
        }
        let statistics = syncers.statistics();
        assert!(statistics.bytes_sent > 0 && statistics.exposed <= statistics.in_flight, "{statistics:?}");
        syncers.leave().unwrap();
        model
    });

    let mut expected: Vec<Vec<f64>> = (0..KEYS).map(|key| vec![0.0; elements(key)]).collect();
    for (key, parameters) in (0..).zip(&mut expected) {
        let mut momentum = vec![0.0; parameters.len()];
        for step in 0..STEPS {
            let rate = if step < SLOWER { 0.1 } else { 0.01 };
            let of_ranks: Vec<Vec<f32>> = (0..RANKS).map(|rank| dense(rank, key, step)).collect();
            for (at, parameter) in parameters.iter_mut().enumerate() {
                let mean = of_ranks.iter().map(|rank| f64::from(rank[at])).sum::<f64>() / f64::from(RANKS);
                momentum[at] = if step == 0 { mean } else { 0.5 * momentum[at] + mean };
                *parameter -= rate * momentum[at];
            }
        }
    }
    for model in &learnt {
        assert!(model == &learnt[0], "all ranks have the same bits");
        for (key, (parameters, expected)) in model.iter().zip(&expected).enumerate() {
            let wrong = parameters
                .iter()
                .zip(expected)
                .position(|(&is, &should)| (f64::from(is) - should).abs() > 1e-5 * should.abs().max(1.0));
            assert_eq!(wrong, None, "key {key}");
        }
    }
}

/// Factors go from rank to rank, whatever hubs serve; the other keys' sums cross between racks and hosts.
#[test]
fn layers_go_by_factors_where_hubs_serve_racks_and_hosts_too() {
    let all = settings();
    let settings = Settings {
        keys: KeyTable::new(all.keys.keys()[..3].to_vec()).unwrap(),
        layers: vec![all.layers[0].clone().by(SchemeChoice::Only(Scheme::Factors))],
        ..all
    };
    let step_of = |syncers: &mut Syncers, step| {
        let rank = syncers.job().rank();
        let by_factors = syncers.of_key(WEIGHT);
        assert!(syncers.takes_factors(by_factors));
        let [x, dy] = factors(rank, step);
        syncers.send_factors(by_factors, LayerFactors::of_f32(&x, &dy)).unwrap();
        syncers.send(0, dense(rank, 0, step)).unwrap();
        syncers.wait().unwrap();
    };
    for (name, hubs, racks, reductions) in shapes() {
        let cluster = Racks::new(Transports::mixed(), &hubs);
        for reduction in reductions {
            let models = cluster.as_every_rank(&racks, options(reduction), |membership, options| {
                let registry = Registry::with_builtins();
                let mut syncers = Syncers::join(membership, options, settings.clone(), &registry, 1).unwrap();
                let mut model: Vec<Vec<f32>> = (0..3).map(|key| vec![0.0; elements(key)]).collect();
                (0..).zip(&mut model).for_each(|(key, values)| syncers.begin(key, values).unwrap());
                for step in 0..2 {
                    step_of(&mut syncers, step);
                    (0..).zip(&mut model).for_each(|(key, values)| drop(syncers.move_out(key, values)));
                }
                syncers.leave().unwrap();
                model
            });
            let ranks = racks.len() as u32;
            for (key, values) in (0..).zip(&models[0]) {
                let [first, second] = [0, 1].map(|step| {
                    let of_ranks: Vec<_> = (0..ranks).map(|rank| dense(rank, key, step)).collect();
                    let mean = |at: usize| of_ranks.iter().map(|own| own[at]).sum::<f32>() / ranks as f32;
                    (0..values.len()).map(mean).collect::<Vec<_>>()
                });
                for (at, value) in values.iter().enumerate() {
                    // Momentum is 0.5, and the rate 0.1.
                    let expected = -0.1 * (1.5 * first[at] + second[at]);
                    let is_near = (value - expected).abs() < 1e-5 * expected.abs().max(1.0);
                    assert!(is_near, "{name}, {reduction}: key {key}, {at}: {value}, not {expected}");
                }
            }
            assert!(models.iter().all(|model| *model == models[0]), "{name}, {reduction}");
        }
    }
}

#[test]
fn a_loop_out_of_order_is_refused_and_may_go_on() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    as_every_rank(&cluster.job("confused", RANKS), |mut syncers| {
        let rank = syncers.job().rank();
        let [by_factors, whole, sent] = [WEIGHT, WHOLE, SENT_WEIGHT].map(|key| syncers.of_key(key));
        let [x, dy] = factors(rank, 0);
        let of_layer = LayerFactors::of_f32(&x, &dy);
        let early = syncers.send(WHOLE, dense(rank, WHOLE, 0)).unwrap_err().to_string();
        assert!(early.contains("whole.weight") && early.contains("without having moved"), "{early}");
        let early = syncers.send_factors(by_factors, of_layer).unwrap_err().to_string();
        assert!(early.contains("fc.weight") && early.contains("without having moved"), "{early}");

        let mut model: Vec<Vec<f32>> = (0..KEYS).map(|key| vec![0.0; elements(key)]).collect();
        (0..).zip(&mut model).for_each(|(key, parameters)| syncers.begin(key, parameters).unwrap());
        let wrong = syncers.send(WEIGHT, dense(rank, WEIGHT, 0)).unwrap_err().to_string();
        assert!(wrong.contains("goes by its factors, and a gradient came"), "{wrong}");
        let wrong = syncers.send_factors(whole, of_layer).unwrap_err().to_string();
        assert!(wrong.contains("does not go by its factors, and factors came"), "{wrong}");

        let wrong = syncers.send(SENT_BIAS, dense(rank, SENT_BIAS, 0)).unwrap_err().to_string();
        assert!(wrong.contains("goes by its factors, and a gradient came"), "{wrong}");
        let short = syncers.send(WHOLE, vec![0.0; 3]).unwrap_err().to_string();
        assert!(short.contains("whole.weight"), "{short}");
        let short = syncers.send_factors(by_factors, LayerFactors::of_f32(&x[1..], &dy)).unwrap_err();
        assert!(short.to_string().contains("takes rows of 64 inputs"), "{short}");
        let short = syncers.send_factors(sent, LayerFactors::of_f32(&x[1..], &dy)).unwrap_err();
        assert!(short.to_string().contains("K rows of 64 inputs"), "{short}");

        syncers.send(WHOLE, dense(rank, WHOLE, 0)).unwrap();
        syncers.send_factors(by_factors, of_layer).unwrap();
        syncers.send_factors(sent, of_layer).unwrap();
        let twice = syncers.send(WHOLE, dense(rank, WHOLE, 1)).unwrap_err().to_string();
        assert!(twice.contains("without having moved"), "{twice}");
        let twice = syncers.send_factors(by_factors, of_layer).unwrap_err().to_string();
        assert!(twice.contains("without having moved"), "{twice}");
        let twice = syncers.send_factors(sent, of_layer).unwrap_err().to_string();
        assert!(twice.contains("without having moved"), "{twice}");
        assert!(syncers.receive(sent).unwrap());
        assert!(syncers.receive(whole).unwrap() && syncers.receive(by_factors).unwrap());
        assert!(!syncers.receive(whole).unwrap(), "nothing is under way any more");
        // The parameters were received, but not moved out.
        let behind = syncers.send(WHOLE, dense(rank, WHOLE, 1)).unwrap_err().to_string();
        assert!(behind.contains("without having moved"), "{behind}");
        for (key, parameters) in (0..).zip(&mut model) {
            syncers.move_out(key, parameters);
        }
        assert!(model[WHOLE as usize].iter().any(|&parameter| parameter != 0.0));
        syncers.send(WHOLE, dense(rank, WHOLE, 1)).unwrap();
        syncers.wait().unwrap();
        syncers.leave().unwrap();
    });
}

#[test]
fn a_nan_among_factors_passes_by_default_and_is_refused_where_asked() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    for reject in [false, true] {
        let name = if reject { "rejects" } else { "passes" };
        let settings = Settings { reject_non_finite: reject, ..settings() };
        let outcomes = as_every_rank_with(&cluster.job(name, RANKS), &settings, |joined| {
            // The job may have ended already, since a rank does not wait for the others before it sends.
            let mut syncers = joined.map_err(|error| error.to_string())?;
            let rank = syncers.job().rank();
            let mut model: Vec<Vec<f32>> = (0..KEYS).map(|key| vec![0.0; elements(key)]).collect();
            for (key, parameters) in (0..).zip(&mut model) {
                syncers.begin(key, parameters).map_err(|error| error.to_string())?;
            }
            let layer = syncers.of_key(WEIGHT);
            let [mut x, dy] = factors(rank, 0);
            if rank == 1 {
                x[3] = f32::NAN;
            }
            let factors = LayerFactors::of_f32(&x, &dy);
            syncers.send_factors(layer, factors).map_err(|error| error.to_string())?;
            syncers.receive(layer).map_err(|error| error.to_string())?;
            syncers.move_out(WEIGHT, &mut model[WEIGHT as usize]);
            assert!(model[WEIGHT as usize].iter().any(|parameter| parameter.is_nan()));
            syncers.leave().map_err(|error| error.to_string())
        });
        if !reject {
            outcomes.into_iter().for_each(|rank| rank.unwrap());
            continue;
        }
        for outcome in outcomes {
            let error = outcome.unwrap_err();
            assert!(error.contains("rank 1"), "{error}");
            assert!(error.contains("factors of key `fc.weight` hold a NaN or an infinity"), "{error}");
        }
        let status = cluster.await_end(name);
        assert_eq!(status.state, JobState::Failed);
        let expected = "rank 1 gave up: its factors of key `fc.weight` hold a NaN or an infinity";
        assert!(status.message.contains(expected), "{}", status.message);
    }
}

#[test]
fn factors_between_workers_are_refused_where_streams_are_to_be_resumed() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let options = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..Default::default() };
    let ticket = cluster.job_with("continues", 1, options);
    let settings = Settings { scheme: SchemeChoice::Only(Scheme::Factors), ..settings() };
    let refused = ticket.join(0, settings).unwrap_err().to_string();
    assert!(refused.contains("layer `fc` goes by factors"), "{refused}");
    assert!(refused.contains("on_interface_down = fail"), "{refused}");
}
