//! The requirements on every communicator, for any rank of a group whose ranks all run it. The tests of other
//! crates' communicators include it.

use half::{bf16, f16};
use paramhub_collective::communicator::{Communicator, CommunicatorError};
use paramhub_core::codec::Dtype;

/// Numbers of elements: none, one, fewer than ranks, an odd number, and several pieces.
const COUNTS: [usize; 6] = [0, 1, 3, 1001, 65_537, 600_001];

/// Small whole numbers, whose sums are exact in every type.
fn value(rank: u32, at: usize) -> f32 {
    ((at * 7 + rank as usize * 3) % 11) as f32 - 5.0
}

fn encoded(values: impl Iterator<Item = f32>, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        Dtype::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        Dtype::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
    }
}

fn of_rank(rank: u32, count: usize, dtype: Dtype) -> Vec<u8> {
    encoded((0..count).map(|at| value(rank, at)), dtype)
}

fn sum_of(size: u32, count: usize, dtype: Dtype) -> Vec<u8> {
    encoded((0..count).map(|at| (0..size).map(|rank| value(rank, at)).sum()), dtype)
}

/// All collectives once, in every type and length.
pub(crate) fn exercise(communicator: &dyn Communicator) {
    let (rank, size) = (communicator.rank(), communicator.size());
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        for count in COUNTS {
            let what = format!("{count} of {dtype}, {size} ranks");
            let mut values = of_rank(rank, count, dtype);
            communicator.allreduce("gradient", &mut values, dtype).unwrap();
            assert!(values == sum_of(size, count, dtype), "allreduce of {what}");

            let root = count as u32 % size;
            let mut values = of_rank(rank, count, dtype);
            communicator.broadcast("weight", &mut values, root).unwrap();
            assert!(values == of_rank(root, count, dtype), "broadcast of {what}");

            let all = of_rank(rank, count * size as usize, dtype);
            let mut own = vec![0; count * dtype.bytes()];
            communicator.reduce_scatter("gradient", &all, &mut own, dtype).unwrap();
            let whole = sum_of(size, count * size as usize, dtype);
            assert!(own == whole[rank as usize * own.len()..][..own.len()], "reduce-scatter of {what}");

            let mut gathered = vec![0; count * dtype.bytes() * size as usize];
            communicator.allgather("weight", &of_rank(rank, count, dtype), &mut gathered).unwrap();
            let expected: Vec<u8> = (0..size).flat_map(|rank| of_rank(rank, count, dtype)).collect();
            assert!(gathered == expected, "allgather of {what}");
            communicator.barrier().unwrap();
        }
    }
}

/// Collectives of several communicators at once, which ranks begin in different orders.
pub(crate) fn duplicates(first: &dyn Communicator) {
    let copies = [first.duplicate().unwrap(), first.duplicate().unwrap()];
    assert!(copies.iter().all(|copy| (copy.rank(), copy.size()) == (first.rank(), first.size())));
    // Ranks begin with different communicators, and none waits for another's order.
    std::thread::scope(|scope| {
        let communicators: [&dyn Communicator; 3] = [first, &copies[0], &copies[1]];
        for turn in 0..3 {
            let number = (turn + first.rank() as usize) % 3;
            let communicator = communicators[number];
            scope.spawn(move || {
                for round in 0..20 {
                    let count = 1 + 1000 * number;
                    let mut values = of_rank(communicator.rank(), count, Dtype::F32);
                    communicator.allreduce("gradient", &mut values, Dtype::F32).unwrap();
                    assert!(values == sum_of(first.size(), count, Dtype::F32), "{number}, {round}");
                }
            });
        }
    });
    let copy_of_a_copy = copies[1].duplicate().unwrap();
    exercise(&*copy_of_a_copy);
    copy_of_a_copy.leave().unwrap();
    copies.iter().for_each(|copy| copy.leave().unwrap());
}

/// Blocks that do not fit, in a communicator of two ranks.
pub(crate) fn misused(communicator: &dyn Communicator) {
    let refused = |outcome: Result<(), CommunicatorError>| {
        let error = outcome.unwrap_err();
        assert!(matches!(error, CommunicatorError::Misused { .. }), "{error}");
        error.to_string()
    };
    let message = refused(communicator.allgather("w", &[0; 4], &mut [0; 7]));
    assert_eq!(message, "collective `w`: 2 blocks of 4 bytes each are not 7 bytes");
    let message = refused(communicator.reduce_scatter("g", &[0; 12], &mut [0; 6], Dtype::F32));
    assert_eq!(message, "collective `g`: 2 blocks of f32 of 6 bytes each are not 12 bytes");
    communicator.barrier().unwrap();
}
