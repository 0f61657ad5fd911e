//! `paramhub tokens`

use clap::{Args, Subcommand};
use comfy_table::{Table, presets};
use paramhub_core::service::{CreateToken, TokenRole, TokenStatus};

use super::{ManagerUrl, client};
use crate::ExitCode;
use crate::config::Config;
use crate::jobs::age;

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct TokensFlags {
    #[command(subcommand)]
    command: TokensCommand,
    /// The connection manager's URL [default: http://127.0.0.1:7770]
    #[arg(long, global = true, value_name = "URL", env = "PARAMHUB_URL")]
    hub: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Clone, Subcommand)]
enum TokensCommand {
    /// Make a token and print it; it is not shown again
    Create {
        /// Its name in listings and in the manager's log
        name: String,
        /// What it is for: `admin` everything, `hub` letting hubs join, `reader` reading jobs, hubs and metrics, `team` the jobs of
        /// a team
        #[arg(long, value_name = "ROLE")]
        role: TokenRole,
        /// The team, for the role `team`
        #[arg(long, value_name = "TEAM")]
        team: Option<String>,
    },
    /// All tokens, without their text
    List,
    /// Revoke a token: the next call with it is refused; jobs that run, and hubs that have joined with it, go on
    ///
    /// `configured` is the token that the manager was started with. It can be revoked when there is another admin token, and
    /// stays revoked if the manager keeps its state (--state).
    Revoke {
        /// The token's name
        name: String,
    },
}

pub(super) struct TokensTask {
    command: TokensCommand,
    json: bool,
}

impl TokensFlags {
    pub(super) fn apply(self, config: &mut Config) -> TokensTask {
        ManagerUrl { manager_url: self.hub }.apply(config);
        TokensTask { command: self.command, json: self.json }
    }
}

pub(super) fn tokens(config: &Config, task: TokensTask) -> anyhow::Result<ExitCode> {
    let client = client(config)?;
    match task.command {
        TokensCommand::Create { name, role, team } => {
            let created = client.create_token(&CreateToken { name, role, team })?;
            match task.json {
                true => println!("{}", serde_json::to_string_pretty(&created)?),
                // Alone on its line, for $(...).
                false => println!("{}", created.token),
            }
        }
        TokensCommand::List => {
            let tokens = client.tokens()?;
            match task.json {
                true => println!("{}", serde_json::to_string_pretty(&tokens)?),
                false => println!("{}", table(&tokens)),
            }
        }
        TokensCommand::Revoke { name } => {
            let revoked = client.revoke_token(&name)?;
            match task.json {
                true => println!("{}", serde_json::to_string_pretty(&revoked)?),
                false => println!("the token `{}` ({}) is revoked", revoked.name, revoked.role),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn table(tokens: &[TokenStatus]) -> String {
    if tokens.is_empty() {
        return "The connection manager asks for no token.".to_owned();
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(["token", "role", "team", "made", "by", "revoked"]);
    for token in tokens {
        let ago = |time| format!("{} ago", age(time));
        let made = if token.created_at == 0 { String::new() } else { ago(token.created_at) };
        let revoked = token.revoked_at.map(ago).unwrap_or_default();
        let TokenStatus { name, role, team, created_by, .. } = token.clone();
        table.add_row([name, role.to_string(), team.unwrap_or_default(), made, created_by, revoked]);
    }
    table.to_string()
}
