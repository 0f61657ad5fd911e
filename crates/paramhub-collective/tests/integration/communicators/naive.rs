//! The naive design (MPI collectives in DAGs, section 2.3): every gradient's allreduce is an operation that
//! runs as soon as the gradient is ready. Two branches become ready in different orders at two ranks, and
//! their sums meet the wrong partners.

use std::sync::{Arc, Mutex};

use paramhub_collective::communicator::{CheckedCommunicator, Communicator, CommunicatorError};
use paramhub_collective::engine::{Engine, EngineConfig, Kind};
use paramhub_core::codec::Dtype;

use super::group::at_all;

/// The net of figure 1: layer 2 has two parallel branches, whose gradients do not depend on each other.
/// Chance decides which of them is ready first; here rank 1 has them in the opposite order.
fn naive(communicator: Arc<dyn Communicator>) -> Vec<Result<f32, String>> {
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let gradients: Vec<_> = ["g2", "g3"]
        .into_iter()
        .map(|name| (name, Arc::new(Mutex::new([0.0_f32])), engine.variable()))
        .collect();
    let (is_first_done, first_done) = std::sync::mpsc::channel();
    let late = usize::from(communicator.rank() != 1);
    let mut first_done = Some(first_done);
    for (branch, (name, gradient, variable)) in gradients.iter().enumerate() {
        // The later branch's gradient waits until the other's allreduce has begun.
        let turn = if branch == late { first_done.take() } else { None };
        let gradient = Arc::clone(gradient);
        let make = move || -> Result<(), String> {
            if let Some(turn) = turn {
                turn.recv().map_err(|error| error.to_string())?;
            }
            *gradient.lock().unwrap() = [branch as f32 + 2.0];
            Ok(())
        };
        engine.operation(format!("backward {name}"), Kind::Compute).mutates([variable]).push(make).unwrap();
    }
    // One thread at a time, as MPI requires unless it was started for more.
    let calls = Arc::new(Mutex::new(()));
    for (name, gradient, variable) in &gradients {
        let calls = Arc::clone(&calls);
        let (communicator, gradient) = (Arc::clone(&communicator), Arc::clone(gradient));
        let (name, is_first_done) = (*name, is_first_done.clone());
        let reduce = move || -> Result<(), CommunicatorError> {
            let _one_at_a_time = calls.lock().unwrap();
            // There may be no receiver left.
            let _ = is_first_done.send(());
            let mut wire = gradient.lock().unwrap()[0].to_le_bytes();
            communicator.allreduce(name, &mut wire, Dtype::F32)?;
            *gradient.lock().unwrap() = [f32::from_le_bytes(wire)];
            Ok(())
        };
        engine
            .operation(format!("allreduce {name}"), Kind::Communicate)
            .mutates([variable])
            .push(reduce)
            .unwrap();
    }
    let sums = gradients.iter().map(|(_, gradient, variable)| {
        engine.wait_for_var(variable).map_err(|failure| failure.to_string())?;
        Ok(gradient.lock().unwrap()[0])
    });
    sums.collect()
}

#[test]
fn collectives_that_run_when_their_data_is_ready_meet_in_another_order() {
    let outcomes = at_all(
        2,
        |config| config,
        |native| {
            let checking = Arc::new(CheckedCommunicator::new(native));
            let outcomes = naive(Arc::clone(&checking) as Arc<dyn Communicator>);
            checking.leave().unwrap();
            outcomes
        },
    );
    for outcomes in &outcomes {
        let failed: Vec<&String> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
        assert_eq!(failed.len(), 2, "{outcomes:?}");
        let mismatch = "call 0 of this communicator is allreduce of `g3`, 4 bytes of f32 (its call 0) there, and allreduce of `g2`";
        assert!(
            failed.iter().all(|message| message.contains(mismatch) && message.contains("allreduce g")),
            "{failed:?}"
        );
    }
}

#[test]
fn unchecked_collectives_that_differ_are_summed_without_an_error() {
    let outcomes = at_all(
        2,
        |config| config,
        |native| {
            let native = Arc::new(native);
            let outcomes = naive(Arc::clone(&native) as Arc<dyn Communicator>);
            native.leave().unwrap();
            outcomes
        },
    );
    // 2 and 2, and 3 and 3 belong together.
    for outcomes in &outcomes {
        assert_eq!(*outcomes, [Ok(5.0), Ok(5.0)], "g2 met g3");
    }
}
