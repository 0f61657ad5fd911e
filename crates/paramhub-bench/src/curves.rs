//! The progress of trainings, epoch by epoch, as lines beside each other.

use paramhub_harness::Usage;
use paramhub_harness::exchange::statistics::{quantile, sorted};
use serde::Deserialize;

use super::plot::{Heading, Lines, Point, Scale, Series};

/// The quantity that is drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Curve {
    #[default]
    Loss,
    Error,
}

/// The JSON that `paramhub train --json` writes.
#[derive(Deserialize)]
pub(super) struct Training {
    epochs: Vec<Epoch>,
    settings: Settings,
}

#[derive(Deserialize)]
struct Epoch {
    step: u32,
    loss: f64,
    accuracy: Option<f64>,
}

#[derive(Deserialize)]
struct Settings {
    net: String,
    workers: u32,
    batch: u32,
    codec: String,
    scheme: String,
    optimizer: String,
}

impl Settings {
    fn name(&self) -> String {
        match self.scheme.as_str() {
            "hub" => format!("{}, {}", self.net, self.codec),
            scheme => format!("{}, {}, {scheme}", self.net, self.codec),
        }
    }
}

/// One line for all trainings that differ only in their seeds.
pub(super) fn curves(trainings: &[Training], curve: Curve) -> Result<Lines, Usage> {
    let value = |epoch: &Epoch| match curve {
        Curve::Loss => Some(epoch.loss),
        Curve::Error => epoch.accuracy.map(|accuracy| 100.0 * (1.0 - accuracy)),
    };
    let steps = |training: &Training| -> Vec<u32> {
        let shown = training.epochs.iter().filter(|epoch| value(epoch).is_some());
        shown.map(|epoch| epoch.step).collect()
    };
    let shared = steps(&trainings[0]);
    if shared.is_empty() {
        let problem = match curve {
            Curve::Loss => "no epoch ended in it, so there is nothing to draw",
            Curve::Error => "no epoch was tested in it: train with --test-every 1",
        };
        return Err(Usage(problem.into()));
    }
    if let Some(other) = trainings.iter().find(|training| steps(training) != shared) {
        return Err(Usage(format!(
            "{} was measured at other steps than {}, so they cannot be drawn together",
            other.settings.name(),
            trainings[0].settings.name()
        )));
    }
    // The axis shows as many labels as fit.
    let every = shared.len().div_ceil(8);
    let label = |(at, &step): (usize, &u32)| {
        let text = if at % every == every - 1 { step.to_string() } else { String::new() };
        (f64::from(step), text)
    };
    let mut names: Vec<String> = Vec::new();
    for training in trainings {
        let name = training.settings.name();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let series = names.into_iter().map(|name| {
        let runs: Vec<Vec<f64>> = trainings
            .iter()
            .filter(|training| training.settings.name() == name)
            .map(|training| training.epochs.iter().filter_map(value).collect())
            .collect();
        let point = |at: usize| {
            let values = sorted(runs.iter().map(|run| run[at]));
            Point { median: quantile(&values, 0.5), low: values[0], high: values[values.len() - 1] }
        };
        let name = if runs.len() > 1 { format!("{name}, {} seeds", runs.len()) } else { name };
        Series { name, is_reference: false, points: (0..shared.len()).map(point).collect() }
    });
    let Settings { workers, batch, optimizer, .. } = &trainings[0].settings;
    let (title, y_label) = match curve {
        Curve::Loss => ("Loss of the training set", "mean of an epoch, rank 0's share"),
        Curve::Error => ("Error on the test set", "% wrong"),
    };
    Ok(Lines {
        heading: Heading {
            title: title.into(),
            notes: vec![format!("{workers} workers of {batch} examples a step, {optimizer}")],
        },
        x_label: "steps".into(),
        y_label: y_label.into(),
        scale: Scale::Linear,
        values: shared.iter().enumerate().map(label).collect(),
        series: series.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training(codec: &str, steps: &[u32], is_tested: bool) -> Training {
        let accuracy = is_tested.then_some(0.75);
        Training {
            epochs: steps.iter().map(|&step| Epoch { step, loss: 1.0 / f64::from(step), accuracy }).collect(),
            settings: Settings {
                net: "lenet".into(),
                workers: 2,
                batch: 4,
                codec: codec.into(),
                scheme: "hub".into(),
                optimizer: "sgd".into(),
            },
        }
    }

    #[test]
    fn trainings_are_lines_over_the_steps_they_share() {
        let exact = || training("f32", &[10, 20, 30], true);
        let mut less_accurate = exact();
        less_accurate.epochs[1].accuracy = Some(0.25);
        let all = [exact(), training("one-bit", &[10, 20, 30], true), less_accurate, exact()];
        let lines = curves(&all, Curve::Error).unwrap();
        let names: Vec<&str> = lines.series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["lenet, f32, 3 seeds", "lenet, one-bit"]);
        assert!(lines.series.iter().all(|series| series.points.iter().all(|point| point.median == 25.0)));
        let highest: Vec<f64> = lines.series[0].points.iter().map(|point| point.high).collect();
        assert_eq!(highest, [25.0, 75.0, 25.0]);
        assert_eq!(lines.values.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [10.0, 20.0, 30.0]);
    }

    #[test]
    fn trainings_that_cannot_be_drawn_together_are_refused() {
        let refused = |trainings: &[Training], curve| curves(trainings, curve).err().unwrap().0;
        let untested = [training("f32", &[10], false)];
        assert!(refused(&untested, Curve::Error).contains("--test-every 1"));
        let unlike = [training("f32", &[10, 20], true), training("one-bit", &[10], true)];
        assert!(refused(&unlike, Curve::Loss).contains("at other steps"));
        assert!(curves(&untested, Curve::Loss).is_ok());
    }
}
