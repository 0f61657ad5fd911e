//! `paramhub checkpoints`, and the checkpoint options of other verbs.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use paramhub::CheckpointConfig;
use paramhub_core::checkpoint::{Every, Resume, ResumeChoice};
use paramhub_core::combinations::{Feature, Features};
use paramhub_hub::{CheckpointFlaw, FoundCheckpoint, NextStart, list_checkpoints, next_start};

use crate::ExitCode;
use crate::config::CHECKPOINTS_KEPT;

#[derive(Args)]
pub(super) struct CheckpointsFlags {
    #[command(subcommand)]
    what: CheckpointsCommand,
}

#[derive(Subcommand)]
enum CheckpointsCommand {
    /// All that lie in a directory, job by job, the newest first, those that do not count among them
    List {
        /// As given to the hub's --checkpoints
        dir: PathBuf,
    },
    /// Read all that are complete and compare them with what was written
    ///
    /// The exit code is 1 where one is not what was written. Those that were never complete do not count, and do no harm.
    Verify {
        /// As given to the hub's --checkpoints
        dir: PathBuf,
    },
}

pub(super) fn checkpoints(flags: &CheckpointsFlags) -> anyhow::Result<ExitCode> {
    let (CheckpointsCommand::List { dir } | CheckpointsCommand::Verify { dir }) = &flags.what;
    let jobs = list_checkpoints(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["job", "step", "size", "age", "hubs", "state", "folder"]);
    let verify = matches!(flags.what, CheckpointsCommand::Verify { .. });
    let (mut all, mut damaged) = (0, 0);
    for (job, found) in &jobs {
        for found in found {
            let state = state(found, verify);
            all += 1;
            damaged += usize::from(!matches!(state.as_str(), "complete" | "verified" | "incomplete"));
            let folder = found.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let step = found.step.to_string();
            let size = indicatif::HumanBytes(found.bytes()).to_string();
            table.add_row([
                job.clone(),
                step,
                size,
                age(found),
                found.parts.len().to_string(),
                state,
                folder,
            ]);
        }
    }
    match all {
        0 => println!("no checkpoints in {}", dir.display()),
        _ => println!("{table}"),
    }
    if verify && damaged > 0 {
        bail!("{damaged} of {all} checkpoints are not what was written");
    }
    Ok(ExitCode::SUCCESS)
}

fn state(found: &FoundCheckpoint, verify: bool) -> String {
    match &found.flaw {
        Some(CheckpointFlaw::Incomplete) => "incomplete".into(),
        Some(CheckpointFlaw::Damaged(why)) => why.clone(),
        None if !verify => "complete".into(),
        None => found.verify().err().unwrap_or("verified".into()),
    }
}

fn age(found: &FoundCheckpoint) -> String {
    let written = UNIX_EPOCH + Duration::from_millis(found.written_ms());
    let age = SystemTime::now().duration_since(written).unwrap_or_default();
    indicatif::HumanDuration(Duration::from_secs(age.as_secs())).to_string()
}

/// The folder in which a hub that a command starts keeps its checkpoints.
pub(super) fn kept(folder: PathBuf) -> CheckpointConfig {
    CheckpointConfig { folder, keep: CHECKPOINTS_KEPT }
}

/// The features of a folder for checkpoints. `runs` says whether the hub already runs.
pub(super) fn asked(runs: bool, folder: Option<&Path>) -> Features {
    Features::of([
        (Feature::RunningHub, runs),
        (Feature::CheckpointFolder, folder.is_some()),
        (Feature::NoCheckpointFolder, !runs && folder.is_none()),
    ])
}

/// Returns the interval at which to write checkpoints: with a folder every 30 seconds, unless the caller
/// chose otherwise.
pub(super) fn effective_every(folder: Option<&Path>, every: Option<Every>) -> Option<Every> {
    let usual = || folder.map(|_| "30s".parse().expect("a pause"));
    every.or_else(usual)
}

/// Returns the checkpoint from which the job goes on. With a name and a folder, the same command goes on with a run
/// that was cut off, unless the caller chose otherwise.
pub(super) fn effective_resume(
    folder: Option<&Path>,
    name: Option<&str>,
    choice: Option<ResumeChoice>,
) -> Option<Resume> {
    match choice {
        Some(ResumeChoice::Never) => None,
        Some(ResumeChoice::From(resume)) => Some(resume),
        None => (folder.is_some() && name.is_some()).then_some(Resume::Auto),
    }
}

/// Prints with what the job begins if that is left to its hub, which is about to find the same.
pub(super) fn say_next_start(folder: Option<&Path>, name: &str, resume: Option<Resume>) {
    let (Some(folder), Some(Resume::Auto)) = (folder, resume) else { return };
    // The hub refuses the job where this fails, and the workers print why.
    match next_start(folder, name) {
        Ok(NextStart::Checkpoint(found)) => eprintln!(
            "paramhub: the last run of job `{name}` has not finished, so this one goes on from its checkpoint of step {}. To \
             begin anew, say --resume=never",
            found.step
        ),
        Ok(NextStart::Anew(why)) if !list_checkpoints_of(folder, name).is_empty() => eprintln!(
            "paramhub: job `{name}` begins anew: {why}. To go on from the newest checkpoint of its name, say --resume"
        ),
        Ok(NextStart::Anew(_)) | Err(_) => {}
    }
}

/// The complete checkpoints of jobs of this name.
fn list_checkpoints_of(folder: &Path, name: &str) -> Vec<FoundCheckpoint> {
    let all = list_checkpoints(folder).ok().and_then(|mut jobs| jobs.remove(name)).unwrap_or_default();
    all.into_iter().filter(|found| found.flaw.is_none()).collect()
}
