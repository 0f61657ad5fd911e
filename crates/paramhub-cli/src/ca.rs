//! `paramhub ca`

use clap::{Args, Subcommand};
use paramhub_core::service::ReplaceAuthority;

use super::{ManagerUrl, client};
use crate::ExitCode;
use crate::config::Config;

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct CaFlags {
    #[command(subcommand)]
    command: Option<CaCommand>,
    /// The connection manager's URL [default: http://127.0.0.1:7770]
    #[arg(long, global = true, value_name = "URL", env = "PARAMHUB_URL")]
    hub: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Clone, Default, Subcommand)]
enum CaCommand {
    /// Print the certificate in PEM, for curl's --cacert and Prometheus's ca_file (the default)
    #[default]
    Show,
    /// Make a new authority, whose fingerprint the secrets of new jobs carry. Programs with a token learn it by themselves;
    /// give curl and Prometheus the certificate that this prints
    Rotate {
        /// Revoke the former authorities: workers of older jobs do not recognise the manager then. Those that have yet to join
        /// fail, and so do jobs without hubs; other jobs that run go on. Without this the last seven are kept
        #[arg(long)]
        revoke_former: bool,
    },
}

pub(super) struct CaTask {
    command: CaCommand,
    json: bool,
}

impl CaFlags {
    pub(super) fn apply(self, config: &mut Config) -> CaTask {
        ManagerUrl { manager_url: self.hub }.apply(config);
        CaTask { command: self.command.unwrap_or_default(), json: self.json }
    }
}

pub(super) fn ca(config: &Config, task: CaTask) -> anyhow::Result<ExitCode> {
    let client = client(config)?;
    let authority = match task.command {
        CaCommand::Show => client.authority()?,
        CaCommand::Rotate { revoke_former } => {
            client.replace_authority(&ReplaceAuthority { revoke_former })?
        }
    };
    match task.json {
        true => println!("{}", serde_json::to_string_pretty(&authority)?),
        false => print!("{}", authority.certificate),
    }
    Ok(ExitCode::SUCCESS)
}
