//! Jobs beside each other and one after the other.

use paramhub_core::service::{JobOptions, JobState};
use paramhub_core::settings::Settings;
use paramhub_hub::{HubConfig, RunningHub};

use crate::cluster::{Cluster, Transports, await_true, gradient, keys, sgd};

over_transports!(
    [tcp shm mixed]
    jobs_beside_each_other_are_both_right,
    a_job_larger_than_the_hub_is_refused_with_what_would_fit,
    a_job_larger_than_jobs_may_be_is_refused_though_the_hub_has_room,
    a_job_with_more_streams_than_jobs_may_have_is_refused_with_what_would_fit,
    jobs_beyond_what_a_core_is_promised_for_are_refused_until_one_ends,
    two_hundred_jobs_leave_nothing_behind,
    a_job_is_spread_over_hubs_interfaces_and_cores,
);

fn mean_job(cluster: &Cluster, name: &str, workers: u32, steps: u32) {
    let settings = Settings::new(keys(&[50_000, 3]));
    cluster.job(name, workers).run(&settings, |job| {
        for step in 0..steps {
            for (key, len) in [(0, 50_000), (1, 3)] {
                let ones = vec![step as f32; len];
                let (_, mean) = job.push_pull(key, ones, vec![0.0f32; len]).unwrap().wait().unwrap();
                assert!(mean.iter().all(|&value| value == step as f32), "{name}, step {step}");
            }
        }
    });
}

fn jobs_beside_each_other_are_both_right(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| mean_job(&cluster, "first", 2, 40));
        let second = scope.spawn(|| {
            let settings = Settings { optimizer: sgd(0.5, 0.0), ..Settings::new(keys(&[70_001])) };
            cluster.job("second", 3).run(&settings, |job| {
                let mut model = vec![gradient(0, 0, 0, 70_001)];
                job.broadcast(&mut model, 0).unwrap();
                let start = gradient(0, 0, 0, 70_001);
                let mut out = model.remove(0);
                for step in 1..=20 {
                    out = job.push_pull(0, vec![1.0f32; 70_001], out).unwrap().wait().unwrap().1;
                    // Each step lowers the parameters by a half, rounded each time.
                    let expect = |start: &f32| (0..step).fold(*start, |value, _| value - 0.5);
                    assert!(
                        out.iter().zip(&start).all(|(value, start)| *value == expect(start)),
                        "step {step}"
                    );
                }
            });
        });
        first.join().unwrap();
        second.join().unwrap();
    });
    assert_eq!(cluster.await_end("first").state, JobState::Finished);
    assert_eq!(cluster.await_end("second").state, JobState::Finished);
}

fn a_job_larger_than_the_hub_is_refused_with_what_would_fit(transports: Transports) {
    let cluster = Cluster::with(transports, |config| config.memory_bytes = Some(10 << 20));
    let settings = Settings::new(keys(&[4 << 20]));
    let refused = cluster.job("large", 1).join(0, settings).expect_err("it does not fit").to_string();
    assert!(refused.contains("needs 33 MiB") || refused.contains("needs 32 MiB"), "{refused}");
    assert!(refused.contains("10 of 10 MiB free"), "{refused}");
    mean_job(&cluster, "small", 1, 2);
}

/// The refusal by a hub with these limits of a job with so many workers.
fn refusal(cluster: &Cluster, name: &str, workers: u32, weight: u32) -> String {
    let ticket = cluster.job_with(name, workers, JobOptions { weight, ..Default::default() });
    let settings = Settings { chunk_bytes: 4096, ..Settings::new(keys(&[4 << 20, 50_000])) };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..workers)
            .map(|rank| {
                let (ticket, settings) = (&ticket, settings.clone());
                scope.spawn(move || ticket.join(rank, settings).expect_err("it does not fit").to_string())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).next().unwrap()
    })
}

fn a_job_larger_than_jobs_may_be_is_refused_though_the_hub_has_room(transports: Transports) {
    let cluster = Cluster::with(transports, |config| config.job_limits.memory_bytes = Some(20 << 20));
    let refused = refusal(&cluster, "large", 1, 1);
    assert!(
        refused.contains("`large` needs 33 MiB") || refused.contains("`large` needs 34 MiB"),
        "{refused}"
    );
    assert!(refused.contains("gives 20 MiB to a job") && refused.contains("--job-memory"), "{refused}");
    mean_job(&cluster, "small", 1, 2);
}

fn a_job_with_more_streams_than_jobs_may_have_is_refused_with_what_would_fit(transports: Transports) {
    let cluster = Cluster::with(transports, |config| {
        config.cores = 2;
        config.job_limits.streams = Some(5);
    });
    let refused = refusal(&cluster, "wide", 3, 1);
    assert!(refused.contains("6 streams to this hub, 2 from each worker"), "{refused}");
    assert!(refused.contains("takes 5 of a job: 2 workers would fit"), "{refused}");
    mean_job(&cluster, "narrow", 2, 2);
}

fn jobs_beyond_what_a_core_is_promised_for_are_refused_until_one_ends(transports: Transports) {
    let cluster = Cluster::with(transports, |config| config.job_limits.share_percent = Some(30));
    let settings = Settings::new(keys(&[1000]));
    let promised = cluster.job("promised", 1).join(0, settings.clone()).unwrap();
    let refused = refusal(&cluster, "greedy", 1, 3);
    assert!(refused.contains("weight 3 is to have 90 % of core 0"), "{refused}");
    assert!(refused.contains("70 % are not promised to other jobs: a weight of 2 would fit"), "{refused}");
    let options = JobOptions { weight: 2, ..Default::default() };
    let full = cluster.job_with("full", 1, options).join(0, settings).unwrap();
    let refused = refusal(&cluster, "late", 1, 1);
    assert!(refused.contains("10 % are not promised to other jobs: end other jobs"), "{refused}");
    // The job that was there goes on, and makes room when it ends.
    let (_, mean) = promised.push_pull(0, vec![7.0f32; 1000], vec![0.0f32; 1000]).unwrap().wait().unwrap();
    assert_eq!(mean, vec![7.0; 1000]);
    promised.leave().unwrap();
    full.leave().unwrap();
    cluster.await_end("promised");
    cluster.await_end("full");
    mean_job(&cluster, "next", 1, 2);
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn resident_kibibytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// 200 jobs through one hub, some of which fail: memory and descriptors stay flat.
fn two_hundred_jobs_leave_nothing_behind(transports: Transports) {
    let cluster = Cluster::new(transports, 2);
    let mut after_warm_up = None;
    for number in 0..200 {
        let name = format!("job{number}");
        if number % 5 == 4 {
            // One rank ends without leaving while the other waits for it.
            let settings = Settings::new(keys(&[50_000]));
            let ticket = cluster.job(&name, 2);
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| {
                    let job = ticket.join(0, settings.clone()).unwrap();
                    job.push_pull(0, vec![0.0f32; 50_000], vec![0.0f32; 50_000]).unwrap().wait().unwrap_err()
                });
                ticket.join(1, settings.clone()).unwrap().leave().unwrap();
                let message = waits.join().unwrap().to_string();
                assert!(message.contains("rank 1 left the job"), "{message}");
            });
        } else {
            mean_job(&cluster, &name, 2, 2);
        }
        cluster.await_end(&name);
        await_true("all memory freed", || (cluster.hub().memory_bytes() == 0).then_some(()));
        if number == 60 {
            after_warm_up = Some((open_descriptors(), resident_kibibytes()));
        }
    }
    let (descriptors, resident) = after_warm_up.unwrap();
    let (descriptors_now, resident_now) = (open_descriptors(), resident_kibibytes());
    assert!(
        descriptors_now <= descriptors + 4,
        "descriptors: {descriptors} after 60 jobs, {descriptors_now} after 200"
    );
    // Each job takes over 800 KiB of buffers: 140 leaked ones would be over 100 MiB.
    assert!(
        resident_now < resident + 16 * 1024,
        "KiB resident: {resident} after 60 jobs, {resident_now} after 200"
    );
}

/// One job spread over two hubs, one of which has two interfaces and fewer cores than it could use.
fn a_job_is_spread_over_hubs_interfaces_and_cores(transports: Transports) {
    let cluster = Cluster::with(transports, |config| {
        config.listen = vec!["127.0.0.1:0".parse().unwrap(), "127.0.0.2:0".parse().unwrap()];
        config.cores = 3;
    });
    let two_cores = HubConfig { cores: 2, ..Default::default() };
    let second = RunningHub::start(cluster.client.clone(), two_cores).unwrap();
    let sizes = [400_000, 3, 90_001];
    let settings = Settings { optimizer: sgd(0.5, 0.9), reproducible: true, ..Settings::new(keys(&sizes)) };
    let train = |ticket: &crate::cluster::Ticket| {
        ticket.run(&settings, |job| {
            let imbalance = job.imbalance();
            assert!(
                imbalance.hubs < 4.0 / 3.0 && imbalance.interfaces < 4.0 / 3.0 && imbalance.cores < 4.0 / 3.0
            );
            let mut model: Vec<Vec<f32>> = sizes.iter().map(|&n| vec![0.0; n as usize]).collect();
            job.broadcast(&mut model, 0).unwrap();
            for step in 0..3 {
                for key in 0..sizes.len() as u32 {
                    let out = std::mem::take(&mut model[key as usize]);
                    let gradient = gradient(job.rank(), key, step, out.len());
                    model[key as usize] = job.push_pull(key, gradient, out).unwrap().wait().unwrap().1;
                }
            }
            model
        })
    };
    let spread = train(&cluster.job("spread", 2));
    let idle_cluster = Cluster::new(transports, 1);
    let alone = train(&idle_cluster.job("alone", 2));
    assert_eq!(spread[0], alone[0], "where a chunk lives does not change it");
    assert_eq!(spread[0], spread[1]);
    let used = await_true("the job has finished", || {
        let status = cluster.client.job("spread").ok()?;
        (status.state == JobState::Finished).then_some(status.counters)
    });
    let bytes = sizes.iter().sum::<u64>() * 4;
    // Three steps and the initial parameters from rank 0, by two ranks, with headers.
    assert!(used.bytes_received > bytes * 7 && used.bytes_received < bytes * 8, "{used:?} for {bytes} bytes");
    second.stop();
}
