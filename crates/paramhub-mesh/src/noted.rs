//! Collectives that take place elsewhere, or in several operations, and are compared as one.

use crate::descriptor::{Collective, Descriptor};
use crate::element::{ElementType, ReduceOp};

/// A collective whose arguments ranks compare, although the mesh does not run it as one operation.
#[derive(Clone, Copy, Debug)]
pub enum Noted<'a> {
    /// An allreduce of `bytes` bytes, for example through a hub.
    AllReduce {
        /// Bytes of each rank's buffer.
        bytes: usize,
        /// The type of the elements.
        element: ElementType,
        /// The operator.
        op: ReduceOp,
    },
    /// A reduction into `root`'s buffer.
    Reduce {
        /// Bytes of each rank's buffer.
        bytes: usize,
        /// The type of the elements.
        element: ElementType,
        /// The operator.
        op: ReduceOp,
        /// The rank that gets the result.
        root: u32,
    },
    /// A broadcast of `root`'s buffer.
    Broadcast {
        /// Bytes of each rank's buffer.
        bytes: usize,
        /// The type of the elements, if ranks are to have the same.
        element: Option<ElementType>,
        /// The rank that has the bytes.
        root: u32,
    },
    /// An allgather of blocks of these lengths, by rank.
    AllGather {
        /// The bytes of each rank's block.
        lengths: &'a [usize],
    },
    /// A reduction of which each rank gets a block of these lengths, by rank.
    ReduceScatter {
        /// The bytes of each rank's block.
        lengths: &'a [usize],
        /// The type of the elements.
        element: ElementType,
        /// The operator.
        op: ReduceOp,
    },
}

impl Noted<'_> {
    /// What ranks compare: the same as for the operation itself.
    pub(crate) fn descriptor(&self) -> Descriptor {
        match *self {
            Noted::AllReduce { bytes, element, op } => Descriptor {
                reduction: Some((element, op)),
                bytes: bytes as u64,
                ..Descriptor::new(Collective::AllReduce)
            },
            Noted::Reduce { bytes, element, op, root } => Descriptor {
                reduction: Some((element, op)),
                root,
                bytes: bytes as u64,
                ..Descriptor::new(Collective::Reduce)
            },
            Noted::Broadcast { bytes, element, root } => {
                Descriptor { element, root, bytes: bytes as u64, ..Descriptor::new(Collective::Broadcast) }
            }
            Noted::AllGather { lengths } => {
                Descriptor::new(Collective::AllGather).with_lengths(lengths.iter().copied())
            }
            Noted::ReduceScatter { lengths, element, op } => {
                let reduction = Some((element, op));
                Descriptor { reduction, ..Descriptor::new(Collective::ReduceScatter) }
                    .with_lengths(lengths.iter().copied())
            }
        }
    }
}
