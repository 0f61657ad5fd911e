//! The command line: one file for each command, and what they share. The programs, `paramhub` and the one in the Python
//! package, only call [`main`].
#![forbid(unsafe_code)]

// Its `println!` and the like replace those of std, which panic if the output cannot be written.
#[macro_use]
extern crate paramhub_harness;

mod admin_token;
mod bench;
mod ca;
mod checkpoints;
#[cfg(test)]
mod combinations_tests;
mod config;
mod deployment;
mod doctor;
mod environment;
mod hub;
mod hubs;
mod jobs;
mod manager;
mod plan;
mod probe;
mod run;
mod schemes;
mod state;
mod teams;
mod tls;
mod tokens;
#[cfg(feature = "demonstrations")]
mod train;
#[cfg(not(feature = "demonstrations"))]
mod without_demonstrations;
#[cfg(not(feature = "demonstrations"))]
use without_demonstrations as train;

use std::any::TypeId;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use paramhub::embedded::EmbeddedError;
use paramhub::service::ErrorCode;
use paramhub::{ControlError, HubError, ManagerClient, ManagerConfig, ManagerError};
use paramhub_harness::Usage;
use paramhub_harness::exchange::PeerFlags;
use paramhub_kernels::Isa;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use admin_token::TokenSource;
use config::{Config, Secret};

pub use admin_token::admin_token_from_environment;
pub use environment::unread_variables;
pub use paramhub_harness::ExitCode;

/// Exchanges gradients and parameters between the workers of distributed training jobs.
///
/// Workers push gradients in small chunks; a hub sums each chunk as it arrives, runs the optimizer on it, and
/// sends the new parameters back.
#[derive(Parser)]
#[command(name = "paramhub", version, max_term_width = 110, after_help = after_help())]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: CliCommand,
}

fn after_help() -> String {
    let train = match cfg!(feature = "demonstrations") {
        true => {
            "  paramhub train                      train a small network with 4 workers through a hub, here and now\n"
        }
        false => "",
    };
    format!(
        "\
First steps:
{train}  paramhub doctor                     what this machine offers, and what is missing
  paramhub hub                        start a hub for jobs to come
  paramhub run -n 4 -- python x.py    start 4 workers of a job of yours

Every option but those of `bench`, `plan` and `probe` can also stand in a file (paramhub.toml, or --config FILE)
or in the environment (PARAMHUB_*). A flag wins over the environment, and the environment over the file; --print-config shows the values in effect.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted; `run` passes on its workers' code."
    )
}

/// Options of every command.
#[derive(Args)]
struct Common {
    /// Configuration file [default: paramhub.toml, if it exists]
    #[arg(long, global = true, value_name = "FILE", env = "PARAMHUB_CONFIG")]
    config: Option<PathBuf>,
    /// Print the effective configuration as TOML, without secrets, and exit
    #[arg(long, global = true)]
    print_config: bool,
    /// Log filter, as in `debug` or `paramhub_hub=debug` [default: info for hub and manager, else warn]
    #[arg(long, global = true, value_name = "FILTER", env = "PARAMHUB_LOG")]
    log: Option<String>,
    /// The token that operators and hubs must give the connection manager; needed unless it listens on loopback only
    #[arg(
        long,
        global = true,
        visible_alias = "token",
        value_name = "TOKEN",
        env = "PARAMHUB_ADMIN_TOKEN",
        hide_env_values = true
    )]
    admin_token: Option<Secret>,
    /// A file with that token in its only line, instead of --admin-token
    #[arg(
        long,
        global = true,
        visible_alias = "token-file",
        value_name = "FILE",
        env = "PARAMHUB_ADMIN_TOKEN_FILE"
    )]
    admin_token_file: Option<PathBuf>,
}

#[derive(Subcommand)]
enum CliCommand {
    /// Train a small network, by default with 4 worker processes through a hub started for the purpose
    Train(train::TrainFlags),
    /// Start a hub, by default with a connection manager of its own
    Hub(hub::HubFlags),
    /// Start a connection manager alone, for hubs that join it
    Manager(manager::ManagerFlags),
    /// List, create, show or stop jobs
    Jobs(jobs::JobsFlags),
    /// List hubs and the bandwidth between their racks, or measure it
    Hubs(hubs::HubsFlags),
    /// Make, list or revoke the tokens that operators, teams and hubs show
    Tokens(tokens::TokensFlags),
    /// Print or replace the certificate of the authority by which curl and Prometheus recognise the connection manager
    Ca(ca::CaFlags),
    /// Save what a connection manager keeps to a file, or restore it for another
    State(state::StateFlags),
    /// Name the teams that share the hubs, and set what the jobs of each may have together
    Teams(teams::TeamsFlags),
    /// List or verify checkpoints
    Checkpoints(checkpoints::CheckpointsFlags),
    /// Start the workers of a job on this machine
    Run(run::RunFlags),
    /// Say what this machine offers and what is missing
    Doctor(doctor::DoctorFlags),
    /// Measure exchanges and kernels on this machine
    Bench(bench::BenchFlags),
    /// Say which deployment of hubs suits a model and a network
    Plan(plan::PlanFlags),
    /// Measure what the network carries between the workers of a job
    Probe(probe::ProbeFlags),
    /// One process of `bench`.
    #[command(hide = true)]
    BenchPeer(PeerFlags),
    /// One worker of `train`.
    #[command(hide = true)]
    TrainWorker(train::WorkerFlags),
    /// Ends the workers of a launcher that was killed.
    #[command(hide = true)]
    WorkerSupervisor,
}

/// Runs the command that `arguments` name; the first argument is the program's own name. Until it ends, the
/// command owns the process's signals, log and standard streams.
///
/// `started_as` is the command with which this program starts its own child processes; `None` means this program's file.
pub fn main(arguments: impl IntoIterator<Item = OsString>, started_as: Option<Vec<OsString>>) -> ExitCode {
    if let Some(command) = started_as {
        paramhub_harness::launch::set_this_program_command(command);
    }
    let parsed =
        command().try_get_matches_from(arguments).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(refused) if refused.use_stderr() => {
            let text = in_plain_words(&refused.to_string());
            eprint!("paramhub: {}", text.strip_prefix("error: ").unwrap_or(&text));
            return ExitCode::from(2);
        }
        Err(help_or_version) => {
            // If the reader has closed the pipe, the help need not be printed.
            let _ = help_or_version.print();
            return ExitCode::SUCCESS;
        }
    };
    let code = match dispatch(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("paramhub: {error:#}");
            ExitCode::from(if is_usage_error(&error) { 2 } else { 1 })
        }
    };
    match paramhub_harness::output::finish() {
        Some(failure) if code == ExitCode::SUCCESS => {
            eprintln!("paramhub: cannot write to standard output: {failure}");
            ExitCode::FAILURE
        }
        _ => code,
    }
}

/// The whole command line.
fn command() -> clap::Command {
    with_switches(Cli::command())
}

/// Lets each flag of a truth value stand alone, as `--flag` for `--flag=true`. `--flag=false` takes back what the
/// environment or the configuration file say.
fn with_switches(command: clap::Command) -> clap::Command {
    let is_truth_value = |arg: &clap::Arg| {
        matches!(arg.get_action(), ArgAction::Set) && arg.get_value_parser().type_id() == TypeId::of::<bool>()
    };
    command
        .mut_args(|arg| match is_truth_value(&arg) {
            true => arg
                .value_parser(BoolishValueParser::new())
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
                .value_name("BOOL"),
            false => arg,
        })
        .mut_subcommands(with_switches)
}

/// Returns whether flags, environment or file must change before the same command can succeed. The wrong
/// value was found here, by the hub or the connection manager that was to start, or by a running manager.
fn is_usage_error(error: &anyhow::Error) -> bool {
    error.chain().any(is_usage_cause)
}

fn is_usage_cause(cause: &(dyn std::error::Error + 'static)) -> bool {
    // `source` of these skips the error that they wrap, so the chain does not contain it.
    match cause.downcast_ref::<EmbeddedError>() {
        Some(EmbeddedError::Manager(error)) => return is_usage_cause(error),
        Some(EmbeddedError::Hub(error)) => return is_usage_cause(error),
        Some(EmbeddedError::Control(error)) => return is_usage_cause(error),
        None => {}
    }
    if let Some(error) = cause.downcast_ref::<ManagerError>() {
        use ManagerError::{EtcdMissing, Setting, TokenNeeded, TokenUnusable, Trust};
        return matches!(error, TokenNeeded { .. } | TokenUnusable | Setting { .. } | EtcdMissing | Trust(_));
    }
    if let Some(error) = cause.downcast_ref::<ControlError>() {
        return matches!(error, ControlError::Url { .. })
            || matches!(error.code(), Some(ErrorCode::BadRequest | ErrorCode::Unauthorized));
    }
    cause.is::<Usage>() || matches!(cause.downcast_ref::<HubError>(), Some(HubError::Config(_)))
}

/// Rust's parse errors speak of digits and strings. A person wants to know which values are accepted.
fn in_plain_words(refused: &str) -> String {
    refused
        .replace("invalid digit found in string", "expected a whole number")
        .replace("cannot parse integer from empty string", "expected a whole number")
        .replace("number too large to fit in target type", "that is too large")
        .replace("invalid float literal", "expected a number")
        .replace("cannot parse float from empty string", "expected a number")
}

fn dispatch(cli: Cli) -> anyhow::Result<ExitCode> {
    Isa::check_environment().map_err(|error| Usage(error.to_string()))?;
    let common = cli.common;
    let mut config = match &cli.command {
        // `paramhub` itself starts these and passes all that they need.
        CliCommand::WorkerSupervisor | CliCommand::TrainWorker(_) | CliCommand::BenchPeer(_) => {
            Config::default()
        }
        _ => config::load(common.config.as_deref())?,
    };
    config.log = common.log.or(config.log);
    let given = TokenSource { token: common.admin_token, file: common.admin_token_file };
    config.take_token(given).map_err(Usage)?;
    let task = cli.command.apply(&mut config);
    if !task.is_started_by_us() {
        unread_variables().iter().for_each(|unread| eprintln!("paramhub: {unread}"));
    }
    if common.print_config {
        print!("{}", config.to_toml());
        return Ok(ExitCode::SUCCESS);
    }
    let usual_log = match task {
        CliTask::Hub | CliTask::Manager => "info",
        CliTask::Train => train::usual_log(&config),
        _ => "warn",
    };
    start_log(&config, usual_log)?;
    match task {
        CliTask::Train => train::train(&config),
        CliTask::Hub => hub::serve(&config),
        CliTask::Manager => manager::serve(&config),
        CliTask::Jobs(task) => jobs::jobs(&config, task),
        CliTask::Hubs(task) => hubs::hubs(&config, task),
        CliTask::Tokens(task) => tokens::tokens(&config, task),
        CliTask::Ca(task) => ca::ca(&config, task),
        CliTask::State(task) => state::state(&config, task),
        CliTask::Teams(task) => teams::teams(&config, task),
        CliTask::Checkpoints(flags) => checkpoints::checkpoints(&flags),
        CliTask::Run(command) => run::run(&config, command),
        CliTask::Doctor(task) => doctor::doctor(&config, task),
        CliTask::Bench(flags) => bench::bench(flags),
        CliTask::Plan(flags) => plan::plan(&flags),
        CliTask::Probe(flags) => probe::probe(&flags),
        CliTask::BenchPeer(flags) => bench::run_process(&flags),
        CliTask::TrainWorker(flags) => train::work(&flags),
        CliTask::WorkerSupervisor => {
            paramhub_harness::launch::supervise_groups(std::io::stdin().lock());
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A command to run. Its options are in the configuration; the variants hold only the arguments that the
/// configuration lacks.
enum CliTask {
    Train,
    Hub,
    Manager,
    Jobs(jobs::JobsTask),
    Hubs(hubs::HubsTask),
    Tokens(tokens::TokensTask),
    Ca(ca::CaTask),
    State(state::StateTask),
    Teams(teams::TeamsTask),
    Checkpoints(checkpoints::CheckpointsFlags),
    Run(Vec<OsString>),
    Doctor(doctor::DoctorTask),
    Bench(bench::BenchFlags),
    Plan(plan::PlanFlags),
    Probe(probe::ProbeFlags),
    BenchPeer(PeerFlags),
    TrainWorker(train::WorkerFlags),
    WorkerSupervisor,
}

impl CliTask {
    /// Returns whether another `paramhub` process started this one. That process has already warned of unread
    /// variables, which both inherit.
    fn is_started_by_us(&self) -> bool {
        matches!(self, CliTask::BenchPeer(_) | CliTask::TrainWorker(_) | CliTask::WorkerSupervisor)
    }
}

impl CliCommand {
    fn apply(self, config: &mut Config) -> CliTask {
        match self {
            CliCommand::Train(flags) => {
                flags.apply(config);
                CliTask::Train
            }
            CliCommand::Hub(flags) => {
                flags.apply(config);
                CliTask::Hub
            }
            CliCommand::Manager(flags) => {
                flags.apply(config);
                CliTask::Manager
            }
            CliCommand::Jobs(flags) => CliTask::Jobs(flags.apply(config)),
            CliCommand::Hubs(flags) => CliTask::Hubs(flags.apply(config)),
            CliCommand::Tokens(flags) => CliTask::Tokens(flags.apply(config)),
            CliCommand::Ca(flags) => CliTask::Ca(flags.apply(config)),
            CliCommand::State(flags) => CliTask::State(flags.apply(config)),
            CliCommand::Teams(flags) => CliTask::Teams(flags.apply(config)),
            CliCommand::Checkpoints(flags) => CliTask::Checkpoints(flags),
            CliCommand::Run(flags) => CliTask::Run(flags.apply(config)),
            CliCommand::Doctor(flags) => CliTask::Doctor(flags.apply(config)),
            CliCommand::Bench(flags) => CliTask::Bench(flags),
            CliCommand::Plan(flags) => CliTask::Plan(flags),
            CliCommand::Probe(flags) => CliTask::Probe(flags),
            CliCommand::BenchPeer(flags) => CliTask::BenchPeer(flags),
            CliCommand::TrainWorker(flags) => CliTask::TrainWorker(flags),
            CliCommand::WorkerSupervisor => CliTask::WorkerSupervisor,
        }
    }
}

/// The option that names the connection manager.
#[derive(Args)]
struct ManagerUrl {
    /// The connection manager's URL; of several managers with one etcd all, separated by commas
    #[arg(long = "hub", value_name = "URL", env = "PARAMHUB_URL")]
    manager_url: Option<String>,
}

impl ManagerUrl {
    fn apply(self, config: &mut Config) {
        // An empty variable counts as unset: some shells unset variables so.
        config.url = self.manager_url.or(config.url.take()).filter(|url| !url.trim().is_empty());
    }
}

/// A client of the configured connection manager, or of one on this machine's default port.
fn client(config: &Config) -> anyhow::Result<ManagerClient> {
    let url = config.url.as_deref().unwrap_or(paramhub::DEFAULT_URL);
    ManagerClient::new(url, config.admin_token()).map_err(|error| Usage(error.to_string()).into())
}

/// Parses a positive number of seconds.
fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds > 0.0);
    seconds.ok_or_else(|| "expected a number of seconds above zero".to_owned())
}

/// Returns the time that a hub may be silent towards a connection manager. The manager checks the bounds.
fn hub_timeout(dead_after_s: Option<f64>) -> Duration {
    let default = ManagerConfig::default().hub_timeout;
    dead_after_s.map_or(default, |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Overrides the configuration with the flags that were given. Before the semicolon are fields that the section
/// always has, after it those that are optional there, too.
macro_rules! overlay {
    ($flags:expr => $section:expr; $($value:ident),* ; $($option:ident),*) => {{
        $(if let Some(value) = $flags.$value { $section.$value = value; })*
        $(if $flags.$option.is_some() { $section.$option = $flags.$option; })*
    }};
}
use overlay;

fn start_log(config: &Config, usual: &str) -> anyhow::Result<()> {
    let filter = config.log.as_deref().unwrap_or(usual);
    let filter: Targets = filter
        .parse()
        .map_err(|error| Usage(format!("the log filter `{filter}` cannot be read: {error}")))?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        // If the log cannot be written, the subscriber would report that with a macro that panics for the
        // same reason.
        .log_internal_errors(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()));
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init()
        .map_err(|error| anyhow::anyhow!("{error}"))
        .context("cannot start the log")
}
