use paramhub_kernels::{
    Adadelta, Adagrad, Adam, Averaged, HyperparameterError, Hyperparameters, Isa, Lamb, Lars, Lion, Mean,
    NAdam, Optimizer, Registry, RmsProp, Sgd, Step, TensorSquares, Undivided,
};
use proptest::prelude::*;

use crate::support::{Random, assert_same, lengths};

const STEPS: u64 = 3;

/// The sums of a tensor whose parameters have the norm 3, and whose gradient or update has the norm 1.5.
const TENSOR: Option<TensorSquares> = Some(TensorSquares { parameters: 9.0, update: 2.25 });

/// One step of one element, written as in the optimizers' documentation.
type Reference = fn(&Step<'_>, f32, f32, &mut [f32; 3]) -> f32;

#[test]
fn every_body_equals_the_scalar_reference_at_every_length() {
    for len in lengths() {
        for case in cases() {
            compare(&case, len, len % 4);
        }
    }
}

#[test]
fn infinite_and_absent_gradients_go_through_as_in_the_reference() {
    for case in cases() {
        for isa in Isa::available() {
            let optimizer = (case.optimizer)(isa);
            let sums =
                [f32::INFINITY, f32::NAN, 0.0, -0.0, f32::MAX, f32::MIN_POSITIVE / 4.0, -1.0, 1.0, 0.5];
            let mut model = [0.0, 1.0, -0.0, 0.0, 1.0, 1.0, f32::NAN, f32::INFINITY, -2.0];
            let mut want = model;
            let mut state = vec![0.0; optimizer.state_slots(&case.hyperparameters) * model.len()];
            let mut wanted_state = [[0.0; 3]; 9];
            for number in 1..=STEPS {
                let step = Step {
                    hyperparameters: &case.hyperparameters,
                    number,
                    contributions: 3,
                    factor: 1.0,
                    tensor: TENSOR,
                };
                optimizer.apply(&step, &mut model, &sums, &mut state);
                for ((parameter, sum), state) in want.iter_mut().zip(sums).zip(&mut wanted_state) {
                    *parameter = (case.reference)(&step, *parameter, sum, state);
                }
                assert_same(&model, &want, &format!("{} at step {number}, {isa}", case.name));
            }
        }
    }
}

#[test]
fn state_slots_follow_the_hyperparameters() {
    let plain = Hyperparameters::default();
    let momentum = Hyperparameters { momentum: 0.9, ..plain };
    assert_eq!(Mean::new().state_slots(&momentum), 0);
    assert_eq!(Undivided::new().state_slots(&momentum), 0);
    assert_eq!(Sgd::new().state_slots(&plain), 0);
    assert_eq!(Sgd::new().state_slots(&momentum), 1);
    assert_eq!(Adam::new().state_slots(&plain), 2);
    assert_eq!(Adam::new().defaults().weight_decay, 0.0);
    assert_eq!(Adam::decoupled().defaults().weight_decay, 0.01);
    let amsgrad = plain.with("amsgrad", 1.0).unwrap();
    assert_eq!((Adam::new().state_slots(&amsgrad), Adadelta::new().state_slots(&plain)), (3, 2));
    let centered = momentum.with("centered", 1.0).unwrap();
    assert_eq!([plain, momentum, centered].map(|h| RmsProp::new().state_slots(&h)), [1, 2, 3]);
    let refused = Adam::new().check_change(&plain, &amsgrad);
    assert_eq!(refused, Err(HyperparameterError::MoreState { needed: 3, allocated: 2 }));

    assert_eq!(Sgd::new().check_change(&momentum, &plain), Ok(()));
    let refused = Sgd::new().check_change(&plain, &momentum);
    assert_eq!(refused, Err(HyperparameterError::MoreState { needed: 1, allocated: 0 }));
}

#[test]
fn a_momentum_set_to_zero_for_a_while_keeps_its_buffer_as_torch_does() {
    let momentum = Hyperparameters { learning_rate: 1.0, momentum: 0.5, ..Hyperparameters::default() };
    let plain = Hyperparameters { momentum: 0.0, ..momentum };
    let (mut model, mut buffer) = ([0.0], [0.0]);
    for (number, h, parameter, velocity) in
        [(1, &momentum, -1.0, 1.0), (2, &plain, -2.0, 1.0), (3, &momentum, -3.5, 1.5)]
    {
        let step = Step { hyperparameters: h, number, contributions: 1, factor: 1.0, tensor: None };
        Sgd::new().apply(&step, &mut model, &[1.0], &mut buffer);
        assert_eq!((model, buffer), ([parameter], [velocity]), "step {number}");
    }
}

#[test]
fn values_out_of_range_are_named() {
    let registry = Registry::with_builtins();
    for (optimizer, name, value, message) in [
        ("sgd", "learning_rate", -1.0, "learning_rate is -1; it must be 0 or more"),
        ("sgd", "learning_rate", f64::NAN, "learning_rate is NaN; it must be 0 or more"),
        ("sgd", "momentum", -0.5, "momentum is -0.5; it must be 0 or more"),
        ("sgd", "weight_decay", f64::INFINITY, "weight_decay is inf; it must be 0 or more"),
        ("sgd", "nesterov", 1.0, "nesterov needs a momentum above 0 and no dampening"),
        ("adam", "beta1", 1.0, "beta1 is 1; it must be 0 or more and less than 1"),
        ("adam", "beta2", -0.1, "beta2 is -0.1; it must be 0 or more and less than 1"),
        ("adamw", "epsilon", -1e-8, "epsilon is -0.00000001; it must be 0 or more"),
        ("adagrad", "lr_decay", -1.0, "lr_decay is -1; it must be 0 or more"),
        ("rmsprop", "alpha", -1.0, "alpha is -1; it must be 0 or more"),
        ("adadelta", "rho", 1.0, "rho is 1; it must be 0 or more and less than 1"),
        ("nadam", "momentum_decay", -1.0, "momentum_decay is -1; it must be 0 or more"),
        ("lars", "nesterov", 1.0, "nesterov is 1; it must be 0, for LARS has none"),
        ("lars", "dampening", 0.5, "dampening is 0.5; it must be 0, for LARS has none"),
        ("lars", "trust_coefficient", -1.0, "trust_coefficient is -1; it must be 0 or more"),
        ("lamb", "beta2", 1.0, "beta2 is 1; it must be 0 or more and less than 1"),
        ("lion", "beta1", 1.0, "beta1 is 1; it must be 0 or more and less than 1"),
    ] {
        let optimizer = registry.optimizer(optimizer).unwrap();
        let h = optimizer.defaults().with(name, value).unwrap();
        let error = optimizer.check(&h).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
        assert_eq!(optimizer.check(&optimizer.defaults()), Ok(()));
    }
    for unused in ["mean", "sum"] {
        assert_eq!(registry.optimizer(unused).unwrap().check(&Hyperparameters::default()), Ok(()));
    }
}

#[test]
#[should_panic(expected = "0 state values do not hold 1 slots of 2")]
fn momentum_without_its_buffer_is_a_bug_of_the_caller() {
    let h = Hyperparameters { momentum: 0.9, ..Hyperparameters::default() };
    let step = Step { hyperparameters: &h, number: 1, contributions: 1, factor: 1.0, tensor: None };
    Sgd::new().apply(&step, &mut [0.0; 2], &[0.0; 2], &mut []);
}

proptest! {
    /// Parameters are the same however a tensor is cut into chunks.
    #[test]
    fn updates_do_not_depend_on_cuts(
        len in 0_usize..2000,
        cut in 0.0_f64..1.0,
        case in 0..cases().len(),
        contributions in 1_u32..9,
        seed: u64,
    ) {
        let case = &cases()[case];
        let optimizer = (case.optimizer)(Isa::best());
        let slots = optimizer.state_slots(&case.hyperparameters);
        let cut = (cut * len as f64) as usize;
        let mut random = Random(seed);
        let mut whole = random.numbers(len);
        let mut pieces = whole.clone();
        let mut state = vec![0.0; slots * len];
        let (mut head, mut tail) = (vec![0.0; slots * cut], vec![0.0; slots * (len - cut)]);
        for number in 1..=STEPS {
            let sum = random.numbers(len);
            let step = Step { hyperparameters: &case.hyperparameters, number, contributions, factor: 1.0, tensor: TENSOR };
            optimizer.apply(&step, &mut whole, &sum, &mut state);
            optimizer.apply(&step, &mut pieces[..cut], &sum[..cut], &mut head);
            optimizer.apply(&step, &mut pieces[cut..], &sum[cut..], &mut tail);
            assert_same(&pieces, &whole, &case.name);
        }
    }
}

#[test]
fn a_factor_scales_the_gradient_before_anything_is_made_of_it() {
    // `sum` returns what it gets: scaled steps have an optimizer. Jobs with LAMB have no scaled steps.
    for case in cases().iter().filter(|case| case.name != "sum" && !case.name.starts_with("lamb")) {
        let optimizer = (case.optimizer)(Isa::best());
        let mut random = Random(5);
        let mut scaled = random.numbers(1000);
        let mut smaller = scaled.clone();
        let mut states = [(); 2].map(|()| vec![0.0; optimizer.state_slots(&case.hyperparameters) * 1000]);
        for number in 1..=STEPS {
            // A power of two, so that both ways are exact.
            let sum = random.numbers(1000);
            let quarter: Vec<f32> = sum.iter().map(|value| value / 4.0).collect();
            let step = Step {
                hyperparameters: &case.hyperparameters,
                number,
                contributions: 3,
                factor: 0.25,
                tensor: None,
            };
            optimizer.apply_to_tensor(&step, &mut scaled, &sum, &mut states[0]);
            optimizer.apply_to_tensor(&Step { factor: 1.0, ..step }, &mut smaller, &quarter, &mut states[1]);
            assert_same(&scaled, &smaller, &case.name);
        }
    }
}

struct Case {
    name: &'static str,
    optimizer: fn(Isa) -> Box<dyn Optimizer>,
    hyperparameters: Hyperparameters,
    reference: Reference,
}

fn cases() -> Vec<Case> {
    let plain = Hyperparameters { learning_rate: 0.1, ..Hyperparameters::default() };
    let decay = Hyperparameters { weight_decay: 0.03, ..plain };
    let momentum = Hyperparameters { momentum: 0.9, ..plain };
    let sgd = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(Sgd::with_isa(isa)),
        hyperparameters,
        reference: reference_sgd,
    };
    let adam = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(Adam::new().with_isa(isa)),
        hyperparameters,
        reference: reference_adam,
    };
    let adamw = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(Adam::decoupled().with_isa(isa)),
        hyperparameters,
        reference: reference_adamw,
    };
    let adagrad = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(Adagrad::with_isa(isa)),
        hyperparameters,
        reference: reference_adagrad,
    };
    let rmsprop = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(RmsProp::with_isa(isa)),
        hyperparameters,
        reference: reference_rmsprop,
    };
    let adadelta = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(Adadelta::with_isa(isa)),
        hyperparameters,
        reference: reference_adadelta,
    };
    let nadam = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(NAdam::with_isa(isa)),
        hyperparameters,
        reference: reference_nadam,
    };
    let lars = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(Lars::with_isa(isa)),
        hyperparameters,
        reference: reference_lars,
    };
    let lamb = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(Lamb::with_isa(isa)),
        hyperparameters,
        reference: reference_lamb,
    };
    let lion = |name, hyperparameters| Case {
        name,
        optimizer: |isa| Box::new(Lion::with_isa(isa)),
        hyperparameters,
        reference: reference_lion,
    };
    let with = |h: Hyperparameters, name: &str| h.with(name, 1.0).unwrap();
    vec![
        Case {
            name: "mean",
            optimizer: |isa| Box::new(Mean::with_isa(isa)),
            hyperparameters: plain,
            reference: |step, _, sum, _| sum * (1.0 / step.contributions as f32),
        },
        Case {
            name: "sum",
            optimizer: |_| Box::new(Undivided::new()),
            hyperparameters: plain,
            reference: |_, _, sum, _| sum,
        },
        sgd("sgd", plain),
        sgd("sgd, decay", decay),
        sgd("sgd, momentum", momentum),
        sgd("sgd, momentum, dampening", Hyperparameters { dampening: 0.4, ..momentum }),
        sgd("sgd, momentum, decay", Hyperparameters { weight_decay: 0.03, ..momentum }),
        sgd("sgd, nesterov", Hyperparameters { nesterov: true, ..momentum }),
        sgd("sgd, nesterov, decay", Hyperparameters { nesterov: true, weight_decay: 0.03, ..momentum }),
        adam("adam", plain),
        adam("adam, decay", decay),
        adam("adam, small beta1", Hyperparameters { beta1: 0.3, ..plain }),
        adam("adam, small beta1, decay", Hyperparameters { beta1: 0.3, ..decay }),
        adamw("adamw", plain),
        adamw("adamw, decay", decay),
        adamw("adamw, small beta1, decay", Hyperparameters { beta1: 0.3, ..decay }),
        sgd("sgd, momentum, maximize", with(momentum, "maximize")),
        adam("adam, amsgrad, small beta1, decay", with(Hyperparameters { beta1: 0.3, ..decay }, "amsgrad")),
        adam("adam, amsgrad, maximize", with(with(plain, "amsgrad"), "maximize")),
        adamw("adamw, amsgrad, decay", with(decay, "amsgrad")),
        adagrad("adagrad", plain),
        adagrad("adagrad, decay, slower", with(with(decay, "lr_decay"), "initial_accumulator")),
        adagrad("adagrad, maximize", with(plain, "maximize")),
        rmsprop("rmsprop", plain),
        rmsprop("rmsprop, decay", decay),
        rmsprop("rmsprop, momentum", momentum),
        rmsprop("rmsprop, epsilon in the root", with(decay, "epsilon_in_root")),
        rmsprop("rmsprop, centered", with(plain, "centered")),
        rmsprop("rmsprop, centered, epsilon in the root, momentum", {
            // Without an epsilon of some size the variance may be below it, and negative.
            with(with(Hyperparameters { epsilon: 1e-2, ..momentum }, "centered"), "epsilon_in_root")
        }),
        rmsprop("rmsprop, centered, small alpha", with(decay, "centered").with("alpha", 0.4).unwrap()),
        rmsprop("rmsprop, centered, momentum, maximize", with(with(momentum, "centered"), "maximize")),
        adadelta("adadelta", plain),
        adadelta("adadelta, decay, small rho", decay.with("rho", 0.3).unwrap()),
        adadelta("adadelta, maximize", with(plain, "maximize")),
        nadam("nadam", plain),
        nadam("nadam, decay, maximize", with(decay, "maximize")),
        nadam(
            "nadam, small beta1, decoupled decay",
            with(Hyperparameters { beta1: 0.3, ..decay }, "decoupled"),
        ),
        lars("lars", plain),
        lars("lars, momentum, decay", Hyperparameters { weight_decay: 0.1, ..momentum }),
        lars(
            "lars, another coefficient, maximize",
            with(momentum.with("trust_coefficient", 0.3).unwrap(), "maximize"),
        ),
        lamb("lamb", plain),
        lamb("lamb, decay, maximize", with(decay, "maximize")),
        lion("lion", plain),
        lion("lion, decay, maximize", with(decay, "maximize")),
    ]
}

fn compare(case: &Case, len: usize, shift: usize) {
    let slots = (case.optimizer)(Isa::baseline()).state_slots(&case.hyperparameters);
    for contributions in [1, 3] {
        let mut random = Random(len as u64);
        let start = random.numbers(len);
        let sums: Vec<Vec<f32>> = (0..STEPS).map(|_| random.numbers(shift + len)).collect();

        let mut want = start.clone();
        let mut wanted_state = vec![[0.0; 3]; len];
        for (number, sum) in (1..).zip(&sums) {
            let step = Step {
                hyperparameters: &case.hyperparameters,
                number,
                contributions,
                factor: 1.0,
                tensor: TENSOR,
            };
            for ((parameter, sum), state) in want.iter_mut().zip(&sum[shift..]).zip(&mut wanted_state) {
                *parameter = (case.reference)(&step, *parameter, *sum, state);
            }
        }
        let wanted_slots: Vec<f32> =
            (0..slots).flat_map(|slot| wanted_state.iter().map(move |state| state[slot])).collect();

        for isa in Isa::available() {
            let optimizer = (case.optimizer)(isa);
            let mut model = start.clone();
            let mut state = vec![0.0; shift + slots * len];
            for (number, sum) in (1..).zip(&sums) {
                let step = Step {
                    hyperparameters: &case.hyperparameters,
                    number,
                    contributions,
                    factor: 1.0,
                    tensor: TENSOR,
                };
                optimizer.apply(&step, &mut model, &sum[shift..], &mut state[shift..]);
            }
            let what = format!("{}, {len} elements, {contributions} contributions, {isa}", case.name);
            assert_same(&model, &want, &what);
            assert_same(&state[shift..], &wanted_slots, &format!("state of {what}"));
        }
    }
}

fn reference_sgd(step: &Step<'_>, parameter: f32, sum: f32, state: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let mut gradient = decayed(step, parameter, sum);
    if h.momentum != 0.0 {
        state[0] = match step.number {
            1 => gradient,
            _ => h.momentum as f32 * state[0] + (1.0 - h.dampening) as f32 * gradient,
        };
        gradient = if h.nesterov { gradient + h.momentum as f32 * state[0] } else { state[0] };
    }
    parameter + -(h.learning_rate as f32) * gradient
}

fn reference_adam(step: &Step<'_>, parameter: f32, sum: f32, state: &mut [f32; 3]) -> f32 {
    let gradient = decayed(step, parameter, sum);
    moments(step, parameter, gradient, state)
}

fn reference_adamw(step: &Step<'_>, parameter: f32, sum: f32, state: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let gradient = mean(step, sum);
    moments(step, parameter * (1.0 - h.learning_rate * h.weight_decay) as f32, gradient, state)
}

fn moments(step: &Step<'_>, parameter: f32, gradient: f32, [m, v, largest]: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let weight = (1.0 - h.beta1) as f32;
    *m = if weight < 0.5 {
        *m + weight * (gradient - *m)
    } else {
        gradient - (gradient - *m) * (1.0 - weight)
    };
    *v = *v * h.beta2 as f32 + (1.0 - h.beta2) as f32 * gradient * gradient;
    let correction = |beta: f64| 1.0 - (0..step.number).fold(1.0, |power, _| power * beta);
    if h.value("amsgrad") == Some(1.0) {
        *largest = if largest.is_nan() || v.is_nan() { f32::NAN } else { largest.max(*v) };
    }
    let second = if h.value("amsgrad") == Some(1.0) { *largest } else { *v };
    let denominator = second.sqrt() / correction(h.beta2).sqrt() as f32 + h.epsilon as f32;
    parameter + (-h.learning_rate / correction(h.beta1)) as f32 * *m / denominator
}

/// The gradient to descend along.
fn mean(step: &Step<'_>, sum: f32) -> f32 {
    let mean = sum * (1.0 / step.contributions as f32);
    if step.hyperparameters.value("maximize") == Some(1.0) { -mean } else { mean }
}

fn decayed(step: &Step<'_>, parameter: f32, sum: f32) -> f32 {
    match step.hyperparameters.weight_decay {
        0.0 => mean(step, sum),
        decay => mean(step, sum) + decay as f32 * parameter,
    }
}

fn reference_adagrad(step: &Step<'_>, parameter: f32, sum: f32, [squares, ..]: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let gradient = decayed(step, parameter, sum);
    if step.number == 1 {
        *squares = h.value("initial_accumulator").unwrap_or(0.0) as f32;
    }
    *squares += gradient * gradient;
    let slowed = 1.0 + (step.number - 1) as f64 * h.value("lr_decay").unwrap_or(0.0);
    parameter + (-h.learning_rate / slowed) as f32 * gradient / (squares.sqrt() + h.epsilon as f32)
}

fn reference_rmsprop(step: &Step<'_>, parameter: f32, sum: f32, state: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let gradient = decayed(step, parameter, sum);
    let alpha = h.value("alpha").unwrap_or(0.99);
    let weight = (1.0 - alpha) as f32;
    let mut rest = &mut state[..];
    let mut next = || {
        let (slot, tail) = std::mem::take(&mut rest).split_first_mut().unwrap();
        rest = tail;
        slot
    };
    let squares = next();
    *squares = alpha as f32 * *squares + weight * gradient * gradient;
    let mut variance = *squares;
    if h.value("centered") == Some(1.0) {
        let average = next();
        let distance = gradient - *average;
        *average = match weight < 0.5 {
            true => *average + weight * distance,
            false => gradient - (1.0 - weight) * distance,
        };
        variance = *squares - *average * *average;
    }
    let buffer = (h.momentum != 0.0).then(&mut next);
    let denominator = match h.value("epsilon_in_root") == Some(1.0) {
        true => (variance + h.epsilon as f32).sqrt(),
        false => variance.sqrt() + h.epsilon as f32,
    };
    match buffer {
        Some(buffer) => {
            *buffer = h.momentum as f32 * *buffer + gradient / denominator;
            parameter + -(h.learning_rate as f32) * *buffer
        }
        None => parameter + -(h.learning_rate as f32) * gradient / denominator,
    }
}

fn reference_adadelta(
    step: &Step<'_>,
    parameter: f32,
    sum: f32,
    [squares, updates, _]: &mut [f32; 3],
) -> f32 {
    let h = step.hyperparameters;
    let gradient = decayed(step, parameter, sum);
    let rho = h.value("rho").unwrap_or(0.9);
    let (kept, new, epsilon) = (rho as f32, (1.0 - rho) as f32, h.epsilon as f32);
    *squares = kept * *squares + new * gradient * gradient;
    let update = (*updates + epsilon).sqrt() / (*squares + epsilon).sqrt() * gradient;
    *updates = kept * *updates + new * update * update;
    parameter + -(h.learning_rate as f32) * update
}

fn reference_nadam(step: &Step<'_>, parameter: f32, sum: f32, [m, v, _]: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let is_decoupled = h.value("decoupled") == Some(1.0);
    let gradient = if is_decoupled { mean(step, sum) } else { decayed(step, parameter, sum) };
    let value = match is_decoupled {
        true => parameter * (1.0 - h.learning_rate * h.weight_decay) as f32,
        false => parameter,
    };
    let weight = (1.0 - h.beta1) as f32;
    *m = match weight < 0.5 {
        true => *m + weight * (gradient - *m),
        false => gradient - (gradient - *m) * (1.0 - weight),
    };
    *v = *v * h.beta2 as f32 + (1.0 - h.beta2) as f32 * gradient * gradient;
    let momentum = |number: u64| h.beta1 * (1.0 - 0.5 * f64::powf(0.96, number as f64 * 0.004));
    let product: f64 = (1..=step.number).map(momentum).product();
    let (now, next) = (momentum(step.number), momentum(step.number + 1));
    let correction = 1.0 - (0..step.number).fold(1.0, |power, _| power * h.beta2);
    let denominator = (*v / correction as f32).sqrt() + h.epsilon as f32;
    let of_gradient = (-h.learning_rate * (1.0 - now) / (1.0 - product)) as f32;
    let of_moment = (-h.learning_rate * next / (1.0 - product * next)) as f32;
    value + of_gradient * gradient / denominator + of_moment * *m / denominator
}

fn reference_lars(step: &Step<'_>, parameter: f32, sum: f32, [buffer, ..]: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let ratio = h.value("trust_coefficient").unwrap_or(0.001) * (3.0 / (1.5 + h.weight_decay * 3.0));
    let rate = (h.learning_rate * ratio) as f32;
    let update = rate * (mean(step, sum) + h.weight_decay as f32 * parameter);
    if h.momentum == 0.0 {
        return parameter - update;
    }
    *buffer = h.momentum as f32 * *buffer + update;
    parameter - *buffer
}

fn reference_lamb(step: &Step<'_>, parameter: f32, sum: f32, [m, v, _]: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let gradient = mean(step, sum);
    *m = h.beta1 as f32 * *m + (1.0 - h.beta1) as f32 * gradient;
    *v = h.beta2 as f32 * *v + (1.0 - h.beta2) as f32 * gradient * gradient;
    let correction = |beta: f64| (1.0 - (0..step.number).fold(1.0, |power, _| power * beta)) as f32;
    let denominator = (*v / correction(h.beta2)).sqrt() + h.epsilon as f32;
    let update = *m / correction(h.beta1) / denominator + h.weight_decay as f32 * parameter;
    parameter - (h.learning_rate * (3.0 / 1.5)) as f32 * update
}

#[test]
fn sums_of_squares_of_chunks_add_up_to_those_of_the_tensor() {
    let h = Hyperparameters { weight_decay: 0.1, momentum: 0.9, ..Hyperparameters::default() };
    let makes: [fn(Isa) -> Box<dyn Optimizer>; 2] =
        [|isa| Box::new(Lars::with_isa(isa)), |isa| Box::new(Lamb::with_isa(isa))];
    for (make, is_lamb) in makes.into_iter().zip([false, true]) {
        for (isa, len) in Isa::available().flat_map(|isa| lengths().map(move |len| (isa, len))) {
            let optimizer = make(isa);
            assert!(optimizer.needs_tensor_norms());
            let mut random = Random(len as u64);
            let (model, sum) = (random.numbers(len), random.numbers(len));
            let slots = optimizer.state_slots(&h);
            let state: Vec<f32> = random.numbers(slots * len).iter().map(|value| value.abs()).collect();
            let step = Step { hyperparameters: &h, number: 3, contributions: 4, factor: 1.0, tensor: None };
            let whole = optimizer.squares(&step, &model, &sum, &state);
            let square = |value: f32| f64::from(value) * f64::from(value);
            let updates = (0..len).map(|at| match is_lamb {
                true => {
                    let mut of = [state[at], state[len + at], 0.0];
                    let step = Step { tensor: TENSOR, ..step };
                    let next = reference_lamb(&step, model[at], sum[at], &mut of);
                    (model[at] - next) / (h.learning_rate * 2.0) as f32
                }
                false => mean(&step, sum[at]),
            });
            let expected = TensorSquares {
                parameters: model.iter().map(|&value| square(value)).sum(),
                update: updates.map(square).sum(),
            };
            // The update of LAMB is found here from two parameters that are close to each other.
            let tolerance = if is_lamb { 1e-2 } else { 1e-12 };
            let is_close = |got: f64, want: f64, tolerance: f64| (got - want).abs() <= tolerance * want;
            assert!(is_close(whole.parameters, expected.parameters, 1e-12), "{isa}, {len}");
            assert!(
                is_close(whole.update, expected.update, tolerance),
                "{isa}, {len}: {whole:?}, {expected:?}"
            );
            let mut parts = TensorSquares::default();
            for range in [0..len / 3, len / 3..len] {
                let state: Vec<f32> =
                    (0..slots).flat_map(|slot| state[slot * len..][range.clone()].to_vec()).collect();
                parts += optimizer.squares(&step, &model[range.clone()], &sum[range], &state);
            }
            assert!(
                is_close(parts.parameters, whole.parameters, 1e-12)
                    && is_close(parts.update, whole.update, 1e-12)
            );
        }
    }
}

#[test]
fn a_tensor_of_zeros_has_the_plain_rate_and_so_has_one_without_a_coefficient() {
    let plain = Hyperparameters { learning_rate: 0.5, ..Hyperparameters::default() };
    let zeros = Some(TensorSquares { parameters: 0.0, update: 1.0 });
    for (h, tensor) in [(plain, zeros), (plain.with("trust_coefficient", 0.0).unwrap(), TENSOR)] {
        let step = Step { hyperparameters: &h, number: 1, contributions: 1, factor: 1.0, tensor };
        let (mut lars, mut lamb) = ([0.0], [0.0]);
        Lars::new().apply(&step, &mut lars, &[1.0], &mut []);
        Lamb::new().apply(&step, &mut lamb, &[1.0], &mut [0.0; 2]);
        assert_eq!((lars, lamb), ([-0.5], [-0.5]));
    }
}

fn reference_lion(step: &Step<'_>, parameter: f32, sum: f32, [momentum, ..]: &mut [f32; 3]) -> f32 {
    let h = step.hyperparameters;
    let gradient = mean(step, sum);
    let direction = h.beta1 as f32 * *momentum + (1.0 - h.beta1) as f32 * gradient;
    let sign = if direction == 0.0 || direction.is_nan() { direction } else { direction.signum() };
    *momentum = h.beta2 as f32 * *momentum + (1.0 - h.beta2) as f32 * gradient;
    parameter * (1.0 - h.learning_rate * h.weight_decay) as f32 - h.learning_rate as f32 * sign
}

#[test]
fn averages_follow_the_parameters_beside_any_state() {
    let momentum = Hyperparameters { momentum: 0.9, learning_rate: 0.1, ..Hyperparameters::default() };
    for decay in [0.0, 0.9, 0.999] {
        let h = momentum.with("ema_decay", decay).unwrap();
        for (isa, len) in Isa::available().flat_map(|isa| lengths().map(move |len| (isa, len))) {
            let optimizer = Averaged::new(Sgd::new()).with_isa(isa);
            assert_eq!((optimizer.state_slots(&momentum), optimizer.state_slots(&h)), (1, 2));
            let mut random = Random(len as u64);
            let mut model = random.numbers(len);
            let (mut plain, mut buffer) = (model.clone(), vec![0.0; len]);
            let (mut state, mut average) = (vec![0.0; 2 * len], vec![0.0; len]);
            for number in 1..=STEPS {
                let sum = random.numbers(len);
                let step = Step { hyperparameters: &h, number, contributions: 2, factor: 1.0, tensor: None };
                optimizer.apply(&step, &mut model, &sum, &mut state);
                Sgd::new().apply(&step, &mut plain, &sum, &mut buffer);
                for (average, parameter) in average.iter_mut().zip(&plain) {
                    *average = match number {
                        1 => *parameter,
                        _ if decay == 0.0 => *parameter,
                        _ => *average + (1.0 - decay) as f32 * (parameter - *average),
                    };
                }
                assert_same(&model, &plain, &format!("parameters, {isa}"));
                assert_same(&state, &[buffer.clone(), average.clone()].concat(), &format!("state, {isa}"));
            }
        }
    }
}

#[test]
fn an_average_that_begins_later_needs_its_slot() {
    let (plain, optimizer) = (Hyperparameters::default(), Averaged::new(Adam::new()));
    let averaged = plain.with("ema_decay", 0.99).unwrap();
    let refused = optimizer.check_change(&plain, &averaged);
    assert_eq!(refused, Err(HyperparameterError::MoreState { needed: 3, allocated: 2 }));
    let refused = optimizer.check(&plain.with("ema_decay", 1.0).unwrap()).unwrap_err().to_string();
    assert!(refused.starts_with("ema_decay is 1; it must be 0 or more and less than 1"), "{refused}");
}
