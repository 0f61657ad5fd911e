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

/// Moves a job off a hub, and waits until it has left and, if a hub was named, until that has all chunks that it leaves behind.
/// Says what happens meanwhile, or with `json` how far it is at the end.
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
        let outcome = outcome(&status);
        if outcome.is_some() || until.is_some_and(|until| Instant::now() >= until) {
            if json {
                println!("{}", serde_json::to_string_pretty(&status)?);
            }
            return match outcome {
                Some(Ok(())) => Ok(ExitCode::SUCCESS),
                Some(Err(why)) => anyhow::bail!("job {name} has not moved: {why}"),
                None => anyhow::bail!(
                    "job {name} has not moved yet: {}; it goes on with that by itself",
                    describe(&status)
                ),
            };
        }
        std::thread::sleep(PAUSE);
        status = client.move_status(&name)?;
        anyhow::ensure!(
            (status.from, status.to) == (from, to),
            "another operator has moved job {name} since"
        );
    }
}

/// What has come of the move, or why nothing will; `None` before that is known.
fn outcome(status: &MoveStatus) -> Option<Result<(), &'static str>> {
    let MoveStatus { to, has_left, has_arrived, standbys, .. } = status;
    let Some(StandbyCounts { shares, ready, .. }) = standbys else {
        return Some(Err("it has ended"));
    };
    match (has_left, to) {
        (false, _) => None,
        (true, None) => Some(Ok(())),
        (true, Some(_)) if *has_arrived => Some(Ok(())),
        (true, Some(_)) if ready == shares => Some(Err("another hub has what it left behind")),
        (true, Some(_)) => None,
    }
}

fn describe(MoveStatus { from, to, has_left, has_arrived, why, standbys }: &MoveStatus) -> String {
    let Some(StandbyCounts { shares, ready, copying }) = standbys else { return "it has ended".into() };
    if !has_left {
        return why.clone();
    }
    let here = match to.filter(|_| *has_arrived) {
        Some(to) => format!("it has left hub {from}, and hub {to} has what it had there"),
        None => format!("it has left hub {from}"),
    };
    match (shares - ready, copying) {
        (0, _) => format!("{here}; all its chunks have a standby"),
        (missing, 0) => format!("{here}; {missing} of its {shares} parts get a standby when a hub is there"),
        (_, _) => format!("{here}; another hub receives what it had there"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_ends_when_the_job_has_left_and_the_hub_that_was_named_has_all_chunks() {
        let counts = |ready, copying| Some(StandbyCounts { shares: 2, ready, copying });
        let status = |to, has_left, has_arrived, standbys| MoveStatus {
            from: 3,
            to,
            has_left,
            has_arrived,
            why: "it is about to leave".into(),
            standbys,
        };
        let staying = status(None, false, false, counts(2, 0));
        assert_eq!((outcome(&staying), describe(&staying).as_str()), (None, "it is about to leave"));
        let alone = status(None, true, false, counts(0, 0));
        assert_eq!(outcome(&alone), Some(Ok(())), "there may be no other hub");
        assert!(describe(&alone).ends_with("2 of its 2 parts get a standby when a hub is there"));
        let copying = status(Some(4), true, false, counts(1, 1));
        assert_eq!(outcome(&copying), None);
        assert!(describe(&copying).ends_with("another hub receives what it had there"));
        let arrived = status(Some(4), true, true, counts(2, 0));
        assert_eq!(outcome(&arrived), Some(Ok(())));
        assert_eq!(
            describe(&arrived),
            "it has left hub 3, and hub 4 has what it had there; all its chunks have a standby"
        );
        let had_all = status(Some(4), true, true, counts(0, 0));
        assert_eq!(outcome(&had_all), Some(Ok(())), "it was the other hub of all chunks before");
        assert!(
            matches!(outcome(&status(Some(4), true, false, counts(2, 0))), Some(Err(_))),
            "another took it"
        );
        for has_left in [false, true] {
            assert_eq!(outcome(&status(Some(4), has_left, false, None)), Some(Err("it has ended")));
        }
    }
}
