//! Counts how often an operation allocates. It is a process of its own, for dhat counts all threads.

use std::convert::Infallible;

use paramhub_collective::engine::{Engine, EngineConfig, Kind, Variable};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const OPERATIONS: usize = 20_000;

fn run(engine: &Engine, variables: &[Variable]) {
    for number in 0..OPERATIONS {
        let pair = 2 * number % variables.len();
        let operation = engine.operation("count", Kind::Compute).reads([&variables[pair]]);
        let captured = [number as u64; 16];
        let work = move || {
            std::hint::black_box(captured);
            Ok::<(), Infallible>(())
        };
        operation.mutates([&variables[pair + 1]]).priority((number % 3) as i32).push(work).unwrap();
    }
    engine.wait_for_all().unwrap();
}

#[test]
fn an_operation_of_few_variables_is_one_allocation_with_all_that_its_closure_captures() {
    let _profiler = dhat::Profiler::builder().testing().build();
    let engine = Engine::new(EngineConfig::default()).unwrap();
    let variables: Vec<Variable> = (0..64).map(|_| engine.variable()).collect();
    // The first run lets queues grow to their size.
    run(&engine, &variables);
    let before = dhat::HeapStats::get().total_blocks;
    run(&engine, &variables);
    let blocks = dhat::HeapStats::get().total_blocks - before;
    let operations = OPERATIONS as u64;
    assert!((operations..operations + operations / 10).contains(&blocks), "{blocks} for {operations}");
}
