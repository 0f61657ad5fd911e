//! `paramhub jobs`

mod move_off;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand, ValueEnum};
use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};
use paramhub::Stragglers;
use paramhub::service::{
    AwaitedRanks, CreateService, HubLabel, JobOptions, JobState, JobStatus, LossCounters, OnInterfaceDown,
    OnWorkerLoss, ServiceCreated, StandbyCounts,
};
use paramhub_core::checkpoint::{CheckpointStatus, Every, Resume};
use paramhub_core::composition::{BetweenSites, OptimizeAt, Reduction};
use paramhub_core::limits::WEIGHT_MAX;
use serde::Serialize;

use super::{ManagerUrl, client, schemes};
use crate::config::Config;
use crate::{ExitCode, Usage};
use move_off::MoveFlags;

/// The width at which sentences in a table are broken.
const SENTENCE_COLUMNS: u16 = 100;

/// Characters of a job's message that a list shows where the output has no width.
const MESSAGE_CHARS: usize = 80;

#[derive(Args)]
#[command(args_override_self = true)]
pub(super) struct JobsFlags {
    #[command(subcommand)]
    what: Option<JobsCommand>,
    #[command(flatten)]
    output: Output,
}

#[derive(Args)]
struct Output {
    /// The connection manager's URL [default: http://127.0.0.1:7770]
    #[arg(long, global = true, value_name = "URL", env = "PARAMHUB_URL")]
    hub: Option<String>,
    /// Print JSON, as the connection manager answers it
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Clone, Subcommand)]
enum JobsCommand {
    /// All jobs that the connection manager remembers, oldest first (the default)
    List(ListFlags),
    /// Create a job for workers that are started otherwise, and print what each of them needs in its environment
    ///
    /// Besides these three lines, one of which is the job's secret, a worker needs RANK. A job whose workers do not come ends
    /// when its lease runs out.
    Create(Box<CreateFlags>),
    /// Everything about one job
    Show {
        /// Its name or namespace
        name: String,
    },
    /// By which scheme each layer of a running job is exchanged, and what moves by it and by the others
    Plan {
        /// Its name or namespace
        name: String,
    },
    /// Replace the secret of a job, and print what workers that have yet to join need; those that have joined go on
    RotateSecret {
        /// Its name or namespace
        name: String,
    },
    /// Move a job with standbys off a hub while it runs, without a lost step, and wait until it has moved
    ///
    /// The hub goes on with its other jobs. Another one receives what the job had there: use this to give a new hub a part of a
    /// running job. Until it has all chunks, some of the job's chunks are at one hub alone.
    Move(MoveFlags),
    /// End a job; its workers get the reason, its memory is freed
    Stop {
        /// Its name or namespace
        name: String,
    },
}

#[derive(Args, Clone, Default)]
struct ListFlags {
    /// Only those in one of these states; living are all that have not ended
    #[arg(long, value_enum, value_delimiter = ',', value_name = "STATE")]
    state: Vec<StateFilter>,
    /// Only the newest so many
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
}

/// A state of jobs to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StateFilter {
    Living,
    Connecting,
    Initialising,
    Running,
    Finished,
    Failed,
}

impl StateFilter {
    fn takes(self, state: JobState) -> bool {
        match self {
            StateFilter::Living => !state.has_ended(),
            StateFilter::Connecting => state == JobState::Connecting,
            StateFilter::Initialising => state == JobState::Initialising,
            StateFilter::Running => state == JobState::Running,
            StateFilter::Finished => state == JobState::Finished,
            StateFilter::Failed => state == JobState::Failed,
        }
    }
}

impl ListFlags {
    fn choose(&self, mut jobs: Vec<JobStatus>) -> Vec<JobStatus> {
        jobs.retain(|job| self.state.is_empty() || self.state.iter().any(|wanted| wanted.takes(job.state)));
        let surplus = jobs.len().saturating_sub(self.limit.unwrap_or(usize::MAX));
        jobs.split_off(surplus)
    }
}

#[derive(Args, Clone)]
struct CreateFlags {
    /// Its name, unique among the jobs that have not ended
    name: String,
    /// Ranks that make it up
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// How many hubs must have joined before it begins; all that have serve it [default: the first is enough]
    #[arg(long, value_name = "N")]
    hubs: Option<u32>,
    /// The most hubs that serve it when it begins, those with the fewest jobs: whatever happens to another hub leaves it alone.
    /// Hubs of racks and hosts do not count [default: all that have joined]
    #[arg(long, value_name = "N")]
    max_hubs: Option<u32>,
    /// The label that hubs must have to serve the job, as `paramhub hub --label` gives it [default: any hub will do]
    #[arg(long, value_name = "LABEL")]
    hub_label: Option<HubLabel>,
    /// How long workers wait for each other and for the hubs [default: 60]
    #[arg(long, value_name = "SECONDS")]
    rendezvous_timeout: Option<f64>,
    /// How long it is kept without any sign of its workers before it runs [default: 120]
    #[arg(long, value_name = "SECONDS")]
    lease: Option<f64>,
    /// How long a worker may be silent before the job is failed [default: 30]
    #[arg(long, value_name = "SECONDS")]
    dead_after: Option<f64>,
    /// What it gets of a hub core's time against other jobs with work there, 1 to 100; theirs is 1 unless they say so, too
    /// [default: 1]
    #[arg(long, value_name = "W", value_parser = clap::value_parser!(u32).range(1..=i64::from(WEIGHT_MAX)))]
    weight: Option<u32>,
    /// How sums become those of all workers where hubs serve racks or hosts: auto, flat, tree, ring, sharded or line
    /// [default: auto]
    #[arg(long, value_name = "HOW")]
    reduction: Option<Reduction>,
    /// Where the optimizer runs then: every-site or owner [default: every-site]
    #[arg(long, value_name = "WHERE")]
    optimize_at: Option<OptimizeAt>,
    /// How sums cross between racks and hosts then: f32, bf16, int8, or the sums of matrices in one-bit or two-bit [default: f32]
    #[arg(long, value_name = "CODEC")]
    between_sites: Option<BetweenSites>,
    /// Encrypt the streams between hosts: of workers to hubs, of hubs to one another, and of collectives [default: false]
    #[arg(long)]
    encrypt: Option<bool>,
    /// What becomes of it when a network interface goes down: fail, or continue over those that are left [default: fail]
    #[arg(long, value_name = "WHAT")]
    on_interface_down: Option<OnInterfaceDown>,
    /// How long a hub waits for a worker whose connection was cut, 0 to 60; the worker dials again meanwhile. One whose
    /// process has ended is lost at once [default: 0.5]
    #[arg(long, value_name = "SECONDS")]
    redial_grace: Option<f64>,
    /// What becomes of it when a worker is lost: fail; continue with those that are left, until another process takes the rank;
    /// or rewind, so that all ranks go back to an earlier step [default: fail]
    #[arg(long, value_name = "WHAT")]
    on_worker_loss: Option<OnWorkerLoss>,
    /// The least number of workers with which it then goes on [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    min_workers: Option<u32>,
    /// The most workers that it may have; it begins with --workers, and the others join while it runs, or with rewind when all
    /// are started again [default: --workers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    max_workers: Option<u32>,
    /// With --on-worker-loss rewind, the number of steps from one to which it can go back to the next [default: 1]
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rewind_every: Option<u32>,
    /// The number of standbys of each chunk, 0 or 1: with 1 another hub has all that workers were answered, and takes over when
    /// the hub is lost [default: 0]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1))]
    replicas: Option<u32>,
    /// How long it waits for others while it has fewer workers than a step needs [default: 300]
    #[arg(long, value_name = "SECONDS")]
    linger: Option<f64>,
    /// The largest number of bytes of a program state, of which a hub keeps the three newest of each rank [default: 0, none]
    #[arg(long, value_name = "BYTES")]
    program_state_bytes: Option<u32>,
    /// What becomes of workers that come late to a step: wait for them; drop:FRACTION, those later than this fraction of the
    /// time that the median took; or backup:N, the last N [default: wait]
    #[arg(long, value_name = "HOW")]
    stragglers: Option<Stragglers>,
    /// End it, naming the rank, when others have waited so long for one of them [default: never]
    #[arg(long, value_name = "SECONDS")]
    progress_timeout: Option<f64>,
    /// How often its hubs, which must be started with --checkpoints, write a checkpoint: a number of steps, as in 1000, or of
    /// seconds, as in 30s [default: never]
    #[arg(long, value_name = "N|Ns")]
    checkpoint_every: Option<Every>,
    /// Go on from a checkpoint of a job of this name: the newest, that of a step, or with auto the newest of its last run
    /// unless that has finished [default: begin anew]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "latest", value_name = "latest|STEP|auto")]
    resume: Option<Resume>,
}

impl CreateFlags {
    fn request(self) -> CreateService {
        let (workers, start_workers) = elastic(self.workers, self.max_workers);
        let rewinds = self.on_worker_loss == Some(OnWorkerLoss::Rewind);
        // A job that goes back and begins with all its ranks may have fewer later.
        let start_workers = start_workers.or(self.max_workers.filter(|_| rewinds));
        let default = JobOptions::default();
        let options = JobOptions {
            rendezvous_timeout_s: self.rendezvous_timeout.unwrap_or(default.rendezvous_timeout_s),
            lease_s: self.lease.unwrap_or(default.lease_s),
            dead_after_s: self.dead_after.unwrap_or(default.dead_after_s),
            reduction: self.reduction.unwrap_or(default.reduction),
            optimize_at: self.optimize_at.unwrap_or(default.optimize_at),
            between_sites: self.between_sites.unwrap_or(default.between_sites),
            hubs: self.hubs,
            max_hubs: self.max_hubs,
            hub_label: self.hub_label,
            encrypt: self.encrypt.unwrap_or(default.encrypt),
            on_interface_down: self.on_interface_down.unwrap_or(default.on_interface_down),
            redial_grace_s: self.redial_grace.unwrap_or(default.redial_grace_s),
            on_worker_loss: self.on_worker_loss.unwrap_or(default.on_worker_loss),
            min_workers: self.min_workers.unwrap_or(default.min_workers),
            start_workers,
            replicas: self.replicas.unwrap_or(default.replicas),
            rewind_every: self.rewind_every.unwrap_or(default.rewind_every),
            linger_s: self.linger.unwrap_or(default.linger_s),
            program_state_bytes: self.program_state_bytes.unwrap_or(default.program_state_bytes),
            weight: self.weight.unwrap_or(default.weight),
            stragglers: self.stragglers.unwrap_or(default.stragglers),
            progress_timeout_s: self.progress_timeout,
            checkpoint_every: self.checkpoint_every,
            resume: self.resume,
        };
        CreateService { name: self.name, workers, options }
    }
}

/// The number of ranks of a job that begins with `workers` and may have `max_workers`, and the number with which it begins, if
/// these differ.
pub(super) fn elastic(workers: u32, max_workers: Option<u32>) -> (u32, Option<u32>) {
    match max_workers {
        Some(max_workers) if max_workers != workers => (max_workers, Some(workers)),
        _ => (workers, None),
    }
}

/// Refuses a largest number of workers that is less than the number with which the job begins.
pub(super) fn check_max_workers(workers: u32, max_workers: Option<u32>) -> Result<(), Usage> {
    match max_workers.filter(|&most| most < workers) {
        Some(most) => Err(Usage(format!(
            "--max-workers {most} is less than the {workers} workers with which the job begins"
        ))),
        None => Ok(()),
    }
}

/// The action, the job, and the form of the output.
pub(super) struct JobsTask {
    what: JobsCommand,
    json: bool,
}

impl JobsFlags {
    pub(super) fn apply(self, config: &mut Config) -> JobsTask {
        ManagerUrl { manager_url: self.output.hub }.apply(config);
        JobsTask {
            what: self.what.unwrap_or(JobsCommand::List(ListFlags::default())),
            json: self.output.json,
        }
    }
}

pub(super) fn jobs(config: &Config, todo: JobsTask) -> anyhow::Result<ExitCode> {
    let client = client(config)?;
    match todo.what {
        JobsCommand::List(flags) => {
            let jobs = flags.choose(client.jobs()?);
            print(todo.json, &jobs, || list(&jobs))?;
        }
        JobsCommand::Create(flags) => {
            check_max_workers(flags.workers, flags.max_workers)?;
            let created = client.create_service(&flags.request())?;
            print(todo.json, &created, || membership(&client.url_for_workers(&created), &created))?;
        }
        JobsCommand::Show { name } => {
            let job = client.job(&name)?;
            print(todo.json, &job, || show(&job))?;
        }
        JobsCommand::Plan { name } => {
            let information_book = client.information_book(&name)?;
            print(todo.json, &information_book, || {
                schemes::text(&information_book.plan).trim_end().to_owned()
            })?;
        }
        JobsCommand::RotateSecret { name } => {
            let created = client.replace_secret(&name)?;
            print(todo.json, &created, || membership(&client.url_for_workers(&created), &created))?;
        }
        JobsCommand::Move(flags) => return move_off::move_off(&client, flags, todo.json),
        JobsCommand::Stop { name } => {
            let job = client.stop_job(&name)?;
            print(todo.json, &job, || stopped(&job))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn print(json: bool, value: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    println!("{}", if json { serde_json::to_string_pretty(value)? } else { text() });
    Ok(())
}

/// The variables that [`Membership::from_env`](paramhub::Membership::from_env) reads, except the rank.
fn membership(url: &str, job: &ServiceCreated) -> String {
    let (namespace, secret) = (job.namespace, String::from(job.secret()));
    format!("PARAMHUB_URL={url}\nPARAMHUB_JOB={namespace}\nPARAMHUB_SECRET={secret}")
}

/// The outcome of a stop. A job that had already ended keeps the reason with which it ended.
fn stopped(job: &JobStatus) -> String {
    let JobStatus { name, message, .. } = job;
    match job.state {
        JobState::Finished => format!("job {name} had finished before"),
        _ if message.starts_with("stopped") => format!("job {name} is stopped, and its memory is free"),
        _ => format!("job {name} had failed before: {message}"),
    }
}

fn list(jobs: &[JobStatus]) -> String {
    if jobs.is_empty() {
        return "no jobs".into();
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if let Some(columns) = columns() {
        table.set_width(columns);
    }
    // Without a width rows are not broken, so messages are cut: `jobs show` and --json have the whole
    // message.
    let message_chars = if table.width().is_some() { usize::MAX } else { MESSAGE_CHARS };
    table.set_header(["job", "state", "workers", "keys", "memory", "received", "sent", "age", "message"]);
    for job in jobs {
        table.add_row([
            job.name.clone(),
            state(job.state).into(),
            format!("{}/{}", job.connected.len(), job.workers),
            job.keys.to_string(),
            bytes(job.counters.memory_bytes),
            bytes(job.counters.bytes_received),
            bytes(job.counters.bytes_sent),
            age(job.created_at),
            shortened(&job.message, message_chars),
        ]);
    }
    table.to_string()
}

/// The width of a table: COLUMNS, which is how a program learns of a terminal that it does not write to itself, or
/// that of the terminal which is standard output.
fn columns() -> Option<u16> {
    let given = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let terminal = || rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| size.ws_col);
    given.or_else(terminal).filter(|&columns| columns > 0)
}

fn shortened(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}...", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

/// Whether the job goes on when a hub is lost.
fn standbys(counts: &StandbyCounts) -> String {
    let StandbyCounts { shares, ready, copying } = *counts;
    match shares - ready {
        0 => "of all chunks: the job goes on when a hub is lost".into(),
        missing if missing == copying => {
            format!("of {ready} of {shares} shares of the chunks; the others are being copied")
        }
        _ => format!(
            "of {ready} of {shares} shares of the chunks: start another hub, since the job ends with the hub of a share that has \
             none"
        ),
    }
}

fn show(job: &JobStatus) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let connected: Vec<String> = job.connected.iter().map(ToString::to_string).collect();
    let lost: Vec<String> = job.lost.iter().map(ToString::to_string).collect();
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let ended = job.ended_at.map_or("-".to_owned(), |at| format!("{} ago", age(at)));
    let expected_workers = job.current_workers.or(job.start_workers).unwrap_or(job.workers);
    let losses =
        job.losses.as_ref().map_or(String::new(), |losses| describe_losses(losses, expected_workers));
    let workers = match (job.start_workers, job.current_workers) {
        (Some(first), Some(current)) => {
            format!("{current}; it began with {first}, and can have {} at most", job.workers)
        }
        (Some(first), None) => format!("{} at most; it began with {first}", job.workers),
        (None, _) => job.workers.to_string(),
    };
    let rows = [
        ("job", job.name.clone()),
        ("namespace", job.namespace.to_string()),
        ("state", state(job.state).into()),
        ("message", or_dash(&job.message)),
        ("workers", workers),
        ("ranks connected", or_dash(&connected.join(" "))),
        ("ranks lost", or_dash(&lost.join(" "))),
        ("losses", losses),
        ("epoch", job.epoch.to_string()),
        ("keys", job.keys.to_string()),
        ("gradients of one worker", bytes(job.bytes)),
        ("optimizer", or_dash(&job.optimizer)),
        ("consistency", or_dash(&job.consistency)),
        ("options", or_dash(&job.options)),
        ("reduction", or_dash(&job.reduction)),
        ("memory", bytes(job.counters.memory_bytes)),
        ("received", bytes(job.counters.bytes_received)),
        ("sent", bytes(job.counters.bytes_sent)),
        ("steps made", job.counters.steps.to_string()),
        ("contributions summed", job.counters.contributions.to_string()),
        ("chunks optimised", job.counters.updates.to_string()),
        ("time of hub cores", format!("{:.3} s", job.counters.busy_ns as f64 / 1e9)),
        ("streams moved", job.counters.streams_moved.to_string()),
        ("left out", or_dash(&left_out(job).join("\n"))),
        ("standbys", job.standbys.as_ref().map_or(String::new(), standbys)),
        ("awaited", job.awaited.as_ref().map_or("-".to_owned(), awaited)),
        ("checkpoints", job.checkpoints.as_ref().map_or("-".to_owned(), checkpoints)),
        ("created", format!("{} ago", age(job.created_at))),
        ("ended", ended),
    ];
    // A job that fails with its first loss counts none, and has no such row.
    for (what, value) in rows.into_iter().filter(|(_, value)| !value.is_empty()) {
        table.add_row([what.to_owned(), value]);
    }
    // Messages, and the explanation of a reduction, are sentences.
    let values = table.column_mut(1).expect("every row has two cells");
    values.set_constraint(ColumnConstraint::UpperBoundary(Width::Fixed(SENTENCE_COLUMNS)));
    table.to_string()
}

/// Shows the number of updates without each late rank, one line per rank.
pub(super) fn left_out(job: &JobStatus) -> Vec<String> {
    let updates = job.counters.updates.max(1);
    let late = (0_u32..).zip(&job.left_out).filter(|&(_, &missed)| missed > 0);
    let line = |(rank, &missed): (u32, &u64)| {
        let percent = missed as f64 * 100.0 / updates as f64;
        format!("rank {rank}, of {missed} of {updates} updates of chunks ({percent:.1}%)")
    };
    late.map(line).collect()
}

/// The workers that the job has lost, and what became of their ranks.
fn describe_losses(losses: &LossCounters, workers: u32) -> String {
    let count =
        |count: u64, one: &str, more: &str| format!("{count} {}", if count == 1 { one } else { more });
    format!(
        "{} lost, {} taken by other processes; {:.1} s with fewer than {workers} workers",
        count(losses.workers_lost, "worker", "workers"),
        count(losses.workers_joined, "rank", "ranks"),
        losses.incomplete_seconds
    )
}

fn awaited(late: &AwaitedRanks) -> String {
    let ranks: Vec<String> = late.ranks.iter().map(ToString::to_string).collect();
    let rank = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{rank} {} for {:.0} s: {} of key {}", ranks.join(", "), late.seconds, late.what, late.key)
}

fn checkpoints(status: &CheckpointStatus) -> String {
    let newest = match status.step {
        None => "none yet".to_owned(),
        Some(step) => format!(
            "step {step}, {} ago, {} in {:.1} s; {} written",
            age(status.written_at),
            bytes(status.bytes),
            status.seconds,
            status.written
        ),
    };
    let more = |count: u64, what: &str| if count > 0 { format!(", {count} {what}") } else { String::new() };
    let failure = if status.failure.is_empty() { String::new() } else { format!(": {}", status.failure) };
    newest + &more(status.skipped, "skipped") + &more(status.failed, "failed") + &failure
}

fn state(state: JobState) -> &'static str {
    match state {
        JobState::Connecting => "connecting",
        JobState::Initialising => "initialising",
        JobState::Running => "running",
        JobState::Finished => "finished",
        JobState::Failed => "failed",
    }
}

pub(crate) fn bytes(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}

/// How long ago a time was, for people.
pub(crate) fn age(since_epoch_s: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    indicatif::HumanDuration(Duration::from_secs(now.saturating_sub(since_epoch_s))).to_string()
}
