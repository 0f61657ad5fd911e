//! The systems that are compared.

use paramhub_core::scheme::{Scheme, SchemeChoice};
use serde::{Deserialize, Serialize};

/// The way in which a training exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum System {
    /// All gradients through the hubs after the backward pass, and all parameters before the next
    Sequential,
    /// Each layer's gradient through the hubs as soon as it exists: wait-free backpropagation
    Wfbp,
    /// The same, with factors where they are smaller
    Poseidon,
    /// The same, with factors for every fully connected layer
    Factors,
    /// Each layer through the hubs as soon as it exists, with fully connected layers' weights in one bit, both ways, and what that
    /// loses fed back: CNTK's 1-bit SGD
    OneBit,
    /// The same, with the factors of every fully connected layer sent to the hub that has it: Project Adam's way
    Adam,
}

impl System {
    pub(super) fn scheme(self) -> SchemeChoice {
        match self {
            System::Sequential | System::Wfbp | System::OneBit => SchemeChoice::default(),
            System::Poseidon => SchemeChoice::Auto,
            System::Factors => SchemeChoice::Only(Scheme::Factors),
            System::Adam => SchemeChoice::Only(Scheme::FactorsToHub),
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            System::Sequential => "sequential",
            System::Wfbp => "WFBP, hub only",
            System::Poseidon => "Poseidon",
            System::Factors => "factors always",
            System::OneBit => "1-bit",
            System::Adam => "Adam",
        }
    }

    /// Returns whether layers are exchanged while others compute.
    pub(super) fn overlaps(self) -> bool {
        self != System::Sequential
    }
}
