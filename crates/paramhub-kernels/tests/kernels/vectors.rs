//! The optimizers against what torch.optim's formulas give in 64-bit floats (`tests/vectors/generate.py`).

use paramhub_kernels::{Hyperparameters, Registry, Step};
use serde_json::Value;

const VECTORS: &str = include_str!("../vectors/optimizers.json");

/// Allowed difference: a millionth of the value (about eight units in the last place) plus a
/// ten-millionth of the largest one, for values that are small because larger ones cancelled.
const RELATIVE: f64 = 1e-6;
const OF_LARGEST: f64 = 1e-7;

/// Sums are given as this many times the gradient, which is exact.
const CONTRIBUTIONS: u32 = 4;

#[test]
fn optimizers_follow_torch_optim() {
    let registry = Registry::with_builtins();
    let cases: Vec<Value> = serde_json::from_str(VECTORS).unwrap();
    assert!(cases.len() >= 19, "only {} cases", cases.len());
    for case in &cases {
        let name = case["name"].as_str().unwrap();
        let optimizer = registry.optimizer(case["optimizer"].as_str().unwrap()).unwrap();
        let steps = case["steps"].as_array().unwrap();
        let mut model: Vec<f32> = numbers(&case["model"]).map(|value| value as f32).collect();
        let slots = optimizer.state_slots(&hyperparameters(&steps[0]["hyperparameters"]));
        let mut state = vec![0.0; slots * model.len()];
        for (number, given) in (1..).zip(steps) {
            let hyperparameters = hyperparameters(&given["hyperparameters"]);
            optimizer.check(&hyperparameters).unwrap();
            let sum: Vec<f32> =
                numbers(&given["gradient"]).map(|value| value as f32 * CONTRIBUTIONS as f32).collect();
            let step = Step {
                hyperparameters: &hyperparameters,
                number,
                contributions: CONTRIBUTIONS,
                factor: 1.0,
                tensor: None,
            };
            optimizer.apply_to_tensor(&step, &mut model, &sum, &mut state);

            assert_close(&model, &given["model"], &format!("{name}: model after step {number}"));
            let wanted_state = given["state"].as_array().unwrap();
            assert_eq!(wanted_state.len(), slots, "{name}");
            for (slot, want) in wanted_state.iter().enumerate() {
                let got = &state[slot * model.len()..][..model.len()];
                assert_close(got, want, &format!("{name}: slot {slot} after step {number}"));
            }
        }
    }
}

fn hyperparameters(given: &Value) -> Hyperparameters {
    given.as_object().unwrap().iter().fold(Hyperparameters::default(), |h, (name, value)| {
        let value = value.as_f64().or(value.as_bool().map(|set| f64::from(u8::from(set))));
        h.with(name, value.unwrap()).unwrap()
    })
}

fn numbers(list: &Value) -> impl Iterator<Item = f64> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap())
}

#[track_caller]
fn assert_close(got: &[f32], want: &Value, what: &str) {
    let largest = numbers(want).fold(0.0, |largest: f64, value| largest.max(value.abs()));
    assert_eq!(got.len(), numbers(want).count(), "{what}");
    for (at, (got, want)) in got.iter().zip(numbers(want)).enumerate() {
        let difference = (f64::from(*got) - want).abs();
        assert!(
            difference <= RELATIVE * want.abs() + OF_LARGEST * largest,
            "{what}: element {at} is {got:e}, not {want:e} (off by {difference:e})"
        );
    }
}
