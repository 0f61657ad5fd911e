//! What cannot be trained, and what ends a training.

use std::sync::atomic::{AtomicU32, Ordering};

use paramhub_collective::communicator::{Communicator, CommunicatorError, Native};
use paramhub_collective::kvstore::StoreKind;
use paramhub_train::trainer::TrainError;

use crate::group::{Before, RUN, Run, at_all, digits, local, sgd, store};

#[test]
fn what_cannot_be_trained_is_refused() {
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
        let told = at_all(2, |native| {
            let calls = AtomicU32::new(0);
            let before = move |native: &Native, name: &str| {
                let is_third = name == "fc2.weight" && calls.fetch_add(1, Ordering::Relaxed) == 2;
                if native.rank() == 1 && is_third {
                    native.abort("the cable was pulled");
                    let (name, reason) = (name.to_owned(), "the cable was pulled".to_owned());
                    return Err(CommunicatorError::Misplaced { name, reason });
                }
                Ok(())
            };
            let store = store(kind, RUN.engine(), Before { inner: native, before });
            let mut steps = 0;
            let told = RUN.through(&data, &*store, sgd(), &mut |progress| steps = progress.step).unwrap_err();
            assert_eq!(store.engine().in_flight(), 0, "{kind}");
            assert!(steps < 5, "{kind}: {steps} steps");
            told.to_string()
        });
        for (rank, told) in told.iter().enumerate() {
            assert!(told.contains("the cable was pulled"), "{kind}, rank {rank}: {told}");
        }
        if kind == StoreKind::DepCha {
            assert!(told[1].contains("allreduce fc2.weight"), "{}", told[1]);
        }
    }
}
