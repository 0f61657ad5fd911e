//! What can happen to a hub's jobs.

use paramhub_core::service::{CauseKind, StopWhen};
use proptest::prelude::*;

/// What happens next. A number that points at a job counts modulo those that there have been.
#[derive(Clone, Debug)]
pub(super) enum Action {
    Plan {
        routes: u16,
        continues: bool,
        writes: bool,
        resumes: bool,
    },
    /// A checkpoint that is being read is read, or cannot be.
    Loaded {
        job: usize,
        well: bool,
    },
    /// A core has allocated a route, or could not.
    Opened {
        job: usize,
        fits: bool,
    },
    /// Streams of a job are admitted: the next, or all.
    Connect {
        job: usize,
        all: bool,
    },
    /// A neighbour leaves by the next port, or all leave.
    Leave {
        job: usize,
        all: bool,
    },
    /// A core finds a fault; without a cause a silence.
    Fault {
        job: usize,
        cause: Option<CauseKind>,
    },
    Panic {
        job: usize,
    },
    /// A wait has reached the job's limit.
    Expire {
        job: usize,
    },
    /// A rank is silent, late, moves and keeps others waiting.
    Notice {
        job: usize,
    },
    Link {
        job: usize,
    },
    CannotLink {
        job: usize,
    },
    LoseSites {
        job: usize,
    },
    Stop {
        job: usize,
        when: StopWhen,
    },
    /// A checkpoint writer answers.
    Answer {
        job: usize,
    },
    /// A core has freed a route.
    Close {
        job: usize,
    },
    Interface {
        number: u16,
        down: bool,
    },
    /// The streams of a job continue over an interface that works.
    Resume {
        job: usize,
    },
    /// The manager is out of reach, or is reached again.
    Manager {
        is_lost: bool,
    },
    Wait {
        ms: u64,
    },
    ShutDown,
}

pub(super) fn action() -> impl Strategy<Value = Action> {
    let job = || 0usize..4;
    let mostly = || prop_oneof![6 => Just(true), 1 => Just(false)];
    let rarely = || prop_oneof![1 => Just(true), 3 => Just(false)];
    let routes = prop_oneof![1 => Just(0u16), 4 => Just(1u16), 4 => Just(2u16)];
    let cause = prop_oneof![
        Just(None),
        Just(Some(CauseKind::Known)),
        Just(Some(CauseKind::PeerLost)),
        Just(Some(CauseKind::GaveUp))
    ];
    let when = prop_oneof![Just(StopWhen::Now), Just(StopWhen::WorkersEnding), Just(StopWhen::WorkersEnded)];
    prop_oneof![
        8 => (routes, any::<bool>(), any::<bool>(), rarely()).prop_map(|(routes, continues, writes, resumes)| {
            Action::Plan { routes, continues, writes, resumes }
        }),
        6 => (job(), mostly()).prop_map(|(job, well)| Action::Loaded { job, well }),
        16 => (job(), mostly()).prop_map(|(job, fits)| Action::Opened { job, fits }),
        10 => (job(), mostly()).prop_map(|(job, all)| Action::Connect { job, all }),
        8 => (job(), any::<bool>()).prop_map(|(job, all)| Action::Leave { job, all }),
        2 => (job(), cause).prop_map(|(job, cause)| Action::Fault { job, cause }),
        1 => job().prop_map(|job| Action::Panic { job }),
        1 => job().prop_map(|job| Action::Expire { job }),
        2 => job().prop_map(|job| Action::Notice { job }),
        2 => job().prop_map(|job| Action::Link { job }),
        1 => job().prop_map(|job| Action::CannotLink { job }),
        1 => job().prop_map(|job| Action::LoseSites { job }),
        4 => (job(), when).prop_map(|(job, when)| Action::Stop { job, when }),
        5 => job().prop_map(|job| Action::Answer { job }),
        10 => job().prop_map(|job| Action::Close { job }),
        3 => (0u16..2, any::<bool>()).prop_map(|(number, down)| Action::Interface { number, down }),
        3 => job().prop_map(|job| Action::Resume { job }),
        2 => any::<bool>().prop_map(|is_lost| Action::Manager { is_lost }),
        6 => (0u64..6000).prop_map(|ms| Action::Wait { ms }),
        1 => Just(Action::ShutDown),
    ]
}
