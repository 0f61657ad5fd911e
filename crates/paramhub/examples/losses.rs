//! Measures how long the steps of a job pause when its workers are killed or frozen, and how soon another process has taken
//! the rank.
//!
//! ```text
//! cargo run --release --package paramhub --example losses -- --kills 10
//! ```
//! Starts a hub and worker processes, of which rank 0 is this one, kills one after the other with SIGKILL, and starts
//! another in its place. Prints for each kill the longest time between two finished steps of rank 0 from the kill on until
//! the rank is back, and the time from the kill to the first step to which the new process contributes; then the
//! medians and the worst.
//!
//! With `--freeze` it stops them with SIGSTOP instead, and gives a worker up after [`DEAD_AFTER`]. Prints for each the
//! longest time between two finished steps of rank 0, less the time after which a worker is given up, until the hub has
//! given up the frozen one; then kills that one and starts another.

use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;
use paramhub_control::ManagerClient;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::service::{CreateService, JobOptions, OnWorkerLoss, ServiceCreated};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_manager::{Manager, ManagerConfig};
use paramhub_worker::{Job, Member, Membership, Options, Transport, WorkerError};

type Error = Box<dyn std::error::Error>;

/// The steps between two kills.
const STEPS: u32 = 30;
/// The time after which a frozen worker is given up: the shortest that a job may have.
const DEAD_AFTER: Duration = Duration::from_secs(1);
/// How long a rank may take to be lost, and to be back.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Arguments {
    /// Workers to kill or freeze, one after the other.
    #[arg(long, default_value_t = 10)]
    kills: u32,
    /// Workers of the job.
    #[arg(long, default_value_t = 4)]
    workers: u32,
    /// Parameters of the model, in millions.
    #[arg(long, default_value_t = 25.5)]
    millions: f64,
    /// Freeze workers instead of killing them.
    #[arg(long)]
    freeze: bool,
    /// What becomes of the job when a worker is lost: `continue` or `rewind`.
    #[arg(long, default_value = "continue")]
    on_worker_loss: OnWorkerLoss,
    /// How tensors travel.
    #[arg(long, default_value = "tcp")]
    transport: Transport,
    /// The membership of a process that this program has started.
    #[arg(long, hide = true)]
    member: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let ended = if arguments.member { work(&arguments) } else { measure(&arguments) };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// A worker: makes steps until the job is over.
fn work(arguments: &Arguments) -> Result<(), Error> {
    let mut rank = Rank::join(Membership::from_env()?, arguments)?;
    loop {
        rank.step()?;
    }
}

fn measure(arguments: &Arguments) -> Result<(), Error> {
    if arguments.freeze && arguments.on_worker_loss != OnWorkerLoss::Continue {
        return Err(
            "--freeze needs --on-worker-loss continue: with rewind rank 0 waits for the frozen rank".into()
        );
    }
    let manager = Manager::start(ManagerConfig { listen: "127.0.0.1:0".parse()?, ..Default::default() })?;
    let client = ManagerClient::new(&manager.url(), None)?;
    let hub = RunningHub::start(client.clone(), HubConfig::default())?;
    let mut options = JobOptions { on_worker_loss: arguments.on_worker_loss, ..JobOptions::default() };
    if arguments.freeze {
        options.dead_after_s = DEAD_AFTER.as_secs_f64();
    }
    let request = CreateService { name: "losses".into(), workers: arguments.workers, options };
    let created = client.create_service(&request)?;
    let start = |rank: u32| start(rank, &created, client.url(), arguments);
    let mut others: Vec<Child> = (1..arguments.workers).map(start).collect::<Result<_, _>>()?;
    let membership = Membership {
        url: client.url().to_owned(),
        namespace: created.namespace,
        secret: created.nonce.into(),
        rank: 0,
    };
    let mut rank = Rank::join(membership, arguments)?;
    let usual = rank.steps(STEPS)?;
    println!("median step {:?}", median(usual));
    let (mut gaps, mut returns) = (Vec::new(), Vec::new());
    let losses = || Ok::<_, Error>(client.job("losses")?.losses.unwrap_or_default());
    for kill in 0..arguments.kills {
        let victim = (kill % (arguments.workers - 1)) as usize;
        let pause = match arguments.freeze {
            true => {
                freeze(&others[victim])?;
                let until_lost = rank.steps_until(|| Ok(losses()?.workers_lost > kill.into()))?;
                Some(until_lost.saturating_sub(DEAD_AFTER))
            }
            false => None,
        };
        let killed = Instant::now();
        others[victim].kill()?;
        others[victim].wait()?;
        others[victim] = start(victim as u32 + 1)?;
        let until_joined = rank.steps_until(|| Ok(losses()?.workers_joined > kill.into()))?;
        // The first step with the new process waits for its parameters.
        let gap = rank.steps(2)?.into_iter().fold(until_joined, Duration::max);
        let back = killed.elapsed();
        match pause {
            Some(pause) => println!("freeze {kill} of rank {}: longest step {pause:?} more", victim + 1),
            None => println!("kill {kill} of rank {}: longest step {gap:?}, back after {back:?}", victim + 1),
        }
        gaps.push(pause.unwrap_or(gap));
        returns.push(back);
        rank.steps(STEPS)?;
    }
    let worst = |times: &[Duration]| times.iter().max().copied().unwrap_or_default();
    let after = if arguments.freeze { " after the worker was given up" } else { "" };
    println!("longest step{after}: median {:?}, worst {:?}", median(gaps.clone()), worst(&gaps));
    println!("back after: median {:?}, worst {:?}", median(returns.clone()), worst(&returns));
    others.iter_mut().try_for_each(Child::kill)?;
    drop(rank);
    others.iter_mut().try_for_each(|other| other.wait().map(drop))?;
    hub.stop();
    manager.stop();
    Ok(())
}

/// A rank with its part in the job, its parameters and its gradient.
struct Rank<'a> {
    membership: Membership,
    arguments: &'a Arguments,
    job: Job,
    gradient: Vec<f32>,
    parameters: Vec<f32>,
}

impl Rank<'_> {
    /// Joins the job and receives its parameters.
    fn join(membership: Membership, arguments: &Arguments) -> Result<Rank<'_>, Error> {
        let elements = (arguments.millions * 1e6) as usize;
        let (job, parameters) = join(&membership, arguments, vec![0.0; elements])?;
        Ok(Rank { membership, arguments, job, gradient: vec![1e-3; elements], parameters })
    }

    /// Makes a step, and returns how long it took. A rank whose job goes back joins again, and makes the step at which all
    /// go on.
    fn step(&mut self) -> Result<Duration, Error> {
        let begun = Instant::now();
        loop {
            let (gradient, parameters) =
                (std::mem::take(&mut self.gradient), std::mem::take(&mut self.parameters));
            let made = self.job.push_pull(0, gradient, parameters).and_then(|handle| handle.wait());
            match made {
                Ok(made) => {
                    (self.gradient, self.parameters) = made;
                    return Ok(begun.elapsed());
                }
                Err(WorkerError::Rewound { .. }) => {
                    // The request that failed has taken the tensors with it.
                    let elements = (self.arguments.millions * 1e6) as usize;
                    self.gradient = vec![1e-3; elements];
                    (self.job, self.parameters) =
                        join(&self.membership, self.arguments, vec![0.0; elements])?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Makes steps until something is so, and returns how long the longest took.
    fn steps_until(&mut self, is_so: impl Fn() -> Result<bool, Error>) -> Result<Duration, Error> {
        let (begun, mut longest) = (Instant::now(), Duration::ZERO);
        while !is_so()? {
            if begun.elapsed() > PATIENCE {
                return Err(format!("a rank is not lost, or not back, after {PATIENCE:?}").into());
            }
            longest = longest.max(self.step()?);
        }
        Ok(longest)
    }

    fn steps(&mut self, count: u32) -> Result<Vec<Duration>, Error> {
        (0..count).map(|_| self.step()).collect()
    }
}

/// Joins the job, and receives its parameters.
fn join(
    membership: &Membership,
    arguments: &Arguments,
    parameters: Vec<f32>,
) -> Result<(Job, Vec<f32>), Error> {
    let table = KeyTable::new(vec![Key::new("model", [parameters.len() as u64])])?;
    let settings = Settings { optimizer: OptimizerChoice::named("sgd"), ..Settings::new(table) };
    let options = Options { transport: arguments.transport, ..Options::default() };
    let job = Member::connect_with(membership.clone(), options)?.init(settings)?;
    let mut parameters = [parameters];
    job.broadcast(&mut parameters, 0)?;
    let [parameters] = parameters;
    Ok((job, parameters))
}

/// Starts this program as another rank.
fn start(rank: u32, job: &ServiceCreated, url: &str, arguments: &Arguments) -> Result<Child, Error> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--member", "--transport", &arguments.transport.to_string()])
        .args(["--on-worker-loss", &arguments.on_worker_loss.to_string()])
        .args(["--millions", &arguments.millions.to_string()])
        .env("PARAMHUB_URL", url)
        .env("PARAMHUB_JOB", job.namespace.to_string())
        .env("PARAMHUB_SECRET", String::from(job.nonce))
        .env("RANK", rank.to_string());
    Ok(command.spawn()?)
}

fn freeze(process: &Child) -> Result<(), Error> {
    match Command::new("kill").args(["-STOP", &process.id().to_string()]).status()?.success() {
        true => Ok(()),
        false => Err("a worker cannot be stopped".into()),
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
