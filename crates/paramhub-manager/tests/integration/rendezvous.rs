//! Ranks meet and agree, and are notified if they do not: real clients, real sockets, one manager.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::*;
use paramhub_core::auth::{Incarnation, Namespace, Nonce};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::placement::Placement;
use paramhub_core::service::{CreateService, ErrorCode, HubCommand, JobCounters, JobOptions, JobState};
use paramhub_core::settings::Settings;

fn waiting_for(rendezvous_timeout_s: f64) -> JobOptions {
    JobOptions { rendezvous_timeout_s, ..JobOptions::default() }
}

#[test]
fn three_ranks_in_any_order_and_a_hub_make_a_job_run() {
    let (manager, client) = start(config());
    let job = Job::create(&client, "digits/run.1", 3);
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos();
    println!("seed {seed}");
    let order = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]][seed as usize % 6];
    let connecting: Vec<_> = order
        .into_iter()
        .map(|rank| {
            let job = job.clone();
            std::thread::sleep(Duration::from_millis(20));
            std::thread::spawn(move || (rank, job.connect(rank).unwrap()))
        })
        .collect();
    eventually("all ranks wait", || job.connected() == [0, 1, 2]);
    assert_eq!(client.job("digits/run.1").unwrap().state, JobState::Connecting, "there is no hub yet");
    let hub = Hub::join(&client, HubBehaviour::Serve);
    for thread in connecting {
        let (_, connected) = thread.join().unwrap();
        assert_eq!((connected.workers, connected.name.as_str()), (3, "digits/run.1"));
        assert_eq!(connected.hubs, std::slice::from_ref(&hub.shape));
    }
    assert_eq!(client.job("digits/run.1").unwrap().state, JobState::Initialising);

    let wanted = settings(10_000);
    let map = ChunkMap::new(&wanted.keys, wanted.chunk_bytes).unwrap();
    let placement = Placement::new(&wanted.keys, &map, std::slice::from_ref(&hub.shape)).unwrap();
    for answer in job.all_ranks(0..3, |job, rank| job.init(rank, settings(10_000))) {
        assert_eq!(answer.unwrap().placement_hash, placement.hash().to_hex().to_string());
    }
    let status = client.job(&job.namespace.to_string()).unwrap();
    assert_eq!((status.state, status.keys, status.bytes), (JobState::Running, 2, 160_000));
    assert_eq!((status.optimizer.as_str(), status.consistency.as_str()), ("mean", "sync"));
    // The same process may call again, as after an answer that was lost.
    job.connect(1).unwrap();
    job.init(1, settings(10_000)).unwrap();

    let counters = JobCounters { bytes_received: 7, updates: 3, ..JobCounters::default() };
    hub.count(&job, counters);
    hub.finish(&job);
    let status = client.job("digits/run.1").unwrap();
    assert_eq!((status.state, status.counters, status.message.as_str()), (JobState::Finished, counters, ""));
    assert!(status.ended_at.is_some());
    let late = job.connect(0);
    assert_eq!(
        (code(&late), message(&late).as_str()),
        (ErrorCode::JobEnded, "job `digits/run.1` has finished")
    );

    let commands = hub.die();
    let [HubCommand::Allocate(plan)] = &commands[..] else { panic!("one command, not {commands:?}") };
    assert_eq!(
        (plan.composition.workers(), plan.hub, plan.nonce, &plan.settings),
        (3, 0, job.nonce, &wanted)
    );
    manager.stop();
}

#[test]
fn the_timeout_names_the_ranks_that_are_missing_and_lets_the_others_try_again() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create_with(&client, "short", 4, waiting_for(0.5));
    let answers = job.all_ranks([0, 2], Job::connect);
    assert!(answers.iter().all(|answer| code(answer) == ErrorCode::Missing), "{answers:?}");
    let expected = "ranks 1 and 3 have not connected to job `short` within 0.5 s";
    assert!(answers.iter().all(|answer| message(answer).starts_with(expected)), "{answers:?}");
    assert_eq!(job.connected(), [] as [u32; 0]);
    // These are other processes, since the first ones gave up.
    let answers = job.all_ranks(0..4, |job, rank| job.connect_as(rank, Incarnation([99; 16])));
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
}

#[test]
fn the_timeout_says_when_it_is_a_hub_that_is_missing() {
    let (_manager, client) = start(config());
    let job = Job::create_with(&client, "hubless", 1, waiting_for(0.2));
    let answer = job.connect(0);
    assert_eq!(code(&answer), ErrorCode::Missing);
    assert!(message(&answer).contains("no hub has joined"), "{answer:?}");
}

#[test]
fn a_second_process_learns_which_process_holds_its_rank() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "twice", 2);
    let first = std::thread::spawn({
        let job = job.clone();
        move || job.connect(1)
    });
    eventually("rank 1 waits", || job.connected() == [1]);
    let second = job.connect_as(1, Incarnation([77; 16]));
    assert_eq!(code(&second), ErrorCode::RankTaken);
    assert!(message(&second).contains("process 1001 on testhost"), "{second:?}");
    let beyond = job.connect(2);
    assert_eq!(code(&beyond), ErrorCode::BadRequest);
    job.connect(0).unwrap();
    first.join().unwrap().unwrap();
    assert_eq!(code(&job.connect_as(1, Incarnation([77; 16]))), ErrorCode::RankTaken);
}

#[test]
fn a_wrong_nonce_and_an_unknown_namespace_look_the_same() {
    let (_manager, client) = start(config());
    let job = Job::create(&client, "secret", 1);
    let wrong_nonce = Job { nonce: Nonce([1; 32]), ..job.clone() }.connect(0);
    let unknown = Job { namespace: Namespace([9; 16]), ..job.clone() }.connect(0);
    assert_eq!((code(&wrong_nonce), code(&unknown)), (ErrorCode::WrongNonce, ErrorCode::WrongNonce));
    assert_eq!(message(&wrong_nonce), message(&unknown));
    let wrong_nonce = Job { nonce: Nonce([1; 32]), ..job.clone() };
    assert_eq!(code(&wrong_nonce.init(0, settings(1))), ErrorCode::WrongNonce);
    assert_eq!(code(&wrong_nonce.leave(0, "")), ErrorCode::WrongNonce);
    assert_eq!(job.connected(), [] as [u32; 0]);
}

#[test]
fn a_disagreement_reaches_every_rank_with_the_first_key_that_differs() {
    let (_manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "split", 3);
    assert!(job.all_ranks(0..3, Job::connect).iter().all(Result::is_ok));
    let begun = Instant::now();
    let waiting = std::thread::spawn({
        let job = job.clone();
        move || job.init(0, settings(8))
    });
    // Rank 0 comes first, so that the test knows which rank is compared with which.
    let status = || client.job("split").unwrap();
    eventually("rank 0 waits", || metric(&client, "paramhub_rendezvous_waiting") == 1.0);
    let late = job.init(2, settings(9));
    let answers = [waiting.join().unwrap(), late, job.init(1, settings(8))];
    for answer in &answers {
        assert_eq!(code(answer), ErrorCode::Disagreement);
        assert_eq!(message(answer), message(&answers[0]));
    }
    let message = message(&answers[0]);
    for part in
        ["job `split`", "rank 2 and rank 0", "key 0", "`conv.weight` f32 [9, 3]", "`conv.weight` f32 [8, 3]"]
    {
        assert!(message.contains(part), "{message}");
    }
    assert!(begun.elapsed() < WAIT_TIMEOUT, "no rank waited for the timeout");
    assert_eq!((status().state, status().message), (JobState::Failed, message));
    assert!(hub.die().is_empty(), "the hub never heard of the job");
}

#[test]
fn a_connection_that_breaks_in_connect_frees_its_rank() {
    let (manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "fragile", 2);
    let body = serde_json::to_string(&job.connect_request(1, Incarnation([5; 16]))).unwrap();
    let path = format!("/v1/jobs/{}/connect", job.namespace);
    let mut stream = TcpStream::connect(manager.address()).unwrap();
    stream.write_all(&request("POST", &path, &body)).unwrap();
    eventually("rank 1 waits", || job.connected() == [1]);
    assert_eq!(code(&job.connect(1)), ErrorCode::RankTaken);
    drop(stream);
    eventually("rank 1 is free", || job.connected().is_empty());
    assert!(job.all_ranks(0..2, Job::connect).iter().all(Result::is_ok));
}

#[test]
fn a_rank_whose_connection_breaks_in_init_ends_the_job_for_the_others() {
    let (manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "halved", 2);
    assert!(job.all_ranks(0..2, Job::connect).iter().all(Result::is_ok));
    let proof = job.prove(paramhub_core::auth::Purpose::Init, 1);
    let call = paramhub_core::service::InitService {
        rank: 1,
        incarnation: process(1),
        proof,
        settings: settings(8),
    };
    let body = serde_json::to_string(&call).unwrap();
    let mut stream = TcpStream::connect(manager.address()).unwrap();
    stream.write_all(&request("POST", &format!("/v1/jobs/{}/init", job.namespace), &body)).unwrap();
    eventually("rank 1 waits", || metric(&client, "paramhub_rendezvous_waiting") == 1.0);
    drop(stream);
    eventually("the job failed", || client.job("halved").unwrap().state == JobState::Failed);
    let answer = job.init(0, settings(8));
    assert_eq!(code(&answer), ErrorCode::JobEnded);
    assert!(message(&answer).contains("rank 1 (process 1001 on testhost) was lost"), "{answer:?}");
}

#[test]
fn a_rank_missing_in_init_is_named() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create_with(&client, "stuck", 3, waiting_for(1.0));
    assert!(job.all_ranks(0..3, Job::connect).iter().all(Result::is_ok));
    for answer in job.all_ranks([0, 1], |job, rank| job.init(rank, settings(8))) {
        assert_eq!(code(&answer), ErrorCode::Missing);
        assert_eq!(message(&answer), "rank 2 has not called InitService for job `stuck` within 1 s");
    }
}

#[test]
fn leaving_frees_a_rank_and_later_ends_the_job() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "quitters", 2);
    assert_eq!(code(&job.leave(0, "")), ErrorCode::BadRequest);
    assert!(job.all_ranks(0..2, Job::connect).iter().all(Result::is_ok));
    job.leave(1, "no data on this machine").unwrap();
    let answer = job.init(0, settings(8));
    assert!(
        message(&answer).contains("rank 1 left before the job ran: no data on this machine"),
        "{answer:?}"
    );
    job.leave(0, "").unwrap();
}

#[test]
fn a_job_waits_for_all_the_hubs_it_names() {
    let (_manager, client) = start(config());
    let first = Hub::join(&client, HubBehaviour::Serve);
    let pair = JobOptions { hubs: Some(2), ..waiting_for(0.5) };
    let job = Job::create_with(&client, "pair", 1, pair);
    let refused = job.connect(0);
    assert_eq!(code(&refused), ErrorCode::Missing);
    let named =
        format!("of the 2 hubs that it waits for only 1, hub 0 ({})", first.shape.interfaces[0].address);
    assert!(message(&refused).contains(&named), "{refused:?}");

    let patient = JobOptions { hubs: Some(2), ..JobOptions::default() };
    let job = Job::create_with(&client, "patient", 1, patient);
    let rank = std::thread::spawn({
        let job = job.clone();
        move || job.connect(0)
    });
    eventually("the rank waits", || job.connected() == [0]);
    assert_eq!(client.job("patient").unwrap().state, JobState::Connecting);
    let second = Hub::join(&client, HubBehaviour::Serve);
    let connected = rank.join().unwrap().unwrap();
    assert_eq!(connected.hubs, [first.shape.clone(), second.shape.clone()]);
    assert_eq!(connected.options, patient);
}

#[test]
fn a_job_without_ranks_holds_nothing_for_longer_than_its_lease() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let options = JobOptions { lease_s: 0.5, ..JobOptions::default() };
    let alone = Job::create_with(&client, "alone", 2, options);
    let waiting = Job::create_with(&client, "waiting", 2, options);
    let rank = std::thread::spawn({
        let job = waiting.clone();
        move || job.connect(0)
    });
    eventually("the lease ran out", || client.job("alone").unwrap().state == JobState::Failed);
    assert!(client.job("alone").unwrap().message.contains("lease of 0.5 s"));
    assert!(message(&alone.connect(0)).contains("lease of 0.5 s"));
    // A job in which a rank waits is alive, however short its lease.
    std::thread::sleep(Duration::from_millis(800));
    waiting.connect(1).unwrap();
    rank.join().unwrap().unwrap();
}

#[test]
fn a_name_is_taken_until_its_job_ends() {
    let (_manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "popular", 1);
    let again = CreateService { name: "popular".into(), workers: 1, options: JobOptions::default() };
    let refused = client.create_service(&again);
    assert_eq!(code(&refused), ErrorCode::NameTaken);
    assert!(message(&refused).contains("`paramhub jobs stop popular`"), "{refused:?}");
    job.connect(0).unwrap();
    job.init(0, settings(8)).unwrap();
    assert_eq!(code(&client.create_service(&again)), ErrorCode::NameTaken);
    hub.finish(&job);
    let second = Job::create(&client, "popular", 1);
    assert_eq!(client.job("popular").unwrap().namespace, second.namespace);
    assert_eq!(client.stop_job("popular").unwrap().state, JobState::Failed);
    Job::create(&client, "popular", 1);
    let states: Vec<JobState> = client.jobs().unwrap().iter().map(|job| job.state).collect();
    assert_eq!(states, [JobState::Finished, JobState::Failed, JobState::Connecting]);
}

#[test]
fn names_workers_and_options_are_bounded() {
    let (_manager, client) = start(config());
    let base = CreateService { name: "n".into(), workers: 1, options: JobOptions::default() };
    let long = "x".repeat(129);
    for name in ["", "a b", "naïve", "a\nb", long.as_str()] {
        let refused = client.create_service(&CreateService { name: name.into(), ..base.clone() });
        assert_eq!(code(&refused), ErrorCode::BadRequest, "{name:?}");
    }
    for workers in [0, 1025, u32::MAX] {
        let refused = client.create_service(&CreateService { workers, ..base.clone() });
        assert!(message(&refused).contains("1 to 1024"), "{refused:?}");
    }
    for seconds in [0.0, -1.0, 1e9] {
        for options in [
            JobOptions { rendezvous_timeout_s: seconds, ..JobOptions::default() },
            JobOptions { lease_s: seconds, ..JobOptions::default() },
            JobOptions { dead_after_s: seconds, ..JobOptions::default() },
        ] {
            let refused = client.create_service(&CreateService { options, ..base.clone() });
            assert_eq!(code(&refused), ErrorCode::BadRequest, "{options:?}");
        }
    }
    let options = JobOptions { hubs: Some(1025), ..JobOptions::default() };
    let refused = client.create_service(&CreateService { options, ..base.clone() });
    assert!(message(&refused).contains("at most 1024"), "{refused:?}");
    let options =
        JobOptions { hubs: Some(0), checkpoint_every: Some("9".parse().unwrap()), ..JobOptions::default() };
    let refused = client.create_service(&CreateService { options, ..base.clone() });
    assert!(
        message(&refused).contains("`checkpoint_every` would have no effect with a job for 0 hubs"),
        "{refused:?}"
    );
    assert!(client.jobs().unwrap().is_empty());
}

#[test]
fn a_table_of_twenty_thousand_keys_passes_for_eight_ranks() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "wide", 8);
    assert!(job.all_ranks(0..8, Job::connect).iter().all(Result::is_ok));
    let wide = || {
        let name = |index: u64| format!("model.layers.{index}.attention.output.projection.weight");
        let keys = (0..20_000).map(|index| Key::new(name(index), [1 + index % 7, 64])).collect();
        Settings::new(KeyTable::new(keys).unwrap())
    };
    for answer in job.all_ranks(0..8, move |job, rank| job.init(rank, wide())) {
        answer.unwrap();
    }
    assert_eq!(client.job("wide").unwrap().keys, 20_000);
}

#[test]
fn settings_that_cannot_be_used_are_refused_to_the_rank_alone() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "odd", 1);
    job.connect(0).unwrap();
    let refused = job.init(0, Settings { chunk_bytes: 7, ..settings(8) });
    assert_eq!(code(&refused), ErrorCode::BadRequest);
    assert!(message(&refused).contains("chunk size 7"), "{refused:?}");
    // The placement alone of so large a table would take the manager's memory.
    let huge = KeyTable::new(vec![Key::new("w", [1 << 36])]).unwrap();
    job.init(0, settings(8)).unwrap();
    let second = Job::create(&client, "huge", 1);
    second.connect(0).unwrap();
    let refused = second.init(0, Settings { chunk_bytes: 1024, ..Settings::new(huge) });
    assert_eq!(code(&refused), ErrorCode::DoesNotFit);
    assert!(message(&refused).contains("larger chunk size"), "{refused:?}");
}

/// One number of /metrics.
fn metric(client: &paramhub_control::ManagerClient, name: &str) -> f64 {
    let address = client.url().strip_prefix("http://").unwrap().parse().unwrap();
    let text = raw(address, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}
