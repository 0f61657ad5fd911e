use std::fmt;

/// What a side of a stream can do beyond the frames that every release of its version knows: one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities(pub u32);

impl Capabilities {
    /// Frames are encrypted.
    pub const ENCRYPTED: Capabilities = Capabilities(1);
    /// One frame carries the requests for several chunks.
    pub const BATCHED: Capabilities = Capabilities(2);
    /// Tensors go over a fabric (libfabric), the stream carries the rest.
    pub const FABRIC: Capabilities = Capabilities(4);
    /// The hub keeps a copy of another hub's chunks.
    pub const REPLICA: Capabilities = Capabilities(8);

    const NAMES: [(Capabilities, &str); 4] = [
        (Capabilities::ENCRYPTED, "encrypted"),
        (Capabilities::BATCHED, "batched requests"),
        (Capabilities::FABRIC, "fabric"),
        (Capabilities::REPLICA, "replica"),
    ];

    /// All that either has.
    #[must_use]
    pub fn or(self, other: Capabilities) -> Capabilities {
        Capabilities(self.0 | other.0)
    }

    /// The capabilities that both have.
    #[must_use]
    pub fn and(self, other: Capabilities) -> Capabilities {
        Capabilities(self.0 & other.0)
    }

    /// Those of these that `other` lacks.
    #[must_use]
    pub fn without(self, other: Capabilities) -> Capabilities {
        Capabilities(self.0 & !other.0)
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Names, for messages; bits without a name by their number.
impl fmt::Display for Capabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for bit in (0..u32::BITS).filter(|bit| self.0 & 1 << bit != 0) {
            let name = Capabilities::NAMES.iter().find(|(named, _)| named.0 == 1 << bit);
            f.write_str(separator)?;
            match name {
                Some((_, name)) => f.write_str(name)?,
                None => write!(f, "capability {bit}")?,
            }
            separator = ", ";
        }
        Ok(())
    }
}
