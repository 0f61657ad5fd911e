//! The description of a collective, in a form that ranks can compare.

use std::fmt;

use crate::element::{ElementType, ReduceOp};

/// Bytes of a [`Descriptor`] on the wire.
pub(crate) const DESCRIPTOR_BYTES: usize = 24;

/// A kind of collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Collective {
    Barrier = 1,
    Broadcast = 2,
    Reduce = 3,
    AllReduce = 4,
    AllGather = 5,
    ReduceScatter = 6,
    Gather = 7,
    Scatter = 8,
    AllToAll = 9,
}

impl Collective {
    const ALL: [Collective; 9] = {
        use Collective::*;
        [Barrier, Broadcast, Reduce, AllReduce, AllGather, ReduceScatter, Gather, Scatter, AllToAll]
    };

    const fn name(self) -> &'static str {
        use Collective::*;
        match self {
            Barrier => "barrier",
            Broadcast => "broadcast",
            Reduce => "reduce",
            AllReduce => "allreduce",
            AllGather => "allgather",
            ReduceScatter => "reduce_scatter",
            Gather => "gather",
            Scatter => "scatter",
            AllToAll => "all_to_all",
        }
    }
}

/// Everything about a collective that must be the same on all ranks and that all of them know. What only some
/// know, such as the lengths of an all_to_all, is compared transfer by transfer.
///
/// ```text
/// 0      1         2    3      4      8       16        24
/// +------+---------+----+------+------+-------+---------+
/// | kind | element | op | zero | root | bytes | lengths |
/// | u8   | u8      | u8 | u8   | u32  | u64   | u64     |
/// +------+---------+----+------+------+-------+---------+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    pub(crate) kind: Collective,
    /// The element and operator of a collective that computes.
    pub(crate) reduction: Option<(ElementType, ReduceOp)>,
    /// The element of a broadcast whose caller has given it. Other collectives that do not compute move bytes.
    pub(crate) element: Option<ElementType>,
    /// The root of a collective that has one, else 0.
    pub(crate) root: u32,
    /// The total number of bytes.
    pub(crate) bytes: u64,
    /// A digest of the ranks' lengths, for collectives in which they may differ, and of the ranks' hosts
    /// where those matter.
    pub(crate) lengths: u64,
}

impl Descriptor {
    pub(crate) const fn new(kind: Collective) -> Self {
        Descriptor { kind, reduction: None, element: None, root: 0, bytes: 0, lengths: 0 }
    }

    pub(crate) fn with_lengths(self, lengths: impl Iterator<Item = usize>) -> Self {
        let mut digest = 0xcbf2_9ce4_8422_2325_u64;
        let mut bytes = 0_u64;
        for length in lengths {
            bytes += length as u64;
            digest = digested(digest, length as u64);
        }
        Descriptor { bytes, lengths: digest, ..self }
    }

    /// Called after the lengths are set: adds the hosts to their digest.
    pub(crate) fn with_hosts(self, hosts: &[u32]) -> Self {
        let lengths = hosts.iter().fold(self.lengths, |digest, &host| digested(digest, host.into()));
        Descriptor { lengths, ..self }
    }

    pub(crate) fn encode(&self) -> [u8; DESCRIPTOR_BYTES] {
        let mut wire = [0; DESCRIPTOR_BYTES];
        wire[0] = self.kind as u8;
        if let Some((element, op)) = self.reduction {
            (wire[1], wire[2]) = (element as u8, op as u8);
        } else if let Some(element) = self.element {
            wire[1] = element as u8;
        }
        wire[4..8].copy_from_slice(&self.root.to_le_bytes());
        wire[8..16].copy_from_slice(&self.bytes.to_le_bytes());
        wire[16..24].copy_from_slice(&self.lengths.to_le_bytes());
        wire
    }

    /// `None` if the bytes are no descriptor.
    pub(crate) fn decode(wire: &[u8; DESCRIPTOR_BYTES]) -> Option<Descriptor> {
        let number = |at: usize| u64::from_le_bytes(wire[at..at + 8].try_into().expect("a fixed range"));
        let (element, reduction) = match (wire[1], wire[2]) {
            (0, 0) => (None, None),
            (element, 0) => (Some(ElementType::from_wire(element)?), None),
            (element, op) => (None, Some((ElementType::from_wire(element)?, ReduceOp::from_wire(op)?))),
        };
        Some(Descriptor {
            kind: Collective::ALL.into_iter().find(|kind| *kind as u8 == wire[0])?,
            reduction,
            element,
            root: u32::from_le_bytes(wire[4..8].try_into().expect("a fixed range")),
            bytes: number(8),
            lengths: number(16),
        })
    }
}

/// FNV-1a over whole numbers: it finds mistakes and need not withstand attacks.
const fn digested(digest: u64, number: u64) -> u64 {
    (digest ^ number).wrapping_mul(0x0000_0100_0000_01b3)
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Collective::*;
        f.write_str(self.kind.name())?;
        let mut parts = Vec::new();
        if let Some((element, op)) = self.reduction {
            parts.push(format!("{op} of {element}"));
        }
        parts.extend(self.element.map(|element| element.to_string()));
        if matches!(self.kind, Broadcast | Reduce | AllReduce | AllGather | ReduceScatter) {
            parts.push(format!("{} bytes", self.bytes));
        }
        if matches!(self.kind, AllGather | ReduceScatter) {
            parts.push(format!("lengths {:08x}", self.lengths >> 32));
        }
        if matches!(self.kind, Broadcast | Reduce | Gather | Scatter) {
            parts.push(format!("root {}", self.root));
        }
        if parts.is_empty() { Ok(()) } else { write!(f, "({})", parts.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_descriptor_round_trips_and_reads_well() {
        let sum = Descriptor {
            reduction: Some((ElementType::BF16, ReduceOp::Sum)),
            bytes: 400,
            ..Descriptor::new(Collective::AllReduce)
        };
        assert_eq!(Descriptor::decode(&sum.encode()), Some(sum));
        assert_eq!(sum.to_string(), "allreduce(sum of bf16, 400 bytes)");
        let of_i32 = Descriptor {
            element: Some(ElementType::I32),
            bytes: 400,
            root: 1,
            ..Descriptor::new(Collective::Broadcast)
        };
        assert_eq!(Descriptor::decode(&of_i32.encode()), Some(of_i32));
        assert_eq!(of_i32.to_string(), "broadcast(i32, 400 bytes, root 1)");
        assert_eq!(Descriptor::new(Collective::Barrier).to_string(), "barrier");
    }

    #[test]
    fn the_order_of_lengths_counts() {
        let gather =
            |lengths: [usize; 3]| Descriptor::new(Collective::AllGather).with_lengths(lengths.into_iter());
        assert_ne!(gather([1, 2, 3]), gather([3, 2, 1]));
        assert_eq!(gather([1, 2, 3]).bytes, 6);
    }

    proptest! {
        #[test]
        fn no_bytes_panic_the_decoder(wire: [u8; DESCRIPTOR_BYTES]) {
            let _ = Descriptor::decode(&wire);
        }
    }
}
