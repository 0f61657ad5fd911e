//! Every short sequence of entries and exits of a variable's queue.

use super::super::queue::{Access, Queue};

/// The length of the longest sequence.
const STEPS: u32 = 9;

/// The specification of the queue: the operations that have the variable are a prefix of all that entered and
/// have not left, either one mutation or the reads up to the first mutation.
fn having(present: &[(usize, Access)]) -> Vec<usize> {
    match present.first() {
        Some(&(first, Access::Mutate)) => vec![first],
        _ => present.iter().take_while(|(_, access)| *access == Access::Read).map(|&(one, _)| one).collect(),
    }
}

/// Enters a reader or a mutator, or lets an operation that has the variable leave.
fn explore(done: &mut Vec<usize>) {
    let mut queue = Queue::new();
    let (mut present, mut given, mut entered): (Vec<(usize, Access)>, Vec<usize>, usize) =
        (vec![], vec![], 0);
    for &step in done.iter() {
        match step {
            0 | 1 => {
                let access = [Access::Read, Access::Mutate][step];
                present.push((entered, access));
                if queue.enter(access, || entered) {
                    given.push(entered);
                }
                entered += 1;
            }
            _ => {
                let leaving = given.remove(step - 2);
                let at = present.iter().position(|&(one, _)| one == leaving).unwrap();
                let (_, access) = present.remove(at);
                queue.leave(access, |next| given.push(next));
            }
        }
    }
    assert_eq!(given, having(&present), "after {done:?}");
    assert_eq!(queue.is_empty(), given.len() == present.len(), "after {done:?}");
    if done.len() < STEPS as usize {
        for step in 0..2 + given.len() {
            done.push(step);
            explore(done);
            done.pop();
        }
    }
}

#[test]
fn every_sequence_gives_the_variable_to_readers_together_and_to_mutators_alone_in_order() {
    explore(&mut Vec::new());
}
