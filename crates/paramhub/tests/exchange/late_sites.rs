//! Racks and hosts that are late are left out of a step as a whole: what counts, what they get, and what is reported.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use paramhub_core::composition::{BetweenSites, OptimizeAt, Reduction};
use paramhub_core::service::JobOptions;
use paramhub_core::settings::Settings;
use paramhub_core::stragglers::Stragglers;
use paramhub_worker::Job;

use crate::cluster::{Transports, WAIT_TIMEOUT, await_true, keys, sgd};
use crate::sites::{Hub, Racks, SIZES, options};

over_transports!(
    [tcp shm mixed]
    a_site_that_is_late_is_left_out_whole_and_counts_again,
    a_job_does_not_wait_for_a_site_that_is_ten_times_slower,
    a_site_that_has_left_is_not_waited_for,
    a_late_site_is_named_to_its_ranks_and_to_rank_0,
    jobs_that_cannot_leave_a_site_out_are_refused_with_the_reason,
);

const STEPS: u32 = 5;
/// Longer than a thread usually waits for a processor: the time of the others' step is the measure of lateness.
const PACE: Duration = Duration::from_millis(5);

/// Three racks of two workers each, which do not follow one another.
const RACKS: [&str; 6] = ["a", "c", "b", "c", "a", "b"];

fn racks(transports: Transports) -> Racks {
    Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 2), Hub::Rack("c", 1)])
}

fn late(reduction: Reduction, stragglers: Stragglers) -> JobOptions {
    JobOptions { stragglers, ..options(reduction) }
}

/// Each step lowers each parameter by the mean of the contributions that count.
fn settings() -> Settings {
    Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys(&SIZES)) }
}

fn start(job: &Job) -> Vec<Vec<f32>> {
    let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&size| vec![0.0; size as usize]).collect();
    job.broadcast(&mut model, 0).unwrap();
    model
}

/// Exchanges gradients of this value, and returns the model.
fn exchange(job: &Job, gradient: f32, model: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let handles: Vec<_> = (0..)
        .zip(model)
        .map(|(key, values)| job.push_pull(key, vec![gradient; values.len()], values).unwrap())
        .collect();
    handles.into_iter().map(|handle| handle.wait().unwrap().1).collect()
}

fn assert_all(model: &[Vec<f32>], expected: f32, name: &str) {
    assert!(model.iter().flatten().all(|&value| value == expected), "{name}: {expected}, not {model:?}");
}

/// The sum of both gradients of a rack. Every mean of several racks shows which are in it, and all are exact in bf16.
fn sum_of(rack: &str) -> f32 {
    match rack {
        "a" => 4.0,
        "b" => 16.0,
        _ => 64.0,
    }
}

fn a_site_that_is_late_is_left_out_whole_and_counts_again(transports: Transports) {
    let cluster = racks(transports);
    for (reduction, stragglers, between_sites, optimize_at) in [
        (Reduction::Sharded, Stragglers::Backup(2), BetweenSites::F32, OptimizeAt::EverySite),
        (Reduction::Sharded, Stragglers::Drop(20.0), BetweenSites::BF16, OptimizeAt::Owner),
        (Reduction::Tree, Stragglers::Backup(2), BetweenSites::ONE_BIT, OptimizeAt::EverySite),
        (Reduction::Tree, Stragglers::Drop(20.0), BetweenSites::F32, OptimizeAt::Owner),
    ] {
        let options = JobOptions { between_sites, optimize_at, ..late(reduction, stragglers) };
        for first_late in ["a", "b"] {
            let others: Vec<&str> = ["a", "b", "c"].into_iter().filter(|rack| *rack != first_late).collect();
            let name = format!("{reduction}, {stragglers}, {between_sites}, first late: {first_late}");
            let [others_are_ahead, in_time_are_done] = [const { AtomicBool::new(false) }; 2];
            let late_are_back = AtomicU32::new(0);
            let wait_for = |flag: &AtomicBool| {
                await_true("the others", || flag.load(Ordering::SeqCst).then_some(()));
            };
            cluster.run(&RACKS, options, &settings(), |job| {
                let rack = RACKS[job.rank() as usize];
                let (own, mut model) = (sum_of(rack) / 2.0, start(job));
                let of_others = -(sum_of(others[0]) + sum_of(others[1])) / 4.0 * STEPS as f32;
                if rack == first_late {
                    wait_for(&others_are_ahead);
                    model = exchange(job, own, model);
                    assert_all(&model, of_others, &name);
                    assert_eq!(
                        job.next_step(0).unwrap(),
                        STEPS,
                        "{name}: it goes on with the job's next step"
                    );
                    late_are_back.fetch_add(1, Ordering::SeqCst);
                } else {
                    for step in 1..=STEPS {
                        std::thread::sleep(PACE);
                        model = exchange(job, own, model);
                        assert_all(&model, of_others / STEPS as f32 * step as f32, &name);
                    }
                    others_are_ahead.store(true, Ordering::SeqCst);
                }
                await_true("the late ones", || (late_are_back.load(Ordering::SeqCst) == 2).then_some(()));
                // Now another site is late.
                if rack == others[0] {
                    wait_for(&in_time_are_done);
                }
                model = exchange(job, own, model);
                let then = of_others - (sum_of(first_late) + sum_of(others[1])) / 4.0;
                assert_all(&model, then, &name);
                in_time_are_done.store(true, Ordering::SeqCst);
            });
            let status = cluster.await_end();
            let chunks = status.counters.updates / u64::from(STEPS + 1);
            let missed = RACKS.map(|rack| match rack {
                rack if rack == first_late => chunks * u64::from(STEPS),
                rack if rack == others[0] => chunks,
                _ => 0,
            });
            assert!(chunks > 10);
            assert_eq!(status.left_out, missed, "{name}");
        }
    }
}

fn a_job_does_not_wait_for_a_site_that_is_ten_times_slower(transports: Transports) {
    let cluster = racks(transports);
    for (reduction, stragglers) in
        [(Reduction::Sharded, Stragglers::Backup(2)), (Reduction::Tree, Stragglers::Drop(0.5))]
    {
        for slow in ["a", "b"] {
            let of_slow = AtomicU32::new(0);
            cluster.run(&RACKS, late(reduction, stragglers), &settings(), |job| {
                let is_slow = RACKS[job.rank() as usize] == slow;
                let mut model = start(job);
                while job.next_step(0).unwrap() < 40 {
                    std::thread::sleep(PACE * if is_slow { 10 } else { 1 });
                    model = exchange(job, 1.0, model);
                    of_slow.fetch_add(u32::from(is_slow), Ordering::SeqCst);
                }
            });
            // Its two workers make as many steps as the others if they wait, and a tenth of that if not.
            let of_slow = of_slow.into_inner();
            assert!((2..=40).contains(&of_slow), "{reduction}, {slow}: {of_slow} of 80 steps");
        }
    }
}

fn a_site_that_has_left_is_not_waited_for(transports: Transports) {
    let cluster = racks(transports);
    for (reduction, stragglers) in
        [(Reduction::Sharded, Stragglers::Drop(2.0)), (Reduction::Tree, Stragglers::Backup(3))]
    {
        cluster.run(&RACKS, late(reduction, stragglers), &settings(), |job| {
            let mut model = start(job);
            let steps = match RACKS[job.rank() as usize] {
                "a" => 4,
                "b" => 12,
                _ => 20,
            };
            // Programs that count their own steps end at different steps of the job.
            for _ in 0..steps {
                std::thread::sleep(Duration::from_millis(1));
                model = exchange(job, 1.0, model);
            }
        });
        let status = cluster.await_end();
        assert_eq!(status.message, "", "{reduction}: {status:?}");
    }
}

fn a_late_site_is_named_to_its_ranks_and_to_rank_0(transports: Transports) {
    let cluster = racks(transports);
    let notices = [const { Mutex::new(Vec::new()) }; 6];
    let told = AtomicU32::new(0);
    // The workers of a rack end at the same step, which its first rank chooses.
    let (ends, agree) = ([const { AtomicBool::new(false) }; 2], [const { Barrier::new(2) }; 2]);
    cluster.run(&RACKS, late(Reduction::Sharded, Stragglers::Backup(2)), &settings(), |job| {
        let mut model = start(job);
        let rank = job.rank();
        let is_late = RACKS[rank as usize] == "b";
        if is_late {
            let notice = await_true("a notice", || job.notices().into_iter().next());
            notices[rank as usize].lock().unwrap().push(notice);
            told.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let place = usize::from(RACKS[rank as usize] == "c");
        let begun = Instant::now();
        loop {
            if rank < 2 {
                let is_over = told.load(Ordering::SeqCst) == 3 || begun.elapsed() > WAIT_TIMEOUT;
                ends[place].store(is_over, Ordering::SeqCst);
            }
            agree[place].wait();
            if ends[place].load(Ordering::SeqCst) {
                break;
            }
            model = exchange(job, 1.0, model);
            if rank == 0 {
                let mut found = notices[0].lock().unwrap();
                let was_told = !found.is_empty();
                found.extend(job.notices());
                told.fetch_add(u32::from(!was_told && !found.is_empty()), Ordering::SeqCst);
            }
        }
        assert!(rank == 0 || job.notices().is_empty(), "rank {rank} is not late");
    });
    for rank in [0, 2, 5] {
        let told = notices[rank].lock().unwrap();
        assert_eq!(told[0].rank, None);
        assert!(told[0].message.starts_with("the hub of rack b (127.0.0.1:"), "{told:?}");
        assert!(told[0].message.ends_with("have ended without it (stragglers = backup:2)"), "{told:?}");
    }
}

fn jobs_that_cannot_leave_a_site_out_are_refused_with_the_reason(transports: Transports) {
    let cluster = racks(transports);
    for (reduction, stragglers, why, remedy) in [
        (Reduction::Ring, Stragglers::Drop(0.5), "none can be left out", "tree, sharded or flat"),
        (Reduction::Tree, Stragglers::Backup(1), "left out with all its workers", "backup:2 or more"),
    ] {
        let outcomes = cluster.try_run(&RACKS, late(reduction, stragglers), &settings(), |_| Ok(()));
        let message = outcomes[0].as_ref().expect_err(why).to_string();
        assert!(message.contains(why) && message.contains(remedy), "{reduction}: {message}");
    }
}
