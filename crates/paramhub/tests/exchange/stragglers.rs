//! Late workers are left out of a step: which contributions count, what the late worker gets, and what is
//! reported.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use paramhub_core::consistency::Consistency;
use paramhub_core::service::JobOptions;
use paramhub_core::settings::Settings;
use paramhub_core::stragglers::Stragglers;
use paramhub_worker::{Job, Member, WorkerError};

use crate::cluster::{Cluster, Transports, WAIT_TIMEOUT, await_true, keys, sgd};

over_transports!(
    [tcp shm mixed]
    the_mean_is_over_those_in_time_and_a_late_contribution_is_dropped_whole,
    a_job_does_not_wait_for_a_worker_that_is_ten_times_slower,
    a_late_worker_catches_up_and_counts_again,
    a_rank_that_has_left_is_not_waited_for,
    ranks_that_are_left_out_are_named_to_themselves_and_to_rank_0,
    jobs_that_cannot_leave_a_rank_out_are_refused_with_the_reason,
);

/// Five chunks, the last of them short, on two cores.
const ELEMENTS: usize = 40_000;
const CHUNK_ELEMENTS: usize = 8192;

fn options(stragglers: Stragglers) -> JobOptions {
    JobOptions { rendezvous_timeout_s: 20.0, stragglers, ..Default::default() }
}

/// Each step lowers each parameter by the mean of the contributions that count.
fn settings() -> Settings {
    Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys(&[ELEMENTS as u64])) }
}

fn start(job: &Job) -> Vec<f32> {
    let mut model = vec![vec![0.0f32; ELEMENTS]];
    job.broadcast(&mut model, 0).unwrap();
    model.remove(0)
}

fn exchange(job: &Job, gradient: f32, model: Vec<f32>) -> Vec<f32> {
    let model = job.push_pull(0, vec![gradient; ELEMENTS], model).unwrap().wait().unwrap().1;
    for chunk in model.chunks(CHUNK_ELEMENTS) {
        assert!(chunk.iter().all(|&value| value == chunk[0]), "a chunk torn between two steps");
    }
    model
}

fn wait_for(flag: &AtomicBool) {
    await_true("the others", || flag.load(Ordering::SeqCst).then_some(()));
}

/// Longer than a thread usually waits for a processor: the time of the others' step is the measure of
/// lateness.
const PACE: Duration = Duration::from_millis(5);

fn the_mean_is_over_those_in_time_and_a_late_contribution_is_dropped_whole(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for (name, stragglers) in [("backup", Stragglers::Backup(1)), ("drop", Stragglers::Drop(20.0))] {
        let flags = [const { AtomicBool::new(false) }; 3];
        let [others_are_ahead, late_is_back, in_time_are_done] = &flags;
        let (first, last) = (Barrier::new(3), Barrier::new(3));
        cluster.job_with(name, 4, options(stragglers)).run(&settings(), |job| {
            let (rank, mut model) = (job.rank(), start(job));
            // Every sum shows whose contributions are in it.
            let own = [1.0f32, 4.0, 16.0, 64.0][rank as usize];
            if rank == 3 {
                wait_for(others_are_ahead);
                model = exchange(job, own, model);
                assert_eq!(model[0], -70.0, "{name}: what the others made, without the late one's");
                assert_eq!(job.next_step(0).unwrap(), 10, "{name}: it goes on with the job's next step");
                late_is_back.store(true, Ordering::SeqCst);
            } else {
                for step in 1..=10 {
                    std::thread::sleep(PACE);
                    first.wait();
                    model = exchange(job, own, model);
                    assert_eq!(model, vec![-7.0 * step as f32; ELEMENTS], "{name}: the mean of 1, 4 and 16");
                }
                others_are_ahead.store(true, Ordering::SeqCst);
                wait_for(late_is_back);
            }
            // Now rank 2 is late.
            match rank {
                2 => wait_for(in_time_are_done),
                _ => drop(last.wait()),
            }
            model = exchange(job, own, model);
            assert_eq!(model, vec![-93.0; ELEMENTS], "{name}: the mean of 1, 4 and 64 at rank {rank}");
            in_time_are_done.store(true, Ordering::SeqCst);
        });
        let status = cluster.await_end(name);
        assert_eq!((status.counters.updates, status.counters.contributions), (55, 165), "five chunks a step");
        assert_eq!(status.left_out, [0, 0, 5, 50], "{name}");
    }
}

fn a_job_does_not_wait_for_a_worker_that_is_ten_times_slower(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    for (name, stragglers) in [("backup", Stragglers::Backup(1)), ("drop", Stragglers::Drop(0.5))] {
        let of_slow = AtomicU32::new(0);
        cluster.job_with(name, 4, options(stragglers)).run(&settings(), |job| {
            let mut model = start(job);
            while job.next_step(0).unwrap() < 40 {
                std::thread::sleep(PACE * if job.rank() == 3 { 10 } else { 1 });
                model = exchange(job, 1.0, model);
                of_slow.fetch_add(u32::from(job.rank() == 3), Ordering::SeqCst);
            }
            // All contributions are ones, so their mean is one.
            let steps = model.iter().map(|&value| -value).fold(0.0, f32::max);
            assert!((40.0..60.0).contains(&steps), "{name}: {steps} steps");
        });
        // The worker makes as many steps as the others if they wait, and a tenth of that if not.
        let of_slow = of_slow.into_inner();
        assert!((1..=20).contains(&of_slow), "{name}: the slow one took {of_slow} of 40 steps");
        let status = cluster.await_end(name);
        let missed = status.left_out[3];
        assert!(missed > status.counters.updates / 2, "{name}: it missed {missed} of {:?}", status.counters);
    }
}

fn a_late_worker_catches_up_and_counts_again(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    cluster.job_with("comeback", 3, options(Stragglers::Drop(4.0))).run(&settings(), |job| {
        let mut model = start(job);
        let mut jumps = Vec::new();
        while job.next_step(0).unwrap() < 60 {
            let before = job.next_step(0).unwrap();
            std::thread::sleep(PACE * if job.rank() == 2 && before < 25 { 30 } else { 1 });
            model = exchange(job, 1.0, model);
            jumps.push((before, job.next_step(0).unwrap() - before));
        }
        if job.rank() == 2 {
            // A busy machine may make the rank late at any time, but not always.
            assert!(jumps.iter().any(|&(_, jump)| jump > 1), "at first it misses steps: {jumps:?}");
            let in_time = jumps.iter().filter(|&&(before, jump)| before >= 25 && jump == 1).count();
            assert!(in_time >= 3, "then it takes part again: {jumps:?}");
        }
    });
}

fn a_rank_that_has_left_is_not_waited_for(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    for (name, stragglers) in [("backup", Stragglers::Backup(2)), ("drop", Stragglers::Drop(2.0))] {
        cluster.job_with(name, 3, options(stragglers)).run(&settings(), |job| {
            let mut model = start(job);
            // Programs that count their own steps end at different steps of the job.
            for _ in 0..[4, 12, 20][job.rank() as usize] {
                std::thread::sleep(Duration::from_millis(1));
                model = exchange(job, 1.0, model);
            }
            assert!(job.next_step(0).unwrap() >= 4);
        });
        let status = cluster.await_end(name);
        assert_eq!(status.message, "", "{name}: {status:?}");
    }
}

fn ranks_that_are_left_out_are_named_to_themselves_and_to_rank_0(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let notices = [const { Mutex::new(Vec::new()) }; 3];
    let rank_0_has_notices = AtomicBool::new(false);
    cluster.job_with("late", 3, options(Stragglers::Backup(1))).run(&settings(), |job| {
        let mut model = start(job);
        if job.rank() == 2 {
            wait_for(&rank_0_has_notices);
        }
        let begun = std::time::Instant::now();
        while job.rank() < 2 && !rank_0_has_notices.load(Ordering::SeqCst) && begun.elapsed() < WAIT_TIMEOUT {
            model = exchange(job, 1.0, model);
            rank_0_has_notices.fetch_or(job.rank() == 0 && !job.notices().is_empty(), Ordering::SeqCst);
        }
        wait_for(&rank_0_has_notices);
        let own =
            || job.notices().into_iter().map(|notice| (notice.rank, notice.message)).collect::<Vec<_>>();
        if job.rank() == 2 {
            await_true("its notice", || (!own().is_empty()).then_some(()));
        }
        notices[job.rank() as usize].lock().unwrap().extend(own());
    });
    let notices = notices.map(|notices| notices.into_inner().unwrap());
    for rank in [0, 2] {
        let (about, message) = &notices[rank][0];
        assert_eq!(*about, Some(2));
        assert!(message.starts_with("rank 2 of job `late` is late: "), "{message}");
        assert!(message.ends_with("have ended without it (stragglers = backup:1)"), "{message}");
        assert!(notices[rank].len() <= 6, "once an order of magnitude: {notices:?}");
    }
    assert!(notices[1].is_empty(), "{notices:?}");
}

/// The error of rank 0 of a job of two when it hands in its settings.
fn refusal(cluster: &Cluster, name: &str, settings: Settings) -> String {
    let ticket = cluster.job_with(name, 2, options(Stragglers::Backup(1)));
    let init = |rank| {
        let member = Member::connect_with(ticket.membership(rank), Default::default());
        member.and_then(|member| member.init(settings.clone())).map(drop)
    };
    let outcomes: [Result<(), WorkerError>; 2] = std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || init(rank))).map(|rank| rank.join().unwrap())
    });
    outcomes[0].as_ref().unwrap_err().to_string()
}

fn jobs_that_cannot_leave_a_rank_out_are_refused_with_the_reason(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let asynchronous = Settings { consistency: Consistency::Asynchronous, ..settings() };
    let clipped = Settings { clip_norm: Some(1.0), ..settings() };
    for (name, settings, why) in [
        ("async", asynchronous, "no step waits for another worker"),
        ("mean", Settings::new(keys(&[4])), "a worker that is left out would miss"),
        ("exact", Settings { reproducible: true, ..settings() }, "differs from run to run"),
        ("clipped", clipped, "the norm, as clipping needs it"),
    ] {
        let message = refusal(&cluster, name, settings);
        assert!(
            message.contains(&format!("job `{name}`")) && message.contains("`stragglers` other than wait"),
            "{message}"
        );
        assert!(message.contains(why) && message.contains("use `stragglers = wait`"), "{message}");
    }
    let create = |options| {
        let request = paramhub_core::service::CreateService { name: "refused".into(), workers: 4, options };
        cluster.client.create_service(&request).unwrap_err().to_string()
    };
    let message = create(options(Stragglers::Backup(4)));
    assert!(message.contains("job `refused` cannot have stragglers = backup:4"), "{message}");
    assert!(message.contains("use backup:3 or less"), "{message}");
    let on_interface_down = paramhub_core::service::OnInterfaceDown::Continue;
    let message = create(JobOptions { on_interface_down, ..options(Stragglers::Drop(0.5)) });
    assert!(
        message.contains(
            "use `on_interface_down = fail` and leave `redial_grace` out, or use `stragglers = wait`"
        ),
        "{message}"
    );
}
