//! A hub and its standby, of which one is lost at any moment while streams are cut: the numbers stay those of an undisturbed
//! job.

use std::sync::Arc;

use paramhub_core::composition::Composition;
use paramhub_core::ports::Side;
use paramhub_core::resuming::ResumeTerms;
use paramhub_core::settings::Settings;
use paramhub_core::standbys::Role;
use paramhub_core::stragglers::Stragglers;
use paramhub_core::wire::{Header, Operation, State};

use super::Shard;
use super::cut_streams::{CHUNKS, Job, WORKERS, elements, expected, settings};
use super::tests::{header, take, wire};
use crate::core::plan::ShardPlan;
use crate::core::stepped_hub::{one_core, plan_at};

const SEEDS: u64 = 200;

fn shard(role: Role) -> Shard {
    shard_of(role, settings())
}

fn shard_of(role: Role, settings: Settings) -> Shard {
    let composition = Composition::flat(vec![one_core()], WORKERS);
    let plan = plan_at(composition, 0, Stragglers::Wait, settings);
    let side = if role == Role::StandsBy { Side::Serving } else { Side::Standby };
    let ports = Arc::new(plan.ports.as_ref().clone().with_counterpart(side, 0, 0));
    let resuming = ResumeTerms { has_standbys: true, ..ResumeTerms::default() };
    Shard::new(ShardPlan { ports, role, resuming, counterpart: "the other hub".into(), ..plan }).unwrap()
}

fn pair() -> [Shard; 2] {
    [Role::Serves { has_standby: true }, Role::StandsBy].map(shard)
}

#[test]
fn a_hub_that_is_lost_at_any_moment_changes_no_number() {
    let (mut cuts, mut lost) = (0, [0, 0, 0]);
    for seed in 0..SEEDS {
        let [serving, standby] = pair();
        let mut job = Job::with_standby(serving, standby, seed);
        // Every third job loses no hub.
        let (who, mut at) = ((seed % 3) as u16, job.below(12_000));
        let mut acts = 0;
        while !job.is_done() {
            job.act(acts < 20_000);
            acts += 1;
            job.end_sums();
            if at == 0 && who < 2 && job.lost.is_empty() {
                job.lose(who);
                lost[usize::from(who)] += 1;
            }
            at = at.saturating_sub(1);
            assert!(acts < 2_000_000, "seed {seed}: the job is stuck");
        }
        let expected: Vec<f32> = (0..CHUNKS).map(|chunk| expected(chunk, false)).collect();
        for (rank, values) in job.values() {
            assert_eq!(values, expected, "seed {seed}, rank {rank}");
        }
        cuts += job.cuts;
        lost[2] += usize::from(job.lost.is_empty());
    }
    assert!(cuts > 500 && lost.iter().all(|&times| times > 20), "{cuts} cuts, {lost:?}");
}

/// Settings with which each update depends on all before: what a standby lacks of the state shows.
fn settings_with_state() -> Settings {
    let mut settings = settings();
    let hyperparameters = settings.optimizer.hyperparameters.as_mut().expect("they are given");
    hyperparameters.momentum = 0.5;
    settings
}

/// The parameters of all ranks at the end of a job in which hubs are lost and others join at random; if `disturbs` is not set, of
/// one in which nothing happens. Counts how often a hub takes over that has joined, how often one is lost before it has all
/// chunks, and how often another joins after that.
fn with_hubs_that_join(seed: u64, disturbs: bool, counts: &mut [u32; 3]) -> Vec<Vec<f32>> {
    let [serving, standby] = [Role::Serves { has_standby: true }, Role::StandsBy]
        .map(|role| shard_of(role, settings_with_state()));
    let mut job = Job::with_standby(serving, standby, seed);
    let (mut is_ready, mut was_lost_early, mut acts) = (true, false, 0);
    while !job.is_done() {
        job.act(disturbs && acts < 60_000);
        job.end_sums();
        is_ready |= job.is_standby_ready();
        acts += 1;
        assert!(acts < 2_000_000, "seed {seed}: the job is stuck");
        if !disturbs || job.has_finished() || acts > 60_000 || job.below(1500) > 0 {
            continue;
        }
        match (job.standby, job.below(2)) {
            (None, _) => {
                job.join(shard_of(Role::StandsBy, settings_with_state()));
                is_ready = false;
                counts[2] += u32::from(std::mem::take(&mut was_lost_early));
            }
            (Some(_), 0) if is_ready => {
                counts[0] += u32::from(job.standby > Some(1));
                job.lose(job.serving);
            }
            (Some(standby), _) => {
                was_lost_early = !is_ready;
                counts[1] += u32::from(was_lost_early);
                job.lose(standby);
            }
        }
    }
    job.values().map(|(_, values)| values.to_vec()).collect()
}

#[test]
fn hubs_that_join_and_are_lost_again_and_again_change_no_number() {
    let mut counts = [0; 3];
    let undisturbed = with_hubs_that_join(0, false, &mut counts);
    assert!(undisturbed.iter().all(|values| *values == undisturbed[0]));
    for seed in 0..SEEDS {
        let values = with_hubs_that_join(seed, true, &mut counts);
        assert_eq!(values, undisturbed, "seed {seed}");
    }
    eprintln!("taken over by one that joined, lost before it had all, another after that: {counts:?}");
    assert!(counts.iter().all(|&times| times > 50), "{counts:?}");
}

#[test]
fn optimizer_state_to_start_from_reaches_the_standby_too() {
    let run = |losses: bool| {
        let [serving, standby] = [Role::Serves { has_standby: true }, Role::StandsBy]
            .map(|role| shard_of(role, settings_with_state()));
        let mut job = Job::with_standby(serving, standby, 5);
        for chunk in 0..CHUNKS {
            let payload = [State::head(7).to_vec(), wire(&vec![8.0; elements(chunk)])].concat();
            let state = header(Operation::InitialiseState, chunk, 0, &payload);
            take(&mut job.shards[0], 0, &state, &payload).unwrap();
            // Rank 0 has its answer before it goes on.
            job.shards[0].answer_begun(0, chunk);
        }
        job.shards[0].resume(0);
        let mut acts = 0;
        while !job.is_done() {
            job.act(false);
            acts += 1;
            if losses && acts == 2_000 {
                job.lose(0);
            }
        }
        assert!(acts > 2_000);
        job.values().map(|(_, values)| values.to_vec()).collect::<Vec<_>>()
    };
    let undisturbed = run(false);
    assert_eq!(run(true), undisturbed);
    assert_ne!(with_hubs_that_join(0, false, &mut [0; 3]), undisturbed, "the state makes a difference");
}

#[test]
fn each_of_the_two_hubs_takes_from_the_other_only_what_it_has_to_say() {
    let [mut serving, mut standby] = pair();
    let payload = wire(&[1.0; 256]);
    let refused =
        |shard: &mut Shard, header: &Header, payload: &[u8]| take(shard, WORKERS, header, payload).is_err();
    let sum = header(Operation::Push, 0, 0, &payload);
    assert!(refused(&mut standby, &sum, &payload), "the chunk has not begun");
    let begin = header(Operation::Initialise, 0, 0, &payload);
    for operation in [Operation::PushPull, Operation::Applied, Operation::Total, Operation::Pull] {
        assert!(refused(&mut standby, &header(operation, 0, 0, &payload), &payload), "{operation:?}");
    }
    take(&mut standby, WORKERS, &begin, &payload).unwrap();
    take(&mut standby, WORKERS, &sum, &payload).unwrap();
    assert!(
        refused(&mut standby, &header(Operation::Push, 0, 7, &payload), &payload),
        "a step that is not due"
    );
    for operation in [Operation::Push, Operation::PushPull, Operation::Initialise, Operation::Leave] {
        assert!(refused(&mut serving, &header(operation, 0, 0, &payload), &payload), "{operation:?}");
    }
    let ahead = Header { step: 3, ..Header::bare(Operation::Applied) };
    assert!(refused(&mut serving, &ahead, &[]), "an acknowledgement of a version that nobody has");
}

#[test]
fn a_worker_that_is_ahead_may_have_made_the_steps_with_the_standby() {
    let [mut serving, _] = pair();
    let payload = wire(&[1.0; 256]);
    take(&mut serving, 0, &header(Operation::Initialise, 0, 0, &payload), &payload).unwrap();
    let ahead = take(&mut serving, 1, &header(Operation::PushPull, 0, 3, &payload), &payload);
    let fault = ahead.unwrap_err();
    assert!(fault.is_ahead() && serving.has_standby(), "{fault:?}");
}
