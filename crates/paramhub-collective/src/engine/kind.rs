//! The kinds of operations.

use std::fmt;

/// The kind of an operation, which decides which threads run it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// Arithmetic: as many threads as there are processors.
    Compute,
    /// Copies in memory, which would otherwise queue behind arithmetic.
    Copy,
    /// Operations that mostly wait for other processes.
    Communicate,
}

impl Kind {
    pub(super) const ALL: [Kind; 3] = [Kind::Compute, Kind::Copy, Kind::Communicate];

    /// The name of the kind, as in the names of its threads.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Compute => "compute",
            Kind::Copy => "copy",
            Kind::Communicate => "communicate",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
