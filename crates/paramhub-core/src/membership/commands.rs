//! The commands for one hub: repeated until the hub acknowledges them.

use std::collections::VecDeque;

use crate::service::{ErrorCode, ServiceError, refusal};

/// Bytes of commands in one answer that has more than one command. A hub takes the rest with its next poll.
const ANSWER_BYTES: usize = 16 << 20;

/// The most commands that a hub can have taken from an earlier manager.
const ACKNOWLEDGED_MAX: u64 = 1 << 48;

/// The commands that a hub has not yet acknowledged, numbered from 1, each as the bytes `C` that go to the
/// hub.
#[derive(Clone, Debug)]
pub struct CommandQueue<C> {
    commands: VecDeque<(u64, C)>,
    newest: u64,
    /// `true` until a hub that knows commands of an earlier manager has called.
    is_restored: bool,
}

impl<C> Default for CommandQueue<C> {
    fn default() -> Self {
        CommandQueue { commands: VecDeque::new(), newest: 0, is_restored: false }
    }
}

impl<C: AsRef<[u8]> + Clone + PartialEq> CommandQueue<C> {
    /// A queue for a hub that has had commands of an earlier manager. They are lost, but for those that the hub has
    /// taken; the numbers of further ones follow those.
    pub fn restored() -> CommandQueue<C> {
        CommandQueue { is_restored: true, ..CommandQueue::default() }
    }

    /// Appends a command.
    pub fn push(&mut self, command: C) {
        self.newest += 1;
        self.commands.push_back((self.newest, command));
    }

    /// Returns whether this command waits already.
    pub fn has(&self, command: &C) -> bool {
        self.commands.iter().any(|(_, waiting)| waiting == command)
    }

    /// Forgets the commands up to `acknowledged`.
    ///
    /// # Errors
    /// If there has been no such command.
    pub fn acknowledge(&mut self, acknowledged: u64) -> Result<(), ServiceError> {
        if self.is_restored && acknowledged <= ACKNOWLEDGED_MAX {
            self.is_restored = false;
            self.newest += acknowledged;
            self.commands.iter_mut().for_each(|(sequence, _)| *sequence += acknowledged);
        }
        let newest = self.newest;
        if acknowledged > newest {
            let message =
                format!("command {acknowledged} cannot be acknowledged: the newest command is {newest}");
            return Err(refusal(ErrorCode::BadRequest, message));
        }
        while self.commands.front().is_some_and(|(sequence, _)| *sequence <= acknowledged) {
            self.commands.pop_front();
        }
        Ok(())
    }

    /// The oldest commands that wait, with their numbers, as many as fit into one answer.
    pub fn waiting(&self) -> Vec<(u64, C)> {
        let mut bytes = 0;
        let fits = |(_, command): &&(u64, C)| {
            let length = command.as_ref().len();
            bytes += length;
            bytes <= ANSWER_BYTES || bytes == length
        };
        self.commands.iter().take_while(fits).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequences(queue: &CommandQueue<Vec<u8>>) -> Vec<u64> {
        queue.waiting().iter().map(|(sequence, _)| *sequence).collect()
    }

    #[test]
    fn commands_are_repeated_until_they_are_acknowledged() {
        let mut queue = CommandQueue::default();
        (0..3).for_each(|_| queue.push(b"stop".to_vec()));
        queue.acknowledge(0).unwrap();
        assert_eq!(sequences(&queue), [1, 2, 3]);
        queue.acknowledge(2).unwrap();
        assert_eq!(sequences(&queue), [3]);
        queue.acknowledge(1).unwrap();
        assert_eq!(sequences(&queue), [3]);
        assert_eq!(queue.acknowledge(4).unwrap_err().code, ErrorCode::BadRequest);
        assert!(queue.has(&b"stop".to_vec()) && !queue.has(&b"go".to_vec()));
    }

    #[test]
    fn the_commands_of_a_restarted_manager_follow_those_that_the_hub_has_taken() {
        let mut queue = CommandQueue::restored();
        queue.push(b"report".to_vec());
        queue.acknowledge(7).unwrap();
        queue.push(b"stop".to_vec());
        assert_eq!(sequences(&queue), [8, 9]);
        queue.acknowledge(8).unwrap();
        assert_eq!(sequences(&queue), [9]);
        assert_eq!(queue.acknowledge(10).unwrap_err().code, ErrorCode::BadRequest);
    }

    #[test]
    fn an_answer_is_bounded_but_never_empty_while_commands_wait() {
        let mut queue = CommandQueue::default();
        [ANSWER_BYTES + 1, 10, 10, ANSWER_BYTES].into_iter().for_each(|bytes| queue.push(vec![b' '; bytes]));
        assert_eq!(queue.waiting().len(), 1);
        queue.acknowledge(1).unwrap();
        assert_eq!(queue.waiting().len(), 2);
    }
}
