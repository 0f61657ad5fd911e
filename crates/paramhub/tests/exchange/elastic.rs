//! Jobs that begin with some of their ranks: others join and leave between steps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paramhub_core::service::{JobOptions, JobState, OnWorkerLoss};
use paramhub_core::settings::Settings;
use paramhub_worker::Job;

use crate::cluster::{Cluster, Ticket, Transports, keys, sgd};

over_transports!(
    [tcp shm mixed]
    ranks_join_and_leave_between_steps,
    a_rank_that_comes_early_joins_when_the_job_runs,
);

/// Five chunks, the last of them short, on two cores.
const ELEMENTS: usize = 40_000;
const STEPS: u32 = 250;
/// The step at which rank 1 leaves.
const LEFT_AT: u32 = 200;

fn options() -> JobOptions {
    JobOptions {
        rendezvous_timeout_s: 20.0,
        on_worker_loss: OnWorkerLoss::Continue,
        start_workers: Some(2),
        ..Default::default()
    }
}

fn join(ticket: &Ticket, rank: u32) -> (Job, Vec<f32>) {
    let settings = Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys(&[ELEMENTS as u64])) };
    let job = ticket.join(rank, settings).unwrap();
    let mut model = vec![vec![0.0f32; ELEMENTS]];
    job.broadcast(&mut model, 0).unwrap();
    (job, model.remove(0))
}

/// Each rank contributes a gradient of its own.
fn own(rank: u32) -> f32 {
    4.0f32.powi(rank as i32)
}

/// Makes a step, which takes a while, so that others join between two of them.
fn step(job: &Job, model: Vec<f32>) -> Vec<f32> {
    std::thread::sleep(Duration::from_millis(2));
    let model = job.push_pull(0, vec![own(job.rank()); ELEMENTS], model).unwrap().wait().unwrap().1;
    assert!(model.iter().all(|&value| value == model[0]), "each step has the same members at all chunks");
    model
}

/// Trains from joining to a step, and returns the step at which it began.
fn train(ticket: &Ticket, rank: u32, until: u32) -> (u32, Vec<f32>) {
    let (job, mut model) = join(ticket, rank);
    let began = job.next_step(0).unwrap();
    while job.next_step(0).unwrap() < until {
        model = step(&job, model);
    }
    job.leave().unwrap();
    (began, model)
}

fn ranks_join_and_leave_between_steps(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = &cluster.job_with("elastic", 4, options());
    let trained = std::thread::scope(|scope| {
        let until = |rank| if rank == 1 { LEFT_AT } else { STEPS };
        let first = [0, 1].map(|rank| scope.spawn(move || train(ticket, rank, until(rank))));
        let status = cluster.await_job("elastic", |status| status.counters.updates > 0);
        assert_eq!((&status.connected[..], &status.lost[..]), (&[0, 1][..], &[][..]));
        let later = [3, 2].map(|rank| scope.spawn(move || train(ticket, rank, until(rank))));
        let [zero, one] = first.map(|thread| thread.join().unwrap());
        let [three, two] = later.map(|thread| thread.join().unwrap());
        [zero, one, two, three]
    });
    let began = trained.each_ref().map(|(began, _)| *began);
    assert!(began[..2] == [0, 0] && began[2] > 0 && began[3] > 0, "{began:?}");
    let members = |step: u32| {
        (0..4u32).filter(move |&rank| step >= began[rank as usize] && !(rank == 1 && step >= LEFT_AT))
    };
    let mean =
        |step| members(step).map(|rank| f64::from(own(rank))).sum::<f64>() / members(step).count() as f64;
    let expected: f64 = -(0..STEPS).map(mean).sum::<f64>();
    for rank in [0, 2, 3] {
        let value = f64::from(trained[rank].1[0]);
        assert!(
            (value / expected - 1.0).abs() < 1e-5,
            "rank {rank}: {value} instead of {expected}; {began:?}"
        );
    }
    let status = cluster.await_end("elastic");
    assert_eq!(status.state, JobState::Finished, "{}", status.message);
    assert_eq!((status.left_out, status.lost), (vec![0; 4], vec![]));
    let losses = status.losses.unwrap();
    assert_eq!((losses.workers_lost, losses.workers_joined), (0, 2));
}

fn a_rank_that_comes_early_joins_when_the_job_runs(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = &cluster.job_with("early", 3, options());
    let has_joined = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let early = scope.spawn(move || {
            let (job, model) = join(ticket, 2);
            has_joined.store(true, Ordering::Release);
            step(&job, model);
            job.leave().unwrap();
        });
        let first = [0, 1].map(|rank| {
            scope.spawn(move || {
                let (job, mut model) = join(ticket, rank);
                while !has_joined.load(Ordering::Acquire) {
                    model = step(&job, model);
                }
                // All that were there make one step more together.
                step(&job, model);
                job.leave().unwrap();
            })
        });
        first.into_iter().for_each(|thread| thread.join().unwrap());
        early.join().unwrap();
    });
    assert_eq!(cluster.await_end("early").state, JobState::Finished);
}
