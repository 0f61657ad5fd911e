//! Gradients that are ready in other orders at other ranks, as branches of a net are: what mis-orders the naive design
//! (`tests/communicators/naive.rs`) must not disturb these. Calls are checked, so that a wrong order would be named.

use crate::exercise::disorder;
use crate::team::{DESIGNS, stores};

#[test]
fn ranks_whose_gradients_are_ready_in_other_orders_sum_what_belongs_together() {
    let seed = match std::env::var("PARAMHUB_TEST_SEED") {
        Ok(text) => text.parse().expect("PARAMHUB_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("PARAMHUB_TEST_SEED={seed}");
    for kind in DESIGNS {
        stores(kind, 3, |store| disorder(store, seed));
    }
}
