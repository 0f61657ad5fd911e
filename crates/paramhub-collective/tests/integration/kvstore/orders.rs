//! Gradients that become ready in different orders at different ranks, as those of a net's branches do: these
//! designs must keep the order that the naive one (`communicators/naive.rs`) loses. Calls are checked,
//! so that an error names a wrong order.

use super::exercise::disorder;
use super::team::{DESIGNS, stores};

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
