//! Jobs whose ranks only meet.

use crate::common::*;
use paramhub_core::auth::Incarnation;
use paramhub_core::service::{ErrorCode, JobOptions, JobState};

fn without_hubs() -> JobOptions {
    JobOptions { hubs: Some(0), ..JobOptions::default() }
}

#[test]
fn ranks_meet_without_a_hub_and_the_job_finishes_with_the_last_of_them() {
    let (_manager, client) = start(config());
    let job = Job::create_with(&client, "ring", 3, without_hubs());
    let addresses: Vec<_> = (0..3).map(|rank| Some(([127, 0, 0, 1], 7800 + rank).into())).collect();
    let own = addresses.clone();
    let connected = job.all_ranks(0..3, move |job, rank| {
        let mut request = job.connect_request(rank, process(rank));
        request.peer_address = own[rank as usize];
        job.connect_with(&request).unwrap()
    });
    assert!(connected.iter().all(|rank| rank.peer_addresses == addresses && rank.hubs.is_empty()));
    let state = || client.job("ring").unwrap().state;
    assert_eq!(state(), JobState::Running);
    assert!(job.connect(1).is_ok(), "a call may be repeated");
    assert_eq!(code(&job.connect_as(1, Incarnation([9; 16]))), ErrorCode::RankTaken);
    let refused = job.init(0, settings(8));
    assert!(message(&refused).contains("was created for 0 hubs"), "{refused:?}");
    job.finish(2).unwrap();
    job.finish(2).unwrap();
    job.finish(0).unwrap();
    assert_eq!(state(), JobState::Running);
    job.finish(1).unwrap();
    assert_eq!(state(), JobState::Finished);
}

#[test]
fn a_rank_that_gives_up_ends_the_job_with_its_reason() {
    let (_manager, client) = start(config());
    let job = Job::create_with(&client, "ring", 2, without_hubs());
    assert!(job.all_ranks(0..2, Job::connect).iter().all(Result::is_ok));
    job.leave(1, "its data set is gone").unwrap();
    let status = client.job("ring").unwrap();
    assert_eq!(
        (status.state, status.message.as_str()),
        (JobState::Failed, "rank 1 left: its data set is gone")
    );
    let refused = job.connect(0);
    assert!(message(&refused).contains("rank 1 left: its data set is gone"), "{refused:?}");
}

#[test]
fn a_job_whose_ranks_are_all_silent_is_ended_by_its_lease() {
    let (_manager, client) = start(config());
    let job = Job::create_with(&client, "ring", 1, JobOptions { lease_s: 0.3, ..without_hubs() });
    job.connect(0).unwrap();
    eventually("the lease ends the job", || client.job("ring").unwrap().state == JobState::Failed);
    assert!(client.job("ring").unwrap().message.contains("lease"), "{:?}", client.job("ring"));
}

#[test]
fn ranks_of_a_job_with_hubs_may_do_without_them_if_all_do() {
    let (_manager, client) = start(config());
    let _hub = Hub::join(&client, HubBehaviour::Serve);
    let job = Job::create(&client, "collectives", 2);
    assert!(job.all_ranks(0..2, Job::connect).iter().all(Result::is_ok));
    job.finish(0).unwrap();
    job.finish(1).unwrap();
    assert_eq!(client.job("collectives").unwrap().state, JobState::Finished);

    let job = Job::create(&client, "mixed", 2);
    assert!(job.all_ranks(0..2, Job::connect).iter().all(Result::is_ok));
    job.finish(1).unwrap();
    let refused = job.init(0, settings(8));
    assert!(message(&refused).contains("rank 1 is done without a hub"), "{refused:?}");
    assert_eq!(client.job("mixed").unwrap().state, JobState::Failed);
}
