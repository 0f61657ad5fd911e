//! The layers of a job's model: which keys belong together, and what the settings say of each layer.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

use super::{Layer, LayerType, Scheme, SchemeChoice};
use crate::codec::Codec;
use crate::combinations::{self, Conflict, Feature, Features, conflict_of};
use crate::key::{Key, elements_of};
use crate::limits::{FACTOR_ELEMENTS_MAX, KEY_NAME_BYTES_MAX, LAYERS_MAX};
use crate::settings::Settings;

/// A layer of a job's model. A key that is in no layer is a layer of its own, without factors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LayerSettings {
    /// The layer's name, unique in the job; queries of the information book use it.
    pub name: String,
    /// Its kind of computation.
    #[serde(rename = "type", default)]
    pub kind: LayerKind,
    /// Its keys, by their positions in the table; a key is in one layer at most. For a fully connected layer
    /// the weight of shape `[outputs, inputs]`, then the bias of shape `[outputs]` if it has one.
    pub keys: Vec<u32>,
    /// The way to exchange it: `auto`, `hub`, `factors` or `factors-to-hub`; the job's choice by default. A
    /// choice that cannot be followed is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub scheme: Option<SchemeChoice>,
    /// The codec of its factors: f32, f16 or bf16; by default that of its keys' dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub factor_codec: Option<Codec>,
    /// `true` if another part of the model uses the weight, too; its gradient is then more than this layer's
    /// factors make.
    #[serde(default)]
    pub tied: bool,
}

/// The form for messages: it gives the number of the layer's keys only.
impl fmt::Display for LayerSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.name)?;
        match self.kind {
            LayerKind::FullyConnected { outputs, inputs, samples } => {
                write!(f, ", fully connected, {outputs} x {inputs}, {samples} samples")?;
            }
            LayerKind::Other => f.write_str(", other")?,
        }
        write!(f, ", keys {:?}", &self.keys[..self.keys.len().min(4)])?;
        if self.keys.len() > 4 {
            write!(f, " and {} more", self.keys.len() - 4)?;
        }
        if let Some(scheme) = self.scheme {
            write!(f, ", by {scheme}")?;
        }
        if let Some(codec) = self.factor_codec {
            write!(f, ", factors as {codec}")?;
        }
        f.write_str(if self.tied { ", tied" } else { "" })
    }
}

/// The kind of computation of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum LayerKind {
    /// A weight of `outputs` times `inputs` numbers, which is multiplied with `samples` vectors in a step.
    FullyConnected {
        /// M.
        outputs: u64,
        /// N.
        inputs: u64,
        /// K, for one worker: the batch, or in a model of sequences the batch times their length.
        samples: u64,
    },
    /// Any other layer; its gradient has no factors.
    #[default]
    Other,
}

/// The reason why layers cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum LayerError {
    /// More layers than a job may have.
    #[error("the job has {0} layers or more, but may have {LAYERS_MAX}: leave out those without factors")]
    TooMany(usize),
    /// A name that is empty, too long, or another layer's.
    #[error("layer {index} is called `{name}`: names are unique and have 1 to {KEY_NAME_BYTES_MAX} bytes")]
    Name {
        /// Position among the layers.
        index: usize,
        /// The name, shortened.
        name: String,
    },
    /// A key that does not exist, that another layer has, or that the layer has twice.
    #[error(
        "layer `{layer}` cannot have key {key}: a key is in the table of {keys}, and in one layer at most"
    )]
    Key {
        /// The layer.
        layer: String,
        /// Position in the table.
        key: u32,
        /// Keys of the table.
        keys: usize,
    },
    /// A layer without keys.
    #[error("layer `{0}` has no keys: name those that it is made of")]
    Keyless(String),
    /// Keys whose form does not match the layer's type.
    #[error(
        "layer `{layer}` is fully connected with {outputs} outputs and {inputs} inputs, so its keys are a weight of \
         [{outputs}, {inputs}] and perhaps a bias of [{outputs}], of one type, and it has 1 sample or more; it has {found}"
    )]
    Shape {
        /// The layer.
        layer: String,
        /// M.
        outputs: u64,
        /// N.
        inputs: u64,
        /// The keys and samples found.
        found: String,
    },
    /// A codec that factors cannot travel in.
    #[error("the factors of layer `{layer}` cannot travel as {codec}: ask for f32, f16 or bf16")]
    FactorCodec {
        /// The layer.
        layer: String,
        /// The codec asked for.
        codec: Codec,
    },
    /// More factors than a hub takes.
    #[error(
        "layer `{layer}` cannot be exchanged by {}: its factors of a step are {elements} numbers, more than the \
         {FACTOR_ELEMENTS_MAX} a hub takes; ask for hub or auto",
        Scheme::FactorsToHub
    )]
    TooManyFactors {
        /// The layer.
        layer: String,
        /// Number of elements in one worker's factors.
        elements: u64,
    },
    /// A layer that does not combine with the scheme or the codec that it asks for, or with the job.
    #[error(transparent)]
    Combination(#[from] Conflict),
}

/// Checks the layers of a job against its keys and its other settings.
///
/// # Errors
/// The first problem found.
pub(crate) fn check(settings: &Settings) -> Result<(), LayerError> {
    if settings.layers.len() > LAYERS_MAX {
        return Err(LayerError::TooMany(settings.layers.len()));
    }
    let of_job = settings.features();
    if let Some(scheme) = settings.scheme.feature() {
        let is_connected = |layer: &LayerSettings| layer.kind != LayerKind::Other;
        let has_none = !settings.layers.iter().any(is_connected);
        let asked = Features::of([(Feature::NoFullyConnectedLayer, has_none)]);
        conflict_of(scheme, of_job.and(asked)).map_or(Ok(()), Err)?;
    }
    let keys = settings.keys.keys();
    let mut taken = vec![false; if settings.layers.is_empty() { 0 } else { keys.len() }];
    let mut names = HashMap::with_capacity(settings.layers.len());
    for (index, layer) in settings.layers.iter().enumerate() {
        let is_long = layer.name.len() > KEY_NAME_BYTES_MAX;
        if layer.name.is_empty() || is_long || names.insert(layer.name.as_str(), index).is_some() {
            let name = layer.name.chars().take(64).collect();
            return Err(LayerError::Name { index, name });
        }
        for &key in &layer.keys {
            match taken.get_mut(key as usize) {
                Some(taken) if !*taken => *taken = true,
                _ => return Err(LayerError::Key { layer: layer.name.clone(), key, keys: keys.len() }),
            }
        }
        layer.check(keys)?;
        let about = |conflict: Conflict| conflict.about(format!("layer `{}`", layer.name));
        let asked = layer.features();
        combinations::check(asked).map_err(about)?;
        let scheme = layer.scheme.and_then(SchemeChoice::feature);
        if let Some(conflict) = scheme.and_then(|scheme| conflict_of(scheme, asked.and(of_job))) {
            return Err(about(conflict).into());
        }
        let choice = layer.scheme.unwrap_or(settings.scheme);
        if choice.forced() == Some(Scheme::FactorsToHub)
            && conflict_of(Feature::FactorsToHub, asked).is_none()
            && let Some(elements) = layer.layer(keys).factors()
            && elements > FACTOR_ELEMENTS_MAX
        {
            return Err(LayerError::TooManyFactors { layer: layer.name.clone(), elements });
        }
    }
    Ok(())
}

impl LayerSettings {
    /// A fully connected layer whose keys are a weight and perhaps a bias.
    pub fn fully_connected(name: impl Into<String>, keys: impl Into<Vec<u32>>, size: [u64; 3]) -> Self {
        let [outputs, inputs, samples] = size;
        let kind = LayerKind::FullyConnected { outputs, inputs, samples };
        LayerSettings { kind, ..LayerSettings::other(name, keys) }
    }

    /// A layer whose gradient has no factors.
    pub fn other(name: impl Into<String>, keys: impl Into<Vec<u32>>) -> Self {
        LayerSettings {
            name: name.into(),
            kind: LayerKind::Other,
            keys: keys.into(),
            scheme: None,
            factor_codec: None,
            tied: false,
        }
    }

    /// The layer, to be exchanged by this scheme.
    #[must_use]
    pub fn by(self, scheme: SchemeChoice) -> Self {
        LayerSettings { scheme: Some(scheme), ..self }
    }

    /// The layer, with its factors in this codec.
    #[must_use]
    pub fn with_factors_in(self, codec: Codec) -> Self {
        LayerSettings { factor_codec: Some(codec), ..self }
    }

    /// The codec of the layer's factors, if it has any. The settings must have been checked.
    pub fn factor_codec(&self, keys: &[Key]) -> Codec {
        self.factor_codec.unwrap_or_else(|| keys[self.keys[0] as usize].dtype.codec())
    }

    fn check(&self, keys: &[Key]) -> Result<(), LayerError> {
        if self.keys.is_empty() {
            return Err(LayerError::Keyless(self.name.clone()));
        }
        if let Some(codec) = self.factor_codec.filter(|codec| codec.is_quantised()) {
            return Err(LayerError::FactorCodec { layer: self.name.clone(), codec });
        }
        let LayerKind::FullyConnected { outputs, inputs, samples } = self.kind else { return Ok(()) };
        let mut own = self.keys.iter().map(|&key| &keys[key as usize]);
        let weight = own.next().expect("it has keys");
        let bias = own.next();
        let fits = weight.shape == [outputs, inputs]
            && bias.is_none_or(|bias| bias.shape == [outputs] && bias.dtype == weight.dtype)
            && own.next().is_none()
            && samples > 0;
        if fits {
            return Ok(());
        }
        // A message names only a few of them.
        let listed: Vec<String> =
            self.keys.iter().take(4).map(|&key| keys[key as usize].to_string()).collect();
        let found = format!("{} keys ({}) and {samples} samples", self.keys.len(), listed.join(", "));
        Err(LayerError::Shape { layer: self.name.clone(), outputs, inputs, found })
    }

    /// The layer in the form that costs are computed for. The settings must have been checked.
    pub(super) fn layer(&self, keys: &[Key]) -> Layer {
        let kind = match self.kind {
            LayerKind::FullyConnected { outputs, inputs, samples } => {
                LayerType::FullyConnected { outputs, inputs, samples, has_bias: self.keys.len() == 2 }
            }
            LayerKind::Other => {
                let parameters = self.keys.iter().map(|&key| elements_of(&keys[key as usize])).sum();
                LayerType::Other { parameters }
            }
        };
        Layer { name: self.name.clone(), kind }
    }
}

/// Reads no more layers than a job may have: a layer takes several times as many bytes as its shortest text.
pub(crate) fn read_layers<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<LayerSettings>, D::Error> {
    struct Layers;

    impl<'de> Visitor<'de> for Layers {
        type Value = Vec<LayerSettings>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "up to {LAYERS_MAX} layers")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut layers = Vec::new();
            while let Some(layer) = list.next_element()? {
                layers.push(layer);
                if layers.len() > LAYERS_MAX {
                    return Err(A::Error::custom(LayerError::TooMany(layers.len())));
                }
            }
            Ok(layers)
        }
    }

    deserializer.deserialize_seq(Layers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consistency::Consistency;
    use crate::key::KeyTable;
    use crate::settings::{OptimizerChoice, SettingsError};

    fn settings(layers: Vec<LayerSettings>) -> Settings {
        let keys =
            vec![Key::new("conv", [8, 3, 3]), Key::new("fc.weight", [10, 20]), Key::new("fc.bias", [10])];
        Settings { layers, ..Settings::new(KeyTable::new(keys).unwrap()) }
    }

    fn fc() -> LayerSettings {
        LayerSettings::fully_connected("fc", [1, 2], [10, 20, 4])
    }

    fn refused(layers: Vec<LayerSettings>) -> String {
        settings(layers).check().unwrap_err().to_string()
    }

    #[test]
    fn choices_survive_text() {
        for text in ["auto", "hub", "factors", "factors-to-hub"] {
            let choice: SchemeChoice = text.parse().unwrap();
            assert_eq!(choice.to_string(), text);
            assert_eq!(serde_json::from_value::<SchemeChoice>(serde_json::json!(text)).unwrap(), choice);
        }
        let refused = "ps".parse::<SchemeChoice>().unwrap_err();
        assert_eq!(refused, "unknown scheme `ps`: expected auto, hub, factors or factors-to-hub");
        assert_eq!(SchemeChoice::default().to_string(), "hub");
    }

    #[test]
    fn layers_are_made_of_keys_of_the_table_once_each() {
        assert_eq!(settings(vec![LayerSettings::other("conv", [0]), fc()]).check(), Ok(()));
        assert!(
            refused(vec![fc(), LayerSettings::other("again", [2])]).contains("`again` cannot have key 2")
        );
        assert!(refused(vec![LayerSettings::other("far", [3])]).contains("cannot have key 3"));
        assert!(refused(vec![LayerSettings::other("none", [])]).contains("`none` has no keys"));
        let double = vec![LayerSettings::other("a", [0]), LayerSettings::other("a", [1])];
        assert!(refused(double).starts_with("layer 1 is called `a`: names are unique"));
    }

    #[test]
    fn a_fully_connected_layer_is_a_weight_and_perhaps_a_bias() {
        let with =
            |keys: &[u32], size| settings(vec![LayerSettings::fully_connected("fc", keys, size)]).check();
        assert_eq!(with(&[1], [10, 20, 1]), Ok(()));
        for (keys, size) in [
            (&[1][..], [20, 10, 1]),
            (&[2, 1], [10, 20, 1]),
            (&[1, 2, 0], [10, 20, 1]),
            (&[1, 0], [10, 20, 1]),
            (&[1], [10, 20, 0]),
        ] {
            let message = with(keys, size).unwrap_err().to_string();
            assert!(
                message.contains("layer `fc` is fully connected with") && message.contains("it has"),
                "{message}"
            );
        }
        let mut mixed = settings(vec![fc()]);
        let mut keys = mixed.keys.keys().to_vec();
        keys[2].dtype = crate::codec::Dtype::BF16;
        mixed.keys = KeyTable::new(keys).unwrap();
        assert!(matches!(mixed.check(), Err(SettingsError::Layer(LayerError::Shape { .. }))));
    }

    #[test]
    fn factors_travel_in_floats_if_there_are_any() {
        assert_eq!(settings(vec![fc().with_factors_in(Codec::BF16)]).check(), Ok(()));
        let message = refused(vec![fc().with_factors_in(Codec::ONE_BIT)]);
        assert!(message.contains("cannot travel as one-bit: ask for f32, f16 or bf16"), "{message}");
        let message = refused(vec![LayerSettings::other("conv", [0]).with_factors_in(Codec::F16)]);
        assert!(
            message.starts_with(
                "layer `conv`: `factor_codec` would have no effect with a layer that is not fully"
            ),
            "{message}"
        );
    }

    #[test]
    fn a_scheme_can_be_forced_only_where_it_works() {
        let factors = SchemeChoice::Only(Scheme::Factors);
        assert_eq!(settings(vec![fc().by(factors)]).check(), Ok(()));
        let message = refused(vec![LayerSettings::other("conv", [0]).by(factors)]);
        assert!(
            message.starts_with("layer `conv`: the scheme factors cannot be combined with a layer that"),
            "{message}"
        );
        assert!(refused(vec![LayerSettings { tied: true, ..fc() }.by(factors)]).contains("tied"));
        let asynchronous =
            Settings { consistency: Consistency::Asynchronous, ..settings(vec![fc().by(factors)]) };
        assert!(asynchronous.check().unwrap_err().to_string().contains("synchronous"));
        let by_all = Settings { scheme: factors, ..settings(vec![fc()]) };
        assert_eq!(by_all.check(), Ok(()), "layers without factors go to the hub all the same");
        let clipped =
            Settings { optimizer: OptimizerChoice::named("sgd"), clip_norm: Some(1.0), ..by_all.clone() };
        assert!(
            clipped.check().unwrap_err().to_string().starts_with("the scheme factors cannot be combined")
        );
        let custom = Settings { aggregator: "largest".into(), ..by_all.clone() };
        assert!(custom.check().unwrap_err().to_string().contains("aggregator"));
        let custom = Settings { optimizer: OptimizerChoice::named("muon"), ..by_all };
        assert!(custom.check().unwrap_err().to_string().contains("optimizer"));
        let to_hub = Settings { scheme: SchemeChoice::Only(Scheme::FactorsToHub), ..clipped };
        assert_eq!(to_hub.check(), Ok(()), "a hub has the sum that the norm is of");
        let custom = Settings { optimizer: OptimizerChoice::named("muon"), ..to_hub.clone() };
        assert_eq!(custom.check(), Ok(()), "and the optimizer");
        let custom = Settings { aggregator: "largest".into(), ..to_hub.clone() };
        assert!(custom.check().unwrap_err().to_string().contains("can only be summed"));
        let late = Settings { consistency: Consistency::Asynchronous, clip_norm: None, ..to_hub.clone() };
        assert!(late.check().unwrap_err().to_string().contains("a step of all workers"));
        let many = LayerSettings::fully_connected("fc", [1, 2], [10, 20, 1 << 28]);
        let message = Settings { layers: vec![many], ..to_hub }.check().unwrap_err().to_string();
        assert!(message.contains("its factors of a step are 8053063680 numbers, more than"), "{message}");
        let auto = Settings { scheme: SchemeChoice::Auto, ..asynchronous };
        let auto = Settings { layers: vec![fc()], ..auto };
        assert_eq!(auto.check(), Ok(()), "auto takes what works");
    }

    #[test]
    fn layers_are_read_strictly_and_not_without_end() {
        let text = r#"{"keys":[{"name":"w","shape":[3,2]}],"scheme":"auto","layers":[{"name":"fc","keys":[0],
            "type":{"fully-connected":{"outputs":3,"inputs":2,"samples":5}}},{"name":"x","keys":[]}]}"#;
        let read: Settings = serde_json::from_str(text).unwrap();
        assert_eq!(read.scheme, SchemeChoice::Auto);
        assert_eq!(read.layers[0], LayerSettings::fully_connected("fc", [0], [3, 2, 5]));
        assert_eq!(read.layers[1], LayerSettings::other("x", []));
        assert_eq!(serde_json::from_str::<Settings>(&serde_json::to_string(&read).unwrap()).unwrap(), read);
        assert!(serde_json::from_str::<Settings>(&text.replace("samples", "batch")).is_err());
        assert!(serde_json::from_str::<Settings>(&text.replace("\"auto\"", "\"best\"")).is_err());
        let many = vec![r#"{"name":"","keys":[]}"#; LAYERS_MAX + 1].join(",");
        let text = format!(r#"{{"keys":[{{"name":"w","shape":[3]}}],"layers":[{many}]}}"#);
        assert!(serde_json::from_str::<Settings>(&text).unwrap_err().to_string().contains("may have 65536"));
    }

    #[test]
    fn disagreement_names_the_layer() {
        let mine = settings(vec![fc()]);
        let message = mine.agree(1, 0, &settings(vec![fc().by(SchemeChoice::Auto)])).unwrap_err().to_string();
        assert!(message.contains("disagree on layer 0") && message.contains("`fc`"), "{message}");
        let message = mine.agree(1, 0, &settings(vec![])).unwrap_err().to_string();
        assert!(message.contains("rank 0 has no such layer"), "{message}");
        let other = Settings { scheme: SchemeChoice::Auto, ..mine.clone() };
        let message = other.agree(1, 0, &mine).unwrap_err().to_string();
        assert!(message.contains("the scheme: rank 1 has auto, rank 0 has hub"), "{message}");
    }
}
