//! The messages that ranks exchange about their results after a training.

use anyhow::Context;
use paramhub_collective::communicator::Communicator;

use super::parameters::difference;

/// The texts of all ranks, in rank order.
pub(super) fn texts(communicator: &dyn Communicator, own: &str) -> anyhow::Result<Vec<String>> {
    let ranks = communicator.size() as usize;
    let mut lengths = vec![0_u8; 8 * ranks];
    communicator.allgather("lengths", &(own.len() as u64).to_le_bytes(), &mut lengths)?;
    let lengths = lengths.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
    let lengths: Vec<usize> = lengths.map(|length| length as usize).collect();
    // The blocks of an allgather have the same length.
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut block = own.as_bytes().to_vec();
    block.resize(longest, 0);
    let mut blocks = vec![0_u8; longest * ranks];
    communicator.allgather("texts", &block, &mut blocks)?;
    let of_rank = |(rank, length)| {
        let block = &blocks[rank * longest..][..length];
        String::from_utf8(block.to_vec()).with_context(|| format!("rank {rank} sent bytes that are no text"))
    };
    lengths.into_iter().enumerate().map(of_rank).collect()
}

/// Returns rank 0's text at every rank.
pub(super) fn text_of_rank_0(communicator: &dyn Communicator, own: &str) -> anyhow::Result<String> {
    let own = if communicator.rank() == 0 { own } else { "" };
    Ok(texts(communicator, own)?.swap_remove(0))
}

/// The largest difference between this rank's parameters and those of rank 0.
pub(super) fn difference_from_rank_0(
    communicator: &dyn Communicator,
    own: &[Vec<f32>],
) -> anyhow::Result<f64> {
    let mut largest = 0.0_f64;
    for values in own {
        let mut of_rank_0 = values.clone();
        communicator.broadcast("parameters", bytemuck::cast_slice_mut(&mut of_rank_0), 0)?;
        let differences = of_rank_0.iter().zip(values).map(|(&a, &b)| difference(a, b));
        largest = differences.fold(largest, f64::max);
    }
    Ok(largest)
}
