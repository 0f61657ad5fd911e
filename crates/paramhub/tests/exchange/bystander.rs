//! A job that must not be affected by what happens beside it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use paramhub_core::service::JobState;
use paramhub_core::settings::Settings;

use crate::cluster::{Cluster, keys};

/// Runs a job while `offend` does something wrong, and checks the job's numbers to the end.
pub(crate) fn beside_a_running_job(cluster: &Cluster, offend: impl FnOnce()) {
    let ticket = cluster.job("bystander", 2);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let bystanders = scope.spawn(|| {
            let settings = Settings::new(keys(&[30_000, 4]));
            ticket.run(&settings, |job| {
                let mut steps = 0;
                // Both ranks must agree on when to end: the sum shows whether either has seen that the
                // offence is over.
                loop {
                    let end = if over.load(Ordering::SeqCst) { 1.0f32 } else { 0.0 };
                    let gradient = vec![end; 4];
                    let (_, votes) = job.push_pull(1, gradient, vec![0.0f32; 4]).unwrap().wait().unwrap();
                    let ones = vec![1.0f32; 30_000];
                    let (_, mean) = job.push_pull(0, ones, vec![0.0f32; 30_000]).unwrap().wait().unwrap();
                    assert!(mean.iter().all(|&value| value == 1.0));
                    steps += 1;
                    if votes[0] > 0.0 && steps > 20 {
                        return steps;
                    }
                }
            })
        });
        cluster.await_state("bystander", JobState::Running);
        let offended = catch_unwind(AssertUnwindSafe(offend));
        over.store(true, Ordering::SeqCst);
        bystanders.join().unwrap();
        offended.unwrap_or_else(|panic| resume_unwind(panic));
    });
    assert_eq!(cluster.await_end("bystander").state, JobState::Finished);
}
