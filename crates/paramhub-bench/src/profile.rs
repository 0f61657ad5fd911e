//! The times that the layers of a model take to compute: published, estimated from VGG19's, or from a file.

use std::path::Path;

use anyhow::Context;
use paramhub_harness::Usage;
use paramhub_harness::models::ModelLayer;
use serde::{Deserialize, Serialize};

/// The seconds that one layer's forward pass and backward pass take in a step, for a whole batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Passes {
    pub(super) forward_seconds: f64,
    pub(super) backward_seconds: f64,
}

impl Passes {
    /// The passes with both times multiplied by `factor`.
    pub(super) fn scaled(self, factor: f64) -> Passes {
        Passes {
            forward_seconds: self.forward_seconds * factor,
            backward_seconds: self.backward_seconds * factor,
        }
    }
}

/// The contents of a profile's file, which must have either the throughput or the layers.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The throughput of one machine with the batch of `--batch`. The time of a step that follows from it is
    /// spread over the layers in proportion to their operations.
    images_per_second: Option<f64>,
    /// The times of layers by name, for the batch of `--batch`, at most once for each layer. Layers that are
    /// not listed take no time.
    layers: Option<Vec<LayerLine>>,
}

/// The times of one layer in a profile's file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerLine {
    name: String,
    forward_ms: f64,
    backward_ms: f64,
}

/// The images per second that Poseidon measured on one machine with a Titan X (section 5).
const PUBLISHED: [(&str, f64); 4] =
    [("googlenet", 257.0), ("vgg19", 35.5), ("vgg19-22k", 34.6), ("inception_v3", 43.2)];
/// Multiply-adds per second of a forward pass and a backward pass together, for models without a published
/// throughput. It is VGG19's rate at the throughput above: a forward pass of an image takes 19.63 billion of
/// them, and both passes take three times as many (see [`spread`]).
const OPERATIONS_PER_SECOND: f64 = 35.5 * 3.0 * 19.63e9;

/// The passes of each layer of a model, front layers first, and where they come from.
pub(super) struct Profile {
    /// The origin of the times, as reports state it.
    pub(super) source: String,
    pub(super) passes: Vec<Passes>,
}

impl Profile {
    /// The built-in profile of a model, for a batch of `samples`.
    pub(super) fn built_in(model: &str, layers: &[ModelLayer], samples: u64) -> Result<Profile, Usage> {
        let operations: u64 = layers.iter().map(|layer| layer.operations).sum();
        if operations == 0 {
            let problem = format!(
                "model {model} does not say what its layers compute: give their times with --profile"
            );
            return Err(Usage(problem));
        }
        let published = PUBLISHED.iter().find(|(name, _)| *name == model);
        let (source, images_per_second) = match published {
            Some(&(_, images_per_second)) => {
                (format!("{images_per_second} images/s, as published"), images_per_second)
            }
            None => {
                let images_per_second = OPERATIONS_PER_SECOND / (3.0 * operations as f64);
                let source =
                    format!("{images_per_second:.1} images/s, estimated from VGG19's published rate");
                (source, images_per_second)
            }
        };
        Ok(Profile { source, passes: spread(layers, samples as f64 / images_per_second) })
    }

    /// Reads the profile in a file, for a batch of `samples`.
    pub(super) fn read(path: &Path, layers: &[ModelLayer], samples: u64) -> anyhow::Result<Profile> {
        let refuse = |problem: String| Usage(format!("--profile {}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
        let expected_form = "expected {\"images_per_second\": N} or {\"layers\": [{\"name\", \"forward_ms\", \"backward_ms\"}, ..]}";
        let file: File = serde_json::from_str(&text)
            .context(expected_form)
            .map_err(|error| refuse(format!("{error:#}")))?;
        let source = path.display().to_string();
        let lines = match (file.images_per_second, file.layers) {
            (Some(images_per_second), None) if images_per_second.is_finite() && images_per_second > 0.0 => {
                if layers.iter().all(|layer| layer.operations == 0) {
                    let problem = "the model does not say what its layers compute: list their times";
                    return Err(refuse(problem.to_owned()).into());
                }
                return Ok(Profile { source, passes: spread(layers, samples as f64 / images_per_second) });
            }
            (None, Some(lines)) if !lines.is_empty() => lines,
            _ => return Err(refuse(expected_form.to_owned()).into()),
        };
        let is_duration = |ms: f64| ms.is_finite() && ms >= 0.0;
        let mut passes = vec![None; layers.len()];
        for line in lines {
            let LayerLine { name, forward_ms, backward_ms } = line;
            let Some(at) = layers.iter().position(|layer| layer.name == name) else {
                return Err(refuse(format!("the model has no layer `{name}`")).into());
            };
            if !is_duration(forward_ms) || !is_duration(backward_ms) {
                let problem =
                    format!("layer `{name}`: forward_ms and backward_ms must be finite and not negative");
                return Err(refuse(problem).into());
            }
            let times = Passes { forward_seconds: forward_ms / 1e3, backward_seconds: backward_ms / 1e3 };
            if passes[at].replace(times).is_some() {
                return Err(refuse(format!("layer `{name}` is listed twice")).into());
            }
        }
        Ok(Profile { source, passes: passes.into_iter().map(Option::unwrap_or_default).collect() })
    }

    /// The seconds that all layers together compute in a step.
    pub(super) fn seconds(&self) -> f64 {
        self.passes.iter().map(|passes| passes.forward_seconds + passes.backward_seconds).sum()
    }

    /// The profile with all times multiplied by `factor`.
    pub(super) fn scaled(self, factor: f64) -> Profile {
        Profile { passes: self.passes.into_iter().map(|passes| passes.scaled(factor)).collect(), ..self }
    }
}

/// Spreads the `seconds` of a step over the layers in proportion to their operations. A backward pass has
/// twice the operations of a forward pass, since it computes two products: the gradient of the inputs and
/// that of the weights.
fn spread(layers: &[ModelLayer], seconds: f64) -> Vec<Passes> {
    let total_operations: u64 = layers.iter().map(|layer| layer.operations).sum();
    let share = |layer: &ModelLayer| seconds * layer.operations as f64 / total_operations.max(1) as f64;
    let passes =
        |layer| Passes { forward_seconds: share(layer) / 3.0, backward_seconds: share(layer) * 2.0 / 3.0 };
    layers.iter().map(passes).collect()
}

#[cfg(test)]
mod tests {
    use paramhub_harness::models::Model;

    use super::*;

    #[test]
    fn the_built_in_times_are_the_published_throughput() {
        for (model, seconds) in [("vgg19", 32.0 / 35.5), ("googlenet", 32.0 / 257.0)] {
            let layers = Model::named(model).unwrap().layers();
            let profile = Profile::built_in(model, &layers, 32).unwrap();
            assert!((profile.seconds() - seconds).abs() < 1e-9, "{model}: {}", profile.seconds());
        }
        let layers = Model::named("vgg19").unwrap().layers();
        let passes = Profile::built_in("vgg19", &layers, 32).unwrap().passes;
        // Convolutions take nearly all the time and hold a seventh of the parameters (Poseidon, section 2.2).
        let convolutions: f64 =
            passes[..16].iter().map(|passes| passes.forward_seconds + passes.backward_seconds).sum();
        assert!(convolutions / (32.0 / 35.5) > 0.99, "{convolutions}");
        let other = Model::named("resnet152").unwrap().layers();
        let seconds = Profile::built_in("resnet152", &other, 1).unwrap().seconds();
        assert!((1.0 / seconds - 60.5).abs() < 0.1, "{seconds}");
        let without_operations = Model::named("transformer-1.1b").unwrap().layers();
        assert!(Profile::built_in("transformer-1.1b", &without_operations, 1).is_err());
    }

    #[test]
    fn a_file_has_a_throughput_or_the_layers_times() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        let layers = Model::named("alexnet").unwrap().layers();
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Profile::read(&path, &layers, 10)
        };
        assert!((read(r#"{"images_per_second": 5}"#).unwrap().seconds() - 2.0).abs() < 1e-9);
        let name = &layers[2].name;
        let line = format!(r#"{{"name": "{name}", "forward_ms": 1, "backward_ms": 2}}"#);
        let text = format!(r#"{{"layers": [{line}]}}"#);
        let passes = read(&text).unwrap().passes;
        assert_eq!(passes[2], Passes { forward_seconds: 0.001, backward_seconds: 0.002 });
        assert_eq!(passes[0], Passes::default());
        for wrong in [
            "{",
            "{}",
            r#"{"layers": []}"#,
            r#"{"images_per_second": 0}"#,
            r#"{"images_per_second": 5, "layers": []}"#,
            r#"{"layers": [{"name": "none", "forward_ms": 1, "backward_ms": 2}]}"#,
            &text.replace("1,", "-1,"),
            &format!(r#"{{"layers": [{line}, {line}]}}"#),
        ] {
            assert!(read(wrong).map(drop).unwrap_err().is::<Usage>(), "{wrong}");
        }
        let without_operations = Model::named("transformer-1.1b").unwrap().layers();
        std::fs::write(&path, r#"{"images_per_second": 5}"#).unwrap();
        assert!(Profile::read(&path, &without_operations, 1).map(drop).unwrap_err().is::<Usage>());
    }
}
