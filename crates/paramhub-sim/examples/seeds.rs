//! Runs the scenarios of many seeds, or shows one: `cargo run --release -p paramhub-sim --example seeds -- 0 1000000`, or
//! `-- 17` for everything that happens in one.

use std::process::ExitCode;

use paramhub_sim::{Scenario, explore, run};

fn main() -> ExitCode {
    let numbers: Option<Vec<u64>> = std::env::args().skip(1).map(|text| text.parse().ok()).collect();
    match numbers.as_deref() {
        Some(&[seed]) => {
            let scenario = Scenario { is_traced: true, ..Scenario::new(seed) };
            println!("{scenario:#?}");
            println!("{:?}", run(&scenario));
        }
        Some(&[first, end]) => match explore(first..end) {
            Ok(explored) => println!("{explored:?}"),
            Err(failing) => {
                eprintln!("{failing}");
                return ExitCode::FAILURE;
            }
        },
        _ => {
            eprintln!("give one seed to see what happens, or the first and the end of a range");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
