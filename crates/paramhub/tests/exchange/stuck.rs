//! A rank that sends heartbeats and does nothing else is stuck in its own code. All ranks are notified which
//! rank is awaited, and for what.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering};

use paramhub_core::consistency::Consistency;
use paramhub_core::service::{JobOptions, JobState};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_worker::Job;

use crate::cluster::{Cluster, Transports, await_true, keys, sgd};

const WORKERS: u32 = 3;

fn mean() -> Settings {
    Settings { optimizer: OptimizerChoice::named("mean"), ..Settings::new(keys(&[300, 20_000])) }
}

fn step(job: &Job) {
    let pushed: Vec<_> = [(0, 300), (1, 20_000)]
        .map(|(key, elements)| job.push_pull(key, vec![1.0_f32; elements], vec![0.0_f32; elements]).unwrap())
        .into();
    pushed.into_iter().for_each(|pushed| drop(pushed.wait().unwrap()));
}

/// Waits until this rank has received a notice with all these parts.
fn await_notice(job: &Job, parts: &[&str]) {
    await_true(&format!("a notice with {parts:?} at rank {}", job.rank()), || {
        let messages = job.notices().into_iter().map(|notice| notice.message);
        messages.into_iter().find(|message| parts.iter().all(|part| message.contains(part)))
    });
}

/// Returns when all ranks have called it `times` times.
fn all_are_here(count: &AtomicU32, times: u32) {
    count.fetch_add(1, Ordering::SeqCst);
    await_true("all ranks", || (count.load(Ordering::SeqCst) >= WORKERS * times).then_some(()));
}

fn metrics(url: &str) -> String {
    let address = url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_rank_stuck_in_its_own_code_is_named_everywhere() {
    let cluster = Cluster::new(Transports::tcp(), 2);
    let count = AtomicU32::new(0);
    let client = cluster.client.clone();
    let awaits = |wanted: bool| {
        await_true("what the manager knows", || {
            client.job("stuck").ok().filter(|status| status.awaited.is_some() == wanted)
        })
    };
    cluster.job("stuck", WORKERS).run(&mean(), |job| {
        for _ in 0..5 {
            step(job);
        }
        if job.rank() != 2 {
            let key = 1;
            let pushed = job.push_pull(key, vec![1.0_f32; 20_000], vec![0.0_f32; 20_000]).unwrap();
            await_notice(
                job,
                &["rank 2 of job `stuck` is awaited", "its contribution to step 5 of key `layer1`"],
            );
            if job.rank() == 0 {
                let status = awaits(true);
                let awaited = status.awaited.unwrap();
                assert_eq!((&awaited.ranks[..], &awaited.key[..]), (&[2][..], "layer1"));
                assert_eq!(awaited.what, "its contribution to step 5");
                assert!(awaited.seconds >= 3.0, "{awaited:?}");
                assert!(status.message.contains("rank 2 of job `stuck` is awaited"), "{}", status.message);
                let metrics = metrics(client.url());
                let of_it = |line: &&str| line.starts_with("paramhub_job_awaited_seconds{");
                let line = metrics.lines().find(of_it).unwrap_or_else(|| panic!("{metrics}"));
                assert!(["rank=\"2\"", "key=\"layer1\""].iter().all(|part| line.contains(part)), "{line}");
            }
            all_are_here(&count, 1);
            pushed.wait().unwrap();
        } else {
            await_notice(job, &["rank 2 of job `stuck` is awaited"]);
            all_are_here(&count, 1);
            job.push_pull(1, vec![1.0_f32; 20_000], vec![0.0_f32; 20_000]).unwrap().wait().unwrap();
        }
        await_notice(job, &["job `stuck` goes on: rank 2 kept the others waiting"]);
        if job.rank() == 0 {
            awaits(false);
        }
        all_are_here(&count, 2);
    });
    assert_eq!(cluster.await_end("stuck").state, JobState::Finished);
}

#[test]
fn a_rank_too_far_ahead_of_a_stuck_rank_receives_its_name() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    let settings = Settings { consistency: Consistency::BoundedStaleness(1), ..mean() };
    let count = AtomicU32::new(0);
    cluster.job("stale", WORKERS).run(&settings, |job| {
        if job.rank() == 1 {
            await_notice(job, &["rank 1 of job `stale` is awaited"]);
            step(job);
        } else {
            step(job);
            step(job);
        }
        all_are_here(&count, 1);
    });
}

#[test]
fn missing_initial_parameters_and_releases_of_rank_0_are_reported_to_all() {
    let cluster = Cluster::new(Transports::tcp(), 2);
    let settings =
        Settings { optimizer: sgd(0.1, 0.0), two_phase: true, ..Settings::new(keys(&[300, 20_000])) };
    let count = AtomicU32::new(0);
    cluster.job("owed", WORKERS).run(&settings, |job| {
        let mut model = vec![vec![0.0_f32; 300], vec![0.0_f32; 20_000]];
        let parts = ["rank 0 of job `owed` is awaited", "to start from"];
        let await_in_all_ranks = |job: &Job| {
            await_notice(job, &parts);
            all_are_here(&count, 1);
        };
        std::thread::scope(|scope| {
            let waiting = (job.rank() != 0).then(|| scope.spawn(|| await_in_all_ranks(job)));
            if job.rank() == 0 {
                await_in_all_ranks(job);
            }
            job.broadcast(&mut model, 0).unwrap();
            waiting.into_iter().for_each(|thread| thread.join().unwrap());
        });
        let pushed: Vec<_> = (0..2)
            .map(|key| {
                let out = std::mem::take(&mut model[key as usize]);
                job.push_pull(key, vec![1.0_f32; out.len()], out).unwrap()
            })
            .collect();
        job.gradient_norm(0).unwrap().wait().unwrap();
        await_notice(job, &["rank 0 of job `owed` is awaited", "its release of step 0"]);
        all_are_here(&count, 2);
        if job.rank() == 0 {
            job.release(0, 1.0).unwrap();
        }
        pushed.into_iter().for_each(|pushed| drop(pushed.wait().unwrap()));
    });
}

#[test]
fn a_job_that_says_so_ends_when_a_rank_makes_no_progress() {
    let cluster = Cluster::new(Transports::tcp(), 2);
    // Long compared with any pause of a busy machine.
    let options = JobOptions { progress_timeout_s: Some(8.0), ..Default::default() };
    let ticket = cluster.job_with("ended", WORKERS, options);
    let messages: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..WORKERS)
            .map(|rank| {
                let ticket = &ticket;
                scope.spawn(move || {
                    let job = ticket.join(rank, mean()).unwrap();
                    step(&job);
                    if rank == 1 {
                        return await_true("the end", || job.failure()).to_string();
                    }
                    let pushed = job.push_pull(0, vec![1.0_f32; 300], vec![0.0_f32; 300]).unwrap();
                    pushed.wait().unwrap_err().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for message in messages {
        assert!(message.contains("because of rank 1"), "{message}");
        assert!(message.contains("rank 1 made no progress"), "{message}");
        assert!(message.contains("its contribution to step 1 of key `layer0`"), "{message}");
    }
    let status = cluster.await_end("ended");
    assert_eq!((status.state, status.awaited), (JobState::Failed, None));
    assert!(status.message.contains("rank 1 made no progress"), "{}", status.message);
}
