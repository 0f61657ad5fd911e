//! Steps in two phases: all hubs know the norm of the whole mean gradient before any parameter is updated
//! with it.

use paramhub_core::codec::Codec;
use paramhub_core::norms::clip_factor;
use paramhub_core::service::JobState;
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::wire::{Header, Norm, Operation, Release, Verdict};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_kernels::{Hyperparameters, Registry, Step};
use paramhub_worker::Job;

use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Ticket, Transports, gradient, keys, sgd};
use crate::raw::{self, Raw};

over_transports!(
    [tcp shm mixed]
    a_gradient_is_clipped_to_its_global_norm_over_all_hubs_and_cores,
    a_norm_that_is_never_reached_changes_no_bit_and_runs_are_alike,
    rank_zero_releases_by_hand_with_any_factor_and_once,
    a_skipped_step_changes_nothing_and_adam_does_not_count_it,
    lars_and_lamb_scale_each_tensor_by_its_norms,
    a_norm_that_is_not_finite_does_what_it_does_in_torch,
    a_learning_rate_holds_for_its_step_in_two_phases_too,
    a_step_by_hand_is_held_normed_released_and_answered,
    offences_against_a_release_fail_their_job_with_the_reason,
    a_rank_that_is_lost_or_leaves_between_the_phases_ends_the_job,
    different_norms_to_clip_to_are_named_to_both_ranks,
);

const SIZES: [u64; 5] = [40_001, 1, 8192, 300, 100_003];
const WORKERS: u32 = 3;
const STEPS: u32 = 6;

/// Values of few bits, so that their sums are exact in any order and bf16 holds them. They double from step
/// to step.
fn exact_gradient(rank: u32, key: u32, step: u32) -> Vec<f32> {
    let scale = (1_u32 << step) as f32;
    let values = gradient(rank, key, step, SIZES[key as usize] as usize);
    values.iter().map(|value| (value * 32.0).round() / 64.0 * scale).collect()
}

fn start() -> Vec<Vec<f32>> {
    SIZES.iter().map(|&size| (0..size).map(|i| i as f32 / 1000.0).collect()).collect()
}

fn adam() -> OptimizerChoice {
    let hyperparameters = Hyperparameters { learning_rate: 0.01, ..Default::default() };
    OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named("adam") }
}

/// Exchanges some keys in one request, and pushes and pulls another in two.
fn exchange_step(job: &Job, step: u32, model: &mut [Vec<f32>]) {
    let pushed = job.push(1, exact_gradient(job.rank(), 1, step)).unwrap();
    let handles: Vec<_> = [4, 3, 2, 0]
        .map(|key| {
            let out = std::mem::take(&mut model[key as usize]);
            (key, job.push_pull(key, exact_gradient(job.rank(), key, step), out).unwrap())
        })
        .into();
    pushed.wait().unwrap();
    let out = std::mem::take(&mut model[1]);
    model[1] = job.pull(1, out).unwrap().wait().unwrap().1;
    for (key, handle) in handles {
        model[key as usize] = handle.wait().unwrap().1;
    }
}

/// Every rank's parameters at the end, and the norm of each step.
type Trained = Vec<(Vec<Vec<f32>>, Vec<f64>)>;

fn train(ticket: &Ticket, settings: &Settings) -> Trained {
    ticket.run(settings, |job| {
        let mut model = start();
        job.broadcast(&mut model, 0).unwrap();
        let mut norms = Vec::new();
        for step in 0..STEPS {
            exchange_step(job, step, &mut model);
            if settings.is_two_phase() {
                let (normed_step, norm) = job.last_gradient_norm().unwrap();
                assert_eq!(normed_step, step);
                norms.push(norm);
            }
        }
        (model, norms)
    })
}

/// Computes the same here with the kernels, from the norms that the job reported, which must be right.
fn check(settings: &Settings, trained: &Trained, factor: impl Fn(f64) -> f32) {
    check_to(settings, trained, factor, 0.0);
}

/// The same, where parameters may differ by this share of the largest one: norms of tensors are added up in another order here.
fn check_to(settings: &Settings, trained: &Trained, factor: impl Fn(f64) -> f32, tolerance: f32) {
    let optimizer = Registry::with_builtins().optimizer(&settings.optimizer.name).unwrap();
    let hyperparameters = settings.optimizer.hyperparameters.unwrap();
    let mut model = start();
    let slots = optimizer.state_slots(&hyperparameters);
    let mut state: Vec<Vec<f32>> = model.iter().map(|key| vec![0.0; key.len() * slots]).collect();
    let norms = &trained[0].1;
    for step in 0..STEPS {
        let sums: Vec<Vec<f32>> = (0..SIZES.len() as u32)
            .map(|key| {
                let mut sum = exact_gradient(0, key, step);
                for rank in 1..WORKERS {
                    sum.iter_mut().zip(exact_gradient(rank, key, step)).for_each(|(sum, g)| *sum += g);
                }
                sum
            })
            .collect();
        let means = sums.iter().flatten().map(|&sum| f64::from(sum * (1.0 / WORKERS as f32)));
        let norm = means.map(|mean| mean * mean).sum::<f64>().sqrt();
        let reported = norms[step as usize];
        assert!((reported - norm).abs() <= norm * 1e-12, "step {step}: {reported} instead of {norm}");
        let step = Step {
            hyperparameters: &hyperparameters,
            number: u64::from(step) + 1,
            contributions: WORKERS,
            factor: factor(reported),
            tensor: None,
        };
        for ((model, sum), state) in model.iter_mut().zip(&sums).zip(&mut state) {
            optimizer.apply_to_tensor(&step, model, sum, state);
        }
    }
    for (reached, reported) in trained {
        assert_eq!(reported, norms, "every rank gets the same");
        assert!(trained[0].0 == *reached, "all ranks have the same parameters");
        for (reached, model) in reached.iter().zip(&model) {
            let largest = model.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let is_close = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= tolerance * largest;
            assert!(
                reached.iter().zip(model).all(is_close),
                "{:?} reached other parameters",
                settings.optimizer
            );
        }
    }
}

fn a_gradient_is_clipped_to_its_global_norm_over_all_hubs_and_cores(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let second =
        RunningHub::start(cluster.client.clone(), HubConfig { cores: 2, ..Default::default() }).unwrap();
    // Gradients are clipped from the third step or so on.
    let clip_norm = 400.0;
    let mut number = 0;
    for optimizer in [sgd(0.1, 0.9), adam()] {
        for (reproducible, codec) in [(false, None), (true, None), (false, Some(Codec::BF16))] {
            let settings = Settings {
                optimizer: optimizer.clone(),
                reproducible,
                codec,
                clip_norm: Some(clip_norm),
                ..Settings::new(keys(&SIZES))
            };
            number += 1;
            let trained = train(&cluster.job(&format!("clip{number}"), WORKERS), &settings);
            let norms = &trained[0].1;
            assert!(norms[0] < clip_norm && norms[STEPS as usize - 1] > clip_norm, "{norms:?}");
            check(&settings, &trained, |norm| clip_factor(clip_norm, norm));
        }
    }
    second.stop();
}

fn a_norm_that_is_never_reached_changes_no_bit_and_runs_are_alike(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let once = Settings { optimizer: sgd(0.1, 0.9), reproducible: true, ..Settings::new(keys(&SIZES)) };
    let twice = Settings { clip_norm: Some(1e6), ..once.clone() };
    let run = |name: &str, settings| train(&cluster.job(name, WORKERS), settings);
    let (plain, held, again) = (run("plain", &once), run("held", &twice), run("again", &twice));
    assert_eq!(plain[0].0, held[0].0);
    assert!(held == again, "norms and parameters are the same from run to run");
    let tight = Settings { clip_norm: Some(1e-3), ..once.clone() };
    assert!(run("tight", &tight) == run("tight-again", &tight));
}

fn rank_zero_releases_by_hand_with_any_factor_and_once(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings =
        Settings { optimizer: sgd(1.0, 0.0), two_phase: true, ..Settings::new(keys(&[20_000, 3])) };
    cluster.job("by-hand", 2).run(&settings, |job| {
        let mut model = vec![vec![0.0_f32; 20_000], vec![0.0; 3]];
        let message = job.release(0, 1.0).unwrap_err().to_string();
        let refusal = if job.rank() == 0 { "wait for its norm" } else { "released by rank 0" };
        assert!(message.contains(refusal), "{message}");
        job.broadcast(&mut model, 7).unwrap();
        let mut expected = 0.0;
        for step in 7..12 {
            let mut late = job.gradient_norm(step).unwrap();
            let [first, second] = [0, 1].map(|key| {
                let out = std::mem::take(&mut model[key as usize]);
                job.push_pull(key, vec![2.0_f32; out.len()], out).unwrap()
            });
            let (_, norm) = job.gradient_norm(step).unwrap().wait().unwrap();
            assert_eq!(norm, (20_003.0_f64 * 4.0).sqrt());
            let factor = 1.0 / (step - 6) as f32;
            if job.rank() == 0 {
                assert!(!first.is_done() && !second.is_done(), "nothing is updated before the release");
                assert!(job.release(step + 1, 1.0).is_err());
                job.release(step, factor).unwrap();
                assert!(job.release(step, factor).unwrap_err().to_string().contains("release it once"));
            }
            expected -= 2.0 * factor;
            (model[0], model[1]) = (first.wait().unwrap().1, second.wait().unwrap().1);
            assert!(model.iter().flatten().all(|&value| value == expected), "step {step}");
            assert!(late.wait_timeout(crate::cluster::WAIT_TIMEOUT).unwrap());
            assert_eq!(job.last_gradient_norm(), Some((step, norm)));
        }
        let message = job.gradient_norm(3).unwrap().wait().unwrap_err().to_string();
        assert!(message.contains("the norm of step 3 is not kept any more"), "{message}");
        // A step that does not come has no norm, and no caller waits for it for ever.
        let never = job.gradient_norm(12).unwrap();
        never.on_complete(|outcome| assert!(outcome.is_err()));
    });
    let plain = Settings { two_phase: false, ..settings.clone() };
    cluster.job("one-phase", 1).run(&plain, |job| {
        let message = job.gradient_norm(0).unwrap_err().to_string();
        assert!(message.contains("only in two phases"), "{message}");
        assert!(job.release(0, 1.0).is_err() && job.last_gradient_norm().is_none());
    });
    let clipped = Settings { clip_norm: Some(1.0), ..settings };
    cluster.job("by-itself", 1).run(&clipped, |job| {
        let message = job.release(0, 1.0).unwrap_err().to_string();
        assert!(message.contains("released by themselves"), "{message}");
        job.initialise(0, vec![0.0_f32; 20_000], 3).unwrap().wait().unwrap();
        let message = job.initialise(1, vec![0.0_f32; 3], 4).unwrap_err().to_string();
        assert!(message.contains("all parameters start from one version"), "{message}");
    });
}

/// The norms of whole tensors, which lie at two hubs with several cores, decide each update.
fn lars_and_lamb_scale_each_tensor_by_its_norms(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let second =
        RunningHub::start(cluster.client.clone(), HubConfig { cores: 2, ..Default::default() }).unwrap();
    let lars =
        Hyperparameters { learning_rate: 2.0, momentum: 0.9, weight_decay: 0.01, ..Default::default() };
    let lamb = Hyperparameters { learning_rate: 0.01, weight_decay: 0.01, ..Default::default() };
    for (name, hyperparameters, clip_norm) in
        [("lars", lars, None), ("lars", lars, Some(400.0)), ("lamb", lamb, None)]
    {
        let optimizer =
            OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named(name) };
        let settings = Settings { optimizer, clip_norm, ..Settings::new(keys(&SIZES)) };
        let factor = |norm| clip_norm.map_or(1.0, |most| clip_factor(most, norm));
        let trained = train(&cluster.job(&format!("{name}-{}", clip_norm.is_some()), WORKERS), &settings);
        check_to(&settings, &trained, factor, 1e-6);
    }
    let refused = Settings {
        optimizer: OptimizerChoice::named("lamb"),
        clip_norm: Some(1.0),
        ..Settings::new(keys(&[4]))
    };
    let message = cluster.job("scaled-lamb", 1).join(0, refused).err().unwrap().to_string();
    assert!(message.contains("lamb takes the norms of its updates before"), "{message}");
    second.stop();
}

/// Gradients of a step, scaled by 1,024, with an infinity in some: what a program does that scales its loss.
fn a_skipped_step_changes_nothing_and_adam_does_not_count_it(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings {
        optimizer: OptimizerChoice::named("adam"),
        two_phase: true,
        ..Settings::new(keys(&[20_000, 3]))
    };
    let train = |name: &str, overflows: &[u32]| {
        let ran = cluster.job(name, 2).run(&settings, |job| {
            let mut model = vec![vec![1.0_f32; 20_000], vec![-1.0; 3]];
            job.broadcast(&mut model, 0).unwrap();
            let mut used = 0;
            for step in 0..4 + overflows.len() as u32 {
                let overflows = overflows.contains(&step);
                let before = model.clone();
                let handles = [0, 1].map(|key| {
                    let out = std::mem::take(&mut model[key as usize]);
                    let mut gradient = vec![1024.0 * (used + 1) as f32; out.len()];
                    if overflows && job.rank() == 1 && key == 0 {
                        gradient[19_999] = f32::INFINITY;
                    }
                    job.push_pull(key, gradient, out).unwrap()
                });
                let (_, norm) = job.gradient_norm(step).unwrap().wait().unwrap();
                assert_eq!(norm.is_finite(), !overflows, "every rank sees the infinity of one");
                if job.rank() == 0 {
                    match overflows {
                        true => job.skip(step).unwrap(),
                        false => job.release(step, 1.0 / 1024.0).unwrap(),
                    }
                    assert!(job.skip(step).unwrap_err().to_string().contains("release it once"));
                }
                model = handles.into_iter().map(|handle| handle.wait().unwrap().1).collect();
                assert_eq!(model == before, overflows, "step {step}");
                used += u32::from(!overflows);
            }
            model
        });
        assert!(ran.iter().all(|model| *model == ran[0]));
        ran.into_iter().next().unwrap()
    };
    assert_eq!(
        train("plain", &[]),
        train("skips", &[0, 2, 3]),
        "Adam's bias correction takes the number of updates"
    );
}

fn a_norm_that_is_not_finite_does_what_it_does_in_torch(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings =
        Settings { optimizer: sgd(1.0, 0.0), clip_norm: Some(1.0), ..Settings::new(keys(&[9000, 3])) };
    for (name, odd) in [("infinite", f32::INFINITY), ("nan", f32::NAN)] {
        cluster.job(name, 2).run(&settings, |job| {
            let mut model = vec![vec![1.0_f32; 9000], vec![1.0; 3]];
            job.broadcast(&mut model, 0).unwrap();
            let mut gradient = vec![1.0_f32; 9000];
            gradient[8999] = odd;
            let first = job.push_pull(0, gradient, model.remove(0)).unwrap();
            let second = job.push_pull(1, vec![1.0_f32; 3], model.remove(0)).unwrap();
            let (first, second) = (first.wait().unwrap().1, second.wait().unwrap().1);
            let (_, norm) = job.last_gradient_norm().unwrap();
            // A factor of 0 makes NaN of infinity and 0 of all else; a factor of NaN makes NaN of everything.
            let others = if odd.is_nan() { f32::NAN } else { 1.0 };
            assert!(norm.is_nan() == odd.is_nan() && !norm.is_finite());
            assert!(first[8999].is_nan());
            let alike = |value: f32| value == others || value.is_nan() && others.is_nan();
            assert!(first[..8999].iter().chain(&second).all(|&value| alike(value)), "{name}");
        });
    }
}

fn a_learning_rate_holds_for_its_step_in_two_phases_too(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings =
        Settings { optimizer: sgd(1.0, 0.0), clip_norm: Some(1e9), ..Settings::new(keys(&[20_000, 3])) };
    cluster.job("schedule", 2).run(&settings, |job| {
        let mut model = vec![vec![0.0_f32; 20_000], vec![0.0; 3]];
        job.broadcast(&mut model, 0).unwrap();
        let mut expected = 0.0;
        for step in 0..6 {
            let learning_rate = 1.0 / f64::from(1 << step);
            if job.rank() == 0 {
                let hyperparameters = Hyperparameters { learning_rate, ..Default::default() };
                job.set_hyperparameters(step, &hyperparameters).unwrap();
            }
            let handles = [0, 1].map(|key| {
                let out = std::mem::take(&mut model[key as usize]);
                job.push_pull(key, vec![1.0_f32; out.len()], out).unwrap()
            });
            model = handles.into_iter().map(|handle| handle.wait().unwrap().1).collect();
            expected -= learning_rate as f32;
            assert!(model.iter().flatten().all(|&value| value == expected), "step {step}");
        }
    });
}

/// A frame made by hand.
fn frame(operation: Operation, step: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header { step, length: payload.len() as u32, ..Header::bare(operation) };
    [&header.encode()[..], payload].concat()
}

fn release(step: u32) -> Vec<u8> {
    frame(Operation::Release, step, &Release(1.0).encode())
}

/// Settings of one key with one chunk, whose parameters rank 0 sends by hand.
fn raw_settings() -> Settings {
    Settings { optimizer: sgd(0.1, 0.0), two_phase: true, ..raw::settings() }
}

fn join_raw(cluster: &Cluster, ticket: &Ticket, rank: u32, settings: &Settings) -> Raw {
    let (mut raw, hello) = Raw::join_with(cluster, ticket, rank, settings);
    match raw.shake_hands(&hello, ticket) {
        Verdict::Welcome { .. } => raw,
        Verdict::Refused { message, .. } => panic!("refused: {message}"),
    }
}

/// Two ranks made by hand, whose step 0 is held.
fn held(cluster: &Cluster, ticket: &Ticket) -> [Raw; 2] {
    let settings = raw_settings();
    let [mut zero, mut one] = std::thread::scope(|scope| {
        let one = scope.spawn(|| join_raw(cluster, ticket, 1, &settings));
        [join_raw(cluster, ticket, 0, &settings), one.join().unwrap()]
    });
    zero.send(&frame(Operation::Initialise, 0, &[0; 16]));
    zero.await_frame(Operation::Applied);
    let gradient: Vec<u8> = [3.0_f32, 0.0, 4.0, 0.0].iter().flat_map(|value| value.to_le_bytes()).collect();
    for raw in [&mut zero, &mut one] {
        raw.send(&frame(Operation::PushPull, 0, &gradient));
    }
    for raw in [&mut zero, &mut one] {
        let (header, payload) = raw.await_frame(Operation::Norm);
        let norm = Norm::decode(&payload).map(|(norm, tensors)| (norm, tensors.len()));
        assert_eq!((header.step, header.chunk, norm), (0, 0, Some((Norm(25.0), 0))));
    }
    [zero, one]
}

fn a_step_by_hand_is_held_normed_released_and_answered(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("raw", 2);
    let [mut zero, mut one] = held(&cluster, &ticket);
    zero.send(&frame(Operation::Release, 0, &Release(0.5).encode()));
    for raw in [&mut zero, &mut one] {
        let (header, payload) = raw.await_frame(Operation::Parameters);
        let first = f32::from_le_bytes(payload[..4].try_into().unwrap());
        assert_eq!((header.step, first), (1, -(0.1_f32 * 1.5)));
        raw.send(&frame(Operation::Leave, 0, &[]));
    }
    drop([zero, one]);
    assert_eq!(cluster.await_end("raw").state, JobState::Finished);
}

fn offences_against_a_release_fail_their_job_with_the_reason(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let once = "a step is released by rank 0, once, after its norm was sent";
    let skip = |step| frame(Operation::Skip, step, &[]);
    let offences: [(&str, usize, Vec<u8>, &str); 10] = [
        ("from another rank", 1, release(0), once),
        ("skipped by another rank", 1, skip(0), once),
        ("skipped and released", 0, [skip(0), release(0)].concat(), once),
        ("a Skip with a payload", 0, frame(Operation::Skip, 0, &[0; 4]), "announces 4 bytes"),
        ("of another step", 0, release(1), once),
        ("twice", 0, [release(0), release(0)].concat(), once),
        ("cut short", 0, frame(Operation::Release, 0, &[0; 3]), "a Release of 3 bytes, not 4"),
        ("too long", 0, frame(Operation::Release, 0, &[0; 20]), "a Release of 20 bytes, not 4"),
        ("the hub's", 0, frame(Operation::Norm, 0, &[0; 8]), "does not go this way"),
        ("a gradient behind one that is held", 1, raw::push(1), "before the first was answered"),
    ];
    beside_a_running_job(&cluster, || {
        for (number, (what, culprit, bytes, reason)) in offences.into_iter().enumerate() {
            let name = format!("release{number}");
            let mut ranks = held(&cluster, &cluster.job(&name, 2));
            ranks[culprit].send(&bytes);
            for raw in &mut ranks {
                let failure = raw.await_failure();
                assert_eq!(failure.rank, Some(culprit as u32), "{what}: {failure:?}");
                assert!(failure.message.contains(reason), "{what}: {}", failure.message);
            }
            drop(ranks);
            assert_eq!(cluster.await_end(&name).state, JobState::Failed, "{what}");
        }
        // A frame before anything is held, and one in a job whose steps have one phase.
        for (name, settings) in [
            ("early", raw_settings()),
            ("one-phase", Settings { two_phase: false, ..raw_settings() }),
            ("mean", raw::settings()),
        ] {
            let ticket = cluster.job(name, 1);
            let mut raw = join_raw(&cluster, &ticket, 0, &settings);
            raw.send(&release(0));
            let failure = raw.await_failure();
            assert!(failure.message.contains(once), "{name}: {failure:?}");
        }
    });
}

fn a_rank_that_is_lost_or_leaves_between_the_phases_ends_the_job(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    for (name, lost) in [("zero-lost", 0), ("one-lost", 1)] {
        let mut ranks = Vec::from(held(&cluster, &cluster.job(name, 2)));
        drop(ranks.remove(lost));
        let failure = ranks[0].await_failure();
        assert_eq!(failure.rank, Some(lost as u32));
        assert!(failure.message.contains(&format!("rank {lost} was lost")), "{failure:?}");
    }
    let [mut zero, mut one] = held(&cluster, &cluster.job("zero-left", 2));
    zero.send(&frame(Operation::Leave, 0, &[]));
    let failure = one.await_failure();
    assert!(failure.message.contains("other ranks wait for its release of step 0"), "{failure:?}");
}

fn different_norms_to_clip_to_are_named_to_both_ranks(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("disagree", 2);
    let messages: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let clip_norm = Some(1.0 + f64::from(rank));
                let settings = Settings { clip_norm, ..raw_settings() };
                let ticket = &ticket;
                scope.spawn(move || ticket.join(rank, settings).err().unwrap().to_string())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(messages.iter().all(|message| message.contains("disagree on clip_norm")), "{messages:?}");
    let wrong = Settings { clip_norm: Some(f64::NAN), ..raw_settings() };
    let message = cluster.job("nowhere", 1).join(0, wrong).unwrap_err().to_string();
    assert!(message.contains("clip_norm is NaN; it must be a finite number above 0"), "{message}");
}
