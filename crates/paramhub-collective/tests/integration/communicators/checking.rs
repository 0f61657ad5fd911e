//! Calls that do not match are detected before they are made.

use paramhub_collective::communicator::{
    CheckedCommunicator, Communicator, CommunicatorError, MeshCommunicator,
};
use paramhub_core::codec::Dtype;

use super::group::at_all;

type Outcome = Result<(), CommunicatorError>;

/// Each rank's error of its own calls; asserts that a later call gets the same error.
fn errors_of(
    size: u32,
    calls: impl Fn(&CheckedCommunicator<MeshCommunicator>) -> Outcome + Sync,
) -> Vec<String> {
    at_all(
        size,
        |config| config,
        |native| {
            let checking = CheckedCommunicator::new(native);
            let error = calls(&checking).unwrap_err();
            assert!(matches!(error, CommunicatorError::Mismatch { .. }), "{error}");
            assert_eq!(checking.barrier().unwrap_err().to_string(), error.to_string(), "it stays so");
            checking.leave().unwrap();
            error.to_string()
        },
    )
}

#[test]
fn the_first_call_that_differs_is_named_at_all_ranks() {
    let reduce = |checking: &CheckedCommunicator<MeshCommunicator>, name: &str, elements: usize| {
        checking.allreduce(name, &mut vec![0; 4 * elements], Dtype::F32)
    };
    let order = errors_of(3, |checking| {
        reduce(checking, "first", 10)?;
        let names = if checking.rank() == 2 { ["b", "a"] } else { ["a", "b"] };
        names.iter().try_for_each(|name| reduce(checking, name, 100))
    });
    let expected = "rank 2 does not do what rank 0 does: call 1 of this communicator is allreduce of `b`, 400 bytes of f32 (its call \
                    1) there, and allreduce of `a`, 400 bytes of f32 (its call 1) at rank 0; collectives come in one order at all \
                    ranks";
    assert!(order.iter().all(|message| message == expected), "{order:?}");

    let lengths = errors_of(2, |checking| reduce(checking, "g", 10 + checking.rank() as usize));
    assert!(lengths[0].contains("40 bytes of f32") && lengths[0].contains("44 bytes of f32"), "{lengths:?}");
    let types = errors_of(2, |checking| {
        let dtype = [Dtype::F16, Dtype::BF16][checking.rank() as usize];
        checking.allreduce("g", &mut [0; 4], dtype)
    });
    assert!(types[1].contains("4 bytes of f16") && types[1].contains("4 bytes of bf16"), "{types:?}");
    let kinds = errors_of(2, |checking| match checking.rank() {
        0 => checking.barrier(),
        _ => checking.broadcast("w", &mut [0; 4], 1),
    });
    assert!(
        kinds[0].contains("is broadcast of `w`, 4 bytes from rank 1 (its call 0) there, and barrier"),
        "{kinds:?}"
    );
    let roots = errors_of(2, |checking| checking.broadcast("w", &mut [0; 4], checking.rank()));
    assert!(roots[0].contains("from rank 1") && roots[0].contains("from rank 0"), "{roots:?}");
    // Names that differ only beyond the part that is sent.
    let long = "x".repeat(200);
    let names = errors_of(2, |checking| reduce(checking, &format!("{long}{}", checking.rank()), 1));
    assert!(names[0].contains("rank 1 does not do"), "{names:?}");
}

#[test]
fn calls_that_fit_are_made_in_duplicates_too() {
    at_all(
        3,
        |config| config,
        |native| {
            let checking = CheckedCommunicator::new(native);
            let copy = checking.duplicate().unwrap();
            let communicators: [&dyn Communicator; 2] = [&checking, &*copy];
            for communicator in communicators {
                let mut values = 2.0_f32.to_le_bytes();
                communicator.allreduce("g", &mut values, Dtype::F32).unwrap();
                assert_eq!(f32::from_le_bytes(values), 6.0);
                let mut all = [0; 3];
                communicator.allgather("w", &[communicator.rank() as u8], &mut all).unwrap();
                assert_eq!(all, [0, 1, 2]);
                communicator.barrier().unwrap();
            }
            // The copy has an order of its own, and its own mismatch.
            let outcome = copy.allreduce(if copy.rank() == 1 { "b" } else { "a" }, &mut [0; 4], Dtype::F32);
            assert!(matches!(outcome, Err(CommunicatorError::Mismatch { rank: 1, sequence: 3, .. })));
            checking.barrier().unwrap();
            copy.leave().unwrap();
            checking.leave().unwrap();
        },
    );
}
