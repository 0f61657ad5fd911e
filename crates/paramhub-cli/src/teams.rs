//! `paramhub teams`

use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use paramhub_core::service::{TeamQuotas, TeamStatus};

use super::{ManagerUrl, client};
use crate::ExitCode;
use crate::config::{Bytes, Config};
use crate::jobs::bytes;

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct TeamsFlags {
    #[command(subcommand)]
    command: TeamsCommand,
    /// The connection manager's URL [default: http://127.0.0.1:7770]
    #[arg(long, global = true, value_name = "URL", env = "PARAMHUB_URL")]
    hub: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Clone, Subcommand)]
enum TeamsCommand {
    /// Add a team, or replace all of its quotas: what is left out has no limit
    ///
    /// The quotas are for all of its living jobs together. Callers get a token with `tokens create NAME --role team --team TEAM`.
    Set {
        /// Its name, with which the names of its jobs begin: lower-case letters, digits, `_` and `-`
        name: String,
        /// Jobs at once
        #[arg(long, value_name = "N")]
        jobs: Option<u32>,
        /// The sum of its jobs' weights, which are their shares of a hub core's time
        #[arg(long, value_name = "W")]
        weight: Option<u32>,
        /// Memory at all hubs, as in 64G
        #[arg(long, value_name = "SIZE")]
        memory: Option<Bytes>,
        /// Streams that all workers may open to all hubs
        #[arg(long, value_name = "N")]
        streams: Option<u64>,
    },
    /// All teams, with what their jobs have of their quotas
    List,
    /// Remove a team that has neither jobs that live nor valid tokens
    Remove {
        /// Its name
        name: String,
    },
}

pub(super) struct TeamsTask {
    command: TeamsCommand,
    json: bool,
}

impl TeamsFlags {
    pub(super) fn apply(self, config: &mut Config) -> TeamsTask {
        ManagerUrl { manager_url: self.hub }.apply(config);
        TeamsTask { command: self.command, json: self.json }
    }
}

pub(super) fn teams(config: &Config, task: TeamsTask) -> anyhow::Result<ExitCode> {
    let client = client(config)?;
    match task.command {
        TeamsCommand::Set { name, jobs, weight, memory, streams } => {
            let memory_bytes = memory.map(|memory| memory.0);
            let set = client.set_team(&name, &TeamQuotas { jobs, weight, memory_bytes, streams })?;
            match task.json {
                true => println!("{}", serde_json::to_string_pretty(&set)?),
                false => println!("team {}: {}", set.name, set.quotas),
            }
        }
        TeamsCommand::List => {
            let teams = client.teams()?;
            match task.json {
                true => println!("{}", serde_json::to_string_pretty(&teams)?),
                false => println!("{}", table(&teams)),
            }
        }
        TeamsCommand::Remove { name } => {
            let removed = client.remove_team(&name)?;
            match task.json {
                true => println!("{}", serde_json::to_string_pretty(&removed)?),
                false => println!("team {} is removed", removed.name),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn table(teams: &[TeamStatus]) -> String {
    if teams.is_empty() {
        return "no teams".to_owned();
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["team", "jobs", "weight", "memory", "streams"]);
    let of = |used: String, quota: Option<String>| match quota {
        Some(quota) => format!("{used} of {quota}"),
        None => used,
    };
    for team in teams {
        let TeamQuotas { jobs, weight, memory_bytes, streams } = team.quotas;
        table.add_row([
            team.name.clone(),
            of(team.jobs.to_string(), jobs.map(|most| most.to_string())),
            of(team.weight.to_string(), weight.map(|most| most.to_string())),
            of(bytes(team.memory_bytes), memory_bytes.map(bytes)),
            of(team.streams.to_string(), streams.map(|most| most.to_string())),
        ]);
    }
    table.to_string()
}
