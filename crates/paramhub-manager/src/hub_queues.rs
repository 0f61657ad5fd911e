//! The commands that wait for each hub, and the polls that wait for commands.

use std::collections::HashMap;

use axum::body::Bytes;
use paramhub_core::membership::CommandQueue;
use paramhub_core::service::{HubCommand, ServiceError};
use tokio::sync::watch;

/// The commands of every hub, by the hub's number. They are kept as JSON, because one plan can be megabytes
/// and may be sent repeatedly.
#[derive(Default)]
pub(crate) struct HubQueues {
    queues: HashMap<u32, HubQueue>,
}

struct HubQueue {
    commands: CommandQueue<Bytes>,
    /// Polls wait for this to change.
    changed: watch::Sender<()>,
}

/// The result of a poll.
pub(crate) struct WaitingCommands {
    /// The commands that wait, with their numbers.
    pub(crate) commands: Vec<(u64, Bytes)>,
    /// Changes when there are others, and closes when the hub is removed.
    pub(crate) more: watch::Receiver<()>,
}

impl HubQueues {
    /// Begins to keep commands for a hub.
    pub(crate) fn add(&mut self, hub: u32) {
        self.insert(hub, CommandQueue::default());
    }

    /// Begins to keep commands for a hub that has had commands of an earlier manager.
    pub(crate) fn restore(&mut self, hub: u32) {
        self.insert(hub, CommandQueue::restored());
    }

    fn insert(&mut self, hub: u32, commands: CommandQueue<Bytes>) {
        self.queues.insert(hub, HubQueue { commands, changed: watch::channel(()).0 });
    }

    /// Forgets a hub's commands, and wakes its polls at once.
    pub(crate) fn remove(&mut self, hub: u32) {
        self.queues.remove(&hub);
    }

    /// Queues a command. A hub that is gone gets none.
    pub(crate) fn push(&mut self, hub: u32, command: &HubCommand, unless_queued: bool) {
        let command = command_json(command);
        if !(unless_queued && self.queues.get(&hub).is_some_and(|queue| queue.commands.has(&command))) {
            self.push_json(hub, command);
        }
    }

    /// Does the same as [`HubQueues::push`], for a command that is JSON already.
    pub(crate) fn push_json(&mut self, hub: u32, command: Bytes) {
        if let Some(queue) = self.queues.get_mut(&hub) {
            queue.commands.push(command);
            queue.changed.send_replace(());
        }
    }

    /// Forgets the commands that a hub has acknowledged, and returns those that wait; `None` if the hub is gone.
    pub(crate) fn poll(
        &mut self,
        hub: u32,
        acknowledged: u64,
    ) -> Option<Result<WaitingCommands, ServiceError>> {
        let queue = self.queues.get_mut(&hub)?;
        let acknowledged = queue.commands.acknowledge(acknowledged);
        Some(acknowledged.map(|()| WaitingCommands {
            commands: queue.commands.waiting(),
            more: queue.changed.subscribe(),
        }))
    }
}

/// A command as JSON.
pub(crate) fn command_json(command: &HubCommand) -> Bytes {
    Bytes::from(serde_json::to_vec(command).expect("commands are plain data"))
}

/// The JSON of [`Commands`](paramhub_core::service::Commands), put together from commands that are JSON already.
pub(crate) fn commands_json(commands: &[(u64, Bytes)]) -> Vec<u8> {
    let bytes: usize = commands.iter().map(|(_, command)| command.len() + 64).sum();
    let mut json = Vec::with_capacity(bytes + 32);
    json.extend_from_slice(b"{\"commands\":[");
    for (index, (sequence, command)) in commands.iter().enumerate() {
        if index > 0 {
            json.push(b',');
        }
        json.extend_from_slice(format!("{{\"sequence\":{sequence},\"command\":").as_bytes());
        json.extend_from_slice(command);
        json.push(b'}');
    }
    json.extend_from_slice(b"]}");
    json
}

#[cfg(test)]
mod tests {
    use super::*;
    use paramhub_core::auth::Namespace;
    use paramhub_core::service::{Commands, StopWhen};

    fn stop() -> HubCommand {
        HubCommand::Stop { namespace: Namespace([0; 16]), reason: "r".into(), when: StopWhen::Now }
    }

    fn poll(queues: &mut HubQueues, acknowledged: u64) -> Vec<u64> {
        let commands = queues.poll(7, acknowledged).unwrap().unwrap().commands;
        let read: Commands = serde_json::from_slice(&commands_json(&commands)).unwrap();
        read.commands.iter().map(|command| command.sequence).collect()
    }

    #[test]
    fn a_hub_gets_its_commands_as_one_json_document() {
        let mut queues = HubQueues::default();
        assert!(queues.poll(7, 0).is_none());
        queues.push(7, &stop(), false);
        queues.add(7);
        assert_eq!(poll(&mut queues, 0), [] as [u64; 0], "a command to a hub that is not here is lost");
        let changed = queues.poll(7, 0).unwrap().unwrap().more;
        (0..3).for_each(|_| queues.push(7, &stop(), false));
        queues.push(7, &stop(), true);
        assert!(changed.has_changed().unwrap());
        assert_eq!(poll(&mut queues, 2), [3]);
        queues.remove(7);
        assert!(changed.has_changed().is_err(), "its polls end");
    }
}
