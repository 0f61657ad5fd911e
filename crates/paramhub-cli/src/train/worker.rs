//! One worker process of `paramhub train`.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use paramhub::{Membership, Options};
use paramhub_collective::communicator::{RendezvousOptions, rendezvous};
use paramhub_train::net::Network;
use paramhub_train::trainer::Progress;

use super::parameters;
use super::spec::{Message, Spec, WorkerReport};
use super::training::{train_by_collectives, train_locally, train_through_hub};
use crate::ExitCode;
use crate::config::ExchangeKind;

/// A bar moves smoothly enough at this pace.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Args)]
pub(crate) struct WorkerFlags {
    spec: PathBuf,
}

pub(crate) fn work(flags: &WorkerFlags) -> anyhow::Result<ExitCode> {
    let text = std::fs::read(&flags.spec).with_context(|| format!("cannot read {}", flags.spec.display()))?;
    let Spec { train: section, folder } = serde_json::from_slice(&text).context("cannot read what to do")?;
    let data = section.data.load()?;
    let mut network = Network::new(section.net, data.train.geometry(), section.seed)?;
    let membership = match section.exchange {
        ExchangeKind::Local => None,
        _ => Some(Membership::from_env()?),
    };
    let rank = membership.as_ref().map_or(0, |membership| membership.rank);
    let mut progress = progress_of(rank, section.chaos_s.is_some());
    let result = match (section.exchange.collective(), membership) {
        (_, None) => train_locally(&section, &data, &mut network, &mut progress)?,
        (None, Some(at)) => {
            let joined = |step| {
                if section.chaos_s.is_some() {
                    send(&Message::Joined { step });
                }
            };
            train_through_hub(&section, &data, &mut network, at, joined, &mut progress)?
        }
        (Some(kind), Some(at)) => {
            let worker = Options { transport: section.transport, ..Options::from_env()? };
            let communicator = rendezvous(at, RendezvousOptions { worker, ..RendezvousOptions::default() })?;
            train_by_collectives(&section, kind, data, &mut network, communicator, &mut progress)?
        }
    };
    let file = parameters::file_of(&folder, rank as usize);
    parameters::save(&file, network.keys(), &result.report.parameters)?;
    // The report grows with the number of epochs, and the launcher limits the length of a line, so it goes
    // into a file.
    WorkerReport::new(rank as usize, &result.report, result.transport).write(&folder)?;
    send(&Message::Reported);
    Ok(ExitCode::SUCCESS)
}

/// Sends the progress of rank 0, for all ranks. With `--chaos` each rank sends each step: any of them may be the one
/// that goes on, and the launcher looks for gaps between steps.
fn progress_of(rank: u32, of_each: bool) -> impl FnMut(&Progress) {
    let mut last_sent: Option<Instant> = None;
    move |progress| {
        let is_due = of_each
            || progress.step == progress.of
            || progress.accuracy.is_some()
            || last_sent.is_none_or(|last_sent| last_sent.elapsed() >= PROGRESS_INTERVAL);
        if (rank == 0 || of_each) && is_due {
            last_sent = Some(Instant::now());
            send(&Message::Progress(progress.into()));
        }
    }
}

fn send(message: &Message) {
    let mut line = serde_json::to_vec(message).expect("messages are plain data");
    line.push(b'\n');
    let mut output = std::io::stdout().lock();
    // If the launcher is gone, its supervisor ends this process.
    let _ = output.write_all(&line).and_then(|()| output.flush());
}
