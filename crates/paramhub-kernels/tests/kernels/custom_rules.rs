//! A user's own optimizer and aggregator, written outside the crate and used by their names.

use std::sync::Arc;

use paramhub_kernels::{
    Aggregator, Codec, HyperparameterError, Hyperparameters, Optimizer, Registry, RegistryError, Step,
    convert, optimizer::slots_mut,
};

/// Adagrad with a decay of its own called `forget`.
struct Forgetful;

impl Optimizer for Forgetful {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        1
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        let h = step.hyperparameters;
        let (rate, epsilon) = (h.learning_rate as f32, h.epsilon as f32);
        let keep = (1.0 - h.value("forget").unwrap_or(0.0)) as f32;
        let [squares] = slots_mut(state, model.len());
        for ((parameter, total), square) in model.iter_mut().zip(sum).zip(squares) {
            let gradient = total * step.mean_factor();
            *square = keep * *square + gradient * gradient;
            *parameter -= rate * gradient / (square.sqrt() + epsilon);
        }
    }

    fn check(&self, h: &Hyperparameters) -> Result<(), HyperparameterError> {
        match h.value("forget") {
            Some(value) if !(0.0..=1.0).contains(&value) => {
                Err(HyperparameterError::OutOfRange { name: "forget".into(), value, expected: "from 0 to 1" })
            }
            _ => Ok(()),
        }
    }
}

/// The sum of squares, so that the first contribution must not simply be copied.
struct SumOfSquares;

impl Aggregator for SumOfSquares {
    fn assign_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        for (total, value) in sum.iter_mut().zip(contribution) {
            *total = value * value;
        }
    }

    fn add_f32(&self, sum: &mut [f32], contribution: &[f32]) {
        for (total, value) in sum.iter_mut().zip(contribution) {
            *total += value * value;
        }
    }
}

#[test]
fn a_custom_optimizer_runs_by_its_name() {
    let mut registry = Registry::with_builtins();
    registry.register_optimizer("forgetful", Arc::new(Forgetful)).unwrap();
    let optimizer = registry.optimizer("forgetful").unwrap();

    let h = Hyperparameters { learning_rate: 1.0, epsilon: 0.0, ..optimizer.defaults() };
    let h = h.with("forget", 1.0).unwrap();
    optimizer.check(&h).unwrap();
    assert!(
        optimizer.check(&h.with("forget", 2.0).unwrap()).unwrap_err().to_string().contains("forget is 2")
    );

    let mut model = [5.0, 5.0, 5.0];
    let mut state = vec![0.0; optimizer.state_slots(&h) * model.len()];
    for number in 1..=2 {
        let step = Step { hyperparameters: &h, number, contributions: 2, factor: 1.0, tensor: None };
        optimizer.apply(&step, &mut model, &[8.0, -2.0, 0.5], &mut state);
    }
    // It keeps no history, so each step is the gradient's sign.
    assert_eq!(model, [3.0, 7.0, 3.0]);
    assert_eq!(state, [16.0, 1.0, 0.0625]);
}

#[test]
fn a_custom_aggregator_reads_every_kind_of_wire() {
    let mut registry = Registry::with_builtins();
    registry.register_aggregator("squares", Arc::new(SumOfSquares)).unwrap();
    let aggregator = registry.aggregator("squares").unwrap();

    // Longer than the tile in which the default methods decode.
    let values: Vec<f32> = (0..1000).map(|value| (value % 64) as f32 - 20.0).collect();
    let want: Vec<f32> = values.iter().map(|value| 2.0 * value * value).collect();
    for codec in [Codec::F32, Codec::F16, Codec::BF16] {
        let mut wire = vec![0; values.len() * codec.bytes()];
        convert::encode(&values, &mut wire, codec);
        let mut sum = vec![f32::NAN; values.len()];
        aggregator.assign(&mut sum, &wire, codec);
        aggregator.add(&mut sum, &wire, codec);
        assert_eq!(sum, want, "{codec}");
    }
}

#[test]
fn names_are_taken_once_and_unknown_ones_are_answered_with_the_known() {
    let mut registry = Registry::with_builtins();
    let taken = registry.register_optimizer("sgd", Arc::new(Forgetful)).unwrap_err();
    assert_eq!(taken, RegistryError::Duplicate { kind: "optimizer", name: "sgd".into() });
    assert!(registry.register_aggregator("", Arc::new(SumOfSquares)).is_err());
    assert!(registry.register_aggregator("sum", Arc::new(SumOfSquares)).is_err());

    let unknown = registry.optimizer("sophia").err().unwrap();
    assert_eq!(
        unknown.to_string(),
        "no optimizer is called \"sophia\"; there are: adadelta, adagrad, adam, adamw, lamb, lars, lion, mean, nadam, rmsprop, sgd, sum"
    );
    let unknown = registry.aggregator("max").err().unwrap();
    assert_eq!(unknown.to_string(), "no aggregator is called \"max\"; there are: sum");
    assert_eq!(
        registry.optimizer_names().collect::<Vec<_>>(),
        [
            "adadelta", "adagrad", "adam", "adamw", "lamb", "lars", "lion", "mean", "nadam", "rmsprop",
            "sgd", "sum"
        ]
    );
    assert_eq!(registry.aggregator_names().collect::<Vec<_>>(), ["sum"]);
}
