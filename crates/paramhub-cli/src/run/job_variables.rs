//! The variables that tell workers what the flags of `paramhub run` ask of a job.
//!
//! The launcher creates one job. A program that opens more, such as one with two optimizers, creates these itself, and
//! `paramhub.torch` then asks for the same. Under other launchers users set the same variables.

use std::process::Command;

use paramhub_core::consistency::Consistency;
use paramhub_core::service::JobOptions;

use super::environment::options;
use crate::config::RunSection;

/// The most characters of a run's name.
const RUN_ID_BYTES_MAX: usize = 48;

/// Sets a variable for each option that differs from its default, and removes the others, which a flag may have overridden.
///
/// What becomes of a job when a worker is lost is not among them: only the launcher's own job has workers that the launcher
/// starts again.
pub(super) fn set(command: &mut Command, section: &RunSection) {
    for (name, value) in variables(section) {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
}

fn variables(section: &RunSection) -> [(&'static str, Option<String>); 20] {
    let (asked, usual) = (options(section), JobOptions::default());
    let run = section.name.clone().filter(|name| is_run_id(name));
    [
        ("PARAMHUB_JOB_DEAD_AFTER", changed(asked.dead_after_s, usual.dead_after_s)),
        ("PARAMHUB_JOB_WEIGHT", changed(asked.weight, usual.weight)),
        ("PARAMHUB_JOB_CONSISTENCY", changed(section.consistency, Consistency::Synchronous)),
        ("PARAMHUB_JOB_CODEC", text(section.codec)),
        ("PARAMHUB_JOB_REDUCTION", changed(asked.reduction, usual.reduction)),
        ("PARAMHUB_JOB_OPTIMIZE_AT", changed(asked.optimize_at, usual.optimize_at)),
        ("PARAMHUB_JOB_BETWEEN_SITES", changed(asked.between_sites, usual.between_sites)),
        ("PARAMHUB_JOB_ENCRYPT", changed(asked.encrypt, usual.encrypt)),
        ("PARAMHUB_JOB_ON_INTERFACE_DOWN", changed(asked.on_interface_down, usual.on_interface_down)),
        ("PARAMHUB_JOB_REDIAL_GRACE", changed(asked.redial_grace_s, usual.redial_grace_s)),
        ("PARAMHUB_JOB_STRAGGLERS", changed(asked.stragglers, usual.stragglers)),
        ("PARAMHUB_JOB_PROGRESS_TIMEOUT", text(asked.progress_timeout_s)),
        ("PARAMHUB_JOB_HUBS", text(section.hubs)),
        ("PARAMHUB_JOB_MAX_HUBS", text(asked.max_hubs)),
        ("PARAMHUB_JOB_HUB_LABEL", text(asked.hub_label)),
        ("PARAMHUB_JOB_REPLICAS", changed(asked.replicas, usual.replicas)),
        ("PARAMHUB_JOB_CHECKPOINT_EVERY", text(asked.checkpoint_every)),
        // The folder is that of the hub, which this launcher has started.
        ("PARAMHUB_JOB_CHECKPOINTS", None),
        // Without a name no later start could find the checkpoints of these jobs.
        ("PARAMHUB_JOB_RESUME", text(asked.resume.filter(|_| run.is_some()))),
        ("PARAMHUB_RUN_ID", run),
    ]
}

/// Returns whether `paramhub.torch` takes the name of this job for that of a run, as a part of its jobs' names.
fn is_run_id(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=RUN_ID_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_plain)
}

fn changed<T: PartialEq + ToString>(value: T, usual: T) -> Option<String> {
    (value != usual).then(|| value.to_string())
}

fn text<T: ToString>(value: Option<T>) -> Option<String> {
    value.map(|value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_ones(section: &RunSection) -> Vec<(&'static str, String)> {
        variables(section).into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }

    #[test]
    fn defaults_set_no_variable() {
        assert_eq!(set_ones(&RunSection::default()), []);
    }

    #[test]
    fn what_the_flags_ask_for_is_set_as_its_flag_reads_it() {
        let section = RunSection {
            name: Some("resnet".into()),
            weight: 3,
            consistency: Consistency::BoundedStaleness(2),
            stragglers: "drop:0.5".parse().unwrap(),
            checkpoints: Some("ck".into()),
            encrypt: true,
            ..RunSection::default()
        };
        let expected = [
            ("PARAMHUB_JOB_WEIGHT", "3"),
            ("PARAMHUB_JOB_CONSISTENCY", "staleness:2"),
            ("PARAMHUB_JOB_ENCRYPT", "true"),
            ("PARAMHUB_JOB_STRAGGLERS", "drop:0.5"),
            ("PARAMHUB_JOB_CHECKPOINT_EVERY", "30s"),
            ("PARAMHUB_JOB_RESUME", "auto"),
            ("PARAMHUB_RUN_ID", "resnet"),
        ];
        assert_eq!(set_ones(&section), expected.map(|(name, value)| (name, value.to_owned())));
    }
}
