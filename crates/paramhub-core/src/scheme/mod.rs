//! This module decides how a layer's gradients are exchanged, and computes what each scheme costs:
//! Poseidon's hybrid communication (sections 3.2 and 4.1).
//!
//! The gradient of a fully connected layer with M outputs and N inputs is a sum of K outer products, one for
//! each sample of the batch, of `u`, the input of the layer (N numbers), and `v`, the gradient of its output
//! (M numbers). From these *factors* another worker can make the gradient itself, and K (M + N) numbers are
//! often far fewer than M N.
//!
//! [`published`] has the paper's own formulas, which count what a machine sends and what it receives
//! together. [`Traffic`] counts the two directions apart, since links are full duplex; it also covers hubs on
//! machines of their own, and encodings that shrink the bytes. If hubs run beside workers and nothing is
//! encoded, both lead to the same choice.
//!
//! ```
//! use paramhub_core::scheme::{Cluster, Layer, Scheme};
//!
//! // The paper's example: 4096 x 4096, 32 samples, 8 machines with a worker and a hub each.
//! let layer = Layer::fully_connected("fc7", 4096, 4096, 32);
//! let cluster = Cluster::beside_workers(8);
//! assert_eq!(cluster.best_scheme(&layer), Scheme::Factors);
//! assert_eq!(cluster.best_scheme(&layer.with_samples(32 * 2048)), Scheme::Hub);
//! ```

mod choice;
mod information_book;
mod layers;
mod plan;
pub mod published;
mod traffic;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use choice::SchemeChoice;
pub use information_book::{
    BestScheme, Found, HubEntry, InformationBook, InformationBookError, Roster, WorkerEntry, addresses,
};
pub use layers::{LayerError, LayerKind, LayerSettings};
pub(crate) use layers::{check, read_layers};
pub use plan::{Plan, PlannedLayer, Why};
pub use traffic::{Cluster, ElementBytes, HubPlace, LinkBytes, Traffic};

/// The way in which a layer is exchanged. `hub`: gradients go to the hubs, parameters come back. `factors`:
/// workers send one another factors, and each makes the gradient and the update itself. `factors-to-hub`:
/// factors go to the one hub that has the whole layer, parameters come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// Gradients go to the hubs, parameters come back: the parameter server.
    Hub,
    /// Workers send one another factors, and each makes the gradient and the update itself: sufficient-factor broadcasting.
    Factors,
    /// Factors go to the one hub that has the whole layer, parameters come back: Project Adam's way.
    FactorsToHub,
}

impl Scheme {
    /// All schemes; of two that cost the same, the first one is preferred.
    pub const ALL: [Scheme; 3] = [Scheme::Hub, Scheme::Factors, Scheme::FactorsToHub];

    /// The name that users write.
    pub fn name(self) -> &'static str {
        match self {
            Scheme::Hub => "hub",
            Scheme::Factors => "factors",
            Scheme::FactorsToHub => "factors-to-hub",
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scheme {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Scheme::ALL.into_iter().find(|scheme| scheme.name() == text);
        named.ok_or_else(|| format!("unknown scheme `{text}`: expected hub, factors or factors-to-hub"))
    }
}

/// The kind of computation of a layer, as far as the form of its gradient depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case", tag = "type")]
pub enum LayerType {
    /// A matrix of `outputs` times `inputs` that is multiplied with each of `samples` vectors in a step: the
    /// batch, or in a model of sequences the batch times their length.
    FullyConnected {
        /// M.
        outputs: u64,
        /// N.
        inputs: u64,
        /// K, for one worker.
        samples: u64,
        /// `true` if the layer adds a vector of `outputs` numbers; its gradient follows from the factors.
        has_bias: bool,
    },
    /// Any other layer; its gradient has no factors.
    Other {
        /// Number of its parameters.
        parameters: u64,
    },
}

/// A layer, whose parameters are exchanged together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Layer {
    /// The layer's name in the model.
    pub name: String,
    /// Its kind of computation.
    #[serde(flatten)]
    pub kind: LayerType,
}

impl Layer {
    /// A fully connected layer of M outputs, N inputs and K samples, without a bias.
    pub fn fully_connected(name: &str, outputs: u64, inputs: u64, samples: u64) -> Layer {
        let kind = LayerType::FullyConnected { outputs, inputs, samples, has_bias: false };
        Layer { name: name.to_owned(), kind }
    }

    /// A layer whose gradient has no factors.
    pub fn other(name: &str, parameters: u64) -> Layer {
        Layer { name: name.to_owned(), kind: LayerType::Other { parameters } }
    }

    /// The layer with another number of samples; unchanged if it has no factors.
    #[must_use]
    pub fn with_samples(&self, samples: u64) -> Layer {
        let mut layer = self.clone();
        if let LayerType::FullyConnected { samples: its, .. } = &mut layer.kind {
            *its = samples;
        }
        layer
    }

    /// Number of parameters, with the bias.
    pub fn parameters(&self) -> u64 {
        match self.kind {
            LayerType::FullyConnected { outputs, inputs, has_bias, .. } => {
                outputs * inputs + if has_bias { outputs } else { 0 }
            }
            LayerType::Other { parameters } => parameters,
        }
    }

    /// Returns how many numbers one worker's factors have; `None` if the layer has none.
    pub fn factors(&self) -> Option<u64> {
        match self.kind {
            LayerType::FullyConnected { outputs, inputs, samples, .. } => {
                Some(samples.saturating_mul(outputs.saturating_add(inputs)))
            }
            LayerType::Other { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_survive_text() {
        for scheme in Scheme::ALL {
            assert_eq!(scheme.to_string().parse(), Ok(scheme));
            assert_eq!(serde_json::to_value(scheme).unwrap(), scheme.name());
        }
        assert!("ps".parse::<Scheme>().unwrap_err().contains("`ps`: expected hub, factors"));
    }

    #[test]
    fn a_bias_travels_with_its_layer() {
        let layer = Layer {
            name: "fc".into(),
            kind: LayerType::FullyConnected { outputs: 10, inputs: 30, samples: 4, has_bias: true },
        };
        assert_eq!((layer.parameters(), layer.factors()), (310, Some(160)));
        assert_eq!(Layer::other("conv", 7).factors(), None);
    }
}
