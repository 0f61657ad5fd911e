//! The settings on which every rank of a job must agree before buffers are allocated.

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

use crate::chunk::{ChunkMap, TooManyChunks};
use crate::codec::Codec;
use crate::combinations::{Conflict, Features};
use crate::consistency::Consistency;
use crate::hyperparameters::Hyperparameters;
use crate::key::{Key, KeyTable};
use crate::limits::{CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, GROUPS_MAX};
use crate::scheme::{self, LayerError, LayerSettings, SchemeChoice};
use crate::wire::{Norm, Tensors};

/// The optimizers that need the norms of whole tensors.
const LARS: &str = "lars";
const LAMB: &str = "lamb";

/// The optimizer that a hub runs on each chunk, fused with the sum.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct OptimizerChoice {
    /// `mean` or `sum` (no optimizer: workers receive the mean or the sum of the gradients), `sgd`, `adam`, `adamw`,
    /// `adagrad`, `rmsprop`, `adadelta`, `nadam`, `lion`, `lars`, `lamb`, or a name registered at the hub.
    pub name: String,
    /// The hyperparameters of group 0 from step 0 on; by default the optimizer's own defaults. A field that is
    /// left out of the object has the common default, not the optimizer's.
    #[serde(default)]
    pub hyperparameters: Option<Hyperparameters>,
    /// The hyperparameters of group 1, of group 2, and so on, from step 0 on.
    #[serde(default, deserialize_with = "read_groups")]
    pub groups: Vec<Hyperparameters>,
}

impl OptimizerChoice {
    /// An optimizer by its name, with its own defaults and one group.
    pub fn named(name: impl Into<String>) -> Self {
        OptimizerChoice { name: name.into(), hyperparameters: None, groups: Vec::new() }
    }

    /// The hyperparameters of each group at step 0, in the order of the groups' numbers; `defaults` are the
    /// optimizer's own.
    pub fn of_groups(&self, defaults: Hyperparameters) -> Vec<Hyperparameters> {
        let first = self.hyperparameters.unwrap_or(defaults);
        [first].into_iter().chain(self.groups.iter().copied()).collect()
    }
}

impl Default for OptimizerChoice {
    fn default() -> Self {
        OptimizerChoice::named("mean")
    }
}

/// The arguments of InitService on which all ranks must agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The tensors.
    pub keys: KeyTable,
    /// The optimizer that turns the sum of gradients into new parameters.
    #[serde(default)]
    pub optimizer: OptimizerChoice,
    /// The way in which contributions are combined: `sum`, or a name registered at the hub.
    #[serde(default = "default_aggregator")]
    pub aggregator: String,
    /// The rule for when a worker sees the contributions of others.
    #[serde(default)]
    pub consistency: Consistency,
    /// Bytes of an f32 chunk: a multiple of 4, 1 KiB to 16 MiB; 32 KiB by default.
    #[serde(default = "default_chunk_bytes")]
    pub chunk_bytes: u32,
    /// The codec of gradients; by default that of their dtype. Parameters travel in their key's dtype.
    ///
    /// A quantised codec sends a key in fewer bits both ways, with error feedback: see
    /// docs/decisions/quantisation.md. int8 is for all keys. one-bit and two-bit are for the weights of fully
    /// connected layers: as the job's codec they apply to the keys of two dimensions only, and the others
    /// travel in their dtype. Any key may name a codec for itself.
    #[serde(default)]
    pub codec: Option<Codec>,
    /// Sum contributions in rank order, whatever the order of arrival, so that results are bit-equal from run
    /// to run. Needs synchronous consistency.
    #[serde(default)]
    pub reproducible: bool,
    /// Fail the job, naming key and rank, when a gradient has a NaN or an infinity; by default they pass.
    #[serde(default)]
    pub reject_non_finite: bool,
    /// Place tensors back to back in shared memory, so that neighbours in the table can be handled as one; by
    /// default each starts at the alignment that suits the processor.
    #[serde(default)]
    pub packed: bool,
    /// Hold every step until the norm of its whole mean gradient is known and rank 0 has released it with a
    /// factor. Needs synchronous consistency and an optimizer.
    #[serde(default)]
    pub two_phase: bool,
    /// Clip the mean gradient to this global norm, a finite number above 0, as
    /// torch.nn.utils.clip_grad_norm_ does. Steps then have two phases, and rank 0's worker releases them by
    /// itself.
    #[serde(default)]
    pub clip_norm: Option<f64>,
    /// The scheme of layers without a choice of their own: `auto`, `hub` (the default), `factors` or
    /// `factors-to-hub`. Layers without factors always go through the hubs.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub scheme: SchemeChoice,
    /// The keys of each layer, at most 65,536 layers. A key that is in no layer is a layer of its own, without
    /// factors.
    #[serde(default, deserialize_with = "scheme::read_layers", skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerSettings>,
}

/// Reads no more groups than a job may have: a group takes a hundred times as many bytes as its shortest
/// text.
fn read_groups<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Hyperparameters>, D::Error> {
    struct Groups;

    impl<'de> Visitor<'de> for Groups {
        type Value = Vec<Hyperparameters>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "the hyperparameters of up to {} groups", GROUPS_MAX - 1)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut groups = Vec::new();
            while let Some(group) = list.next_element()? {
                groups.push(group);
                if groups.len() == GROUPS_MAX {
                    return Err(A::Error::custom(SettingsError::TooManyGroups(1 + groups.len())));
                }
            }
            Ok(groups)
        }
    }

    deserializer.deserialize_seq(Groups)
}

/// Returns whether an optimizer of this name updates parameters. `mean` and `sum` do not: their answers
/// follow from the step's gradients alone.
pub fn has_parameters(optimizer: &str) -> bool {
    !matches!(optimizer, "mean" | "sum")
}

/// Returns whether workers have the optimizer of this name, too; other optimizers are registered at hubs
/// only.
pub fn is_built_in(optimizer: &str) -> bool {
    matches!(
        optimizer,
        "mean"
            | "sum"
            | "sgd"
            | "adam"
            | "adamw"
            | "adagrad"
            | "rmsprop"
            | "adadelta"
            | "nadam"
            | "lion"
            | LARS
            | LAMB
    )
}

/// Returns whether an optimizer of this name is a built-in one that needs the norms of whole tensors, so that a step updates no
/// key before all keys have been pushed to it.
pub fn needs_tensor_norms(optimizer: &str) -> bool {
    matches!(optimizer, LARS | LAMB)
}

fn default_aggregator() -> String {
    "sum".into()
}

fn default_chunk_bytes() -> u32 {
    CHUNK_BYTES_DEFAULT
}

/// The reason why settings cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SettingsError {
    /// A chunk size that is out of bounds or not a whole number of elements.
    #[error("chunk size {0} is not a multiple of 4 between {CHUNK_BYTES_MIN} and {CHUNK_BYTES_MAX} bytes")]
    ChunkBytes(u32),
    /// A key table that makes too many chunks.
    #[error(transparent)]
    TooManyChunks(#[from] TooManyChunks),
    /// More groups than a job may have.
    #[error("the optimizer has {0} groups or more, but a job may have {GROUPS_MAX}")]
    TooManyGroups(usize),
    /// A key is in a group without hyperparameters.
    #[error(
        "key `{key}` is in group {group}, but the optimizer has {groups} {}, counted from 0: give it the hyperparameters of the others",
        if *.groups == 1 { "group" } else { "groups" }
    )]
    Group {
        /// The key.
        key: String,
        /// Its group.
        group: u16,
        /// Groups that have hyperparameters.
        groups: usize,
    },
    /// Settings that do not combine.
    #[error(transparent)]
    Combination(#[from] Conflict),
    /// Layers that cannot be used.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A norm to which nothing can be clipped.
    #[error("clip_norm is {0}; it must be a finite number above 0")]
    ClipNorm(f64),
    /// The norms of all tensors do not fit a frame.
    #[error(
        "an optimizer that needs the norms of tensors takes at most {most} keys with chunks of this size, not {keys}: give a larger \
         chunk_bytes"
    )]
    TensorNorms {
        /// The number of keys.
        keys: usize,
        /// The most that fit.
        most: usize,
    },
    /// Gradients that are scaled after LAMB has taken the norm of its update.
    #[error(
        "lamb takes the norms of its updates before the hub could clip or scale the gradients: leave clip_norm (max_grad_norm) and \
         two_phase (grad_scaler) out"
    )]
    ScaledLamb,
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
    /// Settings for these keys, with all defaults.
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
            packed: false,
            two_phase: false,
            clip_norm: None,
            scheme: SchemeChoice::default(),
            layers: Vec::new(),
        }
    }

    /// Checks the conditions that involve several fields.
    pub fn check(&self) -> Result<(), SettingsError> {
        if !self.chunk_bytes.is_multiple_of(4)
            || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&self.chunk_bytes)
        {
            return Err(SettingsError::ChunkBytes(self.chunk_bytes));
        }
        let groups = self.groups();
        if groups > GROUPS_MAX {
            return Err(SettingsError::TooManyGroups(groups));
        }
        if let Some(key) = self.keys.keys().iter().find(|key| usize::from(key.group) >= groups) {
            return Err(SettingsError::Group { key: key.name.clone(), group: key.group, groups });
        }
        if self.needs_tensor_norms() {
            self.check_tensor_norms()?;
            if self.optimizer.name == LAMB && (self.two_phase || self.clip_norm.is_some()) {
                return Err(SettingsError::ScaledLamb);
            }
        }
        if let Some(norm) = self.clip_norm.filter(|norm| !norm.is_finite() || *norm <= 0.0) {
            return Err(SettingsError::ClipNorm(norm));
        }
        self.check_with(Features::NONE)?;
        scheme::check(self)?;
        ChunkMap::count(&self.keys, self.chunk_bytes)?;
        Ok(())
    }

    /// Checks that the norms of all tensors fit a frame, for an optimizer that needs them. That of a registered one is checked by
    /// the hub.
    pub fn check_tensor_norms(&self) -> Result<(), SettingsError> {
        let most = (self.chunk_bytes as usize).saturating_sub(Norm::BYTES) / Tensors::BYTES_EACH;
        match self.keys.len() {
            keys if keys > most => Err(SettingsError::TensorNorms { keys, most }),
            _ => Ok(()),
        }
    }

    /// The quantised keys, each with its codec.
    pub(crate) fn quantised_keys(&self) -> impl Iterator<Item = (&Key, Codec)> {
        let keys = self.keys.keys().iter().map(|key| (key, self.codec_of(key)));
        keys.filter(|(_, codec)| codec.is_quantised())
    }

    /// Number of groups of keys, at least one; some may have no key.
    pub fn groups(&self) -> usize {
        1 + self.optimizer.groups.len()
    }

    /// Returns whether a complete step waits for its norm and rank 0's release.
    pub fn is_two_phase(&self) -> bool {
        self.two_phase || self.releases_by_itself()
    }

    /// Returns whether rank 0's worker releases held steps without the program.
    pub fn releases_by_itself(&self) -> bool {
        self.clip_norm.is_some() || self.needs_tensor_norms() && !self.two_phase
    }

    fn needs_tensor_norms(&self) -> bool {
        needs_tensor_norms(&self.optimizer.name)
    }

    /// The codec of a key's gradients: its own; else the job's, if that applies to such keys; else that of
    /// its dtype.
    pub fn codec_of(&self, key: &Key) -> Codec {
        let is_for = |codec: &Codec| codec.is_for_shape(&key.shape);
        key.codec.or(self.codec.filter(is_for)).unwrap_or(key.dtype.codec())
    }

    /// Returns whether any key is quantised. Through memory that a worker shares with a hub such keys go in their own type: there
    /// are no bytes to save.
    pub fn quantises(&self) -> bool {
        self.keys.keys().iter().any(|key| self.codec_of(key).is_quantised())
    }

    /// Returns whether there are parameters, which rank 0 initialises; without an optimizer there are none.
    pub fn has_parameters(&self) -> bool {
        has_parameters(&self.optimizer.name)
    }

    /// Refuses `self`, the settings of rank `mine`, if they differ from those of rank `theirs`. The error
    /// names the first difference and both of its sides.
    pub fn agree(&self, mine: u32, theirs: u32, other: &Settings) -> Result<(), SettingsError> {
        let disagree = |what: String, mine_has: String, theirs_has: String| {
            Err(SettingsError::Disagreement { mine, theirs, what, mine_has, theirs_has })
        };
        if let Some((index, left, right)) = self.keys.first_difference(&other.keys) {
            let side =
                |key: Option<&crate::key::Key>| key.map_or("no such key".to_string(), ToString::to_string);
            return disagree(format!("key {index}"), side(left), side(right));
        }
        let (mine_chose, theirs_chose) = (&self.optimizer, &other.optimizer);
        let first = |chosen: &OptimizerChoice| {
            chosen.hyperparameters.map_or("the optimizer's own".into(), |own| format!("{own:?}"))
        };
        let pairs = [
            ("the optimizer", mine_chose.name.clone(), theirs_chose.name.clone()),
            ("the hyperparameters", first(mine_chose), first(theirs_chose)),
            ("the number of groups", self.groups().to_string(), other.groups().to_string()),
            ("the aggregator", self.aggregator.clone(), other.aggregator.clone()),
            ("the consistency", self.consistency.to_string(), other.consistency.to_string()),
            ("the chunk size", self.chunk_bytes.to_string(), other.chunk_bytes.to_string()),
            ("the codec", format!("{:?}", self.codec), format!("{:?}", other.codec)),
            ("reproducible", self.reproducible.to_string(), other.reproducible.to_string()),
            ("reject_non_finite", self.reject_non_finite.to_string(), other.reject_non_finite.to_string()),
            ("packed", self.packed.to_string(), other.packed.to_string()),
            ("two_phase", self.two_phase.to_string(), other.two_phase.to_string()),
            ("clip_norm", format!("{:?}", self.clip_norm), format!("{:?}", other.clip_norm)),
            ("the scheme", self.scheme.to_string(), other.scheme.to_string()),
        ];
        for (what, mine_has, theirs_has) in pairs {
            if mine_has != theirs_has {
                return disagree(what.to_string(), mine_has, theirs_has);
            }
        }
        for (group, (left, right)) in (1..).zip(mine_chose.groups.iter().zip(&theirs_chose.groups)) {
            let (left, right) = (format!("{left:?}"), format!("{right:?}"));
            if left != right {
                return disagree(format!("the hyperparameters of group {group}"), left, right);
            }
        }
        for index in 0..self.layers.len().max(other.layers.len()) {
            let (left, right) = (self.layers.get(index), other.layers.get(index));
            if left != right {
                let side = |layer: Option<&LayerSettings>| {
                    layer.map_or("no such layer".to_string(), ToString::to_string)
                };
                return disagree(format!("layer {index}"), side(left), side(right));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Dtype;
    use crate::key::Key;

    fn settings(shape: u64) -> Settings {
        Settings::new(KeyTable::new(vec![Key::new("w", [shape])]).unwrap())
    }

    #[test]
    fn norms_of_tensors_need_two_phases_and_must_fit_a_frame() {
        let of = |name: &str, keys: usize| Settings {
            optimizer: OptimizerChoice::named(name),
            ..Settings::new(
                KeyTable::new((0..keys).map(|key| Key::new(format!("{key}"), [1])).collect()).unwrap(),
            )
        };
        for name in ["lars", "lamb"] {
            let settings = of(name, 2047);
            settings.check().unwrap();
            assert!(settings.is_two_phase() && settings.releases_by_itself());
            let refused = of(name, 2048).check().unwrap_err().to_string();
            assert!(refused.contains("at most 2047 keys") && refused.contains("not 2048"), "{refused}");
        }
        assert!(!of("sgd", 1).is_two_phase());
        let scaled = Settings { two_phase: true, ..of("lars", 1) };
        scaled.check().unwrap();
        assert!(!scaled.releases_by_itself(), "the program releases");
        for scaled in [
            Settings { two_phase: true, ..of("lamb", 1) },
            Settings { clip_norm: Some(1.0), ..of("lamb", 1) },
        ] {
            let refused = scaled.check().unwrap_err().to_string();
            assert!(
                refused.contains("leave clip_norm (max_grad_norm) and two_phase (grad_scaler) out"),
                "{refused}"
            );
        }
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

    fn grouped(rates: &[f64]) -> Settings {
        let groups =
            rates.iter().map(|&learning_rate| Hyperparameters { learning_rate, ..Default::default() });
        let optimizer = OptimizerChoice { groups: groups.collect(), ..OptimizerChoice::named("sgd") };
        let keys = vec![Key::new("w", [3]), Key::new("b", [1]).in_group(2)];
        Settings { optimizer, ..Settings::new(KeyTable::new(keys).unwrap()) }
    }

    #[test]
    fn every_keys_group_has_hyperparameters() {
        assert_eq!(grouped(&[0.1, 0.2]).check(), Ok(()));
        let refused = grouped(&[0.1]).check().unwrap_err().to_string();
        assert!(refused.starts_with("key `b` is in group 2, but the optimizer has 2 groups"), "{refused}");
        assert!(grouped(&[]).check().unwrap_err().to_string().contains("has 1 group, counted from 0"));
        assert_eq!(grouped(&[0.1; GROUPS_MAX - 1]).check(), Ok(()));
        assert_eq!(grouped(&[0.1; GROUPS_MAX]).check(), Err(SettingsError::TooManyGroups(GROUPS_MAX + 1)));
        let read = |groups: usize| {
            let list = vec!["{}"; groups].join(",");
            serde_json::from_str::<OptimizerChoice>(&format!(r#"{{"name":"sgd","groups":[{list}]}}"#))
        };
        assert_eq!(read(GROUPS_MAX - 1).unwrap().groups.len(), GROUPS_MAX - 1);
        let refused = read(GROUPS_MAX).unwrap_err().to_string();
        assert!(
            refused.starts_with("the optimizer has 1025 groups or more, but a job may have 1024"),
            "{refused}"
        );
        assert!(read(0).unwrap().groups.is_empty());
        let own = Hyperparameters { momentum: 0.5, ..Default::default() };
        let of_groups = grouped(&[0.1, 0.2]).optimizer.of_groups(own);
        assert_eq!(of_groups[0], own);
        assert_eq!([1, 2].map(|group| of_groups[group].learning_rate), [0.1, 0.2]);
    }

    #[test]
    fn disagreement_on_groups_names_the_group() {
        let disagree = |left: &Settings, right: &Settings| left.agree(1, 0, right).unwrap_err().to_string();
        let mine = grouped(&[0.1, 0.25]);
        let message = disagree(&mine, &grouped(&[0.1, 0.5]));
        assert!(message.contains("disagree on the hyperparameters of group 2: rank 1 has"), "{message}");
        assert!(
            message.contains("0.25") && message.contains("0.5") && !message.contains("0.1,"),
            "{message}"
        );
        let message = disagree(&mine, &grouped(&[0.1, 0.25, 0.5]));
        assert!(message.contains("the number of groups: rank 1 has 3, rank 0 has 4"), "{message}");
        let mut ungrouped = mine.clone();
        ungrouped.keys = KeyTable::new(vec![Key::new("w", [3]), Key::new("b", [1])]).unwrap();
        assert!(disagree(&mine, &ungrouped).contains("`b` f32 [1] in group 2, rank 0 has `b` f32 [1]"));
        let mut other = mine.clone();
        other.optimizer.hyperparameters = Some(Hyperparameters::default());
        let message = disagree(&mine, &other);
        assert!(message.contains("the hyperparameters: rank 1 has the optimizer's own"), "{message}");
    }

    #[test]
    fn checks_what_no_single_field_can() {
        assert_eq!(Settings { chunk_bytes: 6, ..settings(1) }.check(), Err(SettingsError::ChunkBytes(6)));
        let stale = Settings { reproducible: true, consistency: Consistency::Asynchronous, ..settings(1) };
        let refused = stale.check().unwrap_err().to_string();
        assert!(refused.contains("`reproducible` cannot be combined with asynchronous"), "{refused}");
        assert_eq!(settings(1).check(), Ok(()));
    }

    #[test]
    fn two_phases_take_a_step_that_ends_at_once_and_an_optimizer() {
        let sgd = OptimizerChoice::named("sgd");
        let good = Settings { optimizer: sgd, clip_norm: Some(1.0), ..settings(1) };
        assert_eq!(good.check(), Ok(()));
        assert!(good.is_two_phase() && !settings(1).is_two_phase());
        for norm in [0.0, -1.0, f64::INFINITY, f64::NAN] {
            let refused = Settings { clip_norm: Some(norm), ..good.clone() }.check();
            assert!(matches!(refused, Err(SettingsError::ClipNorm(_))), "{norm}");
        }
        let consistency = Consistency::BoundedStaleness(1);
        let refused = Settings { consistency, ..good.clone() }.check().unwrap_err().to_string();
        assert!(refused.contains("cannot be combined with bounded staleness"), "{refused}");
        let mean = Settings { two_phase: true, ..settings(1) }.check().unwrap_err().to_string();
        assert!(mean.contains("cannot be combined with the optimizer `mean` or `sum`"), "{mean}");
    }

    #[test]
    fn quantised_codecs_are_for_matrices_unless_a_key_names_its_own() {
        let keys = vec![
            Key::new("fc.weight", [4, 3]),
            Key::new("fc.bias", [4]),
            Key::new("conv.weight", [4, 3, 2, 2]),
            Key::new("forced", [9]).in_codec(Codec::TWO_BIT),
            Key { dtype: Dtype::BF16, ..Key::new("half", [4, 3]) },
            Key::new("exact", [4, 3]).in_codec(Codec::F32),
        ];
        let settings =
            Settings { codec: Some(Codec::ONE_BIT), ..Settings::new(KeyTable::new(keys).unwrap()) };
        let codecs: Vec<Codec> = settings.keys.keys().iter().map(|key| settings.codec_of(key)).collect();
        assert_eq!(
            codecs,
            [Codec::ONE_BIT, Codec::F32, Codec::F32, Codec::TWO_BIT, Codec::ONE_BIT, Codec::F32]
        );
        assert!(settings.quantises() && settings.check() == Ok(()));
        let stale = Settings { consistency: Consistency::Asynchronous, ..settings };
        let refused = stale.check().unwrap_err().to_string();
        assert!(refused.starts_with("key `fc.weight` (one-bit): quantised keys"), "{refused}");
        assert!(refused.contains("changes since the step before"), "{refused}");
        let plain = Settings { codec: Some(Codec::BF16), ..self::settings(3) };
        assert!(!plain.quantises() && plain.check() == Ok(()));
        assert_eq!(plain.codec_of(&plain.keys.keys()[0]), Codec::BF16);
        let vectors = Settings { codec: Some(Codec::TWO_BIT), ..self::settings(3) };
        let refused = vectors.check().unwrap_err().to_string();
        assert!(refused.contains("would have no effect with a job without keys"), "{refused}");
    }

    #[test]
    fn hyperparameters_left_out_are_the_optimizers_own() {
        let read = |json| serde_json::from_str::<OptimizerChoice>(json).unwrap().hyperparameters;
        assert_eq!(read(r#"{ "name": "adamw" }"#), None);
        assert_eq!(read(r#"{ "name": "adamw", "hyperparameters": {} }"#), Some(Hyperparameters::default()));
        let chosen = OptimizerChoice::named("sgd");
        assert_eq!(read(&serde_json::to_string(&chosen).unwrap()), None);
    }
}
