//! Models whose tensors are exchanged: the lists in `models/`, two made from rules, or a file.

use std::path::Path;

use anyhow::Context;
use paramhub::scheme::LayerSettings;
use paramhub::{Codec, Dtype, Key, KeyTable};
use serde::Deserialize;

use crate::Usage;

macro_rules! list {
    ($name:literal) => {
        ($name, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/", $name, ".json")))
    };
}

const LISTS: [(&str, &str); 10] = [
    list!("cifar-quick"),
    list!("alexnet"),
    list!("vgg11"),
    list!("vgg19"),
    list!("googlenet"),
    list!("inception_v3"),
    list!("inception-bn"),
    list!("resnet18"),
    list!("resnet50"),
    list!("resnet152"),
];
const VGG19_22K: &str = "vgg19-22k";
const TRANSFORMER: &str = "transformer-1.1b";

/// A model's tensors, front layers first.
pub struct Model {
    /// The name it is listed by, or its file's.
    pub name: String,
    tensors: Vec<Tensor>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Tensor {
    name: String,
    shape: Vec<u64>,
    #[serde(rename = "type", default)]
    kind: TensorKind,
    /// At how many places of one sample a weight is applied; 1 in a fully connected layer.
    #[serde(default)]
    positions: Option<u64>,
}

/// The kind of layer that a tensor belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum TensorKind {
    /// The weight of a fully connected layer, outputs by inputs; the bias, if there is one, comes next.
    FullyConnected,
    #[default]
    Other,
}

/// The tensors of one layer, a weight and its bias, or a single tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelLayer {
    /// The name that its tensors share.
    pub name: String,
    /// The positions of these tensors in the table of keys.
    pub keys: Vec<u32>,
    /// Outputs and inputs, if the layer is fully connected.
    pub fully_connected: Option<[u64; 2]>,
    /// Multiply-adds in the forward pass of one sample.
    pub operations: u64,
}

#[derive(Deserialize)]
struct List {
    model: Option<String>,
    tensors: Vec<Tensor>,
}

impl Model {
    /// A built-in model.
    pub fn named(name: &str) -> anyhow::Result<Model> {
        let tensors = match name {
            VGG19_22K => vgg19_22k()?,
            TRANSFORMER => transformer(),
            _ => match LISTS.iter().find(|(listed, _)| *listed == name) {
                Some((_, text)) => parse(text)?.tensors,
                None => {
                    let names = names().collect::<Vec<_>>().join(", ");
                    let problem = format!("--model {name}: there is no such model; there are {names}");
                    return Err(Usage(problem).into());
                }
            },
        };
        Ok(Model { name: name.into(), tensors })
    }

    /// The tensors that a file lists.
    pub fn read(path: &Path) -> anyhow::Result<Model> {
        let refuse = |problem: String| Usage(format!("--keys {}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
        let list = parse(&text).map_err(|error| refuse(format!("{error:#}")))?;
        let stem = || path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Model { name: list.model.unwrap_or_else(stem), tensors: list.tensors })
    }

    /// The fully connected layers of a job with these [`keys`](Self::keys) at their full size. In each step a
    /// worker multiplies `samples` vectors.
    pub fn fully_connected(&self, samples: u64) -> Vec<LayerSettings> {
        let tensors = (0..).zip(&self.tensors);
        let layer = |(position, tensor): (u32, &Tensor)| {
            let (TensorKind::FullyConnected, &[outputs, inputs]) = (tensor.kind, &tensor.shape[..]) else {
                return None;
            };
            let name = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
            let is_bias = |next: &&Tensor| next.name == format!("{name}.bias") && next.shape == [outputs];
            let bias = self.tensors.get(position as usize + 1).filter(is_bias).map(|_| position + 1);
            let keys: Vec<u32> = [position].into_iter().chain(bias).collect();
            Some(LayerSettings::fully_connected(name, keys, [outputs, inputs, samples]))
        };
        tensors.filter_map(layer).collect()
    }

    /// The layers, front layers first. Layers have no operations where the list does not give the positions
    /// of their weights.
    pub fn layers(&self) -> Vec<ModelLayer> {
        let mut layers: Vec<ModelLayer> = Vec::new();
        for (key, tensor) in (0..).zip(&self.tensors) {
            let name = tensor.name.rsplit_once('.').map_or(tensor.name.as_str(), |(name, _)| name);
            let positions = tensor.positions.unwrap_or(0);
            let operations = tensor.shape.iter().product::<u64>() * positions;
            match layers.last_mut() {
                Some(layer) if layer.name == name => {
                    layer.keys.push(key);
                    layer.operations += operations;
                }
                _ => {
                    let fully_connected = match (tensor.kind, tensor.shape.as_slice()) {
                        (TensorKind::FullyConnected, &[outputs, inputs]) => Some([outputs, inputs]),
                        _ => None,
                    };
                    layers.push(ModelLayer {
                        name: name.to_owned(),
                        keys: vec![key],
                        fully_connected,
                        operations,
                    });
                }
            }
        }
        layers
    }

    /// The keys of a job whose layers keep their form, and the layers so scaled. Each side of a fully
    /// connected layer is divided by `side`, rounding up; the elements of every other tensor are divided by
    /// its square.
    pub fn scaled(self, side: u64) -> anyhow::Result<(KeyTable, Vec<ModelLayer>)> {
        let mut layers = self.layers();
        let mut keys: Vec<Key> =
            self.tensors.into_iter().map(|tensor| Key::new(tensor.name, tensor.shape)).collect();
        for layer in &mut layers {
            if let Some(shape) = &mut layer.fully_connected {
                *shape = shape.map(|length| length.div_ceil(side));
                for &key in &layer.keys {
                    keys[key as usize].shape.iter_mut().for_each(|length| *length = length.div_ceil(side));
                }
                continue;
            }
            for &key in &layer.keys {
                let key = &mut keys[key as usize];
                if let Some(elements) = key.elements().filter(|_| side > 1) {
                    key.shape = vec![elements.div_ceil(side * side)];
                }
            }
        }
        let keys = KeyTable::new(keys).map_err(|error| Usage(format!("model {}: {error}", self.name)))?;
        Ok((keys, layers))
    }

    /// The keys of a job. A `scale` above 1 divides every tensor's elements by it, rounding up, and flattens
    /// its shape. A quantised `codec` applies to matrices only, any other to all tensors.
    pub fn keys(self, dtype: Dtype, codec: Option<Codec>, scale: u64) -> anyhow::Result<KeyTable> {
        let scaled = |tensor: Tensor| {
            // This needs the shape, which scaling flattens.
            let codec = codec.filter(|codec| !codec.is_quantised() || tensor.shape.len() == 2);
            let key = Key { dtype, codec, ..Key::new(tensor.name, tensor.shape) };
            match key.elements() {
                Some(elements) if scale > 1 => Key { shape: vec![elements.div_ceil(scale)], ..key },
                // The table refuses a key that has no elements or too many.
                _ => key,
            }
        };
        let keys = self.tensors.into_iter().map(scaled).collect();
        KeyTable::new(keys).map_err(|error| Usage(format!("model {}: {error}", self.name)).into())
    }
}

/// The element type that `--dtype` names.
pub fn element_type(dtype: Codec) -> Result<Dtype, Usage> {
    match dtype {
        Codec::F32 => Ok(Dtype::F32),
        Codec::F16 => Ok(Dtype::F16),
        Codec::BF16 => Ok(Dtype::BF16),
        Codec::Quantised(_) => {
            Err(Usage(format!("--dtype {dtype}: elements lie in memory as f32, f16 or bf16")))
        }
    }
}

/// The names that `--model` accepts.
pub fn names() -> impl Iterator<Item = &'static str> {
    LISTS.iter().map(|(name, _)| *name).chain([VGG19_22K, TRANSFORMER])
}

fn parse(text: &str) -> anyhow::Result<List> {
    let form = "expected {\"model\", \"tensors\": [{\"name\", \"shape\"}, ..]} or the bare list of tensors";
    let value: serde_json::Value = serde_json::from_str(text).context(form)?;
    if value.is_array() {
        return Ok(List { model: None, tensors: serde_json::from_value(value).context(form)? });
    }
    serde_json::from_value(value).context(form)
}

/// VGG19 with the 21,841 classes of ImageNet-22K (Poseidon, section 5).
fn vgg19_22k() -> anyhow::Result<Vec<Tensor>> {
    let mut tensors = Model::named("vgg19")?.tensors;
    for tensor in tensors.iter_mut().rev().take(2) {
        tensor.shape[0] = 21_841;
    }
    Ok(tensors)
}

/// A decoder of 22 layers, 2048 wide, with grouped-query attention and gated feed-forward layers: 1.1 billion parameters.
fn transformer() -> Vec<Tensor> {
    const WIDTH: u64 = 2048;
    const KEY_VALUE_WIDTH: u64 = 256;
    const FEED_FORWARD_WIDTH: u64 = 5632;
    const VOCABULARY: u64 = 32_000;
    let tensor = |name: String, shape: &[u64]| {
        let kind = if shape.len() == 2 { TensorKind::FullyConnected } else { TensorKind::Other };
        Tensor { name, shape: shape.into(), kind, positions: None }
    };
    // An embedding's rows are looked up, not multiplied.
    let embedding =
        Tensor { kind: TensorKind::Other, ..tensor("embedding.weight".into(), &[VOCABULARY, WIDTH]) };
    let mut tensors = vec![embedding];
    for layer in 0..22 {
        for (name, shape) in [
            ("attention_norm", &[WIDTH][..]),
            ("attention.query", &[WIDTH, WIDTH]),
            ("attention.key", &[KEY_VALUE_WIDTH, WIDTH]),
            ("attention.value", &[KEY_VALUE_WIDTH, WIDTH]),
            ("attention.output", &[WIDTH, WIDTH]),
            ("feed_forward_norm", &[WIDTH]),
            ("feed_forward.gate", &[FEED_FORWARD_WIDTH, WIDTH]),
            ("feed_forward.up", &[FEED_FORWARD_WIDTH, WIDTH]),
            ("feed_forward.down", &[WIDTH, FEED_FORWARD_WIDTH]),
        ] {
            tensors.push(tensor(format!("layers.{layer}.{name}.weight"), shape));
        }
    }
    tensors.push(tensor("norm.weight".into(), &[WIDTH]));
    tensors.push(tensor("output.weight".into(), &[VOCABULARY, WIDTH]));
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(name: &str, scale: u64) -> u64 {
        Model::named(name).unwrap().keys(Dtype::F32, None, scale).unwrap().elements()
    }

    #[test]
    fn every_model_has_its_published_size() {
        for (name, expected) in [
            ("cifar-quick", 145_578),
            ("alexnet", 61_100_840),
            ("vgg11", 132_863_336),
            ("vgg19", 143_667_240),
            ("googlenet", 6_624_904),
            ("inception_v3", 23_834_568),
            ("inception-bn", 11_295_240),
            ("resnet18", 11_689_512),
            ("resnet50", 25_557_032),
            ("resnet152", 60_192_808),
            ("vgg19-22k", 229_052_817),
            ("transformer-1.1b", 1_100_048_384),
        ] {
            assert_eq!(elements(name, 1), expected, "{name}");
        }
        assert_eq!(names().count(), 12);
    }

    #[test]
    fn fully_connected_layers_are_distinguished_from_the_others() {
        let named = |name: &str| Model::named(name).unwrap();
        let layers = named("vgg19-22k").fully_connected(32);
        let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
        assert_eq!(names, ["classifier.0", "classifier.3", "classifier.6"]);
        assert_eq!(layers[2], LayerSettings::fully_connected("classifier.6", [36, 37], [21_841, 4096, 32]));
        assert_eq!(named("googlenet").fully_connected(1).len(), 1);
        let sequences = named(TRANSFORMER).fully_connected(2048);
        assert_eq!(sequences.len(), 22 * 7 + 1, "but not the embedding");
        assert!(sequences.iter().all(|layer| layer.keys.len() == 1), "they have no biases");
        for name in super::names() {
            let layers = named(name).fully_connected(1);
            let keys = named(name).keys(Dtype::F32, None, 1).unwrap();
            let settings = paramhub::settings::Settings { layers, ..paramhub::settings::Settings::new(keys) };
            assert_eq!(settings.check(), Ok(()), "{name}");
        }
    }

    #[test]
    fn a_scale_divides_every_tensor_and_leaves_none_empty() {
        let coded = Model::named("resnet18").unwrap().keys(Dtype::F32, Some(Codec::ONE_BIT), 1000).unwrap();
        let quantised: Vec<&str> =
            coded.keys().iter().filter(|key| key.codec.is_some()).map(|key| key.name.as_str()).collect();
        assert_eq!(quantised, ["fc.weight"], "matrices alone, by the shapes they had");
        let scaled = Model::named("resnet18").unwrap().keys(Dtype::BF16, None, 1000).unwrap();
        assert_eq!(scaled.len(), 62);
        assert_eq!(scaled.keys()[0].shape, [10], "64 * 3 * 7 * 7 elements by 1000, rounded up");
        assert!(scaled.keys().iter().all(|key| key.elements() >= Some(1) && key.dtype == Dtype::BF16));
    }

    #[test]
    fn layers_are_weights_with_their_biases() {
        let vgg = Model::named("vgg19").unwrap().layers();
        assert_eq!(vgg.len(), 19);
        let fully_connected: Vec<_> = vgg.iter().filter_map(|layer| layer.fully_connected).collect();
        assert_eq!(fully_connected, [[4096, 25_088], [4096, 4096], [1000, 4096]]);
        assert_eq!(vgg[16].keys, [32, 33]);
        // As published: 19.6 billion operations in VGG19, 11.5 in ResNet-152, 5.7 in Inception-V3, 2.0 in
        // BN-Inception.
        for (name, billions) in [
            ("vgg19", 19.6),
            ("resnet152", 11.5),
            ("inception_v3", 5.7),
            ("inception-bn", 2.0),
            ("googlenet", 1.5),
        ] {
            let layers = Model::named(name).unwrap().layers();
            let operations: u64 = layers.iter().map(|layer| layer.operations).sum();
            assert!((operations as f64 / 1e9 - billions).abs() < 0.05, "{name}: {operations}");
            let keys: Vec<u32> = layers.iter().flat_map(|layer| layer.keys.clone()).collect();
            assert!(keys.iter().copied().eq(0..keys.len() as u32), "{name}: every key once, in order");
        }
        let last = Model::named(VGG19_22K).unwrap().layers().pop().unwrap();
        assert_eq!(last.fully_connected, Some([21_841, 4096]));
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let refused = Model::named("resnet51").map(drop).unwrap_err();
        assert!(refused.is::<Usage>());
        let refused = refused.to_string();
        assert!(refused.contains("resnet51") && refused.contains("resnet50, "), "{refused}");
        assert!(refused.contains(VGG19_22K) && refused.contains(TRANSFORMER), "{refused}");
    }

    #[test]
    fn both_forms_of_a_list_are_read() {
        let bare = r#"[{"name": "w", "shape": [2, 3]}, {"name": "b", "shape": []}]"#;
        let full = format!(r#"{{"model": "m", "source": "here", "tensors": {bare}}}"#);
        assert_eq!(parse(bare).unwrap().tensors, parse(&full).unwrap().tensors);
        assert_eq!(parse(&full).unwrap().model.as_deref(), Some("m"));
        for wrong in ["", "{}", "[1]", r#"[{"name": "w", "shape": [-1]}]"#] {
            let refused = parse(wrong).map(drop).unwrap_err().to_string();
            assert!(refused.contains("bare list"), "{wrong}: {refused}");
        }
    }
}
