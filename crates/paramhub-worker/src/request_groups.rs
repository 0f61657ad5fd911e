//! The requests that one call of the program has made for several keys: they end together.

use crate::handle::Ticket;

/// The number of a group in [`RequestGroups`].
pub(crate) type GroupId = u32;

/// The groups under way. A request of one key is a group as well. There are at most as many as keys, because a key has one
/// request at a time.
#[derive(Default)]
pub(crate) struct RequestGroups {
    groups: Vec<Option<Group>>,
    /// Numbers below `groups.len()` that no group has.
    free: Vec<GroupId>,
}

struct Group {
    ticket: Ticket,
    /// The number of its keys, and of those that have not ended.
    keys: u32,
    left: u32,
}

/// A group of which every key has ended.
pub(crate) struct EndedGroup {
    pub(crate) ticket: Ticket,
    pub(crate) keys: u32,
}

impl RequestGroups {
    /// Adds a group of at least one key.
    pub(crate) fn begin(&mut self, keys: usize, ticket: Ticket) -> GroupId {
        let keys = u32::try_from(keys).expect("keys are numbered in u32");
        let group = Some(Group { ticket, keys, left: keys });
        if let Some(free) = self.free.pop() {
            self.groups[free as usize] = group;
            return free;
        }
        self.groups.push(group);
        self.groups.len() as GroupId - 1
    }

    /// Ends one key of a group. Returns the group with its last key.
    pub(crate) fn end_key(&mut self, id: GroupId) -> Option<EndedGroup> {
        let place = &mut self.groups[id as usize];
        let group = place.as_mut().expect("a key under way belongs to a group");
        group.left -= 1;
        if group.left > 0 {
            return None;
        }
        let Group { ticket, keys, .. } = place.take()?;
        self.free.push(id);
        Some(EndedGroup { ticket, keys })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::error::{WorkerError, WorkerId};
    use crate::handle::{RequestCompletion, new_request};

    fn request() -> (Ticket, Arc<RequestCompletion>) {
        new_request(true, WorkerError::Left { who: WorkerId { job: "j".into(), rank: 0 } })
    }

    #[test]
    fn a_group_ends_with_its_last_key_and_its_number_is_used_again() {
        let mut groups = RequestGroups::default();
        let [first, second, third] = [request(), request(), request()];
        let of_three = groups.begin(3, first.0);
        let of_one = groups.begin(1, second.0);
        assert!(groups.end_key(of_three).is_none());
        let ended = groups.end_key(of_one).unwrap();
        assert!(ended.ticket.is_of(&second.1));
        assert_eq!(ended.keys, 1);
        assert_eq!(groups.begin(1, third.0), of_one);
        assert!(groups.end_key(of_three).is_none());
        let ended = groups.end_key(of_three).unwrap();
        assert!(ended.ticket.is_of(&first.1));
        assert_eq!((ended.keys, groups.groups.len()), (3, 2));
    }
}
