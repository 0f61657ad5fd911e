//! What every rank of a job must agree on before buffers are allocated.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::chunk::{ChunkMap, TooManyChunks};
use crate::codec::{Codec, Dtype};
use crate::consistency::Consistency;
use crate::hyperparameters::Hyperparameters;
use crate::key::KeyTable;
use crate::limits::{CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN};

/// The optimizer a hub runs on each chunk, fused with the sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct OptimizerChoice {
    /// `mean` (no optimizer: workers receive the mean gradient), `sgd`, `adam`, `adamw`, or a name registered at the hub.
    pub name: String,
    /// What holds from step 0; by default the optimizer's own defaults.
    #[serde(default)]
    pub hyperparameters: Option<Hyperparameters>,
}

impl Default for OptimizerChoice {
    fn default() -> Self {
        OptimizerChoice { name: "mean".into(), hyperparameters: None }
    }
}

/// The arguments of InitService on which all ranks must agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The tensors.
    pub keys: KeyTable,
    /// What turns the sum of gradients into new parameters.
    #[serde(default)]
    pub optimizer: OptimizerChoice,
    /// How contributions are combined: `sum`, or a name registered at the hub.
    #[serde(default = "default_aggregator")]
    pub aggregator: String,
    /// When a worker sees the others' contributions.
    #[serde(default)]
    pub consistency: Consistency,
    /// Bytes of an f32 chunk.
    #[serde(default = "default_chunk_bytes")]
    pub chunk_bytes: u32,
    /// How gradients travel; by default as they lie in memory. Parameters always travel in their key's dtype.
    #[serde(default)]
    pub codec: Option<Codec>,
    /// Sum contributions in rank order, whatever the order of arrival, so that results are bit-equal from run to run.
    #[serde(default)]
    pub reproducible: bool,
    /// Fail the job, naming key and rank, when a gradient holds a NaN or an infinity; by default they pass.
    #[serde(default)]
    pub reject_non_finite: bool,
    /// Hold every step until the norm of its whole mean gradient is known and rank 0 has released it with a factor.
    #[serde(default)]
    pub two_phase: bool,
    /// Clip the mean gradient to this global norm, as torch.nn.utils.clip_grad_norm_ does; steps are in two phases then, and
    /// rank 0's worker releases them by itself.
    #[serde(default)]
    pub clip_norm: Option<f64>,
}

fn default_aggregator() -> String {
    "sum".into()
}

fn default_chunk_bytes() -> u32 {
    CHUNK_BYTES_DEFAULT
}

/// Why settings cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SettingsError {
    /// The chunk size is out of bounds or no whole number of elements.
    #[error("chunk size {0} is not a multiple of 4 between {CHUNK_BYTES_MIN} and {CHUNK_BYTES_MAX} bytes")]
    ChunkBytes(u32),
    /// Too many chunks.
    #[error(transparent)]
    TooManyChunks(#[from] TooManyChunks),
    /// Rank order has no meaning where contributions are applied one by one.
    #[error("reproducible needs synchronous consistency, but {0} was asked for")]
    ReproducibleNeedsSynchronous(Consistency),
    /// Only a step that ends for all at once has a norm before its update, and only an optimizer something to hold.
    #[error(
        "a step in two phases, as clipping needs, takes synchronous consistency and an optimizer, but {0} was asked for"
    )]
    TwoPhase(String),
    /// A norm that nothing can be clipped to.
    #[error("clip_norm is {0}; it must be a finite number above 0")]
    ClipNorm(f64),
    /// The ranks disagree.
    #[error(
        "rank {mine} and rank {theirs} disagree on {what}: rank {mine} has {mine_has}, rank {theirs} has {theirs_has}"
    )]
    Disagreement {
        /// The later rank.
        mine: u32,
        /// The rank that came first.
        theirs: u32,
        /// The setting, or the position of the first key that differs.
        what: String,
        /// The later rank's value.
        mine_has: String,
        /// The first rank's value.
        theirs_has: String,
    },
}

impl Settings {
    /// Settings with every default for these keys.
    pub fn new(keys: KeyTable) -> Self {
        Settings {
            keys,
            optimizer: OptimizerChoice::default(),
            aggregator: default_aggregator(),
            consistency: Consistency::default(),
            chunk_bytes: CHUNK_BYTES_DEFAULT,
            codec: None,
            reproducible: false,
            reject_non_finite: false,
            two_phase: false,
            clip_norm: None,
        }
    }

    /// Checks what no single field can.
    pub fn check(&self) -> Result<(), SettingsError> {
        if !self.chunk_bytes.is_multiple_of(4)
            || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&self.chunk_bytes)
        {
            return Err(SettingsError::ChunkBytes(self.chunk_bytes));
        }
        if self.reproducible && self.consistency != Consistency::Synchronous {
            return Err(SettingsError::ReproducibleNeedsSynchronous(self.consistency));
        }
        if let Some(norm) = self.clip_norm.filter(|norm| !norm.is_finite() || *norm <= 0.0) {
            return Err(SettingsError::ClipNorm(norm));
        }
        if self.is_two_phase() && !(self.has_parameters() && self.consistency == Consistency::Synchronous) {
            let asked_for = format!("{} with `{}`", self.consistency, self.optimizer.name);
            return Err(SettingsError::TwoPhase(asked_for));
        }
        ChunkMap::new(&self.keys, self.chunk_bytes)?;
        Ok(())
    }

    /// Whether a complete step waits for its norm and rank 0's release.
    pub fn is_two_phase(&self) -> bool {
        self.two_phase || self.clip_norm.is_some()
    }

    /// The codec of a key's gradients.
    pub fn gradient_codec(&self, dtype: Dtype) -> Codec {
        self.codec.unwrap_or(dtype.codec())
    }

    /// Whether the parameters start from what rank 0 sends; without an optimizer there are none.
    pub fn has_parameters(&self) -> bool {
        self.optimizer.name != "mean"
    }

    /// Refuses `self`, the settings of rank `mine`, where they differ from those of rank `theirs`, naming the first
    /// difference and both sides of it.
    pub fn agree(&self, mine: u32, theirs: u32, other: &Settings) -> Result<(), SettingsError> {
        let disagree = |what: String, mine_has: String, theirs_has: String| {
            Err(SettingsError::Disagreement { mine, theirs, what, mine_has, theirs_has })
        };
        if let Some((index, left, right)) = self.keys.first_difference(&other.keys) {
            let side =
                |key: Option<&crate::key::Key>| key.map_or("no such key".to_string(), ToString::to_string);
            return disagree(format!("key {index}"), side(left), side(right));
        }
        let pairs = [
            ("the optimizer", format!("{:?}", self.optimizer), format!("{:?}", other.optimizer)),
            ("the aggregator", self.aggregator.clone(), other.aggregator.clone()),
            ("the consistency", self.consistency.to_string(), other.consistency.to_string()),
            ("the chunk size", self.chunk_bytes.to_string(), other.chunk_bytes.to_string()),
            ("the codec", format!("{:?}", self.codec), format!("{:?}", other.codec)),
            ("reproducible", self.reproducible.to_string(), other.reproducible.to_string()),
            ("reject_non_finite", self.reject_non_finite.to_string(), other.reject_non_finite.to_string()),
            ("two_phase", self.two_phase.to_string(), other.two_phase.to_string()),
            ("clip_norm", format!("{:?}", self.clip_norm), format!("{:?}", other.clip_norm)),
        ];
        for (what, mine_has, theirs_has) in pairs {
            if mine_has != theirs_has {
                return disagree(what.to_string(), mine_has, theirs_has);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Key;

    fn settings(shape: u64) -> Settings {
        Settings::new(KeyTable::new(vec![Key::new("w", [shape])]).unwrap())
    }

    #[test]
    fn disagreement_names_both_sides() {
        let refused = settings(3).agree(2, 0, &settings(4)).unwrap_err().to_string();
        assert!(refused.contains("rank 2 and rank 0 disagree on key 0"), "{refused}");
        assert!(refused.contains("`w` f32 [3]") && refused.contains("`w` f32 [4]"), "{refused}");
        let reproducible = Settings { reproducible: true, ..settings(3) };
        assert!(reproducible.agree(1, 0, &settings(3)).unwrap_err().to_string().contains("reproducible"));
        assert_eq!(settings(3).agree(1, 0, &settings(3)), Ok(()));
        let clipped = Settings { clip_norm: Some(0.5), ..settings(3) };
        let refused = clipped.agree(1, 0, &settings(3)).unwrap_err().to_string();
        assert!(refused.contains("clip_norm: rank 1 has Some(0.5), rank 0 has None"), "{refused}");
        let two_phase = Settings { two_phase: true, ..settings(3) };
        assert!(two_phase.agree(1, 0, &settings(3)).unwrap_err().to_string().contains("two_phase"));
    }

    #[test]
    fn checks_what_no_single_field_can() {
        assert_eq!(Settings { chunk_bytes: 6, ..settings(1) }.check(), Err(SettingsError::ChunkBytes(6)));
        let stale = Settings { reproducible: true, consistency: Consistency::Asynchronous, ..settings(1) };
        assert!(matches!(stale.check(), Err(SettingsError::ReproducibleNeedsSynchronous(_))));
        assert_eq!(settings(1).check(), Ok(()));
    }

    #[test]
    fn two_phases_take_a_step_that_ends_at_once_and_an_optimizer() {
        let sgd = OptimizerChoice { name: "sgd".into(), hyperparameters: None };
        let good = Settings { optimizer: sgd, clip_norm: Some(1.0), ..settings(1) };
        assert_eq!(good.check(), Ok(()));
        assert!(good.is_two_phase() && !settings(1).is_two_phase());
        for norm in [0.0, -1.0, f64::INFINITY, f64::NAN] {
            let refused = Settings { clip_norm: Some(norm), ..good.clone() }.check();
            assert!(matches!(refused, Err(SettingsError::ClipNorm(_))), "{norm}");
        }
        let consistency = Consistency::BoundedStaleness(1);
        let refused = Settings { consistency, ..good.clone() }.check().unwrap_err().to_string();
        assert!(refused.contains("staleness:1 with `sgd`"), "{refused}");
        let mean = Settings { two_phase: true, ..settings(1) };
        assert!(matches!(mean.check(), Err(SettingsError::TwoPhase(_))));
    }

    #[test]
    fn hyperparameters_left_out_are_the_optimizers_own() {
        let read = |json| serde_json::from_str::<OptimizerChoice>(json).unwrap().hyperparameters;
        assert_eq!(read(r#"{ "name": "adamw" }"#), None);
        assert_eq!(read(r#"{ "name": "adamw", "hyperparameters": {} }"#), Some(Hyperparameters::default()));
        let chosen = OptimizerChoice { name: "sgd".into(), hyperparameters: None };
        assert_eq!(read(&serde_json::to_string(&chosen).unwrap()), None);
    }
}
