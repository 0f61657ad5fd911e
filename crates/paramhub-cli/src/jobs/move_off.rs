//! `paramhub jobs move`

use std::time::{Duration, Instant};

use clap::Args;
use paramhub::ManagerClient;
use paramhub_core::service::{MoveJob, MoveStatus, StandbyCounts};

use crate::{ExitCode, Usage};

/// The time between two questions how far the move is.
const PAUSE: Duration = Duration::from_millis(500);

#[derive(Args, Clone)]
pub(super) struct MoveFlags {
    /// Its name or namespace
    name: String,
    /// The number of the hub that it leaves, as `paramhub hubs` lists it; it does not come back there
    #[arg(long, value_name = "HUB")]
    from: u32,
    /// The number of the hub that is to have what it leaves behind [default: any that has room]
    #[arg(long, value_name = "HUB")]
    to: Option<u32>,
    /// Wait no longer than this until it has moved; with 0 not at all [default: without an end]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    timeout: Option<f64>,
}

/// Moves a job off a hub, and waits until it has left and, if a hub was named, until that has all chunks. Says what happens
/// meanwhile, or with `json` how far it is at the end.
pub(super) fn move_off(client: &ManagerClient, flags: MoveFlags, json: bool) -> anyhow::Result<ExitCode> {
    let MoveFlags { name, from, to, timeout } = flags;
    let timeout = timeout.map(|seconds| {
        Duration::try_from_secs_f64(seconds)
            .map_err(|_| Usage(format!("--timeout {seconds} is no number of seconds")))
    });
    let until = timeout.transpose()?.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut status = client.move_job(&name, MoveJob { from, to })?;
    let mut said = String::new();
    loop {
        let state = describe(&status);
        if !json && state != said {
            println!("job {name}: {state}");
            said = state;
        }
        let is_over = is_over(&status);
        if is_over || until.is_some_and(|until| Instant::now() >= until) {
            if json {
                println!("{}", serde_json::to_string_pretty(&status)?);
            }
            anyhow::ensure!(
                is_over,
                "job {name} has not moved yet: {}; it goes on with that by itself",
                describe(&status)
            );
            return Ok(ExitCode::SUCCESS);
        }
        std::thread::sleep(PAUSE);
        status = client.move_status(&name)?;
        anyhow::ensure!(
            (status.from, status.to) == (from, to),
            "another operator has moved job {name} since"
        );
    }
}

/// Whether nothing is to be waited for any more. A share may lack a standby for long if no hub was named.
fn is_over(status: &MoveStatus) -> bool {
    let are_ready = status.standbys.is_none_or(|StandbyCounts { shares, ready, .. }| ready == shares);
    status.has_left && (are_ready || status.to.is_none())
}

fn describe(MoveStatus { from, has_left, why, standbys, .. }: &MoveStatus) -> String {
    if !has_left {
        return why.clone();
    }
    match standbys {
        None => format!("it has left hub {from}, and has ended"),
        Some(StandbyCounts { shares, ready, .. }) if ready == shares => {
            format!("it has left hub {from}, and all its chunks have a standby")
        }
        Some(StandbyCounts { copying: 0, .. }) => {
            format!(
                "it has left hub {from}; another hub becomes the standby of what it had there when it can"
            )
        }
        Some(_) => format!("it has left hub {from}; another hub receives what it had there"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_to_a_hub_ends_when_that_has_all_chunks() {
        let counts = |ready, copying| Some(StandbyCounts { shares: 2, ready, copying });
        let status = |to, has_left, standbys| MoveStatus {
            from: 3,
            to,
            has_left,
            why: "it is about to leave".into(),
            standbys,
        };
        let staying = status(None, false, counts(2, 0));
        assert!(!is_over(&staying));
        assert_eq!(describe(&staying), "it is about to leave");
        assert!(is_over(&status(None, true, counts(0, 0))), "there may be no other hub");
        let copying = status(Some(4), true, counts(1, 1));
        assert!(!is_over(&copying) && describe(&copying).ends_with("another hub receives what it had there"));
        assert!(is_over(&status(Some(4), true, counts(2, 0))));
        assert!(is_over(&status(Some(4), true, None)), "the job has ended");
    }
}
