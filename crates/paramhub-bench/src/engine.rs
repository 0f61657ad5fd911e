//! `paramhub bench engine`: the cost of the dependency engine, measured with operations that do nothing.
//!
//! A time is measured from the first push until a wait for all operations returns, and divided by the number
//! of operations. Graphs and numbers of threads take turns. For comparison closures go through a channel to
//! one thread, which is the least that any engine does.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use clap::Args;
use comfy_table::{Table, presets};
use paramhub_collective::engine::{Engine, EngineConfig, Kind, OperationBuilder, Variable};
use paramhub_harness::exchange::report::write_json;
use paramhub_harness::exchange::statistics::{quantile, sorted};
use paramhub_harness::exchange::{check_destination, count, usage};
use paramhub_harness::{ExitCode, Usage};
use serde::Serialize;

use super::rounds::order;

/// Variables that operations use in turn in graphs with many.
const VARIABLES: usize = 512;
/// Operations that one mutation releases and for which another waits.
const FAN: usize = 64;
/// Reads for each mutation.
const READERS: usize = 1000;
const PUSHERS: usize = 2;

/// Run graphs of operations that do nothing through the dependency engine
#[derive(Args)]
pub struct EngineFlags {
    /// Operations of one round
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    operations: usize,
    /// Rounds, of which the medians are shown; graphs take turns
    #[arg(long, value_name = "N", default_value_t = 9)]
    rounds: u32,
    /// Numbers of compute threads to compare
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 2])]
    threads: Vec<usize>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Written with `--json`. Nanoseconds are those of one operation.
#[derive(Serialize)]
struct Results {
    machine: String,
    processors: usize,
    operations: usize,
    rounds: u32,
    costs: Vec<Cost>,
    version: &'static str,
}

#[derive(Serialize)]
struct Cost {
    graph: &'static str,
    /// Threads of the compute pool.
    threads: usize,
    nanoseconds: f64,
    p10: f64,
    p90: f64,
    operations_per_second: f64,
}

/// Pushes operations in one pattern.
struct Graph {
    name: &'static str,
    push: fn(&Engine, usize),
    /// `true` if each operation begins only after a wait for the last. Most of its time is then that of
    /// waking up.
    waits: bool,
}

const GRAPHS: [Graph; 6] = [
    Graph { name: "chain: read a, mutate b", push: chain, waits: false },
    Graph { name: "independent: mutate two of 512", push: independent, waits: false },
    Graph { name: "independent, two threads push", push: two_pushers, waits: false },
    Graph { name: "fan-out to 64, fan-in", push: fan, waits: false },
    Graph { name: "one mutation, 999 readers", push: readers, waits: false },
    Graph { name: "round trip: push and wait", push: round_trip, waits: true },
];
const CHANNEL: &str = "no engine: a channel to one thread";
/// Round trips take longer, so fewer are made: one in so many.
const ROUND_TRIPS: usize = 10;

pub(super) fn engine(flags: &EngineFlags) -> anyhow::Result<ExitCode> {
    check_destination("--json", flags.json.as_deref())?;
    if flags.operations < READERS || flags.rounds == 0 {
        return Err(Usage(format!("expected --operations from {READERS} and --rounds from 1 on")).into());
    }
    for &threads in &flags.threads {
        if let Err(error) = Engine::new(config(threads)) {
            return Err(Usage(format!("--threads {threads}: {error}")).into());
        }
    }
    let results = measure(flags)?;
    println!("{}", table(&results));
    println!(
        "nanoseconds an operation, from first push to last end: medians of {} of {} in turns, with p10 and p90; {}, {}",
        count(flags.rounds as usize, "round"),
        count(flags.operations, "operation"),
        results.machine,
        count(results.processors, "processor"),
    );
    flags.json.as_deref().map_or(Ok(()), |path| write_json(&results, path))?;
    Ok(ExitCode::SUCCESS)
}

fn measure(flags: &EngineFlags) -> anyhow::Result<Results> {
    let cases: Vec<_> =
        GRAPHS.iter().flat_map(|graph| flags.threads.iter().map(move |&threads| (graph, threads))).collect();
    let mut times = vec![Vec::new(); cases.len() + 1];
    for round in 0..flags.rounds {
        for number in order(round, times.len()) {
            let nanoseconds = match cases.get(number) {
                Some((graph, threads)) => run(graph, *threads, flags.operations)?,
                None => run_channel(flags.operations),
            };
            times[number].push(nanoseconds);
        }
    }
    let names = cases.iter().map(|(graph, threads)| (graph.name, *threads)).chain([(CHANNEL, 1)]);
    let costs = names.zip(times).map(|((graph, threads), times)| {
        let times = sorted(times);
        let [nanoseconds, p10, p90] = [0.5, 0.1, 0.9].map(|share| quantile(&times, share));
        Cost { graph, threads, nanoseconds, p10, p90, operations_per_second: 1e9 / nanoseconds }
    });
    Ok(Results {
        machine: usage::processor().unwrap_or_else(|| "unknown processor".into()),
        processors: thread::available_parallelism().map_or(1, usize::from),
        operations: flags.operations,
        rounds: flags.rounds,
        costs: costs.collect(),
        version: env!("CARGO_PKG_VERSION"),
    })
}

/// Nanoseconds per operation.
fn run(graph: &Graph, threads: usize, operations: usize) -> anyhow::Result<f64> {
    let operations = if graph.waits { operations / ROUND_TRIPS } else { operations };
    let engine = Engine::new(config(threads))?;
    // Here threads start and memory is allocated.
    (graph.push)(&engine, operations.min(VARIABLES));
    engine.wait_for_all()?;
    let started = Instant::now();
    (graph.push)(&engine, operations);
    engine.wait_for_all()?;
    Ok(started.elapsed().as_secs_f64() * 1e9 / operations as f64)
}

fn config(compute_threads: usize) -> EngineConfig {
    EngineConfig { compute_threads, ..EngineConfig::default() }
}

fn run_channel(operations: usize) -> f64 {
    let (send, received) = mpsc::channel::<Box<dyn FnOnce() -> usize + Send>>();
    let runner = thread::spawn(move || received.iter().map(|work| work()).sum::<usize>());
    let started = Instant::now();
    for operation in 0..operations {
        send.send(Box::new(move || usize::from(operation < usize::MAX))).expect("it receives");
    }
    drop(send);
    assert_eq!(runner.join().expect("it cannot panic"), operations);
    started.elapsed().as_secs_f64() * 1e9 / operations as f64
}

fn chain(engine: &Engine, operations: usize) {
    let [a, b] = [(); 2].map(|()| engine.variable());
    (0..operations).for_each(|_| push(operation(engine).reads([&a]).mutates([&b])));
}

fn independent(engine: &Engine, operations: usize) {
    let variables = many(engine, VARIABLES);
    for number in 0..operations {
        let pair = 2 * number % VARIABLES;
        push(operation(engine).mutates(&variables[pair..pair + 2]));
    }
}

fn two_pushers(engine: &Engine, operations: usize) {
    thread::scope(|scope| {
        for pusher in 0..PUSHERS {
            let share = operations / PUSHERS + usize::from(pusher < operations % PUSHERS);
            scope.spawn(move || independent(engine, share));
        }
    });
}

fn fan(engine: &Engine, operations: usize) {
    let (root, variables) = (engine.variable(), many(engine, FAN));
    for number in 0..operations {
        match number % (FAN + 1) {
            FAN => push(operation(engine).reads(&variables).mutates([&root])),
            leaf => push(operation(engine).reads([&root]).mutates([&variables[leaf]])),
        }
    }
}

fn readers(engine: &Engine, operations: usize) {
    let (shared, variables) = (engine.variable(), many(engine, VARIABLES));
    for number in 0..operations {
        let own = &variables[number % VARIABLES];
        match number % READERS {
            0 => push(operation(engine).mutates([&shared, own])),
            _ => push(operation(engine).reads([&shared]).mutates([own])),
        }
    }
}

fn round_trip(engine: &Engine, operations: usize) {
    let [a, b] = [(); 2].map(|()| engine.variable());
    for _ in 0..operations {
        push(operation(engine).reads([&a]).mutates([&b]));
        engine.wait_for_var(&b).expect("nothing fails");
    }
}

fn many(engine: &Engine, count: usize) -> Vec<Variable> {
    (0..count).map(|_| engine.variable()).collect()
}

fn operation(engine: &Engine) -> OperationBuilder<'_> {
    engine.operation("nothing", Kind::Compute)
}

fn push(operation: OperationBuilder<'_>) {
    operation.push(|| Ok::<(), Infallible>(())).expect("the engine is open");
}

fn table(results: &Results) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["graph", "compute threads", "ns", "p10", "p90", "M operations/s"]);
    for cost in &results.costs {
        let times = [cost.nanoseconds, cost.p10, cost.p90].map(|nanoseconds| format!("{nanoseconds:.0}"));
        let speed = format!("{:.2}", cost.operations_per_second / 1e6);
        table.add_row(
            [cost.graph.to_owned(), cost.threads.to_string()].into_iter().chain(times).chain([speed]),
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_graph_pushes_all_its_operations_and_they_end() {
        for graph in &GRAPHS {
            for operations in [1, 63, 1001] {
                let engine = Engine::new(EngineConfig::default()).unwrap();
                (graph.push)(&engine, operations);
                engine.wait_for_all().unwrap();
                assert_eq!(engine.pushed(), operations as u64, "{}", graph.name);
            }
        }
    }
}
