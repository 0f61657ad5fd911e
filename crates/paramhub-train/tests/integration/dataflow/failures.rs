//! Trainings that cannot start, and failures that end one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use paramhub_collective::communicator::{Communicator, CommunicatorError, MeshCommunicator};
use paramhub_collective::kvstore::StoreKind;
use paramhub_kernels::{Hyperparameters, Optimizer, Step};
use paramhub_train::trainer::TrainError;

use super::group::{Before, RUN, Run, at_all, digits, local, sgd, store};

#[test]
fn a_training_that_cannot_work_is_refused() {
    let data = digits();
    let store = local(RUN.engine());
    let refused = Run { per_rank: 100, ..RUN }.through(&data, &*store, sgd(), &mut |_| {}).unwrap_err();
    assert!(matches!(refused, TrainError::TooFewExamples { workers: 100, needed: 1600, .. }), "{refused}");
    let refused = Run { batch: 0, ..RUN }.through(&data, &*store, sgd(), &mut |_| {}).unwrap_err();
    assert!(matches!(refused, TrainError::EmptyBatch), "{refused}");

    Run { epochs: 0, ..RUN }.through(&data, &*store, sgd(), &mut |_| {}).unwrap();
    let again = RUN.through(&data, &*store, sgd(), &mut |_| {}).unwrap_err().to_string();
    assert_eq!(again, "key fc1.weight: it has its value already");
}

#[test]
fn a_broken_collective_ends_the_training_of_all_and_leaves_nothing_in_flight() {
    let data = digits();
    for kind in [StoreKind::Funnel, StoreKind::DepCha] {
        let messages = at_all(2, |native| {
            let calls = AtomicU32::new(0);
            let before = move |native: &MeshCommunicator, name: &str| {
                let is_third = name == "fc2.weight" && calls.fetch_add(1, Ordering::Relaxed) == 2;
                if native.rank() == 1 && is_third {
                    native.abort("the cable was pulled");
                    let (name, reason) = (name.to_owned(), "the cable was pulled".to_owned());
                    return Err(CommunicatorError::Misused { name, reason });
                }
                Ok(())
            };
            let store = store(kind, RUN.engine(), Before { inner: native, before });
            let mut steps = 0;
            let error =
                RUN.through(&data, &*store, sgd(), &mut |progress| steps = progress.step).unwrap_err();
            assert_eq!(store.engine().in_flight(), 0, "{kind}");
            assert!(steps < 5, "{kind}: {steps} steps");
            error.to_string()
        });
        for (rank, message) in messages.iter().enumerate() {
            assert!(message.contains("the cable was pulled"), "{kind}, rank {rank}: {message}");
        }
        if kind == StoreKind::DepCha {
            assert!(messages[1].contains("allreduce fc2.weight"), "{}", messages[1]);
        }
    }
}

/// Sgd that fails in its third step.
struct Breaks(Arc<dyn Optimizer>);

impl Optimizer for Breaks {
    fn state_slots(&self, hyperparameters: &Hyperparameters) -> usize {
        self.0.state_slots(hyperparameters)
    }

    fn apply(&self, step: &Step<'_>, model: &mut [f32], sum: &[f32], state: &mut [f32]) {
        assert!(step.number < 3, "out of steps");
        self.0.apply(step, model, sum, state);
    }
}

#[test]
fn an_operation_that_panics_ends_the_training_by_its_name_and_the_others_learn_that_the_rank_is_gone() {
    let data = digits();
    for kind in [StoreKind::Funnel, StoreKind::ConCom, StoreKind::DepCha] {
        let messages = at_all(2, |native| {
            let rank = native.rank();
            let store = store(kind, RUN.engine(), native);
            let optimizer: Arc<dyn Optimizer> = if rank == 1 { Arc::new(Breaks(sgd())) } else { sgd() };
            let error = RUN.through(&data, &*store, optimizer, &mut |_| {}).unwrap_err();
            assert_eq!(store.engine().in_flight(), 0, "{kind}");
            error.to_string()
        });
        // The update of the last layer is pushed first.
        assert!(
            messages[1].contains("update fc3.bias") && messages[1].contains("out of steps"),
            "{kind}: {}",
            messages[1]
        );
        assert!(messages[0].contains("rank 1"), "{kind}: {}", messages[0]);
    }
}
