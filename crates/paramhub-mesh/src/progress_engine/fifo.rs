//! Many first-in-first-out queues by key, in one allocation that is reused.

use std::collections::HashMap;
use std::hash::Hash;

const END: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Queues<K, T> {
    /// The first and last node of each queue that is not empty.
    ends: HashMap<K, (u32, u32)>,
    nodes: Vec<Node<T>>,
    ready: Vec<u32>,
}

#[derive(Debug)]
struct Node<T> {
    value: Option<T>,
    next: u32,
}

impl<K: Copy + Eq + Hash, T> Queues<K, T> {
    pub(crate) fn new() -> Self {
        Queues { ends: HashMap::new(), nodes: Vec::new(), ready: Vec::new() }
    }

    pub(crate) fn push_back(&mut self, key: K, value: T) {
        let node = self.node(value);
        match self.ends.get_mut(&key) {
            Some((_, last)) => {
                self.nodes[*last as usize].next = node;
                *last = node;
            }
            None => {
                self.ends.insert(key, (node, node));
            }
        }
    }

    pub(crate) fn push_front(&mut self, key: K, value: T) {
        let node = self.node(value);
        match self.ends.get_mut(&key) {
            Some((first, _)) => {
                self.nodes[node as usize].next = *first;
                *first = node;
            }
            None => {
                self.ends.insert(key, (node, node));
            }
        }
    }

    pub(crate) fn has(&self, key: K) -> bool {
        self.ends.contains_key(&key)
    }

    pub(crate) fn pop_front(&mut self, key: K) -> Option<T> {
        let (first, last) = *self.ends.get(&key)?;
        let next = self.nodes[first as usize].next;
        if next == END {
            self.ends.remove(&key);
        } else {
            self.ends.insert(key, (next, last));
        }
        self.release(first)
    }

    /// Removes the first value for which `f` holds from `key`'s queue.
    pub(crate) fn remove(&mut self, key: K, f: impl Fn(&T) -> bool) -> Option<T> {
        let (first, last) = *self.ends.get(&key)?;
        let (mut before, mut node) = (END, first);
        while node != END {
            let next = self.nodes[node as usize].next;
            if self.nodes[node as usize].value.as_ref().is_some_and(&f) {
                match (before, next) {
                    (END, END) => {
                        self.ends.remove(&key);
                    }
                    (END, next) => {
                        self.ends.insert(key, (next, last));
                    }
                    (before, next) => {
                        self.nodes[before as usize].next = next;
                        self.ends.insert(key, (first, if next == END { before } else { last }));
                    }
                }
                return self.release(node);
            }
            (before, node) = (node, next);
        }
        None
    }

    /// All values, in no particular order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.nodes.iter().filter_map(|node| node.value.as_ref())
    }

    /// The number of values.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len() - self.ready.len()
    }

    fn node(&mut self, value: T) -> u32 {
        let node = Node { value: Some(value), next: END };
        match self.ready.pop() {
            Some(index) => {
                self.nodes[index as usize] = node;
                index
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        }
    }

    fn release(&mut self, node: u32) -> Option<T> {
        self.ready.push(node);
        self.nodes[node as usize].value.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn queues_behave_like_queues(actions in prop::collection::vec((0..4_u8, 0..3_usize, 0..8_u8), 0..200)) {
            let mut queues = Queues::new();
            let mut model = [const { VecDeque::new() }; 3];
            for (action, key, value) in actions {
                match action {
                    0 => { queues.push_back(key, value); model[key].push_back(value); }
                    1 => { queues.push_front(key, value); model[key].push_front(value); }
                    2 => prop_assert_eq!(queues.pop_front(key), model[key].pop_front()),
                    _ => {
                        let at = model[key].iter().position(|other| *other == value);
                        let expected = at.and_then(|at| model[key].remove(at));
                        prop_assert_eq!(queues.remove(key, |other| *other == value), expected);
                    }
                }
                prop_assert_eq!(queues.has(key), !model[key].is_empty());
                prop_assert_eq!(queues.len(), model.iter().map(VecDeque::len).sum::<usize>());
                let mut values: Vec<u8> = queues.values().copied().collect();
                let mut expected: Vec<u8> = model.iter().flatten().copied().collect();
                values.sort_unstable();
                expected.sort_unstable();
                prop_assert_eq!(values, expected);
            }
        }
    }
}
