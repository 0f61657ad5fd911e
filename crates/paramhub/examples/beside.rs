//! Measures how long a step of a small job takes while a large one opens and is freed on the same core of a
//! hub.
//!
//! ```text
//! cargo run --release --package paramhub --example beside -- --gib 5
//! ```
//! Prints a small job's median step alone, its longest step while another job of so many GiB of parameters
//! opens (its hub keeps twice as much), and its longest step while that job is freed. The exit code is 1
//! unless both are within the larger of 50 ms and 20 medians.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use paramhub_control::ManagerClient;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::service::{CreateService, JobOptions};
use paramhub_core::settings::Settings;
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_manager::{Manager, ManagerConfig};
use paramhub_worker::{Job, Member, Membership, Options, Transport};

type Error = Box<dyn std::error::Error>;

/// Steps of the small job alone.
const STEPS: usize = 2000;

#[derive(Parser)]
struct Arguments {
    /// Parameters of the large job, in GiB.
    #[arg(long, default_value_t = 5.0)]
    gib: f64,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool, Error> {
    let manager = Manager::start(ManagerConfig { listen: "127.0.0.1:0".parse()?, ..Default::default() })?;
    let client = ManagerClient::new(&manager.url(), None)?;
    let hub = RunningHub::start(client.clone(), HubConfig::default())?;
    let small = join(&client, "small", 1000)?;
    let mut alone = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        alone.push(step(&small)?);
    }
    alone.sort();
    let median = alone[STEPS / 2];
    let bar = (median * 20).max(Duration::from_millis(50));
    println!("alone: median {median:?}, longest {:?} of {STEPS}", alone[STEPS - 1]);
    let elements = (arguments.gib * f64::from(1 << 30) / 4.0) as u64;
    let begun = Instant::now();
    let (opened, steps, longest) =
        while_stepping(&small, || join(&client, "large", elements).map_err(|e| e.to_string()))?;
    let large = opened?;
    println!(
        "{} GiB open within {:?}: {steps} steps, the longest {longest:?}",
        arguments.gib,
        begun.elapsed()
    );
    let begun = Instant::now();
    let (freed, steps, longest_freed) = while_stepping(&small, || {
        large.leave().map_err(|error| error.to_string())?;
        // Waits until only the small job's memory is left.
        while hub.memory_bytes() > 64 << 20 {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok::<(), String>(())
    })?;
    freed?;
    println!("freed within {:?}: {steps} steps, the longest {longest_freed:?}", begun.elapsed());
    let is_within = longest.max(longest_freed) <= bar;
    println!("bar {bar:?}: {}", if is_within { "kept" } else { "missed" });
    small.leave()?;
    hub.stop();
    manager.stop();
    Ok(is_within)
}

/// Joins as the only rank of a new job of one key.
fn join(client: &ManagerClient, name: &str, elements: u64) -> Result<Job, Error> {
    let create = CreateService { name: name.into(), workers: 1, options: JobOptions::default() };
    let created = client.create_service(&create)?;
    let membership = Membership::of_job(client.url(), &created, 0);
    let options = Options { transport: Transport::Tcp, ..Default::default() };
    let settings = Settings::new(KeyTable::new(vec![Key::new("w", [elements])])?);
    Ok(Member::connect_with(membership, options)?.init(settings)?)
}

fn step(job: &Job) -> Result<Duration, Error> {
    let begun = Instant::now();
    job.push_pull(0, vec![1.0_f32; 1000], vec![0.0_f32; 1000])?.wait()?;
    Ok(begun.elapsed())
}

/// The number of steps, and the longest of them, while `work` runs on another thread.
fn while_stepping<T: Send>(
    job: &Job,
    work: impl FnOnce() -> T + Send,
) -> Result<(T, usize, Duration), Error> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let worked = scope.spawn(|| {
            let made = work();
            is_over.store(true, Ordering::Release);
            made
        });
        let (mut steps, mut longest) = (0, Duration::ZERO);
        while !is_over.load(Ordering::Acquire) && !worked.is_finished() {
            longest = longest.max(step(job)?);
            steps += 1;
        }
        match worked.join() {
            Ok(made) => Ok((made, steps, longest)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
