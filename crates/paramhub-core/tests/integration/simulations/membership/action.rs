//! The actions that can happen to a manager.

use paramhub_core::service::StopWhen;
use proptest::prelude::*;

/// The next action. Numbers that point at a job, a call or a hub count modulo those that there are.
#[derive(Clone, Debug)]
pub(super) enum Action {
    Create {
        workers: u32,
        hubs: Option<u32>,
        in_racks: bool,
    },
    Connect {
        job: usize,
        rank: u32,
        process: u8,
    },
    Init {
        job: usize,
        rank: u32,
        process: u8,
    },
    /// The settings of a call to InitService have been compared.
    Compared {
        call: usize,
        agree: bool,
    },
    /// The oldest placement that is being made is ready, or cannot be made.
    Placed {
        fits: bool,
    },
    HangUp {
        call: usize,
    },
    Leave {
        job: usize,
        rank: u32,
        process: u8,
        finished: bool,
    },
    /// A rank says that it has lost a hub of its job.
    LoseHub {
        job: usize,
        rank: u32,
        process: u8,
        hub: usize,
    },
    Stop {
        job: usize,
        when: StopWhen,
    },
    Probe,
    Join {
        address: u32,
        rack: usize,
    },
    /// A hub carries out its oldest command.
    Obey {
        hub: usize,
        well: bool,
    },
    /// A hub reports that one of its jobs has ended.
    End {
        hub: usize,
        finished: bool,
    },
    Depart {
        hub: usize,
        gone: bool,
    },
    /// A hub is heard no longer, or is heard again.
    Freeze {
        hub: usize,
    },
    Wait {
        ms: u64,
    },
    /// The manager is killed and started again.
    Restart,
}

pub(super) fn action() -> impl Strategy<Value = Action> {
    let job = || 0usize..3;
    let rank = || 0u32..3;
    // Nearly always the same process calls as a rank.
    let process = || prop_oneof![8 => Just(0u8), 1 => Just(1u8)];
    let mostly = || prop_oneof![6 => Just(true), 1 => Just(false)];
    let when = prop_oneof![Just(StopWhen::Now), Just(StopWhen::WorkersEnding), Just(StopWhen::WorkersEnded)];
    let hubs = prop_oneof![4 => Just(None), 1 => Just(Some(0)), 1 => Just(Some(2))];
    prop_oneof![
        3 => (1u32..4, hubs, any::<bool>())
            .prop_map(|(workers, hubs, in_racks)| Action::Create { workers, hubs, in_racks }),
        12 => (job(), rank(), process()).prop_map(|(job, rank, process)| Action::Connect { job, rank, process }),
        12 => (job(), rank(), process()).prop_map(|(job, rank, process)| Action::Init { job, rank, process }),
        6 => (0usize..4, mostly()).prop_map(|(call, agree)| Action::Compared { call, agree }),
        4 => mostly().prop_map(|fits| Action::Placed { fits }),
        2 => (0usize..6).prop_map(|call| Action::HangUp { call }),
        1 => (job(), rank(), process(), any::<bool>())
            .prop_map(|(job, rank, process, finished)| Action::Leave { job, rank, process, finished }),
        2 => (job(), rank(), process(), 0usize..2)
            .prop_map(|(job, rank, process, hub)| Action::LoseHub { job, rank, process, hub }),
        1 => (job(), when).prop_map(|(job, when)| Action::Stop { job, when }),
        1 => Just(Action::Probe),
        5 => (0u32..4, 0usize..3).prop_map(|(address, rack)| Action::Join { address, rack }),
        12 => (0usize..4, mostly()).prop_map(|(hub, well)| Action::Obey { hub, well }),
        3 => (0usize..4, any::<bool>()).prop_map(|(hub, finished)| Action::End { hub, finished }),
        1 => (0usize..4, any::<bool>()).prop_map(|(hub, gone)| Action::Depart { hub, gone }),
        2 => (0usize..4).prop_map(|hub| Action::Freeze { hub }),
        4 => (0u64..4000).prop_map(|ms| Action::Wait { ms }),
        1 => Just(Action::Restart),
    ]
}
