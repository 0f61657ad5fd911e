//! The variants of an exchange, and how each differs from the baseline.

use std::sync::Arc;

use clap::ValueEnum;
use paramhub::limits::CHUNK_BYTES_MAX;
use paramhub::{Aggregator, Optimizer, Registry};
use paramhub_harness::exchange::spec::{Optimizer as Optimized, Spec, Transport};
use paramhub_kernels::nontemporal::{self, NonTemporal};
use serde::{Deserialize, Serialize};

use super::no_op::{NoSum, NoUpdate};
use super::wide::{ThreadGroup, Wide};

/// One way to exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Variant {
    /// The hub as it is: the baseline, which the others are compared with.
    #[default]
    #[value(skip)]
    Normal,
    /// Sums and updates are written past the cache (table 4)
    NonTemporal,
    /// A key, up to 16 MB of it, is one chunk; as many threads as the hub has cores work on one at a time, each on a piece
    /// (section 4.5, "Tall vs. Wide")
    Wide,
    /// A worker has one stream, to one core; cores share all chunks under locks and hand each other the answers
    /// (section 4.5, "Key Affinity")
    WorkerByInterface,
    /// Push, then Pull, instead of the fused PushPull
    PushThenPull,
    /// Streams are encrypted
    Encrypted,
    /// The hub keeps a copy of each step's model, to go back to when a worker is lost
    Copies,
    /// The hub keeps a copy of every twentieth step's model
    #[value(name = "copies-20")]
    CopiesOfTwentieth,
    /// Gradients arrive and are counted, but not summed (numbers are not checked)
    NoAggregator,
    /// Sums are made, but the parameters stay as they are (numbers are not checked)
    NoOptimizer,
    /// Neither aggregator nor optimizer (numbers are not checked)
    Communication,
}

impl Variant {
    /// The variants of this exchange that can run here.
    pub(super) fn all(exchange: &Spec) -> impl Iterator<Item = Variant> {
        Variant::value_variants().iter().copied().filter(|variant| variant.obstacle(exchange).is_none())
    }

    /// Returns the reason why this variant of the exchange cannot run here, if it cannot.
    pub(super) fn obstacle(self, exchange: &Spec) -> Option<&'static str> {
        let is_of_copies = matches!(self, Variant::Copies | Variant::CopiesOfTwentieth);
        if self == Variant::NonTemporal && !nontemporal::IS_SUPPORTED {
            return Some("this processor has no stores that bypass the cache");
        }
        if is_of_copies && exchange.optimizer == Optimized::Mean {
            return Some("the mean has no parameters to copy; choose an --optimizer");
        }
        if !is_of_copies && self != Variant::Normal && exchange.transport != Transport::Tcp {
            return Some("it replaces parts of the path over TCP; choose --transport tcp");
        }
        None
    }

    /// Returns whether the parameters must be those that the kernels compute from the gradients.
    pub(super) fn is_exact(self) -> bool {
        !matches!(self, Variant::NoAggregator | Variant::NoOptimizer | Variant::Communication)
    }

    /// The variant of an exchange.
    pub(crate) fn of_exchange(spec: &Spec) -> anyhow::Result<Variant> {
        match &spec.variant {
            None => Ok(Variant::Normal),
            Some(name) => Variant::from_str(name, false).map_err(anyhow::Error::msg),
        }
    }

    /// The name in a table or a plot.
    pub(super) fn name(self) -> &'static str {
        match self {
            Variant::Normal => "baseline",
            Variant::NonTemporal => "past the cache",
            Variant::Wide => "wide, not tall",
            Variant::WorkerByInterface => "worker by interface",
            Variant::PushThenPull => "Push, then Pull",
            Variant::Encrypted => "encrypted",
            Variant::Copies => "copies of each step",
            Variant::CopiesOfTwentieth => "copies of every 20th step",
            Variant::NoAggregator => "no aggregator",
            Variant::NoOptimizer => "no optimizer",
            Variant::Communication => "communication only",
        }
    }

    /// The specification of this variant.
    pub(super) fn of(self, baseline: &Spec) -> Spec {
        // The baseline is no value of the flag.
        let variant = self.to_possible_value().map(|value| value.get_name().to_owned());
        let is_fused = self != Variant::PushThenPull;
        let mut spec = Spec { variant, is_fused, is_exact: self.is_exact(), ..baseline.clone() };
        spec.encrypt |= self == Variant::Encrypted;
        match self {
            Variant::Copies => spec.rewind_every = Some(1),
            Variant::CopiesOfTwentieth => spec.rewind_every = Some(20),
            _ => {}
        }
        if self == Variant::Wide {
            // Chunks count elements of f32, whatever the key's dtype.
            let longest = spec.keys.keys().iter().filter_map(|key| key.elements()).max().unwrap_or(1);
            let bytes = (longest * 4).next_multiple_of(1 << 10).min(CHUNK_BYTES_MAX.into());
            spec.chunk_bytes = bytes as u32;
        }
        if self != Variant::Normal {
            // The bare streams are the same for all variants.
            spec.is_raw = false;
        }
        spec
    }

    /// The variant's optimizers and aggregators, under the usual names.
    pub(crate) fn registry(self, cores: usize) -> anyhow::Result<Registry> {
        let builtins = Registry::with_builtins();
        let mut registry = Registry::empty();
        let threads = (self == Variant::Wide).then(|| ThreadGroup::new(cores)).transpose()?;
        let sum = builtins.aggregator("sum")?;
        let sum: Arc<dyn Aggregator> = match (self, &threads) {
            (Variant::NonTemporal, _) => Arc::new(NonTemporal::new(sum)),
            (Variant::NoAggregator | Variant::Communication, _) => Arc::new(NoSum),
            (_, Some(threads)) => Arc::new(Wide::new(threads, sum)),
            _ => sum,
        };
        registry.register_aggregator("sum", sum)?;
        for name in builtins.optimizer_names() {
            let update = builtins.optimizer(name)?;
            let update: Arc<dyn Optimizer> = match (self, &threads) {
                (Variant::NonTemporal, _) => Arc::new(NonTemporal::new(update)),
                (Variant::NoOptimizer | Variant::Communication, _) => Arc::new(NoUpdate(update)),
                (_, Some(threads)) => Arc::new(Wide::new(threads, update)),
                _ => update,
            };
            registry.register_optimizer(name, update)?;
        }
        Ok(registry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_knows_what_the_hub_is_asked_for() {
        for &variant in Variant::value_variants() {
            let registry = variant.registry(2).unwrap();
            assert!(
                registry.optimizer_names().eq(Registry::with_builtins().optimizer_names()),
                "{variant:?}"
            );
            assert!(registry.aggregator("sum").is_ok(), "{variant:?}");
        }
    }
}
