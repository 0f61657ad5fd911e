//! What can happen to a worker's job.

use proptest::prelude::*;

/// What happens next. A number that points at a stream counts modulo all streams, and points at its hub, too.
#[derive(Clone, Debug)]
pub(super) enum Action {
    Request,
    /// The hubs answer a request, or all.
    Answer {
        all: bool,
    },
    Leave {
        ms: u64,
    },
    GiveUp,
    Break {
        stream: usize,
        how: Break,
    },
    /// A hub stops to read, or reads again.
    Block {
        stream: usize,
        is_blocked: bool,
    },
    HubCloses {
        stream: usize,
    },
    HubDies {
        stream: usize,
    },
    HubFails {
        stream: usize,
    },
    HubSilent {
        stream: usize,
    },
    StreamSilent {
        stream: usize,
    },
    /// The attempts to open a broken stream again end.
    Reopen {
        stream: usize,
        attempt: Attempt,
    },
    Wait {
        ms: u64,
    },
}

/// When a stream is found to be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Break {
    Receiving,
    /// When the next frame is to be sent.
    Sending,
}

/// How the attempts to open a stream again end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    Opens,
    FindsJobEnded,
    Fails,
}

pub(super) fn action() -> impl Strategy<Value = Action> {
    let stream = || 0usize..6;
    let how = prop_oneof![Just(Break::Receiving), Just(Break::Sending)];
    let attempt =
        prop_oneof![6 => Just(Attempt::Opens), 1 => Just(Attempt::FindsJobEnded), 1 => Just(Attempt::Fails)];
    prop_oneof![
        12 => Just(Action::Request),
        12 => prop_oneof![3 => Just(true), 1 => Just(false)].prop_map(|all| Action::Answer { all }),
        3 => (0u64..4000).prop_map(|ms| Action::Leave { ms }),
        1 => Just(Action::GiveUp),
        8 => (stream(), how).prop_map(|(stream, how)| Action::Break { stream, how }),
        3 => (stream(), any::<bool>()).prop_map(|(stream, is_blocked)| Action::Block { stream, is_blocked }),
        3 => stream().prop_map(|stream| Action::HubCloses { stream }),
        1 => stream().prop_map(|stream| Action::HubDies { stream }),
        1 => stream().prop_map(|stream| Action::HubFails { stream }),
        1 => stream().prop_map(|stream| Action::HubSilent { stream }),
        2 => stream().prop_map(|stream| Action::StreamSilent { stream }),
        12 => (stream(), attempt).prop_map(|(stream, attempt)| Action::Reopen { stream, attempt }),
        4 => (0u64..1500).prop_map(|ms| Action::Wait { ms }),
        1 => (0u64..12_000).prop_map(|ms| Action::Wait { ms }),
    ]
}
