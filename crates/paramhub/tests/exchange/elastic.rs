//! Jobs that begin with some of their ranks: others join and leave between steps, or all are started again, more or fewer.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paramhub_core::service::{JobOptions, JobState, OnWorkerLoss};
use paramhub_core::settings::Settings;
use paramhub_worker::{Job, Options};

use crate::cluster::{Cluster, Ticket, Transports, keys, sgd};

over_transports!(
    [tcp shm mixed]
    ranks_join_and_leave_between_steps,
    a_rank_that_comes_early_joins_when_the_job_runs,
    each_start_goes_on_with_as_many_ranks_as_it_has,
    a_start_of_another_number_takes_the_place_of_one_that_has_not_met,
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

/// A job of up to four ranks that goes back.
fn rewinding() -> JobOptions {
    JobOptions { on_worker_loss: OnWorkerLoss::Rewind, program_state_bytes: 100, ..options() }
}

/// What a rank of a start has seen.
#[derive(Debug)]
struct Seen {
    resumed_step: Option<u32>,
    /// The program state of that step.
    state: Option<Vec<u8>>,
    value: f32,
}

/// Starts this many ranks together. They train up to a step, each saving a program state before every step, and then all die,
/// or leave at the end.
fn start_all(ticket: &Ticket, settings: &Settings, workers: u32, until: u32) -> Vec<Seen> {
    let have_made_it = &Barrier::new(workers as usize);
    let rank = |rank: u32| {
        let options = Options { started_workers: Some(workers), ..Options::default() };
        let job = ticket.join_with(rank, options, settings.clone()).unwrap();
        let resumed_step = job.resumed_step();
        let state = resumed_step.and_then(|step| job.program_state(step).unwrap().wait().unwrap().1);
        let mut model = vec![vec![0.0f32; ELEMENTS]];
        job.broadcast(&mut model, 0).unwrap();
        let mut model = model.remove(0);
        loop {
            let next = job.next_step(0).unwrap();
            job.save_program_state(next, vec![rank as u8, next as u8]).unwrap().wait().unwrap();
            if next == until {
                break;
            }
            model = job.push_pull(0, vec![own(rank); ELEMENTS], model).unwrap().wait().unwrap().1;
        }
        assert!(model.iter().all(|&value| value == model[0]));
        have_made_it.wait();
        if until == LAST {
            job.leave().unwrap();
        } else {
            job.abort_handle().abort("its launcher ends all ranks");
        }
        Seen { resumed_step, state, value: model[0] }
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..workers).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The step at which the last start ends.
const LAST: u32 = 20;

fn each_start_goes_on_with_as_many_ranks_as_it_has(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for (name, reproducible, clip_norm) in
        [("sums", false, None), ("in-order", true, None), ("clipped", false, Some(100.0))]
    {
        let settings = Settings {
            optimizer: sgd(1.0, 0.0),
            reproducible,
            clip_norm,
            ..Settings::new(keys(&[ELEMENTS as u64]))
        };
        let ticket = cluster.job_with(name, 4, rewinding());
        let (mut expected, mut begun, mut before) = (0.0f32, 0, 2);
        for (workers, until) in [(2, 5), (4, 9), (3, 12), (1, 16), (2, LAST)] {
            let mean = (0..workers).map(own).sum::<f32>() / workers as f32;
            // The norm of the mean gradient is larger than the one to which it is clipped.
            let step = clip_norm.map_or(mean, |clip_norm| clip_norm as f32 / (ELEMENTS as f32).sqrt());
            (begun..until).for_each(|_| expected -= step);
            let resumed_step = Some(begun).filter(|&step| step > 0);
            // A rank that was not there before has the state of the lowest.
            let of = |rank: u32| if rank < before { rank } else { 0 };
            let state = |rank| resumed_step.map(|step| vec![of(rank) as u8, step as u8]);
            for (rank, seen) in (0..).zip(start_all(&ticket, &settings, workers, until)) {
                let begins = (seen.resumed_step, seen.state);
                assert_eq!(begins, (resumed_step, state(rank)), "{name}: rank {rank} of {workers}");
                let error = (seen.value / expected - 1.0).abs();
                assert!(error < 1e-4, "{name}: {} of {workers} ranks instead of {expected}", seen.value);
            }
            (begun, before) = (until, workers);
        }
        let status = cluster.await_end(name);
        assert_eq!(status.state, JobState::Finished, "{}", status.message);
        assert_eq!((status.current_workers, status.lost, status.workers), (Some(2), vec![], 4));
    }
}

fn a_start_of_another_number_takes_the_place_of_one_that_has_not_met(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = &Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys(&[ELEMENTS as u64])) };
    let ticket = &cluster.job_with("replaced", 4, rewinding());
    std::thread::scope(|scope| {
        let options = Options { started_workers: Some(2), ..Options::default() };
        let former = scope.spawn(move || ticket.join_with(1, options, settings.clone()).map(drop));
        cluster.await_job("replaced", |status| status.connected == [1]);
        let seen = start_all(ticket, settings, 3, LAST);
        assert!(seen.iter().all(|seen| seen.resumed_step.is_none()), "{seen:?}");
        let refused = former.join().unwrap().unwrap_err().to_string();
        assert!(refused.contains("rank 1") && refused.contains("belongs to"), "{refused}");
    });
    let refused = {
        let ticket = cluster.job_with("too-many", 4, rewinding());
        let options = Options { started_workers: Some(5), ..Options::default() };
        ticket.join_with(0, options, settings.clone()).map(drop).unwrap_err().to_string()
    };
    assert!(
        refused.contains("5 ranks have been started, and job `too-many` can have 4 at most"),
        "{refused}"
    );
}
