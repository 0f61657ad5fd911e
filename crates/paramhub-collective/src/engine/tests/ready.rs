//! The order in which ready operations are taken.

use std::time::Duration;

use super::super::ready::ReadyQueue;

#[test]
fn the_highest_priority_comes_first_and_the_oldest_among_equals() {
    let queue = ReadyQueue::new(Duration::ZERO);
    let entries = [(0, 'c'), (-1, 'f'), (7, 'a'), (0, 'd')];
    queue.put(entries).unwrap();
    queue.put([(7, 'b'), (0, 'e'), (i32::MIN, 'g')]).unwrap();
    assert!(!queue.is_empty());
    let taken: String = (0..7).map(|_| queue.take().unwrap()).collect();
    assert_eq!(taken, "abcdefg");
    assert!(queue.is_empty());
}

#[test]
fn a_closed_queue_gives_back_what_was_not_taken_and_takes_nothing() {
    let queue = ReadyQueue::new(Duration::ZERO);
    queue.put([(1, 'b'), (2, 'a')]).unwrap();
    assert_eq!(queue.close(), ['a', 'b']);
    assert_eq!(queue.put([(0, 'c')]), Err(vec!['c']));
    assert_eq!(queue.take(), None);
}
