//! The mesh communicator meets the requirements on all communicators.

use paramhub_collective::communicator::{Communicator, MeshCommunicator};
use paramhub_core::codec::Dtype;

use super::exercise::{duplicates, exercise, misused};
use super::group::at_all;

/// Runs `work` at every rank; each rank leaves after its work.
fn native(size: u32, work: impl Fn(&MeshCommunicator) + Sync) {
    at_all(
        size,
        |config| config,
        |native| {
            work(&native);
            native.leave().unwrap();
        },
    );
}

#[test]
fn every_rank_gets_every_collective_s_result_whatever_the_world_s_size() {
    for size in 1..=5 {
        native(size, |communicator| exercise(communicator));
    }
}

#[test]
fn duplicates_have_orders_of_their_own() {
    native(3, |first| duplicates(first));
}

#[test]
fn blocks_that_do_not_fit_are_refused_before_anything_is_sent() {
    native(2, |communicator| misused(communicator));
}

#[test]
fn an_aborted_communicator_gives_all_ranks_the_reason() {
    let messages = at_all(
        3,
        |config| config,
        |communicator| {
            if communicator.rank() == 1 {
                communicator.abort("the loss is not a number");
            }
            let mut values = vec![0; 4000];
            let outcome = (0..1000).find_map(|_| communicator.allreduce("g", &mut values, Dtype::F32).err());
            outcome.expect("it ends").to_string()
        },
    );
    // The rank that receives it first may pass it on to the other.
    for rank in [0, 2] {
        let messages = &messages[rank];
        assert!(messages.contains("ended the mesh: the loss is not a number"), "{messages}");
    }
}
