//! The order in which ready operations are taken.

use std::time::Duration;

use super::super::ready::ReadyPool;

#[test]
fn the_highest_priority_comes_first_and_the_oldest_among_equals() {
    let pool = ReadyPool::new(Duration::ZERO);
    let entries = [(0, 'c'), (-1, 'f'), (7, 'a'), (0, 'd')];
    pool.put(entries).unwrap();
    pool.put([(7, 'b'), (0, 'e'), (i32::MIN, 'g')]).unwrap();
    assert!(!pool.is_empty());
    let taken: String = (0..7).map(|_| pool.take().unwrap()).collect();
    assert_eq!(taken, "abcdefg");
    assert!(pool.is_empty());
}

#[test]
fn a_closed_pool_gives_back_what_was_not_taken_and_takes_nothing() {
    let pool = ReadyPool::new(Duration::ZERO);
    pool.put([(1, 'b'), (2, 'a')]).unwrap();
    assert_eq!(pool.close(), ['a', 'b']);
    assert_eq!(pool.put([(0, 'c')]), Err(vec!['c']));
    assert_eq!(pool.take(), None);
}
