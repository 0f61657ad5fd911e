//! `paramhub checkpoints`, and what other verbs say of them.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use paramhub_core::checkpoint::{Every, Resume};
use paramhub_hub::{Flaw, Found, list_checkpoints};

use super::Usage;
use crate::CheckpointConfig;
use crate::cli::ExitCode;
use crate::config::CHECKPOINTS_KEPT;

#[derive(Args)]
pub(super) struct CheckpointsFlags {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
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
    let (What::List { dir } | What::Verify { dir }) = &flags.what;
    let jobs = list_checkpoints(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["job", "step", "size", "age", "hubs", "state", "folder"]);
    let verify = matches!(flags.what, What::Verify { .. });
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

fn state(found: &Found, verify: bool) -> String {
    match &found.flaw {
        Some(Flaw::Incomplete) => "incomplete".into(),
        Some(Flaw::Damaged(why)) => why.clone(),
        None if !verify => "complete".into(),
        None => found.verify().err().unwrap_or("verified".into()),
    }
}

fn age(found: &Found) -> String {
    let written = UNIX_EPOCH + Duration::from_millis(found.written_ms());
    let age = SystemTime::now().duration_since(written).unwrap_or_default();
    indicatif::HumanDuration(Duration::from_secs(age.as_secs())).to_string()
}

/// Where the hub keeps them that a verb starts.
pub(super) fn kept(folder: PathBuf) -> CheckpointConfig {
    CheckpointConfig { folder, keep: CHECKPOINTS_KEPT }
}

/// Refuses a folder for a hub that has its own, and asking for checkpoints of one that is started here without a folder. `runs` says
/// whether the hub runs already.
pub(super) fn check(
    runs: bool,
    folder: Option<&Path>,
    every: Option<Every>,
    resume: Option<Resume>,
) -> Result<(), Usage> {
    let refused = |problem: &str| Err(Usage(problem.into()));
    if runs && folder.is_some() {
        return refused(
            "--checkpoints is for the hub that is started here: one that runs has been told where its own go",
        );
    }
    if runs || folder.is_some() {
        return Ok(());
    }
    if resume.is_some() {
        return refused(
            "--resume goes on from a checkpoint: say with --checkpoints DIR where the hub that is started here finds it",
        );
    }
    if every.is_some() {
        return refused(
            "--checkpoint-every has the hub write checkpoints: say with --checkpoints DIR where the one that is started here \
             puts them",
        );
    }
    Ok(())
}

/// A folder is there for something to be in it.
pub(super) fn effective_every(folder: Option<&Path>, every: Option<Every>) -> Option<Every> {
    let usual = || folder.map(|_| "30s".parse().expect("a pause"));
    every.or_else(usual)
}
