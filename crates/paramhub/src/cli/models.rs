//! Whose tensors are exchanged: the lists in `models/`, two made from rules, or a file.

use std::path::Path;

use anyhow::Context;
use serde::Deserialize;

use crate::cli::Usage;
use crate::{Codec, Dtype, Key, KeyTable};

macro_rules! list {
    ($name:literal) => {
        ($name, include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/", $name, ".json")))
    };
}

const LISTS: [(&str, &str); 8] = [
    list!("alexnet"),
    list!("vgg11"),
    list!("vgg19"),
    list!("googlenet"),
    list!("inception_v3"),
    list!("resnet18"),
    list!("resnet50"),
    list!("resnet152"),
];
const VGG19_22K: &str = "vgg19-22k";
const TRANSFORMER: &str = "transformer-1.1b";

/// A model's tensors, front layers first.
pub(super) struct Model {
    pub(super) name: String,
    tensors: Vec<Tensor>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Tensor {
    name: String,
    shape: Vec<u64>,
}

#[derive(Deserialize)]
struct List {
    model: Option<String>,
    tensors: Vec<Tensor>,
}

impl Model {
    /// A built-in model.
    pub(super) fn named(name: &str) -> anyhow::Result<Model> {
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

    /// The tensors a file lists.
    pub(super) fn read(path: &Path) -> anyhow::Result<Model> {
        let refuse = |problem: String| Usage(format!("--keys {}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
        let list = parse(&text).map_err(|error| refuse(format!("{error:#}")))?;
        let stem = || path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Model { name: list.model.unwrap_or_else(stem), tensors: list.tensors })
    }

    /// The keys of a job. A `scale` above 1 divides every tensor's elements by it, rounding up, and flattens its shape. A
    /// quantised `codec` is that of matrices, another one that of all.
    pub(super) fn keys(self, dtype: Dtype, codec: Option<Codec>, scale: u64) -> anyhow::Result<KeyTable> {
        let scaled = |tensor: Tensor| {
            // Before a scale takes its shape.
            let codec = codec.filter(|codec| !codec.is_quantised() || tensor.shape.len() == 2);
            let key = Key { dtype, codec, ..Key::new(tensor.name, tensor.shape) };
            match key.elements() {
                Some(elements) if scale > 1 => Key { shape: vec![elements.div_ceil(scale)], ..key },
                // What has too many elements or none is refused by the table.
                _ => key,
            }
        };
        let keys = self.tensors.into_iter().map(scaled).collect();
        KeyTable::new(keys).map_err(|error| Usage(format!("model {}: {error}", self.name)).into())
    }
}

/// The element type that `--dtype` names.
pub(super) fn element_type(dtype: Codec) -> Result<Dtype, Usage> {
    match dtype {
        Codec::F32 => Ok(Dtype::F32),
        Codec::F16 => Ok(Dtype::F16),
        Codec::BF16 => Ok(Dtype::BF16),
        Codec::OneBit | Codec::TwoBit => {
            Err(Usage(format!("--dtype {dtype}: elements lie in memory as f32, f16 or bf16")))
        }
    }
}

/// What `--model` takes.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
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
    let tensor = |name: String, shape: &[u64]| Tensor { name, shape: shape.into() };
    let mut tensors = vec![tensor("embedding.weight".into(), &[VOCABULARY, WIDTH])];
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
            ("alexnet", 61_100_840),
            ("vgg11", 132_863_336),
            ("vgg19", 143_667_240),
            ("googlenet", 6_624_904),
            ("inception_v3", 23_834_568),
            ("resnet18", 11_689_512),
            ("resnet50", 25_557_032),
            ("resnet152", 60_192_808),
            ("vgg19-22k", 229_052_817),
            ("transformer-1.1b", 1_100_048_384),
        ] {
            assert_eq!(elements(name, 1), expected, "{name}");
        }
        assert_eq!(names().count(), 10);
    }

    #[test]
    fn a_scale_divides_every_tensor_and_leaves_none_empty() {
        let coded = Model::named("resnet18").unwrap().keys(Dtype::F32, Some(Codec::OneBit), 1000).unwrap();
        let quantised: Vec<&str> =
            coded.keys().iter().filter(|key| key.codec.is_some()).map(|key| key.name.as_str()).collect();
        assert_eq!(quantised, ["fc.weight"], "matrices alone, by the shapes they had");
        let scaled = Model::named("resnet18").unwrap().keys(Dtype::BF16, None, 1000).unwrap();
        assert_eq!(scaled.len(), 62);
        assert_eq!(scaled.keys()[0].shape, [10], "64 * 3 * 7 * 7 elements by 1000, rounded up");
        assert!(scaled.keys().iter().all(|key| key.elements() >= Some(1) && key.dtype == Dtype::BF16));
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
