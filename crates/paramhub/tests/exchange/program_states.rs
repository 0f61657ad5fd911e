//! Program states: what each rank keeps at the hub, beside the exchange of gradients.

use std::sync::Barrier;

use paramhub_core::service::{JobOptions, OnInterfaceDown, OnWorkerLoss};
use paramhub_core::settings::Settings;
use paramhub_core::wire::{Attempt, Header, Operation, ProgramState, Verdict};
use paramhub_worker::{Job, WorkerError};

use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Ticket, Transports, keys, sgd};
use crate::raw::{self, Raw};

over_transports!(
    [tcp shm mixed]
    each_rank_keeps_its_three_newest_states_while_gradients_go_on,
    states_of_every_length_come_back,
    a_state_that_cannot_be_saved_is_refused_before_it_leaves,
    the_process_that_takes_a_rank_finds_the_states_of_the_one_before,
    a_resumed_stream_repeats_what_was_under_way,
    offences_fail_their_job_with_the_reason,
);

const STATE_BYTES: usize = 1_000_000;

fn options(program_state_bytes: usize) -> JobOptions {
    let program_state_bytes = program_state_bytes as u32;
    JobOptions { rendezvous_timeout_s: 20.0, program_state_bytes, ..Default::default() }
}

fn state(rank: u32, step: u32, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|byte| (byte * 31 + step as usize * 7 + rank as usize) as u8).collect()
}

fn save(job: &Job, step: u32, bytes: usize) {
    job.save_program_state(step, state(job.rank(), step, bytes)).unwrap().wait().unwrap();
}

fn pull(job: &Job, step: u32) -> Option<Vec<u8>> {
    job.program_state(step).unwrap().wait().unwrap().1
}

fn each_rank_keeps_its_three_newest_states_while_gradients_go_on(transports: Transports) {
    const ELEMENTS: usize = 300_000;
    let cluster = Cluster::new(transports, 2);
    let ticket = cluster.job_with("keeps", 3, options(STATE_BYTES));
    let saved = Barrier::new(3);
    ticket.run(&Settings::new(keys(&[ELEMENTS as u64])), |job| {
        let mut mean = vec![0.0f32; ELEMENTS];
        for step in 0..4 {
            let saving = job.save_program_state(step, state(job.rank(), step, STATE_BYTES)).unwrap();
            let gradient = vec![(job.rank() + step) as f32; ELEMENTS];
            mean = job.push_pull(0, gradient, mean).unwrap().wait().unwrap().1;
            assert!(mean.iter().all(|&value| value == 1.0 + step as f32));
            saving.wait().unwrap();
        }
        // The newest is replaced by a shorter one.
        save(job, 3, 10);
        saved.wait();
        let pulling = job.program_state(2).unwrap();
        mean = job.push_pull(0, vec![1.0f32; ELEMENTS], mean).unwrap().wait().unwrap().1;
        assert!(mean.iter().all(|&value| value == 1.0));
        assert!(pulling.wait().unwrap().1 == Some(state(job.rank(), 2, STATE_BYTES)));
        assert_eq!(pull(job, 3), Some(state(job.rank(), 3, 10)));
        assert_eq!(pull(job, 1), Some(state(job.rank(), 1, STATE_BYTES)));
        assert_eq!([pull(job, 0), pull(job, 4)], [None, None]);
    });
}

fn states_of_every_length_come_back(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[1])) };
    for most in [1, 1023, 1024, 5000] {
        let ticket = cluster.job_with(&format!("most-{most}"), 2, options(most));
        ticket.run(&settings, |job| {
            for (step, bytes) in (0..).zip([0, 1, most / 2, most]) {
                save(job, step, bytes);
                assert_eq!(pull(job, step), Some(state(job.rank(), step, bytes)), "{bytes} of {most} bytes");
            }
        });
    }
}

fn a_state_that_cannot_be_saved_is_refused_before_it_leaves(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let misused = |outcome: Result<(), WorkerError>| match outcome {
        Err(error @ WorkerError::Misused { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    cluster.job_with("small", 1, options(100)).run(&raw::settings(), |job| {
        let refused = misused(job.save_program_state(1, vec![0; 101]).map(drop));
        let reason = "the program state of step 1 has 101 bytes, but program_state_bytes of the job is 100";
        assert!(refused.contains(reason), "{refused}");
        save(job, 5, 100);
        let refused = misused(job.save_program_state(4, vec![0; 1]).map(drop));
        assert!(refused.contains("step 4 cannot be saved after that of step 5"), "{refused}");
        assert_eq!(pull(job, 5), Some(state(0, 5, 100)));
    });
    cluster.job("none", 1).run(&raw::settings(), |job| {
        let saved = misused(job.save_program_state(1, vec![0; 1]).map(drop));
        let pulled = misused(job.program_state(1).map(drop));
        for refused in [saved, pulled] {
            assert!(refused.contains("create it with program_state_bytes"), "{refused}");
        }
    });
}

fn the_process_that_takes_a_rank_finds_the_states_of_the_one_before(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let options =
        JobOptions { on_worker_loss: OnWorkerLoss::Continue, min_workers: 2, ..options(STATE_BYTES) };
    let ticket: &Ticket = &cluster.job_with("taken", 2, options);
    let settings = Settings { optimizer: sgd(1.0, 0.0), ..Settings::new(keys(&[4])) };
    let join = |rank| ticket.join(rank, settings.clone()).unwrap();
    let start = |job: &Job| job.broadcast(&mut [vec![0.0f32; 4]], 0).unwrap();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let job = join(0);
            start(&job);
            save(&job, 1, 8);
            job.push_pull(0, vec![1.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap();
            assert_eq!(pull(&job, 1), Some(state(0, 1, 8)));
            job.leave().unwrap();
        });
        let lost = join(1);
        start(&lost);
        save(&lost, 1, STATE_BYTES);
        // The next state may be on its way when the process ends.
        drop(lost.save_program_state(2, state(1, 2, STATE_BYTES)).unwrap());
        lost.abort_handle().abort("it dies");
        drop(lost);
        cluster.await_job("taken", |status| status.lost == [1]);
        let job = join(1);
        start(&job);
        assert!(pull(&job, 1) == Some(state(1, 1, STATE_BYTES)));
        job.push_pull(0, vec![1.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap();
        job.leave().unwrap();
        other.join().unwrap();
    });
}

fn frame(operation: Operation, step: u32, offset: u32, total: u32, piece: &[u8]) -> Vec<u8> {
    let payload = match operation {
        Operation::PullProgramState => vec![],
        _ => [&ProgramState::head(total)[..], piece].concat(),
    };
    let length = payload.len() as u32;
    let header = Header { step, chunk: offset, length, ..Header::bare(operation) };
    [&header.encode()[..], &payload].concat()
}

fn a_resumed_stream_repeats_what_was_under_way(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let options = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..options(64) };
    let ticket = cluster.job_with("resumed", 1, options);
    let (mut raw, mut hello) = Raw::join_but_for_streams(&cluster, &ticket, 0);
    assert!(matches!(raw.shake_hands(&hello, &ticket), Verdict::Welcome { .. }));
    let mut number = 0;
    let mut resume = |raw: &mut Raw| {
        number += 1;
        hello.attempt = Attempt::Numbered { epoch: 1, number };
        let mut newer = Raw::dial(cluster.hub().addresses()[0]);
        assert!(matches!(newer.shake_hands(&hello, &ticket), Verdict::Welcome { .. }));
        newer.await_frame(Operation::Heartbeat);
        *raw = newer;
    };
    let first = frame(Operation::SaveProgramState, 3, 0, 20, &[1; 16]);
    let last = frame(Operation::SaveProgramState, 3, 16, 20, &[2; 4]);
    raw.send(&first);
    resume(&mut raw);
    for _ in 0..2 {
        // The second time the state is saved already, and the answer was lost.
        raw.send(&[&first[..], &last].concat());
        let (saved, _) = raw.await_frame(Operation::ProgramStateSaved);
        assert_eq!((saved.step, saved.length), (3, 0));
        resume(&mut raw);
    }
    for _ in 0..2 {
        raw.send(&frame(Operation::PullProgramState, 3, 0, 0, &[]));
        let (header, payload) = raw.await_frame(Operation::ProgramState);
        assert_eq!((header.step, header.chunk), (3, 0));
        assert_eq!(payload, [&20_u32.to_le_bytes()[..], &[1; 16], &[2; 4]].concat());
        resume(&mut raw);
    }
}

fn offences_fail_their_job_with_the_reason(transports: Transports) {
    let cluster = Cluster::new(transports, 1);
    let save = Operation::SaveProgramState;
    beside_a_running_job(&cluster, || {
        for (number, (bytes, frames, reason)) in [
            (0, frame(save, 1, 0, 0, &[]), "no program state can be saved in this job"),
            (
                0,
                frame(Operation::PullProgramState, 1, 0, 0, &[]),
                "no program state can be saved in this job",
            ),
            (
                9,
                frame(save, 1, 0, 10, &[0; 4]),
                "has 10 bytes, more than the 9 of the job's `program_state_bytes`",
            ),
            (
                9,
                frame(save, 1, 0, 10, &[0; 10]),
                "sent 14 bytes as a piece of a program state, which has 4 to 13",
            ),
            (
                9,
                frame(save, 1, 1, 9, &[0; 4]),
                "a piece of step 1 begins at byte 1, but byte 0 of step 1 is due",
            ),
            (9, frame(Operation::ProgramState, 1, 0, 9, &[0; 4]), "does not go this way"),
        ]
        .into_iter()
        .enumerate()
        {
            let ticket = cluster.job_with(&format!("offence-{number}"), 1, options(bytes));
            let mut raw = Raw::join(&cluster, &ticket, 0);
            raw.send(&frames);
            let failure = raw.await_failure();
            assert_eq!(failure.rank, Some(0));
            assert!(failure.message.contains(reason), "{}", failure.message);
        }
    });
}
