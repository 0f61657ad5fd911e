//! Jobs whose ranks all go back to an earlier step when one of them is lost: no update lacks a contribution, and the end
//! is that of an undisturbed run.

use std::sync::Barrier;

use paramhub_core::service::{JobOptions, JobState, JobStatus, OnWorkerLoss};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_worker::{Job, WorkerError};

use crate::cluster::{Cluster, Ticket, Transports, keys, sgd};

over_transports!(
    [tcp shm mixed]
    the_end_is_that_of_an_undisturbed_run_whoever_dies_whenever,
    a_reproducible_job_ends_with_the_same_bits,
    steps_are_repeated_from_the_copies_of_every_nth_step,
    steps_in_two_phases_are_repeated,
    ranks_that_have_left_are_awaited_again,
    ranks_begin_anew_if_one_is_lost_before_all_parameters_have_come,
);

/// Five chunks, the last of them short, on two cores.
const ELEMENTS: usize = 40_000;
const STEPS: u32 = 24;

fn options(rewind_every: u32) -> JobOptions {
    JobOptions {
        rendezvous_timeout_s: 20.0,
        on_worker_loss: OnWorkerLoss::Rewind,
        rewind_every,
        ..Default::default()
    }
}

fn settings() -> Settings {
    Settings { optimizer: sgd(0.5, 0.5), ..two_keys() }
}

fn two_keys() -> Settings {
    Settings::new(keys(&[ELEMENTS as u64, 100]))
}

fn start(job: &Job) -> Result<Vec<Vec<f32>>, WorkerError> {
    let mut model = vec![vec![0.0f32; ELEMENTS], vec![0.0; 100]];
    job.broadcast(&mut model, 0)?;
    Ok(model)
}

/// What a rank contributes to a step. Sums of these are exact in whatever order.
fn gradient(rank: u32, step: u32) -> f32 {
    (4u32.pow(rank) * (step % 3 + 1)) as f32
}

/// Contributes to the next step of all keys. With `dies` it contributes to the first one alone, so that the step is made at
/// most in part.
fn exchange(job: &Job, model: Vec<Vec<f32>>, dies: bool) -> Result<Vec<Vec<f32>>, WorkerError> {
    let step = job.next_step(0)?;
    let of_key = |(key, parameters): (u32, Vec<f32>)| {
        job.push_pull(key, vec![gradient(job.rank(), step); parameters.len()], parameters)
    };
    let most = if dies { 1 } else { usize::MAX };
    let handles: Vec<_> = (0..).zip(model).take(most).map(of_key).collect::<Result<_, _>>()?;
    if dies {
        return Ok(Vec::new());
    }
    handles.into_iter().map(|handle| handle.wait().map(|(_, parameters)| parameters)).collect()
}

/// Ends a rank without a Leave.
fn die(job: Job) {
    job.abort_handle().abort("it dies");
    drop(job);
}

/// What has become of a rank.
struct Lived {
    model: Vec<Vec<f32>>,
    /// The steps at which its processes have begun.
    begun: Vec<Option<u32>>,
}

/// The processes of a rank, one after the other. They die when the rank first comes to one of the steps in `deaths`; one
/// whose job goes back joins anew.
fn live(ticket: &Ticket, rank: u32, settings: &Settings, deaths: &[u32]) -> Lived {
    let (mut deaths, mut begun) = (deaths.iter().copied().peekable(), Vec::new());
    loop {
        let job = join(ticket, rank, settings);
        begun.push(job.resumed_step());
        let ended = (|| {
            let mut model = start(&job)?;
            loop {
                let step = job.next_step(0)?;
                if step == STEPS {
                    return Ok(Some(model));
                }
                if deaths.next_if_eq(&step).is_some() {
                    exchange(&job, model, true)?;
                    return Ok(None);
                }
                model = exchange(&job, model, false)?;
            }
        })();
        match ended {
            Ok(Some(model)) => {
                job.leave().unwrap();
                return Lived { model, begun };
            }
            Ok(None) => die(job),
            Err(WorkerError::Rewound { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Joins a job, perhaps once more if a rank is lost meanwhile.
fn join(ticket: &Ticket, rank: u32, settings: &Settings) -> Job {
    loop {
        match ticket.join(rank, settings.clone()) {
            Err(WorkerError::Rewound { .. }) => {}
            joined => return joined.unwrap(),
        }
    }
}

fn run(ticket: &Ticket, settings: &Settings, deaths: [&[u32]; 3]) -> Vec<Lived> {
    std::thread::scope(|scope| {
        let ranks =
            [0, 1, 2].map(|rank| scope.spawn(move || live(ticket, rank, settings, deaths[rank as usize])));
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The parameters at the end of a job in which nobody is lost.
fn undisturbed(cluster: &Cluster, settings: &Settings) -> Vec<Vec<f32>> {
    let ticket = cluster.job_with("undisturbed", 3, JobOptions::default());
    let ended = run(&ticket, settings, [&[], &[], &[]]).remove(0);
    assert_eq!(ended.begun, [None]);
    cluster.await_end("undisturbed");
    ended.model
}

fn assert_ended_as(ended: &[Lived], expected: &[Vec<f32>]) {
    assert!(ended.iter().all(|lived| lived.model == expected), "{:?}", ended[0].begun);
}

fn the_end_is_that_of_an_undisturbed_run_whoever_dies_whenever(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = cluster.job_with("rewinds", 3, options(1));
    let ended = run(&ticket, &settings(), [&[9], &[0, 4], &[10, 17, 23]]);
    let begun = &ended[0].begun;
    for died in [0, 4, 9, 10, 17, 23] {
        assert!(begun.contains(&Some(died)), "step {died} is made again, and none before it: {begun:?}");
    }
    assert_ended_as(&ended, &undisturbed(&cluster, &settings()));
    let status = cluster.await_end("rewinds");
    assert_eq!(status.state, JobState::Finished, "{}", status.message);
    assert_eq!(status.losses.unwrap().workers_lost, 6);
}

fn a_reproducible_job_ends_with_the_same_bits(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings { reproducible: true, optimizer: OptimizerChoice::named("adamw"), ..two_keys() };
    let ticket = cluster.job_with("exact", 3, options(5));
    let ended = run(&ticket, &settings, [&[13], &[3, 14], &[]]);
    assert_ended_as(&ended, &undisturbed(&cluster, &settings));
}

fn steps_are_repeated_from_the_copies_of_every_nth_step(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = cluster.job_with("copies", 3, options(7));
    let ended = run(&ticket, &settings(), [&[], &[6, 18], &[20]]);
    assert_eq!(ended[0].begun, [None, Some(0), Some(14), Some(14)]);
    assert_ended_as(&ended, &undisturbed(&cluster, &settings()));
    // Six chunks; 6, 4 and 6 steps were made twice, and of each step with a death perhaps a part.
    let updates = cluster.await_end("copies").counters.updates;
    assert!((6 * 40..6 * 43).contains(&updates), "{updates}");
}

fn steps_in_two_phases_are_repeated(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let settings = Settings { clip_norm: Some(1.0), reproducible: true, ..settings() };
    let ticket = cluster.job_with("clipped", 3, options(1));
    let ended = run(&ticket, &settings, [&[5], &[11], &[12]]);
    assert_ended_as(&ended, &undisturbed(&cluster, &settings));
}

/// Rank 2 has left when another dies, as if its program had ended. It is awaited again.
fn ranks_that_have_left_are_awaited_again(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = &cluster.job_with("left", 3, options(10));
    let (settings, done) = (&settings(), &Barrier::new(3));
    let train = |rank: u32| {
        let job = ticket.join(rank, settings.clone()).unwrap();
        let mut model = start(&job).unwrap();
        while job.next_step(0).unwrap() < STEPS {
            model = exchange(&job, model, false).unwrap();
        }
        job
    };
    std::thread::scope(|scope| {
        for rank in [0, 1] {
            scope.spawn(move || {
                let job = train(rank);
                done.wait();
                done.wait();
                if rank == 0 {
                    die(job);
                }
            });
        }
        let job = train(2);
        done.wait();
        job.leave().unwrap();
        done.wait();
    });
    cluster.await_job("left", |status| status.lost == [0, 1, 2]);
    let ended = run(ticket, settings, [&[], &[], &[]]);
    assert_eq!(ended[2].begun, [Some(20)]);
    assert_ended_as(&ended, &undisturbed(&cluster, settings));
    assert_eq!(cluster.await_end("left").state, JobState::Finished);
}

fn ranks_begin_anew_if_one_is_lost_before_all_parameters_have_come(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = &cluster.job_with("early", 3, options(1));
    let settings = &settings();
    // Whichever rank it is that dies.
    for died in [0, 1] {
        std::thread::scope(|scope| {
            let ranks = [0, 1, 2].map(|rank| scope.spawn(move || join(ticket, rank, settings)));
            let [rank_0, rank_1, rank_2] = ranks.map(|rank| rank.join().unwrap());
            assert_eq!([&rank_0, &rank_1, &rank_2].map(Job::resumed_step), [None; 3]);
            // Other parameters than those of the job's end, and of the first key alone.
            rank_0.initialise(0, vec![7.0f32; ELEMENTS], 0).unwrap().wait().unwrap();
            let mut stay = vec![rank_0, rank_1, rank_2];
            die(stay.remove(died));
            for job in stay {
                let lost = job.pull(1, vec![0.0f32; 100]).and_then(|handle| handle.wait().map(drop));
                assert!(matches!(lost, Err(WorkerError::Rewound { .. })), "{lost:?}");
            }
        });
    }
    let ended = run(ticket, settings, [&[], &[3], &[]]);
    for lived in &ended {
        assert_eq!(lived.begun, [None, Some(3)]);
    }
    assert_ended_as(&ended, &undisturbed(&cluster, settings));
    let status = cluster.await_end("early");
    assert_eq!(status.state, JobState::Finished, "{}", status.message);
    assert_eq!(status.losses.unwrap().workers_lost, 3);
}

#[test]
fn the_others_are_told_who_is_lost_and_what_becomes_of_the_job() {
    let cluster = Cluster::new(Transports::tcp(), 2);
    let ticket = &cluster.job_with("told", 2, JobOptions { linger_s: 1.0, ..options(1) });
    let told = std::thread::scope(|scope| {
        let survivor = scope.spawn(move || {
            let job = ticket.join(0, settings()).unwrap();
            let model = start(&job).unwrap();
            exchange(&job, model, false).unwrap_err()
        });
        let lost = ticket.join(1, settings()).unwrap();
        start(&lost).unwrap();
        die(lost);
        survivor.join().unwrap()
    });
    assert_eq!(told.culprit(), Some(1));
    let text = told.to_string();
    for part in ["goes back to an earlier step: rank 1 gave up", "when each of its ranks has a process again"]
    {
        assert!(text.contains(part), "{text}");
    }
    let status = cluster.await_end("told");
    let expected = "ranks 0 and 1 were lost, and no other process has come for 1 s (linger_s), while the job goes on with all of its \
                    workers. The last loss: rank 1 gave up";
    assert!(status.message.contains(expected), "{}", status.message);
}

/// The hubs' copies count as memory of the job.
#[test]
fn the_copies_are_counted_as_memory() {
    let memory = |name: &str, options: JobOptions| {
        let cluster = Cluster::new(Transports::tcp(), 2);
        let ticket = cluster.job_with(name, 1, options);
        let job = ticket.join(0, settings()).unwrap();
        let reserved = |status: &JobStatus| status.counters.memory_bytes > 0;
        let bytes = cluster.await_job(name, reserved).counters.memory_bytes;
        drop(job);
        bytes
    };
    let (with, without) = (memory("with", options(1)), memory("without", JobOptions::default()));
    let copies = 4 * 2 * (ELEMENTS as u64 + 100);
    assert!((copies..copies + 1024).contains(&(with - without)), "{with} {without}");
}
