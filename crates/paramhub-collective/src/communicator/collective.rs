//! The collectives of a communicator, as values: what one call asks for.

use paramhub_core::codec::Dtype;

/// A collective with this rank's operands. Every rank makes the same call, with operands of its own.
#[derive(Debug)]
pub enum Collective<'a> {
    /// Replaces each rank's values by the sum of all ranks' values. All ranks get the same bits. Halves are
    /// added in f32, and may be rounded after each contribution.
    Allreduce {
        /// This rank's values, which become the sum.
        values: &'a mut [u8],
        /// The type of the values.
        dtype: Dtype,
    },
    /// Gives `root`'s bytes to every rank, in place.
    Broadcast {
        /// The bytes.
        bytes: &'a mut [u8],
        /// The rank whose bytes the others get.
        root: u32,
    },
    /// Sums `values`, which has one block for each rank, over all ranks, and gives this rank the sum of its
    /// own block.
    ReduceScatter {
        /// This rank's blocks, in rank order.
        values: &'a [u8],
        /// The sum of this rank's block.
        sum: &'a mut [u8],
        /// The type of the values.
        dtype: Dtype,
    },
    /// Gives every rank's `block` to every rank, in rank order. All blocks have one length.
    Allgather {
        /// This rank's block.
        block: &'a [u8],
        /// The blocks of all ranks.
        all: &'a mut [u8],
    },
    /// Waits until every rank has called it.
    Barrier,
}

impl Collective<'_> {
    /// Its name, as people and timelines have it.
    pub fn kind(&self) -> &'static str {
        match self {
            Collective::Allreduce { .. } => "allreduce",
            Collective::Broadcast { .. } => "broadcast",
            Collective::ReduceScatter { .. } => "reduce-scatter",
            Collective::Allgather { .. } => "allgather",
            Collective::Barrier => "barrier",
        }
    }

    /// Bytes that this rank gives.
    pub fn bytes(&self) -> usize {
        match self {
            Collective::Allreduce { values, .. } => values.len(),
            Collective::Broadcast { bytes, .. } => bytes.len(),
            Collective::ReduceScatter { values, .. } => values.len(),
            Collective::Allgather { block, .. } => block.len(),
            Collective::Barrier => 0,
        }
    }

    /// The type of the values, if they are summed.
    pub fn dtype(&self) -> Option<Dtype> {
        match self {
            Collective::Allreduce { dtype, .. } | Collective::ReduceScatter { dtype, .. } => Some(*dtype),
            Collective::Broadcast { .. } | Collective::Allgather { .. } | Collective::Barrier => None,
        }
    }

    /// The rank whose bytes the others get.
    pub fn root(&self) -> Option<u32> {
        match self {
            Collective::Broadcast { root, .. } => Some(*root),
            _ => None,
        }
    }
}
