//! What becomes of jobs, hubs, tokens and callers when another manager leads.

use std::thread::JoinHandle;

use etcd_client::Client;
use paramhub_control::{ControlError, ManagerClient};
use paramhub_core::service::{
    CreateService, CreateToken, ErrorCode, JobOptions, JobState, ReplaceAuthority, TokenRole,
};
use paramhub_manager::{Manager, ManagerConfig, RunningManager, restore_to_etcd};
use rustix::process::{Signal, kill_process};

use crate::common::*;
use crate::server::EtcdServer;
use crate::{AFTER_THE_LEASE, PREFIX, client_of, config_at, health, leader, leads, start_at};

/// Takes the lease from the manager that leads, as etcd does if it hears nothing of it.
fn take_the_lead_away(etcd: &EtcdServer) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let mut client = Client::connect([etcd.endpoint()], None).await.unwrap();
        let leader = client.get(format!("{PREFIX}/leader"), None).await.unwrap();
        let lease = leader.kvs().first().expect("one leads").lease();
        client.lease_revoke(lease).await.unwrap();
    });
}

fn metric(manager: &RunningManager, name: &str) -> String {
    let answer = raw(manager.address(), b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let line = answer.lines().find(|line| line.starts_with(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {answer}")).rsplit(' ').next().unwrap().to_owned()
}

/// A job that runs at a hub.
fn run(client: &ManagerClient, name: &str) -> Job {
    let job = Job::create(client, name, 1);
    job.connect(0).unwrap();
    job.init(0, settings(8)).unwrap();
    job
}

#[test]
fn of_managers_that_start_at_once_one_leads_and_the_others_say_so() {
    let etcd = EtcdServer::start();
    let starting: Vec<JoinHandle<RunningManager>> = (0..3)
        .map(|_| {
            let config = config_at(&etcd);
            std::thread::spawn(move || Manager::start(config).unwrap())
        })
        .collect();
    let managers: Vec<RunningManager> = starting.into_iter().map(|thread| thread.join().unwrap()).collect();
    let first = leader(&managers);
    let url = managers[first].url();
    for manager in managers.iter().filter(|manager| manager.url() != url) {
        eventually("it knows the leader", || health(manager.address()) == format!("ok, follows {url}"));
        assert_eq!(metric(manager, "paramhub_manager_leads"), "0");
        let answer = raw(manager.address(), &request("GET", "/v1/jobs", ""));
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert!(answer.contains(r#""code":"not_leader""#), "{answer}");
        assert!(answer.contains(&format!(r#""leader":"{url}""#)), "{answer}");
        assert!(raw(manager.address(), &request("GET", "/openapi.json", "")).starts_with("HTTP/1.1 200 "));
        // One that is asked by itself is asked again until it leads, and the error says who does.
        let alone = ManagerClient::new(&manager.url(), None).unwrap().with_retry_timeout(Default::default());
        let refused = alone.jobs().unwrap_err();
        assert!(
            matches!(refused, ControlError::NoLeader { .. }) && refused.to_string().contains(&url),
            "{refused}"
        );
    }
    assert_eq!(metric(&managers[first], "paramhub_manager_leads"), "1");
    let client = client_of(&managers);
    let job = Job::create(&client, "found", 1);
    assert_eq!(client.job("found").unwrap().namespace, job.namespace);
    assert_eq!(client.host_and_port(), managers[first].address().to_string());
}

#[test]
fn jobs_and_hubs_go_on_under_the_next_leader() {
    let etcd = EtcdServer::start();
    let mut managers = vec![start_at(&etcd)];
    leader(&managers);
    managers.push(start_at(&etcd));
    let client = client_of(&managers);
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let (done, running) = (run(&client, "done"), run(&client, "running"));
    hub.finish(&done);
    let gathering = Job::create(&client, "gathering", 2);
    let waiting = {
        let job = gathering.clone();
        std::thread::spawn(move || job.connect(0))
    };
    eventually("rank 0 waits", || gathering.connected() == [0]);
    let beginning = Job::create(&client, "beginning", 2);
    beginning.all_ranks(0..2, |job, rank| job.connect(rank).unwrap());
    let before = client.jobs().unwrap();

    // It gives up the lead as it stops: the other need not wait for the lease to end.
    managers.remove(0).stop();
    assert_eq!(leader(&managers), 0);
    let after = client.jobs().unwrap();
    let names = |jobs: &[paramhub_core::service::JobStatus]| {
        jobs.iter().map(|job| (job.name.clone(), job.state)).collect::<Vec<_>>()
    };
    assert_eq!(names(&after), names(&before));
    gathering.connect(1).unwrap();
    waiting
        .join()
        .unwrap()
        .expect("the rank that waited was told that its manager stops, and asked the next");
    beginning.all_ranks(0..2, |job, rank| job.init(rank, settings(8)).unwrap());
    for job in [&running, &beginning] {
        hub.finish(job);
    }
    assert_eq!(client.job("running").unwrap().state, JobState::Finished);
    hub.finish(&run(&client, "after"));
    assert_eq!(client.hubs().unwrap().len(), 1, "the hub went on under its number");
}

#[test]
fn a_leader_that_loses_its_lease_follows_and_may_lead_again() {
    let etcd = EtcdServer::start();
    let managers = [start_at(&etcd), start_at(&etcd)];
    let client = client_of(&managers);
    let mut changes = 0;
    let mut before = leader(&managers);
    for round in 0..6 {
        Job::create(&client, &format!("job-{round}"), 1);
        take_the_lead_away(&etcd);
        eventually("it has noticed", || {
            !leads(&managers[before]) || {
                // It may have taken the lead again: then it does not matter.
                let client = client_of([&managers[before]]);
                client.jobs().is_ok()
            }
        });
        let now = leader(&managers);
        changes += usize::from(now != before);
        before = now;
        let jobs = client.jobs().unwrap();
        assert_eq!(jobs.len(), round + 1, "each leader has what the one before has saved");
    }
    println!("{changes} of 6 times another manager led");
}

#[test]
fn what_a_leader_without_its_lease_was_asked_is_asked_of_the_next() {
    let etcd = EtcdServer::start();
    let managers = [start_at(&etcd), start_at(&etcd)];
    let client = client_of(&managers);
    leader(&managers);
    let options = JobOptions { hubs: Some(0), ..JobOptions::default() };
    let job = Job::create_with(&client, "gathering", 2, options);
    let waiting = {
        let job = job.clone();
        std::thread::spawn(move || job.connect(0))
    };
    eventually("rank 0 waits", || job.connected() == [0]);
    take_the_lead_away(&etcd);
    leader(&managers);
    job.connect(1).unwrap();
    waiting.join().unwrap().unwrap();
}

#[test]
fn a_creation_that_is_repeated_finds_its_job() {
    let etcd = EtcdServer::start();
    let managers = [start_at(&etcd)];
    leader(&managers);
    let call = |key: &str, name: &str| {
        let body = format!(r#"{{"name": "{name}", "workers": 1}}"#);
        let request = format!(
            "POST /v1/jobs HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nidempotency-key: {key}\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = raw(managers[0].address(), request.as_bytes());
        (answer[9..12].to_owned(), answer.rsplit("\r\n").next().unwrap().to_owned())
    };
    let (key, other) = ("1".repeat(32), "2".repeat(32));
    let created = call(&key, "once");
    assert_eq!(created.0, "200", "{created:?}");
    assert!(created.1.contains(&key), "{created:?}");
    assert_eq!(call(&key, "once"), created);
    for (key, name) in [(&other, "once"), (&key, "another")] {
        let refused = call(key, name);
        assert!(refused.0 == "409" && refused.1.contains("name_taken"), "{refused:?}");
    }
    assert_eq!(call("short", "another").0, "400");
    let client = client_of(&managers);
    client.stop_job("once").unwrap();
    assert_eq!(call(&key, "once").0, "409", "the namespace belongs to the job that has ended");
    assert_eq!(client.jobs().unwrap().len(), 1);
}

#[test]
fn followers_know_the_tokens_and_the_authority_of_the_leader() {
    let etcd = EtcdServer::start();
    let with_token = || ManagerConfig { admin_token: Some("the-first-token".into()), ..config_at(&etcd) };
    let managers = [Manager::start(with_token()).unwrap(), Manager::start(with_token()).unwrap()];
    let of = |managers: &[RunningManager], token: &str| {
        let urls: Vec<String> =
            managers.iter().map(|manager| format!("https://{}", manager.address())).collect();
        ManagerClient::new(&urls.join(","), Some(token.to_owned())).unwrap().with_retry_timeout(WAIT_TIMEOUT)
    };
    let admin = of(&managers, "the-first-token");
    let request = CreateToken { name: "second".into(), role: TokenRole::Admin, team: None };
    let second = admin.create_token(&request).unwrap().token;
    let replaced = admin.replace_authority(&ReplaceAuthority { revoke_former: true }).unwrap();
    let first = leader(&managers);
    // Over TLS a caller recognises a follower by its own token, although the follower answers that it does not lead.
    let follower = &managers[1 - first];
    let of_follower = of(std::slice::from_ref(follower), &second).with_retry_timeout(Default::default());
    eventually("the follower knows the token", || {
        matches!(of_follower.jobs(), Err(ControlError::NoLeader { .. }))
    });
    admin.revoke_token("second").unwrap();
    let [one, two] = managers;
    let (stops, stays) = if first == 0 { (one, two) } else { (two, one) };
    stops.stop();
    let managers = [stays];
    leader(&managers);
    let admin = of(&managers, "the-first-token");
    assert_eq!(admin.authority().unwrap(), replaced);
    assert_eq!(code(&of(&managers, &second).jobs()), ErrorCode::Unauthorized);
}

#[test]
fn managers_say_that_etcd_is_away_and_go_on_when_it_is_back() {
    let mut etcd = EtcdServer::start();
    let managers = [start_at(&etcd), start_at(&etcd)];
    let client = client_of(&managers);
    leader(&managers);
    let hub = Hub::join(&client, HubBehaviour::Serve);
    let job = run(&client, "running");
    etcd.kill();
    for manager in &managers {
        eventually("it says so", || {
            health(manager.address()).contains("follows nobody: etcd does not answer: ")
        });
        let answer = raw(manager.address(), &request("GET", "/v1/jobs", ""));
        assert!(answer.contains("not_leader") && answer.contains("etcd does not answer"), "{answer}");
    }
    etcd.start_again();
    leader(&managers);
    assert_eq!(client.job("running").unwrap().state, JobState::Running);
    hub.finish(&job);
    hub.finish(&run(&client, "after"));
    assert_eq!(client.job("after").unwrap().state, JobState::Finished);
}

/// For a moment only: nobody needs to follow.
#[test]
fn a_leader_outlasts_an_etcd_that_is_frozen_for_a_moment() {
    let etcd = EtcdServer::start();
    let managers = [start_at(&etcd)];
    let client = client_of(&managers);
    leader(&managers);
    kill_process(etcd.pid(), Signal::STOP).unwrap();
    let creating = {
        let client = client.clone();
        let request = CreateService { name: "late".into(), workers: 1, options: Default::default() };
        std::thread::spawn(move || client.create_service(&request))
    };
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert!(!creating.is_finished(), "a job is not created before it is saved");
    kill_process(etcd.pid(), Signal::CONT).unwrap();
    let created = creating.join().unwrap().unwrap();
    assert_eq!(client.job("late").unwrap().namespace, created.namespace);
}

#[test]
fn a_leader_that_cannot_renew_its_lease_answers_nothing_before_another_may_lead() {
    let etcd = EtcdServer::start();
    let managers = [start_at(&etcd)];
    leader(&managers);
    kill_process(etcd.pid(), Signal::STOP).unwrap();
    std::thread::sleep(AFTER_THE_LEASE);
    assert!(!leads(&managers[0]));
    let answer = raw(managers[0].address(), &request("GET", "/v1/jobs", ""));
    kill_process(etcd.pid(), Signal::CONT).unwrap();
    assert!(answer.contains("not_leader"), "{answer}");
    leader(&managers);
}

#[test]
fn a_state_that_was_saved_moves_into_etcd() {
    let with_token = |config: ManagerConfig| ManagerConfig { admin_token: Some("t".into()), ..config };
    let of = |manager: &RunningManager| {
        let url = format!("https://{}", manager.address());
        ManagerClient::new(&url, Some("t".into())).unwrap().with_retry_timeout(WAIT_TIMEOUT)
    };
    let alone = Manager::start(with_token(config())).unwrap();
    Job::create(&of(&alone), "moves", 2);
    let authority = of(&alone).authority().unwrap();
    let saved = of(&alone).state().unwrap();
    alone.stop();
    let etcd = EtcdServer::start();
    let address = etcd.address(PREFIX).parse().unwrap();
    restore_to_etcd(&saved, &address).unwrap();
    let refused = restore_to_etcd(&saved, &address).unwrap_err().to_string();
    assert!(refused.contains("is there already"), "{refused}");
    let manager = Manager::start(with_token(config_at(&etcd))).unwrap();
    assert_eq!(of(&manager).authority().unwrap(), authority);
    assert_eq!(of(&manager).jobs().unwrap()[0].name, "moves");
    // And out of it again.
    let (again, folder) = (of(&manager).state().unwrap(), tempfile::tempdir().unwrap());
    manager.stop();
    paramhub_manager::restore(&again, &folder.path().join("state")).unwrap();
}
