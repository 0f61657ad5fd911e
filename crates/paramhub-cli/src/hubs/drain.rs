//! `paramhub hubs drain`

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use clap::Args;
use paramhub::ManagerClient;
use paramhub_core::auth::Namespace;
use paramhub_core::service::{DrainStatus, JobAtHub};

use crate::{ExitCode, Usage};

/// The time between two questions whether all jobs have left.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Args, Clone, Copy)]
pub(super) struct DrainFlags {
    /// The hub's number, as `paramhub hubs` lists it
    number: u32,
    /// Let it take jobs again
    #[arg(long, conflicts_with = "timeout")]
    cancel: bool,
    /// Wait no longer than this until all jobs have left; with 0 not at all [default: without an end]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    timeout: Option<f64>,
}

/// Drains a hub, and waits until all jobs have left it. Says what happens meanwhile, or with `json` what is left at the end.
pub(super) fn drain(client: &ManagerClient, flags: DrainFlags, json: bool) -> anyhow::Result<ExitCode> {
    let number = flags.number;
    let timeout = flags.timeout.map(Duration::try_from_secs_f64).transpose().map_err(|_| {
        Usage(format!("--timeout {} is no number of seconds", flags.timeout.unwrap_or_default()))
    })?;
    let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let say = |line: String| {
        if !json {
            println!("{line}");
        }
    };
    let mut status = client.drain_hub(number, !flags.cancel)?;
    if flags.cancel {
        say(format!("{} is not drained, and takes new jobs", status.name));
    } else {
        say(format!("{} takes no new jobs", status.name));
        status = wait_until_left(client, status, until, say)?;
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    }
    if !flags.cancel && !status.jobs.is_empty() {
        let names: Vec<&str> = status.jobs.iter().map(|job| job.name.as_str()).collect();
        anyhow::bail!(
            "{} still has jobs ({}), and stays drained: wait with `paramhub hubs drain {number}`, or let it take jobs again with \
             --cancel",
            status.name,
            names.join(", ")
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits until all jobs have left a hub that is drained, or that time has come. Returns what is left then.
fn wait_until_left(
    client: &ManagerClient,
    mut status: DrainStatus,
    until: Option<Instant>,
    say: impl Fn(String),
) -> anyhow::Result<DrainStatus> {
    let mut told = Told::default();
    loop {
        told.news(&status).into_iter().for_each(&say);
        anyhow::ensure!(
            status.drained,
            "{} is not drained any more: another operator has ended that",
            status.name
        );
        if status.jobs.is_empty() {
            say(format!("{} has no jobs: it can be stopped", status.name));
            return Ok(status);
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            return Ok(status);
        }
        std::thread::sleep(PAUSE);
        status = client.drain_status(status.hub)?;
    }
}

/// What has been said of each job that was there last.
#[derive(Default)]
struct Told(BTreeMap<Namespace, JobAtHub>);

impl Told {
    /// What is new since the last call.
    fn news(&mut self, status: &DrainStatus) -> Vec<String> {
        let mut news = Vec::new();
        let is_there = |namespace: &Namespace| status.jobs.iter().any(|job| job.namespace == *namespace);
        self.0.retain(|namespace, job| {
            if !is_there(namespace) {
                news.push(format!("job {} has left", job.name));
            }
            is_there(namespace)
        });
        for job in &status.jobs {
            let before = self.0.insert(job.namespace, job.clone());
            if before.is_none_or(|before| before != *job) {
                news.push(format!("job {}: {}", job.name, job.why));
            }
        }
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_of_a_job_is_said_once() {
        let status = |jobs: &[(u8, &str)]| DrainStatus {
            hub: 0,
            name: "hub 0".into(),
            drained: true,
            jobs: jobs
                .iter()
                .map(|&(namespace, why)| JobAtHub {
                    name: format!("job-{namespace}"),
                    namespace: Namespace([namespace; 16]),
                    why: why.into(),
                })
                .collect(),
        };
        let mut told = Told::default();
        assert_eq!(
            told.news(&status(&[(1, "it waits"), (2, "it stays")])),
            ["job job-1: it waits", "job job-2: it stays"]
        );
        assert!(told.news(&status(&[(1, "it waits"), (2, "it stays")])).is_empty());
        assert_eq!(told.news(&status(&[(1, "it leaves"), (2, "it stays")])), ["job job-1: it leaves"]);
        assert_eq!(told.news(&status(&[(2, "it stays")])), ["job job-1 has left"]);
    }
}
