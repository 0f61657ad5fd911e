//! The time that each layer of a model computes.

use std::path::Path;

use anyhow::Context;
use paramhub_harness::Usage;
use paramhub_harness::models::ModelLayer;
use serde::{Deserialize, Serialize};

/// Seconds of one layer in a step, for a whole batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Passes {
    pub(super) forward: f64,
    pub(super) backward: f64,
}

impl Passes {
    /// The passes with both times multiplied by `factor`.
    pub(super) fn times(self, factor: f64) -> Passes {
        Passes { forward: self.forward * factor, backward: self.backward * factor }
    }
}

/// The file of a profile.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The throughput of one machine with this batch. It is spread over the layers by their operations.
    images_per_second: Option<f64>,
    /// The times of each layer by name, for the batch of `--batch`. Layers that are not listed take no time.
    #[serde(default)]
    layers: Vec<LayerLine>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerLine {
    name: String,
    forward_ms: f64,
    backward_ms: f64,
}

/// Images a second that the papers measured on one machine with a Titan X (Poseidon, section 5).
const PUBLISHED: [(&str, f64); 4] =
    [("googlenet", 257.0), ("vgg19", 35.5), ("vgg19-22k", 34.6), ("inception_v3", 43.2)];
/// Multiplications and additions a second of a forward pass and a backward pass together, for models without
/// a published throughput: those of VGG19 above, three times 19.6 billion an image.
const OPERATIONS_PER_SECOND: f64 = 35.5 * 3.0 * 19.63e9;

/// The times, and their source.
pub(super) struct Profile {
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
        let (source, pace) = match published {
            Some(&(_, pace)) => (format!("{pace} images/s, as published"), pace),
            None => {
                let pace = OPERATIONS_PER_SECOND / (3.0 * operations as f64);
                (format!("{pace:.1} images/s, at the pace of the published VGG19"), pace)
            }
        };
        Ok(Profile { source, passes: spread(layers, samples as f64 / pace) })
    }

    /// The profile in a file.
    pub(super) fn read(path: &Path, layers: &[ModelLayer], samples: u64) -> anyhow::Result<Profile> {
        let refuse = |problem: String| Usage(format!("--profile {}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
        let form = "expected {\"images_per_second\": N} or {\"layers\": [{\"name\", \"forward_ms\", \"backward_ms\"}, ..]}";
        let file: File =
            serde_json::from_str(&text).context(form).map_err(|error| refuse(format!("{error:#}")))?;
        let source = path.display().to_string();
        let is_time = |time: f64| time.is_finite() && time >= 0.0;
        match file.images_per_second {
            Some(pace) if file.layers.is_empty() && pace.is_finite() && pace > 0.0 => {
                return Ok(Profile { source, passes: spread(layers, samples as f64 / pace) });
            }
            Some(_) => return Err(refuse(form.to_owned()).into()),
            None => {}
        }
        let mut passes = vec![Passes::default(); layers.len()];
        for line in file.layers {
            let LayerLine { name, forward_ms, backward_ms } = line;
            let Some(at) = layers.iter().position(|layer| layer.name == name) else {
                return Err(refuse(format!("the model has no layer `{name}`")).into());
            };
            if !is_time(forward_ms) || !is_time(backward_ms) {
                return Err(refuse(format!("layer `{name}` takes no such time")).into());
            }
            passes[at] = Passes { forward: forward_ms / 1e3, backward: backward_ms / 1e3 };
        }
        Ok(Profile { source, passes })
    }

    /// The seconds of a whole step.
    pub(super) fn seconds(&self) -> f64 {
        self.passes.iter().map(|passes| passes.forward + passes.backward).sum()
    }

    /// The profile with all times multiplied by `factor`.
    pub(super) fn stretched(self, factor: f64) -> Profile {
        Profile { passes: self.passes.into_iter().map(|passes| passes.times(factor)).collect(), ..self }
    }
}

/// Spreads a step's time over the layers by their operations. A backward pass has twice the operations of a
/// forward pass: one product for each of its two gradients.
fn spread(layers: &[ModelLayer], seconds: f64) -> Vec<Passes> {
    let all: u64 = layers.iter().map(|layer| layer.operations).sum();
    let share = |layer: &ModelLayer| seconds * layer.operations as f64 / all.max(1) as f64;
    let passes = |layer| Passes { forward: share(layer) / 3.0, backward: share(layer) * 2.0 / 3.0 };
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
        let convolutions: f64 = passes[..16].iter().map(|passes| passes.forward + passes.backward).sum();
        assert!(convolutions / (32.0 / 35.5) > 0.99, "{convolutions}");
        let other = Model::named("resnet152").unwrap().layers();
        let seconds = Profile::built_in("resnet152", &other, 1).unwrap().seconds();
        assert!((1.0 / seconds - 60.5).abs() < 0.1, "{seconds}");
        let silent = Model::named("transformer-1.1b").unwrap().layers();
        assert!(Profile::built_in("transformer-1.1b", &silent, 1).is_err());
    }

    #[test]
    fn a_file_names_a_pace_or_the_layers_times() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        let layers = Model::named("alexnet").unwrap().layers();
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Profile::read(&path, &layers, 10)
        };
        assert!((read(r#"{"images_per_second": 5}"#).unwrap().seconds() - 2.0).abs() < 1e-9);
        let name = &layers[2].name;
        let text = format!(r#"{{"layers": [{{"name": "{name}", "forward_ms": 1, "backward_ms": 2}}]}}"#);
        let passes = read(&text).unwrap().passes;
        assert_eq!(passes[2], Passes { forward: 0.001, backward: 0.002 });
        assert_eq!(passes[0], Passes::default());
        for wrong in [
            "{",
            r#"{"images_per_second": 0}"#,
            r#"{"layers": [{"name": "none", "forward_ms": 1, "backward_ms": 2}]}"#,
            &text.replace("1,", "-1,"),
        ] {
            assert!(read(wrong).map(drop).unwrap_err().is::<Usage>(), "{wrong}");
        }
    }
}
