//! What is compared: a design, what its collectives go over, and the order in which a step pushes its keys.

use paramhub_collective::kvstore::StoreKind;
use serde::{Deserialize, Serialize};

/// How a step exchanges.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(in crate::cli::bench) enum Design {
    /// Whoever pushes calls the collectives
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

/// What carries collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(in crate::cli::bench) enum Carrier {
    /// This library's own communicator
    Native,
    /// An installed MPI
    Mpi,
}

/// In which order a step pushes its keys, and pulls them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(in crate::cli::bench) enum KeyOrder {
    /// Keys by their numbers, as MXNet's training loop and the paper's have it
    FrontFirst,
    /// As backpropagation makes the gradients
    LastFirst,
    /// The back keys, which have two thirds of the bytes, as backpropagation makes their gradients, then the others by their
    /// numbers, as the next forward pass wants them
    BackThenFront,
}

/// Of the bytes, what goes while the backward pass runs, which takes two thirds of the computation.
const BACK_SHARE: f64 = 2.0 / 3.0;

/// One way to exchange, with processes of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(in crate::cli::bench) struct Contestant {
    pub(super) design: Design,
    /// None of a hub.
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

    /// In names of files.
    pub(super) fn slug(self) -> String {
        self.label().replace(", ", "-").replace(' ', "-")
    }

    /// The numbers of keys that have so many bytes, in this order.
    pub(super) fn keys(self, bytes: &[usize]) -> Vec<usize> {
        let front = match self {
            KeyOrder::FrontFirst => bytes.len(),
            KeyOrder::LastFirst => 0,
            KeyOrder::BackThenFront => {
                let all: usize = bytes.iter().sum();
                let mut back = 0;
                let count = bytes.iter().rev().take_while(|&&bytes| {
                    back += bytes;
                    back as f64 <= BACK_SHARE * all as f64
                });
                bytes.len() - count.count()
            }
        };
        (front..bytes.len()).rev().chain(0..front).collect()
    }
}

impl Contestant {
    /// All that these name: designs in turn over each carrier, and the hub once.
    pub(super) fn all(designs: &[Design], carriers: &[Carrier]) -> Vec<Contestant> {
        let mut all: Vec<Contestant> = Vec::new();
        for &over in carriers {
            let collective = designs.iter().filter(|design| **design != Design::Hub);
            all.extend(collective.map(|&design| Contestant { design, over: Some(over) }));
        }
        if designs.contains(&Design::Hub) {
            all.push(Contestant { design: Design::Hub, over: None });
        }
        all
    }

    /// For people.
    pub(super) fn label(self) -> String {
        let design = self.design.store();
        self.over.map_or_else(|| design.to_string(), |over| format!("{design} over {}", over.label()))
    }

    /// In names of files.
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
        let all = Contestant::all(&designs, &[Carrier::Native, Carrier::Mpi]);
        let slugs: Vec<String> = all.iter().map(|contestant| contestant.slug()).collect();
        assert_eq!(slugs, ["depcha-native", "funnel-native", "depcha-mpi", "funnel-mpi", "hub"]);
    }

    #[test]
    fn every_order_has_every_key_once() {
        let bytes = [1, 2, 3, 3, 3];
        assert_eq!(KeyOrder::FrontFirst.keys(&bytes), [0, 1, 2, 3, 4]);
        assert_eq!(KeyOrder::LastFirst.keys(&bytes), [4, 3, 2, 1, 0]);
        // 6 of 12 bytes at the back, as 9 would be too many.
        assert_eq!(KeyOrder::BackThenFront.keys(&bytes), [4, 3, 0, 1, 2]);
        assert_eq!(KeyOrder::BackThenFront.keys(&[7]), [0]);
    }
}
