use paramhub_kernels::nontemporal::NonTemporal;
use paramhub_kernels::{Adam, Aggregator, Hyperparameters, Mean, Optimizer, Sgd, Step, Sum, Undivided};

use crate::support::{CODECS, Random, assert_same, lengths};

/// Lengths around cache lines, tiles and a chunk; all lengths would take long and find no more.
fn some_lengths() -> impl Iterator<Item = usize> {
    lengths().filter(|len| *len < 40 || *len % 13 == 0 || *len > 250)
}

#[test]
fn streamed_sums_have_the_bits_of_cached_ones_at_every_length_and_offset() {
    let (cached, streamed) = (Sum::new(), NonTemporal::new(Sum::new()));
    let mut random = Random(11);
    for len in some_lengths() {
        for shift in 0..4 {
            let before = random.patterns(shift + len);
            let both = |work: &dyn Fn(&dyn Aggregator, &mut [f32]), what: &str| {
                let (mut expected, mut found) = (before.clone(), before.clone());
                work(&cached, &mut expected[shift..]);
                work(&streamed, &mut found[shift..]);
                assert_same(&found, &expected, &format!("{what}, {len} elements, offset {shift}"));
            };
            for codec in CODECS {
                let wire = random.bytes(shift + len * codec.bytes());
                both(&|rule, sum| rule.assign(sum, &wire[shift..], codec), &format!("assign {codec}"));
                both(&|rule, sum| rule.add(sum, &wire[shift..], codec), &format!("add {codec}"));
            }
            let contribution = random.patterns(len);
            both(&|rule, sum| rule.assign_f32(sum, &contribution), "assign_f32");
            both(&|rule, sum| rule.add_f32(sum, &contribution), "add_f32");
        }
    }
}

#[test]
fn streamed_updates_have_the_bits_of_cached_ones_at_every_length_and_offset() {
    let plain = Hyperparameters { weight_decay: 0.01, ..Hyperparameters::default() };
    let nesterov = Hyperparameters { momentum: 0.9, nesterov: true, ..plain };
    compare("mean", Mean::new(), &plain);
    compare("sum", Undivided::new(), &plain);
    compare("sgd", Sgd::new(), &plain);
    compare("nesterov", Sgd::new(), &nesterov);
    compare("adam", Adam::new(), &plain);
    compare("three slots", ThreeSlots, &plain);
}

fn compare<R: Optimizer + Clone>(name: &str, rule: R, hyperparameters: &Hyperparameters) {
    let streamed = NonTemporal::new(rule.clone());
    assert_eq!(streamed.state_slots(hyperparameters), rule.state_slots(hyperparameters));
    assert_eq!(streamed.defaults(), rule.defaults());
    let mut random = Random(12);
    for len in some_lengths() {
        for shift in 0..4 {
            let mut expected = random.numbers(shift + len);
            let mut found = expected.clone();
            let mut expected_state = vec![0.0; shift + rule.state_slots(hyperparameters) * len];
            let mut found_state = expected_state.clone();
            for number in 1..=3 {
                let sum = random.numbers(len);
                let step = Step { hyperparameters, number, contributions: 3, factor: 1.0, tensor: None };
                rule.apply(&step, &mut expected[shift..], &sum, &mut expected_state[shift..]);
                streamed.apply(&step, &mut found[shift..], &sum, &mut found_state[shift..]);
            }
            assert_same(&found, &expected, &format!("{name}, {len} elements, offset {shift}"));
            assert_same(&found_state, &expected_state, &format!("{name}'s state, {len} elements"));
        }
    }
}

#[test]
fn hyperparameters_that_the_inner_optimizer_refuses_are_refused() {
    let nonsense = Hyperparameters { nesterov: true, ..Hyperparameters::default() };
    assert_eq!(NonTemporal::new(Sgd::new()).check(&nonsense), Sgd::new().check(&nonsense));
    assert!(Sgd::new().check(&nonsense).is_err());
}

/// An optimizer with more state than goes through a tile.
#[derive(Clone)]
struct ThreeSlots;

impl Optimizer for ThreeSlots {
    fn state_slots(&self, _: &Hyperparameters) -> usize {
        3
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        let len = model.len();
        for (at, (parameter, total)) in model.iter_mut().zip(sum).enumerate() {
            for slot in 0..3 {
                state[slot * len + at] += total * step.number as f32;
                *parameter -= state[slot * len + at];
            }
        }
    }
}
