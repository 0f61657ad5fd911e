//! Hubs join, serve, refuse, end jobs and vanish.

use std::time::{Duration, Instant};

use crate::common::*;
use paramhub_core::auth::Namespace;
use paramhub_core::service::{
    CauseKind, ErrorCode, HubCommand, HubEvent, HubJobCounters, HubReport, JobCounters, JobEnd, JobState,
    PollCommands, Presence, RegisterHub,
};
use paramhub_core::wire::VERSION;
use paramhub_manager::ManagerConfig;

/// A job that runs on the hubs that have joined.
fn run(client: &paramhub_control::ManagerClient, name: &str, workers: u32) -> Job {
    let job = Job::create(client, name, workers);
    assert!(job.all_ranks(0..workers, Job::connect).iter().all(Result::is_ok));
    assert!(job.all_ranks(0..workers, |job, rank| job.init(rank, settings(8))).iter().all(Result::is_ok));
    job
}

#[test]
fn every_hub_gets_its_part_and_the_job_ends_with_the_last() {
    let (_manager, client) = start(config());
    let hubs = [Hub::join(&client, HubBehaviour::Serve), Hub::join(&client, HubBehaviour::Serve)];
    let job = run(&client, "pair", 2);
    hubs[0].report(HubEvent::Noticed { namespace: job.namespace, message: "rank 1 is silent".into() });
    assert_eq!(client.job("pair").unwrap().message, "rank 1 is silent");
    for (bytes, hub) in [10, 32].into_iter().zip(&hubs) {
        hub.count(&job, JobCounters { bytes_sent: bytes, ..JobCounters::default() });
    }
    hubs[0].finish(&job);
    hubs[0].finish(&job);
    let status = client.job("pair").unwrap();
    assert_eq!((status.state, status.counters.bytes_sent), (JobState::Running, 42));
    hubs[1].finish(&job);
    assert_eq!(client.job("pair").unwrap().state, JobState::Finished);
    for (index, hub) in hubs.into_iter().enumerate() {
        let commands = hub.die();
        let [HubCommand::Allocate(plan)] = &commands[..] else { panic!("one command, not {commands:?}") };
        assert_eq!((plan.hub as usize, plan.composition.sites[0].hubs.len()), (index, 2));
    }
}

#[test]
fn a_hub_that_cannot_hold_the_job_is_named_to_every_rank() {
    let (_manager, client) = start(config());
    let willing = Hub::join(&client, HubBehaviour::Serve);
    let full = Hub::join(&client, HubBehaviour::Refuse);
    let job = Job::create(&client, "large", 3);
    assert!(job.all_ranks(0..3, Job::connect).iter().all(Result::is_ok));
    for answer in job.all_ranks(0..3, |job, rank| job.init(rank, settings(8))) {
        assert_eq!(code(&answer), ErrorCode::DoesNotFit);
        let address = &full.shape.interfaces[0].address;
        let expected = format!("hub 1 ({address}) cannot serve job `large`: it needs 3 GB and 2 GB are free");
        assert_eq!(message(&answer), expected);
    }
    // The hub that had allocated frees the memory, and a smaller job finds both hubs available.
    assert_eq!(client.stop_job("large").unwrap().state, JobState::Failed);
    let commands = willing.die();
    assert!(matches!(&commands[..], [HubCommand::Allocate(_), HubCommand::Stop { .. }]), "{commands:?}");
}

#[test]
fn a_hub_that_places_otherwise_fails_the_job_loudly() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::PlaceOtherwise);
    let job = Job::create(&client, "skewed", 1);
    job.connect(0).unwrap();
    let answer = job.init(0, settings(8));
    assert_eq!(code(&answer), ErrorCode::Internal);
    assert!(message(&answer).contains("one version of paramhub everywhere"), "{answer:?}");
}

#[test]
fn a_lost_hub_fails_its_jobs_and_no_others() {
    let (_manager, client) = start(ManagerConfig { hub_timeout: Duration::from_millis(500), ..config() });
    let first = Hub::join(&client, HubBehaviour::Serve);
    let early = run(&client, "early", 1);
    let second = Hub::join(&client, HubBehaviour::Serve);
    let both = run(&client, "both", 1);
    let address = second.shape.interfaces[0].address.clone();
    let (registered, shape) = (second.registered.clone(), second.shape.clone());
    second.die();
    let listed = || client.hubs().unwrap().iter().map(|hub| (hub.hub, hub.unheard)).collect::<Vec<_>>();
    eventually("the hub is not heard", || listed() == [(0, false), (1, true)]);
    let status = client.job("both").unwrap();
    assert_eq!(status.state, JobState::Running);
    let notice = format!("hub 1 ({address}) has not been heard for 0.5 s; the job goes on");
    assert!(status.message.starts_with(&notice), "{}", status.message);
    // New jobs are for the hub that calls.
    run(&client, "between", 1);
    let poll = PollCommands { acknowledged: 0, wait_s: 0.0 };
    client.poll_commands(&registered, &poll).unwrap();
    assert_eq!(listed(), [(0, false), (1, false)]);

    // Another process has its address by now.
    let offer = RegisterHub {
        protocol: VERSION,
        shape,
        place: Default::default(),
        machine: String::new(),
        keeps_checkpoints: None,
        encrypt: false,
        labels: Vec::new(),
    };
    client.register_hub(&offer).unwrap();
    let failed = client.job("both").unwrap();
    let expected = format!("hub 1 ({address}) was lost: another hub has joined at its address");
    assert_eq!((failed.state, failed.message), (JobState::Failed, expected));
    assert_eq!(client.job("early").unwrap().state, JobState::Running);
    assert_eq!(listed()[..2].iter().map(|(hub, _)| *hub).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(code(&client.poll_commands(&registered, &poll)), ErrorCode::NotFound);
    // The ranks get the reason, and the remaining hub is sent a stop and serves new jobs.
    assert!(message(&both.connect(0)).contains("was lost"));
    eventually("the new hub is not heard either", || listed() == [(0, false), (2, true)]);
    run(&client, "later", 1);
    first.finish(&early);
    let commands = first.die();
    let stopped = |command: &HubCommand| matches!(command, HubCommand::Stop { namespace, reason, .. } if *namespace == both.namespace && reason.contains("was lost"));
    assert!(commands.iter().any(stopped), "{commands:?}");
}

#[test]
fn a_job_ends_when_a_rank_has_lost_a_hub_that_does_not_call() {
    let (_manager, client) = start(config());
    let hubs = [Hub::join(&client, HubBehaviour::Serve), Hub::join(&client, HubBehaviour::Serve)];
    let job = run(&client, "bereft", 2);
    let [alive, dead] = hubs.each_ref().map(|hub| hub.shape.interfaces[0].address.clone());
    let [first, second] = hubs;
    assert_eq!(code(&job.lose(0, "127.0.0.1:1")), ErrorCode::BadRequest);
    let without_proof = Job { secrets: Default::default(), ..job.clone() };
    assert_eq!(code(&without_proof.lose(0, &dead)), ErrorCode::WrongNonce);
    second.die();
    job.lose(0, &alive).unwrap();
    job.lose(1, &dead).unwrap();
    eventually("the job has failed", || client.job("bereft").unwrap().state == JobState::Failed);
    let message = client.job("bereft").unwrap().message;
    let expected = format!(
        "rank 1 lost hub 1 ({dead}), which the connection manager does not hear either: it closed the connection"
    );
    assert_eq!(message, expected);
    let stopped =
        |command: &HubCommand| matches!(command, HubCommand::Stop { reason, .. } if *reason == expected);
    assert!(first.die().iter().any(stopped));
}

#[test]
fn a_job_ends_with_the_reason_its_hub_gives() {
    let (_manager, client) = start(config());
    let hubs = [Hub::join(&client, HubBehaviour::Serve), Hub::join(&client, HubBehaviour::Serve)];
    let job = run(&client, "bereft", 2);
    let reason = "rank 1 was lost in step 7".to_string();
    hubs[0].report(HubEvent::Ended(JobEnd::failed(job.namespace, reason.clone(), CauseKind::PeerLost)));
    let status = client.job("bereft").unwrap();
    assert_eq!((status.state, status.message.as_str()), (JobState::Failed, reason.as_str()));
    client.stop_job("bereft").unwrap();
    let [first, second] = hubs.map(Hub::die);
    assert!(!first.iter().any(|command| matches!(command, HubCommand::Stop { .. })));
    let Some(HubCommand::Stop { reason: received, .. }) = second.last() else { panic!("{second:?}") };
    assert_eq!(*received, reason);
}

#[test]
fn stopping_a_job_waits_until_its_hub_has_freed_it() {
    let (_manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = run(&client, "team/long", 1);
    let stopped = client.stop_job("team/long").unwrap();
    assert_eq!((stopped.state, stopped.message.as_str()), (JobState::Failed, "stopped by an operator"));
    assert_eq!(client.stop_job(&job.namespace.to_string()).unwrap().state, JobState::Failed);
    assert_eq!(code(&client.stop_job("team")), ErrorCode::NotFound);
    assert!(matches!(hub.die().last(), Some(HubCommand::Stop { .. })));
}

#[test]
fn a_job_that_is_stopped_shows_the_reason_and_its_hub_receives_it() {
    let (manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    run(&client, "team/long", 1);
    let long = "x".repeat(257);
    for reason in ["", "two\nlines", "\u{1b}[31mred", "\u{202e}backwards", long.as_str()] {
        let refused = client.stop_job_because("team/long", reason);
        assert_eq!(code(&refused), ErrorCode::BadRequest, "{reason:?}");
        assert!(message(&refused).contains("256 printable"), "{refused:?}");
    }
    let mistyped = raw(manager.address(), &request("DELETE", "/v1/jobs/team%2Flong?raeson=x", ""));
    assert!(mistyped.starts_with("HTTP/1.1 400 ") && mistyped.contains("raeson"), "{mistyped}");
    assert_eq!(client.job("team/long").unwrap().state, JobState::Running);
    let stopped = client.stop_job_because("team/long", "100 % of a+b & c=d?").unwrap();
    let reason_text = "stopped: 100 % of a+b & c=d?";
    assert_eq!((stopped.state, stopped.message.as_str()), (JobState::Failed, reason_text));
    // The second reason changes nothing.
    assert_eq!(client.stop_job_because("team/long", "another").unwrap().message, reason_text);
    let commands = hub.die();
    let Some(HubCommand::Stop { reason, .. }) = commands.last() else { panic!("{commands:?}") };
    assert_eq!(reason, reason_text);
}

#[test]
fn stopping_a_job_names_a_hub_that_does_not_confirm() {
    let (_manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let address = hub.shape.interfaces[0].address.clone();
    run(&client, "clinging", 1);
    hub.die();
    let refused = client.stop_job("clinging");
    assert_eq!(code(&refused), ErrorCode::Missing);
    assert!(message(&refused).contains(&format!("hub 0 ({address}) did not confirm")), "{refused:?}");
    assert_eq!(client.job("clinging").unwrap().state, JobState::Failed);
}

#[test]
fn a_hub_that_leaves_gets_no_further_jobs_and_is_not_waited_for() {
    let (_manager, client) = start(config());
    let leaving = Hub::join(&client, HubBehaviour::IgnoreAllocations);
    let given = Job::create(&client, "given", 1);
    given.connect(0).unwrap();
    let rank = {
        let given = given.clone();
        std::thread::spawn(move || given.init(0, settings(8)))
    };
    eventually("the hub is to allocate", || client.job("given").unwrap().keys > 0);
    let report_presence = |presence| {
        let report = HubReport { presence, ..HubReport::default() };
        leaving.client.report(&leaving.registered, &report)
    };
    report_presence(Presence::Leaving).unwrap();
    // The job was placed on the hub while it shut down. Its rank is notified at once.
    assert!(message(&rank.join().unwrap()).contains("is shutting down"));
    let staying = Hub::join(&client, HubBehaviour::Serve);
    let later = run(&client, "later", 1);
    report_presence(Presence::Gone).unwrap();
    let hubs: Vec<u32> = client.hubs().unwrap().iter().map(|hub| hub.hub).collect();
    assert_eq!(hubs, [staying.registered.hub]);
    assert_eq!(code(&report_presence(Presence::Gone)), ErrorCode::NotFound);
    assert_eq!(client.job("later").unwrap().state, JobState::Running);
    staying.finish(&later);
    assert!(
        !leaving
            .die()
            .iter()
            .any(|command| matches!(command, HubCommand::Allocate(plan) if plan.name == "later"))
    );
}

#[test]
fn an_announced_end_is_answered_when_every_hub_has_its_checkpoint_and_the_job_goes_on() {
    let (_manager, client) = start(config());
    let hubs = [Hub::join(&client, HubBehaviour::Serve), Hub::join(&client, HubBehaviour::Serve)];
    let job = run(&client, "interrupted", 2);
    let reason = "its launcher was interrupted by SIGTERM";
    assert_eq!(client.announce_workers_end("interrupted", reason).unwrap().state, JobState::Running);
    hubs[0].report(HubEvent::Ended(JobEnd {
        rank: Some(0),
        ..JobEnd::failed(job.namespace, "rank 0 was lost".into(), CauseKind::PeerLost)
    }));
    let status = client.workers_have_ended("interrupted", reason).unwrap();
    assert_eq!((status.state, status.message), (JobState::Failed, format!("stopped: {reason}")));
    let refused = client.workers_have_ended("no-such-job", reason);
    assert_eq!(code(&refused), ErrorCode::NotFound);
}

#[test]
fn a_poll_waits_and_a_command_is_repeated_until_it_is_acknowledged() {
    let (_manager, client) = start(config());
    let registered = client
        .register_hub(&RegisterHub {
            protocol: VERSION,
            shape: shape(),
            place: Default::default(),
            machine: String::new(),
            keeps_checkpoints: None,
            encrypt: false,
            labels: Vec::new(),
        })
        .unwrap();
    let poll =
        |acknowledged, wait_s| client.poll_commands(&registered, &PollCommands { acknowledged, wait_s });
    assert!(poll(0, 0.05).unwrap().commands.is_empty());
    let job = Job::create(&client, "repeated", 1);
    job.connect(0).unwrap();
    let rank = std::thread::spawn({
        let job = job.clone();
        move || job.init(0, settings(8))
    });
    let first = loop {
        let polled = poll(0, 9.0).unwrap().commands;
        if let [command] = &polled[..] {
            break command.sequence;
        }
    };
    assert_eq!(first, 1);
    assert_eq!(poll(0, 9.0).unwrap().commands[0].sequence, 1, "not acknowledged, so sent again");
    assert!(poll(1, 0.0).unwrap().commands.is_empty());
    assert_eq!(code(&poll(2, 0.0)), ErrorCode::BadRequest);
    client.stop_job("repeated").unwrap_err();
    assert_eq!(poll(1, 9.0).unwrap().commands[0].sequence, 2);
    assert!(rank.join().unwrap().is_err());
}

#[test]
fn a_hub_that_comes_back_takes_the_place_of_its_former_self() {
    let (_manager, client) = start(config());
    let hub = Hub::join(&client, HubBehaviour::Serve);
    run(&client, "orphan", 1);
    let again = client
        .register_hub(&RegisterHub {
            protocol: VERSION,
            shape: hub.shape.clone(),
            place: Default::default(),
            machine: String::new(),
            keeps_checkpoints: None,
            encrypt: false,
            labels: Vec::new(),
        })
        .unwrap();
    assert_eq!(again.hub, 1);
    let status = client.job("orphan").unwrap();
    assert_eq!(status.state, JobState::Failed);
    assert!(status.message.contains("another hub has joined at its address"), "{}", status.message);
    assert_eq!(client.hubs().unwrap().len(), 1);
}

#[test]
fn a_hub_that_serves_an_unknown_job_is_ordered_to_stop_it() {
    let (_manager, client) = start(config());
    let registered = client
        .register_hub(&RegisterHub {
            protocol: VERSION,
            shape: shape(),
            place: Default::default(),
            machine: String::new(),
            keeps_checkpoints: None,
            encrypt: false,
            labels: Vec::new(),
        })
        .unwrap();
    let namespace = Namespace([3; 16]);
    let jobs = vec![HubJobCounters { namespace, counters: JobCounters::default(), left_out: Vec::new() }];
    let report = HubReport { jobs, ..HubReport::default() };
    client.report(&registered, &report).unwrap();
    client.report(&registered, &report).unwrap();
    let polled = client.poll_commands(&registered, &PollCommands { acknowledged: 0, wait_s: 0.0 }).unwrap();
    let [command] = &polled.commands[..] else { panic!("one command, not {polled:?}") };
    assert!(matches!(&command.command, HubCommand::Stop { namespace: stopped, .. } if *stopped == namespace));
}

#[test]
fn only_the_hub_itself_polls_and_reports() {
    let (_manager, client) = start(config());
    let mut wrong_token = client
        .register_hub(&RegisterHub {
            protocol: VERSION,
            shape: shape(),
            place: Default::default(),
            machine: String::new(),
            keeps_checkpoints: None,
            encrypt: false,
            labels: Vec::new(),
        })
        .unwrap();
    wrong_token.token = "0".repeat(64);
    let poll = PollCommands { acknowledged: 0, wait_s: 0.0 };
    assert_eq!(code(&client.poll_commands(&wrong_token, &poll)), ErrorCode::Unauthorized);
    assert_eq!(code(&client.report(&wrong_token, &HubReport::default())), ErrorCode::Unauthorized);
}

#[test]
fn stopping_the_manager_answers_all_waiting_callers() {
    let (manager, client) = start(config());
    let registered = client
        .register_hub(&RegisterHub {
            protocol: VERSION,
            shape: shape(),
            place: Default::default(),
            machine: String::new(),
            keeps_checkpoints: None,
            encrypt: false,
            labels: Vec::new(),
        })
        .unwrap();
    let job = Job::create(&client, "interrupted", 2);
    let rank = std::thread::spawn({
        let job = job.clone();
        move || job.connect(0)
    });
    let hub = std::thread::spawn({
        let client = client.clone();
        move || client.poll_commands(&registered, &PollCommands { acknowledged: 0, wait_s: 10.0 })
    });
    eventually("rank 0 waits", || job.connected() == [0]);
    let begun = Instant::now();
    manager.stop();
    assert!(message(&rank.join().unwrap()).contains("shutting down"));
    // The hub may have been between two polls.
    assert!(hub.join().unwrap().is_err());
    assert!(begun.elapsed() < WAIT_TIMEOUT);
    assert!(client.jobs().is_err());
}
