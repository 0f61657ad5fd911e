//! Offences and their consequences: a clear error for the offender and for the ranks that depend on it, and
//! no effect on others.

use std::io::Read;
use std::sync::Arc;

use paramhub_core::auth::{Incarnation, Nonce};
use paramhub_core::consistency::Consistency;
use paramhub_core::service::{CreateService, JobOptions, JobState, OnInterfaceDown};
use paramhub_core::settings::Settings;
use paramhub_core::wire::{
    Attempt, CHALLENGE_MESSAGE_BYTES, Capabilities, Header, Hello, Operation, Refusal, Verdict,
};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_worker::{Job, Member, WorkerError};

use crate::cluster::{Cluster, Ticket, Transports, WAIT_TIMEOUT, keys, sgd};
use crate::raw::{Raw, hello, proof, push, settings};

over_transports!(
    [tcp shm mixed]
    a_wrong_nonce_opens_neither_door,
    a_proven_rank_is_refused_what_is_not_its_own,
    a_worker_of_version_1_takes_steps_beside_one_of_version_2,
    a_second_process_of_a_rank_is_refused_with_the_address_of_the_first,
    different_key_tables_are_named_to_both_ranks,
    a_gradient_with_nan_passes_by_default_and_is_refused_where_asked,
    a_worker_whose_connection_ends_without_leaving_is_named_to_the_others,
    a_rank_that_never_comes_is_named,
    a_rank_that_stops_between_init_and_its_streams_is_named,
    a_name_belongs_to_one_living_job,
    stopping_a_job_ends_its_workers_with_the_reason,
    a_port_in_use_is_named_with_what_to_do,
    a_hub_that_shuts_down_says_so_to_its_workers,
    a_worker_that_is_gone_before_it_is_welcomed_is_named_to_the_others,
    a_worker_may_leave_without_waiting_for_what_it_asked_for,
    a_rank_zero_that_leaves_without_parameters_is_named_to_ranks_that_wait,
    a_worker_that_was_silent_too_long_learns_why_its_job_is_over,
);

fn a_wrong_nonce_opens_neither_door(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("secret", 1);
    let guess = Ticket { nonce: Nonce([0; 32]), ..ticket.clone() };
    let refused = Member::connect(guess.membership(0)).expect_err("the nonce is wrong").to_string();
    assert!(
        refused.contains("PARAMHUB_SECRET") || refused.contains("nonce") || refused.contains("secret"),
        "{refused}"
    );
    // The job's secret opens no stream: the rank has a secret of its own.
    ticket.run(&settings(), |_| {
        for ticket in [&guess, &ticket] {
            let mut raw = Raw::dial(cluster.hub().addresses()[0]);
            let hello = hello(ticket, 0, &settings(), &cluster);
            match raw.shake_hands(&hello, ticket) {
                Verdict::Refused { message, .. } => {
                    assert!(message.contains("secret is wrong"), "{message}")
                }
                Verdict::Welcome { .. } => panic!("a wrong secret was let in"),
            }
            assert!(raw.is_closed());
        }
    });
}

fn a_proven_rank_is_refused_what_is_not_its_own(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let options = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..Default::default() };
    let ticket = cluster.job_with("proven", 2, options);
    let (mut zero, hello) = std::thread::scope(|scope| {
        let other = scope.spawn(|| Raw::join_but_for_streams(&cluster, &ticket, 1));
        let zero = Raw::join_but_for_streams(&cluster, &ticket, 0);
        other.join().unwrap();
        zero
    });
    assert!(matches!(zero.shake_hands(&hello, &ticket), Verdict::Welcome { .. }));
    let refused = |hello: &Hello, ticket: &Ticket| {
        let mut raw = Raw::dial(cluster.hub().addresses()[0]);
        match raw.shake_hands(hello, ticket) {
            Verdict::Refused { refusal, message } => (refusal, message),
            Verdict::Welcome { .. } => panic!("{hello:?} was let in"),
        }
    };
    let numbered = |epoch, number| Attempt::Numbered { epoch, number };
    for (what, hello, refusal, reason) in [
        ("again", hello, Refusal::RankTaken, "two processes have the same rank"),
        (
            "another process",
            Hello { incarnation: Incarnation([9; 16]), ..hello },
            Refusal::RankTaken,
            "two processes have the same rank",
        ),
        (
            "another placement",
            Hello { placement: [0; 32], ..hello },
            Refusal::Placement,
            "different placements",
        ),
        (
            "another epoch",
            Hello { attempt: numbered(2, 1), ..hello },
            Refusal::Stale,
            "epoch 2 of the job, and the rank belongs to the process that holds it since epoch 1",
        ),
        (
            "what no hub of this release can do",
            Hello {
                offered: Capabilities::FABRIC,
                required: Capabilities::FABRIC,
                attempt: numbered(1, 1),
                ..hello
            },
            Refusal::Capability,
            "what this hub cannot do: fabric",
        ),
    ] {
        let (given, message) = refused(&hello, &ticket);
        assert_eq!(given, refusal, "{what}: {message}");
        assert!(message.contains(reason), "{what}: {message}");
    }
    // Rank 1 knows its own secret only.
    let as_another = Ticket { secrets: Arc::default(), ..ticket.clone() };
    as_another.secrets.lock().unwrap().insert(0, ticket.secret(1));
    assert_eq!(refused(&hello, &as_another).0, Refusal::WrongNonce);
    // A stream that was opened before the newest is refused when it comes late.
    let mut newest = Raw::dial(cluster.hub().addresses()[0]);
    let third = Hello { attempt: numbered(1, 3), ..hello };
    assert!(matches!(newest.shake_hands(&third, &ticket), Verdict::Welcome { .. }));
    for late in [1, 2, 3] {
        let (refusal, message) = refused(&Hello { attempt: numbered(1, late), ..hello }, &ticket);
        assert_eq!(refusal, Refusal::Stale, "{message}");
        assert!(message.contains(&format!("attempt {late}, and attempt 3 has come before")), "{message}");
    }
}

/// A worker of the release before has no secret of its own, and is served as it was.
fn a_worker_of_version_1_takes_steps_beside_one_of_version_2(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("neighbours", 2);
    std::thread::scope(|scope| {
        let newer = scope.spawn(|| {
            let job = ticket.join(1, settings()).unwrap();
            for _ in 0..3 {
                let (_, mean) = job.push_pull(0, vec![1.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap();
                assert_eq!(mean, [0.5; 4], "the older worker's gradients are zero");
            }
            job.leave().unwrap();
        });
        let mut older = Raw::join_as_version_1(&cluster, &ticket, 0);
        for step in 0..3 {
            older.send(&push(step));
            assert_eq!(older.await_frame(Operation::Parameters).0.step, step + 1);
        }
        older.send(&Header::bare(Operation::Leave).encode());
        newer.join().unwrap();
    });
    assert_eq!(cluster.await_end("neighbours").state, JobState::Finished);
}

fn a_second_process_of_a_rank_is_refused_with_the_address_of_the_first(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("twins", 2);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| Member::connect(ticket.membership(0)));
        cluster.await_job("twins", |status| status.connected == [0]);
        let second = Member::connect(ticket.membership(0)).expect_err("the rank is taken").to_string();
        assert!(second.contains("rank 0") && second.contains(&std::process::id().to_string()), "{second}");
        let other = Member::connect(ticket.membership(1)).unwrap();
        let job = first.join().unwrap().unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| other.init(settings()).unwrap().leave().unwrap());
            job.init(settings()).unwrap().leave().unwrap();
            other.join().unwrap();
        });
    });
}

fn different_key_tables_are_named_to_both_ranks(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("tables", 2);
    let messages: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2u32)
            .map(|rank| {
                let (ticket, sizes) = (&ticket, [4, 5 + u64::from(rank)]);
                scope.spawn(move || ticket.join(rank, Settings::new(keys(&sizes))).err().unwrap().to_string())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for message in messages {
        assert!(
            message.contains("key 1")
                && message.contains("`layer1` f32 [5]")
                && message.contains("`layer1` f32 [6]"),
            "{message}"
        );
    }
    assert_eq!(cluster.await_end("tables").state, JobState::Failed);
}

fn a_gradient_with_nan_passes_by_default_and_is_refused_where_asked(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    for reject in [false, true] {
        let settings = Settings { reject_non_finite: reject, ..Settings::new(keys(&[3, 20_000])) };
        let ticket = cluster.job(if reject { "rejects" } else { "passes" }, 2);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2)
                .map(|rank| {
                    let (ticket, settings) = (&ticket, &settings);
                    scope.spawn(move || {
                        let mut gradient = vec![1.0f32; 20_000];
                        if rank == 1 {
                            gradient[12_345] = f32::NAN;
                        }
                        let job = ticket.join(rank, settings.clone())?;
                        let (_, mean) = job.push_pull(1, gradient, vec![0.0f32; 20_000])?.wait()?;
                        Ok::<_, WorkerError>(mean)
                    })
                })
                .collect();
            for rank in ranks {
                match rank.join().unwrap() {
                    Ok(mean) if !reject => {
                        assert!(
                            mean[12_345].is_nan() && mean.iter().filter(|value| value.is_nan()).count() == 1
                        );
                    }
                    Err(error) if reject => {
                        let error = error.to_string();
                        assert!(
                            error.contains("rank 1 sent a gradient of key `layer1` whose element 12345"),
                            "{error}"
                        );
                    }
                    other => panic!("reject {reject}: {:?}", other.map(|_| ())),
                }
            }
        });
    }
}

fn a_worker_whose_connection_ends_without_leaving_is_named_to_the_others(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("lost", 2);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            // A rank may not even have its stream yet when the other is lost. It is notified all the same.
            let exchange = |job: Job| job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4])?.wait().map(drop);
            ticket.join(0, settings()).and_then(exchange).unwrap_err().to_string()
        });
        let mut raw = Raw::join(&cluster, &ticket, 1);
        // The connection ends in the middle of a frame: none of the frame counts.
        raw.send(&push(0)[..20]);
        drop(raw);
        let error = waits.join().unwrap();
        assert!(error.contains("rank 1 was lost"), "{error}");
    });
    assert!(cluster.await_end("lost").message.contains("rank 1 was lost"));
}

fn a_rank_that_never_comes_is_named(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let options = JobOptions { rendezvous_timeout_s: 0.4, ..Default::default() };
    let ticket = cluster.job_with("incomplete", 3, options);
    let message = Member::connect(ticket.membership(1)).expect_err("two ranks are missing").to_string();
    assert!(message.contains("ranks 0 and 2"), "{message}");
}

fn a_rank_that_stops_between_init_and_its_streams_is_named(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let options = JobOptions { rendezvous_timeout_s: 1.5, ..Default::default() };
    let ticket = cluster.job_with("halfway", 2, options);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let job = ticket.join(0, settings()).unwrap();
            job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap_err().to_string()
        });
        Raw::join_but_for_streams(&cluster, &ticket, 1);
        let error = waits.join().unwrap();
        assert!(error.contains("rank 1 did not open all streams"), "{error}");
    });
}

fn a_name_belongs_to_one_living_job(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    cluster.job("mine", 1);
    let again = CreateService { name: "mine".into(), workers: 1, options: JobOptions::default() };
    let refused = cluster.client.create_service(&again).unwrap_err().to_string();
    assert!(refused.contains("`mine`") && refused.contains("paramhub jobs stop mine"), "{refused}");
    cluster.client.stop_job("mine").unwrap();
    cluster.client.create_service(&again).unwrap();
}

fn stopping_a_job_ends_its_workers_with_the_reason(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("stopped", 2);
    // The job runs before its workers have opened their streams.
    let (joined, has_joined) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let (ticket, joined) = (&ticket, joined.clone());
                scope.spawn(move || {
                    let job = ticket.join(rank, settings()).unwrap();
                    joined.send(()).unwrap();
                    loop {
                        let exchanged = job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4]);
                        if let Err(error) = exchanged.and_then(|handle| handle.wait()) {
                            return error.to_string();
                        }
                    }
                })
            })
            .collect();
        (0..2).for_each(|_| has_joined.recv_timeout(WAIT_TIMEOUT).unwrap());
        cluster.await_state("stopped", JobState::Running);
        cluster.client.stop_job("stopped").unwrap();
        for rank in ranks {
            let error = rank.join().unwrap();
            assert!(error.contains("job `stopped` failed") && error.contains("stop"), "{error}");
        }
    });
}

fn a_port_in_use_is_named_with_what_to_do(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let config = HubConfig { listen: cluster.hub().addresses().to_vec(), ..Default::default() };
    let refused =
        RunningHub::start(cluster.client.clone(), config).expect_err("the port is in use").to_string();
    let port = cluster.hub().addresses()[0].to_string();
    assert!(refused.contains(&port) && refused.contains("in use"), "{refused}");
}

fn a_hub_that_shuts_down_says_so_to_its_workers(transports: Transports) {
    let mut cluster = Cluster::new(transports, 2);
    let ticket = cluster.job("orphaned", 1);
    let settings = Settings::new(keys(&[100_000]));
    // The job runs before its worker has opened every stream.
    let (joined, has_joined) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let job = ticket.join(0, settings.clone()).unwrap();
            joined.send(()).unwrap();
            loop {
                let exchanged = job.push_pull(0, vec![0.0f32; 100_000], vec![0.0f32; 100_000]);
                if let Err(error) = exchanged.and_then(|handle| handle.wait()) {
                    return error.to_string();
                }
            }
        });
        has_joined.recv_timeout(WAIT_TIMEOUT).unwrap();
        cluster.hub.take().unwrap().stop();
        let error = worker.join().unwrap();
        assert!(error.contains("the hub is shutting down"), "{error}");
    });
}

fn a_worker_that_is_gone_before_it_is_welcomed_is_named_to_the_others(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    for round in 0..8 {
        let name = format!("gone{round}");
        let ticket = cluster.job(&name, 2);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let exchange =
                    |job: Job| job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4])?.wait().map(drop);
                ticket.join(0, settings()).and_then(exchange).unwrap_err().to_string()
            });
            let (mut raw, hello) = Raw::join_but_for_streams(&cluster, &ticket, 1);
            raw.send(&hello.encode());
            let mut challenge = [0; CHALLENGE_MESSAGE_BYTES];
            raw.socket.read_exact(&mut challenge).unwrap();
            // The proof has arrived when the hub notices that the other end is gone.
            raw.send(&proof(&ticket, &hello, &challenge).0);
            raw.reset();
            let error = waits.join().unwrap();
            assert!(error.contains("rank 1 was lost"), "{error}");
        });
    }
}

fn a_worker_may_leave_without_waiting_for_what_it_asked_for(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let ticket = cluster.job("hasty", 1);
    let mut raw = Raw::join(&cluster, &ticket, 0);
    raw.send(&[push(0), Header::bare(Operation::Leave).encode().to_vec()].concat());
    assert_eq!(raw.await_frame(Operation::Parameters).0.step, 1);
    assert_eq!(cluster.await_end("hasty").state, JobState::Finished);
    // The hub goes on.
    cluster.job("next", 1).run(&settings(), |_| ());
}

fn a_rank_zero_that_leaves_without_parameters_is_named_to_ranks_that_wait(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings =
        Settings { optimizer: sgd(0.1, 0.0), consistency: Consistency::Asynchronous, ..settings() };
    let ticket = cluster.job("headless", 2);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let job = ticket.join(1, settings.clone()).unwrap();
            job.pull(0, vec![0.0f32; 4]).unwrap().wait().unwrap_err()
        });
        ticket.join(0, settings.clone()).unwrap().leave().unwrap();
        let error = waits.join().unwrap();
        assert!(error.to_string().contains("rank 0 left the job"), "{error}");
        assert!(matches!(error, WorkerError::Failed { culprit: Some(0), .. }), "{error:?}");
    });
}

fn a_worker_that_was_silent_too_long_learns_why_its_job_is_over(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let options = JobOptions { rendezvous_timeout_s: 20.0, dead_after_s: 1.0, ..Default::default() };
    let ticket = cluster.job_with("frozen", 1, options);
    let mut raw = Raw::join(&cluster, &ticket, 0);
    let failure = raw.await_failure();
    assert_eq!(failure.rank, Some(0));
    assert!(failure.message.contains("rank 0 was lost: it has not been heard for"), "{failure:?}");
    assert!(raw.is_closed());
}
