//! The command line: one file per verb. The `paramhub` program is [`main`] alone, and so is the one in the Python package.

// First, for its `println!` and the like stand for those of std in all that follows.
#[macro_use]
mod output;

mod bench;
mod checkpoints;
mod deployment;
mod doctor;
mod environment;
mod exit;
mod hub;
mod hubs;
mod jobs;
mod manager;
mod models;
mod plan;
mod probe;
mod run;
mod schemes;
mod train;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};

use paramhub_kernels::Isa;

use crate::config::{self, Config, Secret};
use crate::embedded::EmbeddedError;
use crate::service::ErrorCode;
use crate::{ControlError, HubError, ManagerClient, ManagerConfig, ManagerError};
pub use environment::unread_variables;
pub use exit::ExitCode;

/// Exchanges gradients and parameters between the workers of distributed training jobs.
///
/// Workers push gradients in small chunks; a hub sums each chunk as it arrives, runs the optimizer on it, and
/// sends the new parameters back.
#[derive(Parser)]
#[command(name = "paramhub", version, max_term_width = 110, after_help = AFTER_HELP)]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    verb: Verb,
}

const AFTER_HELP: &str = "\
First steps:
  paramhub train                      train a small network with 4 workers through a hub, here and now
  paramhub doctor                     what this machine offers, and what is missing
  paramhub hub                        start a hub for jobs to come
  paramhub run -n 4 -- python x.py    start 4 workers of a job of yours

Every option but those of `bench`, `plan` and `probe` can also stand in a file (paramhub.toml, or --config FILE)
or in the environment (PARAMHUB_*). A flag wins over the environment, and the environment over the file; --print-config shows what holds.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted; `run` passes on its workers' code.";

/// For every command.
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
    /// What the connection manager asks of operators and hubs; needed unless it listens on loopback only
    #[arg(
        long,
        global = true,
        visible_alias = "token",
        value_name = "TOKEN",
        env = "PARAMHUB_ADMIN_TOKEN",
        hide_env_values = true
    )]
    admin_token: Option<Secret>,
}

#[derive(Subcommand)]
enum Verb {
    /// Train a small network, by default with 4 worker processes through a hub started for the purpose
    Train(train::TrainFlags),
    /// Start a hub, by default with a connection manager of its own
    Hub(hub::HubFlags),
    /// Start a connection manager alone, for hubs that join it
    Manager(manager::ManagerFlags),
    /// List, create, show or stop jobs
    Jobs(jobs::JobsFlags),
    /// List hubs and what the network between their racks carries, or let them probe it
    Hubs(hubs::HubsFlags),
    /// List or verify what hubs have written
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
    BenchPeer(bench::PeerFlags),
    /// One worker of `train`.
    #[command(hide = true)]
    TrainWorker(train::WorkerFlags),
    /// One rank of `train` that another launcher has started.
    #[command(hide = true)]
    TrainRank(train::RankFlags),
    /// Ends the workers of a launcher that was killed.
    #[command(hide = true)]
    Warden,
}

/// Wrong flags or a wrong configuration: exit code 2.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Runs the command that `arguments` ask for, the program's own name first. It takes over the process: signals, the log and
/// the standard streams are its own until it ends.
///
/// `started_as` is how to start this command line once more, for the processes it starts; `None` means this program's file.
pub fn main(arguments: impl IntoIterator<Item = OsString>, started_as: Option<Vec<OsString>>) -> ExitCode {
    if let Some(command) = started_as {
        crate::launch::started_as(command);
    }
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(refused) if refused.use_stderr() => {
            let text = in_plain_words(&refused.to_string());
            eprint!("paramhub: {}", text.strip_prefix("error: ").unwrap_or(&text));
            return ExitCode::from(2);
        }
        Err(help_or_version) => {
            // A reader that has gone away needs no help.
            let _ = help_or_version.print();
            return ExitCode::SUCCESS;
        }
    };
    let code = match dispatch(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("paramhub: {error:#}");
            ExitCode::from(if is_usage(&error) { 2 } else { 1 })
        }
    };
    match output::finish() {
        Some(failure) if code == ExitCode::SUCCESS => {
            eprintln!("paramhub: cannot write to standard output: {failure}");
            ExitCode::FAILURE
        }
        _ => code,
    }
}

/// Whether flags, environment or file have to change before the same command can succeed: a value that was found wrong here, by the
/// hub or the connection manager that was to start, or by the running manager that was asked.
fn is_usage(error: &anyhow::Error) -> bool {
    error.chain().any(is_of_usage)
}

fn is_of_usage(cause: &(dyn std::error::Error + 'static)) -> bool {
    // These show their causes as themselves, so that no chain leads to them.
    match cause.downcast_ref::<EmbeddedError>() {
        Some(EmbeddedError::Manager(error)) => return is_of_usage(error),
        Some(EmbeddedError::Hub(error)) => return is_of_usage(error),
        Some(EmbeddedError::Control(error)) => return is_of_usage(error),
        None => {}
    }
    if let Some(error) = cause.downcast_ref::<ManagerError>() {
        use ManagerError::{Setting, TokenNeeded, TokenUnusable};
        return matches!(error, TokenNeeded { .. } | TokenUnusable | Setting { .. });
    }
    if let Some(error) = cause.downcast_ref::<ControlError>() {
        return matches!(error, ControlError::Url { .. })
            || matches!(error.code(), Some(ErrorCode::BadRequest | ErrorCode::Unauthorized));
    }
    cause.is::<Usage>() || matches!(cause.downcast_ref::<HubError>(), Some(HubError::Config(_)))
}

/// What Rust's numbers say of text that is none is about its digits; a person wants to know what would do.
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
    let mut config = match &cli.verb {
        // Started by us, with all they need.
        Verb::Warden | Verb::TrainWorker(_) | Verb::TrainRank(_) | Verb::BenchPeer(_) => Config::default(),
        _ => config::load(common.config.as_deref())?,
    };
    config.log = common.log.or(config.log);
    config.admin_token = common.admin_token.or(config.admin_token).filter(|token| !token.0.is_empty());
    let verb = cli.verb.apply(&mut config);
    if !verb.is_started_by_us() {
        unread_variables().iter().for_each(|unread| eprintln!("paramhub: {unread}"));
    }
    if common.print_config {
        print!("{}", config.to_toml());
        return Ok(ExitCode::SUCCESS);
    }
    start_log(&config, matches!(verb, Todo::Hub | Todo::Manager))?;
    match verb {
        Todo::Train => train::train(&config),
        Todo::Hub => hub::serve(&config),
        Todo::Manager => manager::serve(&config),
        Todo::Jobs(todo) => jobs::jobs(&config, todo),
        Todo::Hubs(todo) => hubs::hubs(&config, todo),
        Todo::Checkpoints(flags) => checkpoints::checkpoints(&flags),
        Todo::Run(command) => run::run(&config, command),
        Todo::Doctor(todo) => doctor::doctor(&config, todo),
        Todo::Bench(flags) => bench::bench(flags),
        Todo::Plan(flags) => plan::plan(&flags),
        Todo::Probe(flags) => probe::probe(&flags),
        Todo::BenchPeer(flags) => bench::take_part(&flags),
        Todo::TrainWorker(flags) => train::work(&flags),
        Todo::TrainRank(flags) => train::take_part(&config, &flags),
        Todo::Warden => {
            crate::launch::watch_over(std::io::stdin().lock());
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A verb whose options are in the configuration, with what is no configuration.
enum Todo {
    Train,
    Hub,
    Manager,
    Jobs(jobs::Todo),
    Hubs(hubs::Todo),
    Checkpoints(checkpoints::CheckpointsFlags),
    Run(Vec<OsString>),
    Doctor(doctor::Todo),
    Bench(bench::BenchFlags),
    Plan(plan::PlanFlags),
    Probe(probe::ProbeFlags),
    BenchPeer(bench::PeerFlags),
    TrainWorker(train::WorkerFlags),
    TrainRank(train::RankFlags),
    Warden,
}

impl Todo {
    /// Its environment is that of a command which has been told already.
    fn is_started_by_us(&self) -> bool {
        matches!(self, Todo::BenchPeer(_) | Todo::TrainWorker(_) | Todo::TrainRank(_) | Todo::Warden)
    }
}

impl Verb {
    fn apply(self, config: &mut Config) -> Todo {
        match self {
            Verb::Train(flags) => {
                flags.apply(config);
                Todo::Train
            }
            Verb::Hub(flags) => {
                flags.apply(config);
                Todo::Hub
            }
            Verb::Manager(flags) => {
                flags.apply(config);
                Todo::Manager
            }
            Verb::Jobs(flags) => Todo::Jobs(flags.apply(config)),
            Verb::Hubs(flags) => Todo::Hubs(flags.apply(config)),
            Verb::Checkpoints(flags) => Todo::Checkpoints(flags),
            Verb::Run(flags) => Todo::Run(flags.apply(config)),
            Verb::Doctor(flags) => Todo::Doctor(flags.apply(config)),
            Verb::Bench(flags) => Todo::Bench(flags),
            Verb::Plan(flags) => Todo::Plan(flags),
            Verb::Probe(flags) => Todo::Probe(flags),
            Verb::BenchPeer(flags) => Todo::BenchPeer(flags),
            Verb::TrainWorker(flags) => Todo::TrainWorker(flags),
            Verb::TrainRank(flags) => Todo::TrainRank(flags),
            Verb::Warden => Todo::Warden,
        }
    }
}

/// Which connection manager to turn to.
#[derive(Args)]
struct ManagerUrl {
    /// The connection manager's URL
    #[arg(long, value_name = "URL", env = "PARAMHUB_URL")]
    hub: Option<String>,
}

impl ManagerUrl {
    fn apply(self, config: &mut Config) {
        // An empty variable is how some shells unset one.
        config.url = self.hub.or(config.url.take()).filter(|url| !url.trim().is_empty());
    }
}

/// A client of the configured connection manager, else of the one on this machine's usual port.
fn client(config: &Config) -> anyhow::Result<ManagerClient> {
    let url = config.url.as_deref().unwrap_or(crate::DEFAULT_URL);
    ManagerClient::new(url, config.admin_token()).map_err(|error| Usage(error.to_string()).into())
}

/// A time on the command line.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds > 0.0);
    seconds.ok_or_else(|| "expected a number of seconds above zero".to_owned())
}

/// As long as a hub may be silent towards a connection manager. The manager says what is possible.
fn hub_timeout(dead_after_s: Option<f64>) -> Duration {
    let usual = ManagerConfig::default().hub_timeout;
    dead_after_s.map_or(usual, |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

/// Puts the flags that were given over what the configuration has.
macro_rules! overlay {
    ($flags:expr => $section:expr; $($value:ident),* ; $($option:ident),*) => {{
        $(if let Some(value) = $flags.$value { $section.$value = value; })*
        $(if $flags.$option.is_some() { $section.$option = $flags.$option; })*
    }};
}
use overlay;

fn start_log(config: &Config, is_server: bool) -> anyhow::Result<()> {
    let filter = config.log.as_deref().unwrap_or(if is_server { "info" } else { "warn" });
    let filter = tracing_subscriber::EnvFilter::try_new(filter)
        .map_err(|error| Usage(format!("the log filter `{filter}` cannot be read: {error}")))?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        // Where the log cannot be written, it would say so with a macro that panics for the same reason.
        .log_internal_errors(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .try_init()
        .map_err(|error| anyhow::anyhow!("{error}"))
        .context("cannot start the log")
}
