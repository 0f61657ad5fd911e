//! This module defines the scenarios that are compared. A scenario is a design and what carries its
//! collectives. Each runs with several orders in which a step pushes its keys.

use paramhub_collective::kvstore::StoreKind;
use serde::{Deserialize, Serialize};

/// The way in which a step exchanges its gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Design {
    /// The thread that pushes calls the collectives
    Funnel,
    /// Threads of the engine, over several communicators, with barriers
    #[value(name = "concom")]
    ConCom,
    /// Threads of the engine, chained by a dummy variable
    #[value(name = "depcha")]
    DepCha,
    /// No collectives: sums come from a hub
    Hub,
}

/// The system that carries collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Carrier {
    /// This library's own communicator
    Native,
    /// An installed MPI
    Mpi,
}

/// The order in which a step pushes and pulls its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum KeyOrder {
    /// Keys by their numbers, as MXNet's training loop and the paper's have it
    FrontFirst,
    /// As backpropagation makes the gradients
    LastFirst,
    /// The back keys, which have two thirds of the bytes, as backpropagation makes their gradients, then the others by their
    /// numbers, as the next forward pass wants them
    BackThenFront,
}

/// The largest share of the bytes that the back keys may have. The backward pass takes two thirds of the
/// computation, so about this share can be sent while it runs.
const BACK_SHARE: f64 = 2.0 / 3.0;

/// One way to exchange. Each scenario runs in processes of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Scenario {
    pub(super) design: Design,
    /// The carrier; `None` for a hub.
    pub(super) over: Option<Carrier>,
}

impl Design {
    pub(super) fn store(self) -> StoreKind {
        match self {
            Design::Funnel => StoreKind::Funnel,
            Design::ConCom => StoreKind::ConCom,
            Design::DepCha => StoreKind::DepCha,
            Design::Hub => StoreKind::Hub,
        }
    }
}

impl Carrier {
    pub(super) fn label(self) -> &'static str {
        match self {
            Carrier::Native => "native",
            Carrier::Mpi => "MPI",
        }
    }
}

impl KeyOrder {
    pub(super) fn label(self) -> &'static str {
        match self {
            KeyOrder::FrontFirst => "front first",
            KeyOrder::LastFirst => "last first",
            KeyOrder::BackThenFront => "back, then front",
        }
    }

    /// Returns the name that file names contain.
    pub(super) fn slug(self) -> String {
        self.label().replace(", ", "-").replace(' ', "-")
    }

    /// Returns the numbers of all keys in this order. `key_bytes` has the size of each key.
    pub(super) fn keys(self, key_bytes: &[usize]) -> Vec<usize> {
        let front_keys = match self {
            KeyOrder::FrontFirst => key_bytes.len(),
            KeyOrder::LastFirst => 0,
            KeyOrder::BackThenFront => {
                let all_bytes: usize = key_bytes.iter().sum();
                let mut back_bytes = 0;
                let back_keys = key_bytes.iter().rev().take_while(|&&bytes| {
                    back_bytes += bytes;
                    back_bytes as f64 <= BACK_SHARE * all_bytes as f64
                });
                key_bytes.len() - back_keys.count()
            }
        };
        (front_keys..key_bytes.len()).rev().chain(0..front_keys).collect()
    }
}

impl Scenario {
    /// Returns all scenarios of these designs and carriers: each design with collectives over each carrier,
    /// and the hub once.
    pub(super) fn all(designs: &[Design], carriers: &[Carrier]) -> Vec<Scenario> {
        let mut all: Vec<Scenario> = Vec::new();
        for &over in carriers {
            let collective = designs.iter().filter(|design| **design != Design::Hub);
            all.extend(collective.map(|&design| Scenario { design, over: Some(over) }));
        }
        if designs.contains(&Design::Hub) {
            all.push(Scenario { design: Design::Hub, over: None });
        }
        all
    }

    /// Returns the name that tables and figures show.
    pub(super) fn label(self) -> String {
        let design = self.design.store();
        self.over.map_or_else(|| design.to_string(), |over| format!("{design} over {}", over.label()))
    }

    /// Returns the name that file names contain.
    pub(super) fn slug(self) -> String {
        self.label().to_lowercase().replace(" over ", "-")
    }

    pub(super) fn is_by_mpi(self) -> bool {
        self.over == Some(Carrier::Mpi)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hub_is_there_once_whatever_collectives_go_over() {
        let designs = [Design::Hub, Design::DepCha, Design::Funnel];
        let all = Scenario::all(&designs, &[Carrier::Native, Carrier::Mpi]);
        let slugs: Vec<String> = all.iter().map(|scenario| scenario.slug()).collect();
        assert_eq!(slugs, ["depcha-native", "funnel-native", "depcha-mpi", "funnel-mpi", "hub"]);
    }

    #[test]
    fn every_order_has_every_key_once() {
        let bytes = [1, 2, 3, 3, 3];
        assert_eq!(KeyOrder::FrontFirst.keys(&bytes), [0, 1, 2, 3, 4]);
        assert_eq!(KeyOrder::LastFirst.keys(&bytes), [4, 3, 2, 1, 0]);
        // 6 of 12 bytes are at the back, as 9 would be too many.
        assert_eq!(KeyOrder::BackThenFront.keys(&bytes), [4, 3, 0, 1, 2]);
        assert_eq!(KeyOrder::BackThenFront.keys(&[7]), [0]);
    }
}
