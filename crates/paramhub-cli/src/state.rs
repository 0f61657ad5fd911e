//! `paramhub state`

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use paramhub::{restore_state, restore_state_to_etcd};

use super::{ManagerUrl, Usage, client};
use crate::ExitCode;
use crate::config::{Config, StatePlace};

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct StateFlags {
    #[command(subcommand)]
    command: StateCommand,
    /// The connection manager's URL [default: http://127.0.0.1:7770]
    #[arg(long, global = true, value_name = "URL", env = "PARAMHUB_URL")]
    hub: Option<String>,
}

#[derive(Clone, Subcommand)]
enum StateCommand {
    /// Save all that a running connection manager keeps to a new file, which only you can read: jobs, tokens, teams and the
    /// authority of its certificates, with their secrets
    Save {
        /// The file
        file: PathBuf,
    },
    /// Write what was saved into a directory, or under a prefix of etcd, for connection managers to start with (--state)
    Restore {
        /// The file
        file: PathBuf,
        /// The directory, or the etcd and its prefix as in etcd://HOST:PORT/PREFIX, which has no state yet
        #[arg(long, value_name = "DIR|URL")]
        state: StatePlace,
    },
}

pub(super) struct StateTask(StateCommand);

impl StateFlags {
    pub(super) fn apply(self, config: &mut Config) -> StateTask {
        ManagerUrl { manager_url: self.hub }.apply(config);
        StateTask(self.command)
    }
}

pub(super) fn state(config: &Config, task: StateTask) -> anyhow::Result<ExitCode> {
    match task.0 {
        StateCommand::Save { file } => {
            let client = client(config)?;
            let created = create(&file).with_context(|| format!("cannot save to {}", file.display()))?;
            let saved = client.state().map_err(anyhow::Error::from).and_then(|state| {
                write(created, &state).with_context(|| format!("cannot save to {}", file.display()))
            });
            if saved.is_err() {
                let _ = std::fs::remove_file(&file);
            }
            saved?;
        }
        StateCommand::Restore { file, state } => {
            let saved = std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let restored = match &state {
                StatePlace::Directory(directory) => restore_state(&saved, directory),
                StatePlace::Etcd(address) => restore_state_to_etcd(&saved, address),
                StatePlace::Unusable(why) => return Err(Usage(format!("--state: {why}")).into()),
            };
            restored.with_context(|| format!("cannot restore {}", file.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A new file that only its owner can read.
fn create(file: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)
}

fn write(mut file: File, state: &[u8]) -> std::io::Result<()> {
    file.write_all(state)?;
    file.sync_all()
}
