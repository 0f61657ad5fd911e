//! Times allreduces between processes of this machine, through shared memory and over TCP, beside OpenMPI's.
//!
//! ```sh
//! cargo run --release -p paramhub-mesh --example mesh_bench -- --ranks 4 --rounds 15
//! ```
//! In every round every team has a turn for every row, so that other load on the machine affects all teams
//! alike; a team without a turn sleeps. The seconds of a turn are those of its slowest rank, after a barrier.
//! The output has medians over the rounds, and the median of the ratios, round by round, of the seconds of
//! OpenMPI's faster form to ours.
//!
//! OpenMPI takes part where `mpirun` and `mpicc` are installed
//! (`apt-get install openmpi-bin libopenmpi-dev`); its program is bench/peers/allreduce.c.

mod rank;
mod team;

use std::path::Path;

use team::{Team, TeamKind};

type Failure = Box<dyn std::error::Error>;

/// Elements of single buffers. The last number is that of all ResNet-50's gradients.
const ELEMENTS: [usize; 7] = [1, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20, 25_557_032];

fn main() -> Result<(), Failure> {
    if let Some(environment) = rank::RankEnvironment::from_environment()? {
        return rank::work(&environment);
    }
    let (ranks, rounds) = (number("--ranks", 4)?, number("--rounds", 9)?);
    let only = option("--only")?;
    let wanted = |name: &str| only.as_ref().is_none_or(|only| only.split(',').any(|one| one == name));
    let mut rows: Vec<(String, Vec<usize>)> =
        ELEMENTS.map(|elements| (format!("{} bytes", 4 * elements), vec![elements])).into();
    rows.push(("resnet50, 161 tensors".into(), tensors(&models().join("resnet50.json"))?));
    if let Some(row) = option("--row")? {
        rows = vec![rows.swap_remove(row.parse()?)];
    }
    let mut teams = Vec::new();
    for kind in TeamKind::ALL.into_iter().filter(|kind| wanted(kind.name())) {
        match Team::start(kind, ranks) {
            Ok(team) => teams.push(team),
            Err(error) => eprintln!("{} takes no part: {error}", kind.name()),
        }
    }
    println!("{ranks} ranks, medians of {rounds} rounds");
    for (name, tensors) in &rows {
        measure(name, tensors, &mut teams, rounds)?;
    }
    Ok(())
}

/// Measures one row: every form of every team in turn, with one round of warm-up.
fn measure(name: &str, tensors: &[usize], teams: &mut [Team], rounds: usize) -> Result<(), Failure> {
    let mut seconds: Vec<Vec<f64>> = vec![Vec::with_capacity(rounds); teams.len()];
    for round in 0..=rounds {
        for turn in 0..teams.len() {
            // Every other round goes backwards, so that no team always follows the same one.
            let place = if round % 2 == 0 { turn } else { teams.len() - 1 - turn };
            let time = teams[place].best(tensors)?;
            if round > 0 {
                seconds[place].push(time);
            }
        }
    }
    let bytes = 4.0 * tensors.iter().sum::<usize>() as f64;
    println!("{name}");
    for (place, team) in teams.iter().enumerate() {
        let time = median(seconds[place].clone());
        let counterpart = teams.iter().position(|other| team.kind.counterpart() == Some(other.kind));
        let ratio = counterpart.map_or(String::new(), |counterpart| {
            let ratios = seconds[counterpart].iter().zip(&seconds[place]).map(|(theirs, ours)| theirs / ours);
            format!("{:>6.2} of OpenMPI's speed", median(ratios.collect()))
        });
        println!(
            "  {:<16} {:>10.1} us {:>8.3} GB/s {ratio}",
            team.kind.name(),
            time * 1e6,
            bytes / time / 1e9
        );
    }
    Ok(())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn models() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

/// The number of elements of each tensor in a list: the product of the numbers in the brackets after
/// `"shape":`.
fn tensors(list: &Path) -> Result<Vec<usize>, Failure> {
    let text = std::fs::read_to_string(list)?;
    let shapes = text.split("\"shape\": [").skip(1).map(|rest| rest.split(']').next().unwrap_or_default());
    let elements = |shape: &str| shape.split(',').map(|edge| edge.trim().parse::<usize>()).product();
    Ok(shapes.map(elements).collect::<Result<_, _>>()?)
}

fn number(flag: &str, default: usize) -> Result<usize, Failure> {
    Ok(option(flag)?.map_or(Ok(default), |text| text.parse())?)
}

fn option(flag: &str) -> Result<Option<String>, Failure> {
    let mut arguments = std::env::args().skip_while(|argument| argument != flag);
    match (arguments.next(), arguments.next()) {
        (None, _) => Ok(None),
        (Some(_), Some(value)) => Ok(Some(value)),
        (Some(_), None) => Err(format!("{flag} takes a value").into()),
    }
}
