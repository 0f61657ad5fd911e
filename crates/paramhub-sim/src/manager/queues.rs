//! The commands that wait for each hub, and the polls that wait for commands.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use paramhub_core::membership::CommandQueue;
use paramhub_core::service::{HubCommand, HubRegistered, NumberedCommand, ServiceError};

use crate::network::StreamId;

/// A command in place of its JSON: it is repeated, and compared with others, as a whole.
#[derive(Clone)]
struct QueuedCommand(Arc<HubCommand>);

/// The commands of every hub, by the hub's number.
#[derive(Default)]
pub(super) struct HubQueues {
    queues: BTreeMap<u32, CommandQueue<QueuedCommand>>,
    /// The polls that wait for commands.
    polls: Vec<WaitingPoll>,
    /// The hubs whose polls need not wait any longer.
    changed: BTreeSet<u32>,
}

/// A poll that waits for commands.
pub(super) struct WaitingPoll {
    pub(super) stream: StreamId,
    pub(super) hub: HubRegistered,
    pub(super) acknowledged: u64,
}

impl AsRef<[u8]> for QueuedCommand {
    /// Commands of one small job fit into one answer.
    fn as_ref(&self) -> &[u8] {
        &[]
    }
}

impl PartialEq for QueuedCommand {
    fn eq(&self, other: &QueuedCommand) -> bool {
        format!("{:?}", self.0) == format!("{:?}", other.0)
    }
}

impl HubQueues {
    /// Begins to keep commands for a hub.
    pub(super) fn add(&mut self, hub: u32) {
        self.queues.insert(hub, CommandQueue::default());
    }

    /// Begins to keep commands for a hub that has had commands of an earlier manager.
    pub(super) fn restore(&mut self, hub: u32) {
        self.queues.insert(hub, CommandQueue::restored());
    }

    /// Forgets a hub's commands; its polls are to be answered.
    pub(super) fn remove(&mut self, hub: u32) {
        self.queues.remove(&hub);
        self.changed.insert(hub);
    }

    /// Queues a command. A hub that is gone gets none.
    pub(super) fn push(&mut self, hub: u32, command: HubCommand, unless_queued: bool) {
        let Some(queue) = self.queues.get_mut(&hub) else { return };
        let command = QueuedCommand(Arc::new(command));
        if !(unless_queued && queue.has(&command)) {
            queue.push(command);
            self.changed.insert(hub);
        }
    }

    /// Forgets the commands that a hub has acknowledged, and returns those that wait.
    pub(super) fn poll(&mut self, hub: u32, acknowledged: u64) -> Result<Vec<NumberedCommand>, ServiceError> {
        let queue = self.queues.get_mut(&hub).expect("commands are kept for every hub that has joined");
        queue.acknowledge(acknowledged)?;
        let numbered = |(sequence, command): (u64, QueuedCommand)| NumberedCommand {
            sequence,
            command: (*command.0).clone(),
        };
        Ok(queue.waiting().into_iter().map(numbered).collect())
    }

    /// Lets a poll wait.
    pub(super) fn wait(&mut self, poll: WaitingPoll) {
        self.polls.push(poll);
    }

    /// Takes a poll that waits.
    pub(super) fn take(&mut self, stream: StreamId) -> Option<WaitingPoll> {
        let index = self.polls.iter().position(|poll| poll.stream == stream)?;
        Some(self.polls.remove(index))
    }

    /// Takes the polls for which something has changed.
    pub(super) fn take_changed(&mut self) -> Vec<WaitingPoll> {
        let changed = std::mem::take(&mut self.changed);
        self.polls.extract_if(.., |poll| changed.contains(&poll.hub.hub)).collect()
    }
}
