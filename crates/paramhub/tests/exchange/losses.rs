//! Jobs that go on when workers are lost: what counts, who waits, and how another process takes a rank.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use paramhub_core::service::{CreateService, ErrorCode, JobOptions, JobState, OnWorkerLoss};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_worker::{Job, Member, Options};

use crate::cluster::{Cluster, Ticket, Transports, keys, sgd};

over_transports!(
    [tcp shm mixed]
    steps_go_on_without_a_lost_rank_and_with_the_process_that_takes_it,
    no_step_is_lost_where_all_workers_are_awaited,
    all_ranks_may_be_replaced_and_find_parameters_and_state,
    a_rank_may_be_lost_again_and_again,
    a_rank_that_has_left_may_be_taken_while_the_job_lives,
    the_schedule_goes_on_when_the_rank_that_set_it_is_lost,
);

/// Five chunks, the last of them short, on two cores.
const ELEMENTS: usize = 40_000;
const CHUNKS: u64 = 5;
const CHUNK_ELEMENTS: usize = 8192;

fn options(min_workers: u32) -> JobOptions {
    JobOptions {
        rendezvous_timeout_s: 20.0,
        on_worker_loss: OnWorkerLoss::Continue,
        min_workers,
        ..Default::default()
    }
}

/// Each step lowers each parameter by the mean of the contributions.
fn settings() -> Settings {
    with_momentum(0.0)
}

fn with_momentum(momentum: f64) -> Settings {
    Settings { optimizer: sgd(1.0, momentum), ..Settings::new(keys(&[ELEMENTS as u64])) }
}

fn start(job: &Job) -> Vec<f32> {
    let mut model = vec![vec![0.0f32; ELEMENTS]];
    job.broadcast(&mut model, 0).unwrap();
    whole(model.remove(0))
}

/// Contributes a gradient that shows whose it is.
fn exchange(job: &Job, model: Vec<f32>) -> Vec<f32> {
    let gradient = own(job.rank());
    whole(job.push_pull(0, vec![gradient; ELEMENTS], model).unwrap().wait().unwrap().1)
}

fn own(rank: u32) -> f32 {
    4.0f32.powi(rank as i32)
}

/// A model whose chunks each have one value in all elements.
fn whole(model: Vec<f32>) -> Vec<f32> {
    for chunk in model.chunks(CHUNK_ELEMENTS) {
        assert!(chunk.iter().all(|&value| value == chunk[0]), "a chunk torn between two steps");
    }
    model
}

/// Makes steps until so many have been made in all.
fn train(job: &Job, mut model: Vec<f32>, until: u32) -> Vec<f32> {
    while job.next_step(0).unwrap() < until {
        model = exchange(job, model);
    }
    model
}

/// Ends a rank without a Leave.
fn die(job: Job) {
    job.abort_handle().abort("it dies");
    drop(job);
}

fn take(ticket: &Ticket, rank: u32, settings: &Settings) -> Job {
    ticket.join(rank, settings.clone()).unwrap()
}

fn steps_go_on_without_a_lost_rank_and_with_the_process_that_takes_it(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = cluster.job_with("goes-on", 3, options(2));
    let (begun, ticket) = (Barrier::new(3), &ticket);
    let survivor = |rank| {
        let job = take(ticket, rank, &settings());
        let mut model = train(&job, start(&job), 3);
        begun.wait();
        // The steps after the loss take a while, so that the other process joins between two of them.
        while job.next_step(0).unwrap() < 200 {
            std::thread::sleep(Duration::from_millis(2));
            model = exchange(&job, model);
        }
        job.leave().unwrap();
        model
    };
    let (models, joined_at) = std::thread::scope(|scope| {
        let survivors = [0, 1].map(|rank| scope.spawn(move || survivor(rank)));
        let lost = take(ticket, 2, &settings());
        train(&lost, start(&lost), 3);
        begun.wait();
        die(lost);
        cluster.await_job("goes-on", |status| status.lost == [2]);
        let job = take(ticket, 2, &settings());
        let step = job.resumed_step().expect("it joins a job that runs");
        let mut model = start(&job);
        let expected = -21.0 - 2.5 * (step - 3) as f32;
        assert_eq!(model, vec![expected; ELEMENTS], "the parameters of step {step}, which all make together");
        assert_eq!(job.next_step(0).unwrap(), step);
        model = train(&job, model, 200);
        job.leave().unwrap();
        let mut models: Vec<Vec<f32>> = survivors.map(|thread| thread.join().unwrap()).into();
        models.push(model);
        (models, step)
    });
    let expected = -21.0 - 2.5 * (joined_at - 3) as f32 - 7.0 * (200 - joined_at) as f32;
    assert!(models.iter().all(|model| model[..] == [expected; ELEMENTS]), "joined at {joined_at}");
    let status = cluster.await_end("goes-on");
    assert_eq!((status.state, status.epoch), (JobState::Finished, 3), "{}", status.message);
    assert_eq!(status.left_out, [0, 0, CHUNKS * u64::from(joined_at - 3)]);
    assert_eq!(status.counters.updates, CHUNKS * 200);
}

fn no_step_is_lost_where_all_workers_are_awaited(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = &cluster.job_with("waits", 2, options(2));
    let (begun, settings) = (&Barrier::new(2), &with_momentum(0.5));
    let (survivor, other) = std::thread::scope(|scope| {
        let survivor = scope.spawn(move || {
            let job = take(ticket, 0, settings);
            let model = train(&job, start(&job), 3);
            begun.wait();
            let model = train(&job, model, 10);
            job.leave().unwrap();
            model
        });
        let lost = take(ticket, 1, settings);
        train(&lost, start(&lost), 3);
        begun.wait();
        die(lost);
        let status = cluster.await_job("waits", |status| status.lost == [1]);
        assert!(status.message.contains("rank 1 gave up"), "{}", status.message);
        let job = take(ticket, 1, settings);
        assert_eq!(job.resumed_step(), Some(3), "no step has been made without it");
        let model = train(&job, start(&job), 10);
        job.leave().unwrap();
        (survivor.join().unwrap(), model)
    });
    assert_eq!(survivor, other);
    assert_eq!(other, undisturbed(&cluster, 2, settings, 10));
    assert_eq!(cluster.await_end("waits").left_out, [0, 0]);
}

fn all_ranks_may_be_replaced_and_find_parameters_and_state(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = &cluster.job_with("restarted", 2, options(2));
    let settings = &with_momentum(0.5);
    let run = |until: u32, expected: Option<u32>| {
        let models: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                scope.spawn(move || {
                    let job = take(ticket, rank, settings);
                    assert_eq!(job.resumed_step(), expected, "at rank {rank}");
                    let model = train(&job, start(&job), until);
                    match until {
                        12 => job.leave().unwrap(),
                        _ => die(job),
                    }
                    model
                })
            });
            ranks.map(|rank| rank.join().unwrap()).into()
        });
        assert_eq!(models[0], models[1]);
        models.into_iter().next().unwrap()
    };
    run(3, None);
    cluster.await_job("restarted", |status| status.lost == [0, 1]);
    run(7, Some(3));
    cluster.await_job("restarted", |status| status.lost == [0, 1]);
    let model = run(12, Some(7));
    assert_eq!(model, undisturbed(&cluster, 2, settings, 12));
    assert_eq!(cluster.await_end("restarted").state, JobState::Finished);
}

fn a_rank_may_be_lost_again_and_again(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let (cluster, over) = (&cluster, &AtomicBool::new(false));
    let ticket = &cluster.job_with("often", 3, options(1));
    let settings = &settings();
    std::thread::scope(|scope| {
        let survivor = scope.spawn(move || {
            let job = take(ticket, 0, settings);
            let mut model = start(&job);
            while !over.load(Ordering::SeqCst) {
                model = exchange(&job, model);
            }
            job.leave().unwrap();
        });
        let others = [1, 2].map(|rank| {
            scope.spawn(move || {
                for life in 0..6 {
                    let job = take(ticket, rank, settings);
                    let model = start(&job);
                    let until = job.next_step(0).unwrap() + 1 + life;
                    // Half of the lives end in the middle of a step.
                    let model = train(&job, model, until);
                    if life % 2 == 0 {
                        drop(job.push_pull(0, vec![own(rank); ELEMENTS], model).unwrap());
                    }
                    die(job);
                    cluster.await_job("often", |status| status.lost.contains(&rank));
                }
            })
        });
        others.into_iter().for_each(|other| other.join().unwrap());
        over.store(true, Ordering::SeqCst);
        survivor.join().unwrap();
    });
    let status = cluster.await_end("often");
    assert_eq!(status.state, JobState::Finished, "{}", status.message);
    assert!(status.left_out[0] == 0 && status.left_out[1] > 0, "{:?}", status.left_out);
}

/// The parameters after so many steps of a job in which nobody is lost.
fn undisturbed(cluster: &Cluster, workers: u32, settings: &Settings, steps: u32) -> Vec<f32> {
    let ticket = cluster.job("undisturbed", workers);
    ticket.run(settings, |job| train(job, start(job), steps)).remove(0)
}

#[test]
fn a_job_that_waits_for_workers_in_vain_fails_with_the_reason() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let ticket = &cluster.job_with("in-vain", 2, JobOptions { linger_s: 1.0, ..options(2) });
    let refused = std::thread::scope(|scope| {
        let survivor = scope.spawn(move || {
            let job = take(ticket, 0, &settings());
            let model = start(&job);
            job.push_pull(0, vec![1.0f32; ELEMENTS], model).unwrap().wait().unwrap_err().to_string()
        });
        let lost = take(ticket, 1, &settings());
        start(&lost);
        die(lost);
        survivor.join().unwrap()
    });
    let expected = "rank 1 was lost, and no other process has come for 1 s (linger_s), while the job goes on with 2 workers";
    assert!(refused.contains(expected), "{refused}");
    let status = cluster.await_end("in-vain");
    assert!(
        status.message.contains(expected) && status.message.contains("rank 1 gave up"),
        "{}",
        status.message
    );
}

#[test]
fn a_rank_is_taken_with_the_settings_of_the_job_by_one_process_and_only_when_it_is_lost() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let ticket = &cluster.job_with("taken", 2, options(2));
    let settings = &settings();
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(move || {
            let job = take(ticket, 1, settings);
            start(&job);
            job
        });
        let job = take(ticket, 0, settings);
        start(&job);
        (job, second.join().unwrap())
    });
    let refused = ticket.join(1, settings.clone()).unwrap_err().to_string();
    assert!(refused.contains("rank 1 of job `taken` belongs to process"), "{refused}");
    die(second);
    cluster.await_job("taken", |status| status.lost == [1]);
    let others = Settings { optimizer: sgd(0.5, 0.0), ..settings.clone() };
    let refused = ticket.join(1, others).unwrap_err().to_string();
    assert!(refused.contains("are not those on which the ranks agreed"), "{refused}");
    // A process that has not come further than to connect, and is not heard any more, has the rank for a while only.
    let gone = Member::connect_with(ticket.membership(1), Options::default()).unwrap();
    let job = take(ticket, 1, settings);
    drop(gone);
    start(&job);
    std::thread::scope(|scope| {
        let ranks = [&first, &job].map(|job| scope.spawn(move || train(job, vec![0.0; ELEMENTS], 2)));
        assert_eq!(ranks.map(|rank| rank.join().unwrap()[0]), [-5.0, -5.0]);
    });
    first.leave().unwrap();
    job.leave().unwrap();
    assert_eq!(cluster.await_end("taken").state, JobState::Finished);
}

#[test]
fn workers_may_be_lost_before_rank_0_has_sent_all_parameters_to_start_from() {
    let cluster = Cluster::new(Transports::tcp(), 2);
    let ticket = &cluster.job_with("early", 3, options(1));
    let settings = &Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys(&[ELEMENTS as u64, 100])) };
    std::thread::scope(|scope| {
        let ranks = [0, 1, 2].map(|rank| scope.spawn(move || take(ticket, rank, settings)));
        let [rank_0, rank_1, rank_2] = ranks.map(|rank| rank.join().unwrap());
        // The first key alone.
        rank_0.initialise(0, vec![7.0f32; ELEMENTS], 0).unwrap().wait().unwrap();
        die(rank_0);
        die(rank_1);
        cluster.await_job("early", |status| status.lost == [0, 1]);
        let waits = rank_2.pull(1, vec![0.0f32; 100]).unwrap();
        let rank_0 = take(ticket, 0, settings);
        assert_eq!(rank_0.resumed_step(), None, "it begins like the first one");
        for (key, elements) in [(0, ELEMENTS), (1, 100)] {
            rank_0.initialise(key, vec![3.0f32; elements], 0).unwrap().wait().unwrap();
        }
        assert_eq!(waits.wait().unwrap().1, [3.0; 100]);
        let kept = rank_0.pull(0, vec![0.0f32; ELEMENTS]).unwrap().wait().unwrap().1;
        assert_eq!(kept[0], 7.0, "those that the hubs had stay");
        let rank_1 = take(ticket, 1, settings);
        assert_eq!(rank_1.resumed_step(), Some(0));
        for job in [&rank_0, &rank_1, &rank_2] {
            assert_eq!(job.pull(1, vec![0.0f32; 100]).unwrap().wait().unwrap().1, [3.0; 100]);
        }
        for job in [rank_0, rank_1, rank_2] {
            job.leave().unwrap();
        }
    });
    assert_eq!(cluster.await_end("early").state, JobState::Finished);
}

#[test]
fn a_job_whose_rank_0_does_not_come_back_with_parameters_fails() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let ticket = &cluster.job_with("waits", 2, JobOptions { linger_s: 1.0, ..options(1) });
    std::thread::scope(|scope| {
        let rank_1 = scope.spawn(move || take(ticket, 1, &settings()));
        die(take(ticket, 0, &settings()));
        let _rank_1 = rank_1.join().unwrap();
        let status = cluster.await_end("waits");
        let message = &status.message;
        assert!(message.contains("rank 0 was lost"), "{message}");
        assert!(message.contains("without those that rank 0 had yet to send"), "{message}");
    });
}

#[test]
fn a_running_job_that_takes_processes_is_found_by_its_name() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let request = |name: &str, options| CreateService { name: name.into(), workers: 1, options };
    let find = |name: &str, options| cluster.client.find_or_create(&request(name, options), Duration::ZERO);
    let (created, is_new) = find("found", options(1)).unwrap();
    assert!(is_new);
    let (found, is_new) = find("found", options(1)).unwrap();
    assert!(!is_new && found.namespace == created.namespace, "its rank has not connected");
    let ticket = Ticket::of(&cluster, created, 1);
    let first = take(&ticket, 0, &settings());
    train(&first, start(&first), 3);
    let (found, is_new) = find("found", options(1)).unwrap();
    assert!(!is_new && found.nonce == ticket.nonce, "it runs, and its rank may be lost");
    die(first);
    let again = take(&Ticket::of(&cluster, found, 1), 0, &settings());
    assert_eq!(again.resumed_step(), Some(3));
    again.leave().unwrap();
    cluster.await_end("found");
    assert!(find("found", options(1)).unwrap().1, "a job that has ended is not found");
    let other = cluster.job("other", 1);
    let job = take(&other, 0, &settings());
    let refused = find("other", JobOptions::default()).unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::NameTaken), "its ranks are there for good: {refused}");
    job.leave().unwrap();
}

/// As launchers do that start all ranks again when one has failed at its end.
fn a_rank_that_has_left_may_be_taken_while_the_job_lives(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = &cluster.job_with("left", 2, options(2));
    let settings = &with_momentum(0.5);
    // The others go on without a rank that has left, so neither may begin before the other has its place.
    let have_places = &Barrier::new(2);
    let run = |until: u32, ends_well: [bool; 2], expected: Option<u32>| {
        let ranks: Vec<(Job, Vec<f32>)> = std::thread::scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                scope.spawn(move || {
                    let job = take(ticket, rank, settings);
                    have_places.wait();
                    assert_eq!(job.resumed_step(), expected, "at rank {rank}");
                    let model = train(&job, start(&job), until);
                    (job, model)
                })
            });
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let mut models = Vec::new();
        for ((job, model), ends_well) in ranks.into_iter().zip(ends_well) {
            match ends_well {
                true => job.leave().unwrap(),
                false => die(job),
            }
            models.push(model);
        }
        assert_eq!(models[0], models[1]);
        models.swap_remove(0)
    };
    run(5, [true, false], None);
    let model = run(9, [true, true], Some(5));
    assert_eq!(model, undisturbed(&cluster, 2, settings, 9));
    assert_eq!(cluster.await_end("left").state, JobState::Finished);
}

/// The learning rate of a step.
fn rate(step: u32) -> f64 {
    match step {
        ..4 => 1.0,
        4..8 => 0.5,
        8..24 => 0.25,
        24.. => 0.125,
    }
}

/// Makes steps with the same gradient at each rank, and sets their learning rate where it changes.
fn train_by_schedule(job: &Job, mut model: Vec<f32>, until: u32, rate: fn(u32) -> f64) -> Vec<f32> {
    while job.next_step(0).unwrap() < until {
        let step = job.next_step(0).unwrap();
        if step > 0 && rate(step) != rate(step - 1) {
            let OptimizerChoice { hyperparameters, .. } = sgd(rate(step), 0.0);
            job.set_hyperparameters(step, &hyperparameters.unwrap()).unwrap();
        }
        model = whole(job.push_pull(0, vec![1.0f32; ELEMENTS], model).unwrap().wait().unwrap().1);
    }
    model
}

fn the_schedule_goes_on_when_the_rank_that_set_it_is_lost(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let ticket = &cluster.job_with("schedule", 3, options(1));
    let (settings, meets) = (&settings(), &Barrier::new(3));
    let ends = std::thread::scope(|scope| {
        // Rank 1 decides when rank 0 is lost, and is lost itself.
        let others = [(1, 20), (2, 30)].map(|(rank, last)| {
            scope.spawn(move || {
                let job = take(ticket, rank, settings);
                let model = train_by_schedule(&job, start(&job), 10, rate);
                // From its first step on the others wait for the successor of rank 0.
                meets.wait();
                meets.wait();
                let model = train_by_schedule(&job, model, last, rate);
                match last {
                    30 => job.leave().unwrap(),
                    _ => die(job),
                }
                model
            })
        });
        let lost = take(ticket, 0, settings);
        // It is lost before it sets the rate of step 4, which the others may have set already.
        train_by_schedule(&lost, start(&lost), 4, rate);
        die(lost);
        cluster.await_job("schedule", |status| status.lost == [0]);
        meets.wait();
        let successor = take(ticket, 0, settings);
        let model = start(&successor);
        assert_eq!(successor.resumed_step(), Some(10));
        meets.wait();
        // It has begun its schedule anew, so that nothing of it may hold.
        let model = train_by_schedule(&successor, model, 30, |step| f64::from(step) * 100.0);
        successor.leave().unwrap();
        let [_, at_rank_2] = others.map(|other| other.join().unwrap());
        [model, at_rank_2]
    });
    let expected = -(0..30).map(rate).sum::<f64>() as f32;
    assert!(ends.iter().all(|model| model[..] == [expected; ELEMENTS]), "{} {}", ends[0][0], ends[1][0]);
    assert_eq!(cluster.await_end("schedule").state, JobState::Finished);
}
