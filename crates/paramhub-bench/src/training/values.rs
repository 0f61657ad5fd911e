//! Values of the options of `paramhub train` and of the benchmarks that train.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use paramhub_collective::kvstore::StoreKind;
use paramhub_core::combinations::Feature;
use paramhub_core::settings::has_parameters;
use serde::{Deserialize, Serialize};

/// The optimizer of `paramhub train`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainOptimizer {
    #[default]
    /// SGD with momentum.
    Sgd,
    /// SGD with Nesterov's momentum.
    Nesterov,
    /// Adam.
    Adam,
    /// Adam with decoupled weight decay.
    AdamW,
}

impl TrainOptimizer {
    const ALL: [TrainOptimizer; 4] = [Self::Sgd, Self::Nesterov, Self::Adam, Self::AdamW];

    fn name(self) -> &'static str {
        match self {
            Self::Sgd => "sgd",
            Self::Nesterov => "nesterov",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
        }
    }

    /// The kernel that computes it. Nesterov is a setting of SGD.
    pub fn kernel(self) -> &'static str {
        if self == Self::Nesterov { "sgd" } else { self.name() }
    }

    /// A learning rate with which the bundled networks learn.
    pub fn default_learning_rate(self) -> f64 {
        match self {
            Self::Sgd | Self::Nesterov => 0.02,
            Self::Adam | Self::AdamW => 0.002,
        }
    }
}

impl fmt::Display for TrainOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TrainOptimizer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !has_parameters(text) {
            return Err(format!(
                "`{text}` returns the {text} of the gradients and updates no parameters, so nothing would be learnt: \
                 use sgd, nesterov, adam or adamw"
            ));
        }
        Self::ALL
            .into_iter()
            .find(|optimizer| optimizer.name() == text)
            .ok_or_else(|| format!("unknown optimizer `{text}`: expected sgd, nesterov, adam or adamw"))
    }
}

/// The system that exchanges the gradients of `paramhub train`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ExchangeKind {
    /// Worker processes through a hub.
    #[default]
    Hub,
    /// One process computes every worker's share.
    Local,
    /// Worker processes by collectives, which each worker's main thread calls key by key.
    Funnel,
    /// By collectives over several communicators at once.
    Concom,
    /// By collectives in a chain of dependencies.
    Depcha,
}

impl ExchangeKind {
    /// The kind of key-value store, if the exchange is by collectives.
    pub fn collective(self) -> Option<StoreKind> {
        match self {
            ExchangeKind::Hub | ExchangeKind::Local => None,
            ExchangeKind::Funnel => Some(StoreKind::Funnel),
            ExchangeKind::Concom => Some(StoreKind::ConCom),
            ExchangeKind::Depcha => Some(StoreKind::DepCha),
        }
    }
}

impl ExchangeKind {
    /// The feature of this exchange.
    pub fn feature(self) -> Feature {
        match self.collective() {
            Some(kind) => kind.feature(),
            None if self == ExchangeKind::Local => Feature::ExchangeLocal,
            None => Feature::ExchangeHub,
        }
    }
}

impl fmt::Display for ExchangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("none is skipped");
        f.write_str(value.get_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_optimizer_that_learns_nothing_is_refused_with_a_reason() {
        for text in ["mean", "sum"] {
            let refused = text.parse::<TrainOptimizer>().unwrap_err();
            assert!(
                refused.contains(&format!("the {text} of the gradients and updates no parameters")),
                "{refused}"
            );
        }
        for optimizer in TrainOptimizer::ALL {
            assert_eq!(optimizer.to_string().parse(), Ok(optimizer));
        }
    }
}
