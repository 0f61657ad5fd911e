//! Times allreduces between processes of this machine, through shared memory and over TCP, beside OpenMPI's.
//!
//! ```sh
//! cargo run --release -p paramhub-mesh --example mesh_bench -- --ranks 2,4,8 --rounds 15 --plot mesh.svg
//! ```
//! `--ranks` takes one number of ranks or several, which are measured one after the other. The rows are
//! single buffers from 4 bytes to all of ResNet-50's gradients, and these gradients as 161 tensors. `--row`
//! chooses one row by its number, counted from 0, and `--only` chooses teams by their names, separated by
//! commas.
//!
//! In every round every team has a turn for every row, so that other load on the machine affects all teams
//! alike; a team without a turn sleeps. The seconds of a turn are those of its slowest rank, after a
//! barrier. A buffer of up to 256 KB is allreduced 30 times in a row within a turn, whose seconds are then
//! their mean. The output has medians over the rounds, and the median of the ratios, round by round, of the
//! seconds of OpenMPI's faster form to ours. `--plot` draws the medians of the single buffers of up to 64 MB
//! as an SVG file.
//!
//! OpenMPI takes part where `mpirun` and `mpicc` are installed
//! (`apt-get install openmpi-bin libopenmpi-dev`); its program is bench/peers/allreduce.c.

mod plot;
mod rank;
mod team;

use std::num::NonZeroUsize;
use std::path::Path;

use plot::Timing;
use team::{Team, TeamKind};

type Failure = Box<dyn std::error::Error>;

/// Elements of single buffers. The last number is that of all ResNet-50's gradients.
const ELEMENTS: [usize; 11] =
    [1, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 25_557_032];

fn main() -> Result<(), Failure> {
    if let Some(environment) = rank::RankEnvironment::from_environment()? {
        return rank::work(&environment);
    }
    let ranks_list = option("--ranks")?.unwrap_or_else(|| "4".into());
    let ranks_list =
        ranks_list.split(',').map(|text| positive("--ranks", text)).collect::<Result<Vec<_>, _>>()?;
    let rounds = positive("--rounds", &option("--rounds")?.unwrap_or_else(|| "9".into()))?;
    let only = option("--only")?;
    let plot = option("--plot")?;
    let mut rows: Vec<(String, Vec<usize>)> =
        ELEMENTS.map(|elements| (format!("{} bytes", 4 * elements), vec![elements])).into();
    rows.push(("resnet50, 161 tensors".into(), tensors(&models().join("resnet50.json"))?));
    if let Some(row) = option("--row")? {
        let row: usize = row.parse()?;
        rows = vec![rows.into_iter().nth(row).ok_or_else(|| format!("there is no row {row}"))?];
    }
    let mut timings = Vec::new();
    for ranks in ranks_list {
        let mut teams = start_teams(ranks, only.as_deref());
        println!("{ranks} ranks, medians of {rounds} rounds");
        for (name, tensors) in &rows {
            let medians = measure(name, tensors, &mut teams, rounds)?;
            if let &[elements] = tensors.as_slice() {
                let timing = |(team, seconds): (&Team, f64)| Timing {
                    kind: team.kind,
                    ranks,
                    bytes: 4 * elements,
                    microseconds: seconds * 1e6,
                };
                timings.extend(teams.iter().zip(medians).map(timing));
            }
        }
    }
    plot.map_or(Ok(()), |path| plot::write(Path::new(&path), &timings, rounds))
}

fn start_teams(ranks: usize, only: Option<&str>) -> Vec<Team> {
    let wanted = |name: &str| only.is_none_or(|only| only.split(',').any(|one| one == name));
    let mut teams = Vec::new();
    for kind in TeamKind::ALL.into_iter().filter(|kind| wanted(kind.name())) {
        match Team::start(kind, ranks) {
            Ok(team) => teams.push(team),
            Err(error) => eprintln!("{} takes no part: {error}", kind.name()),
        }
    }
    teams
}

/// Measures one row: every form of every team in turn, with one round of warm-up. Returns the median of each
/// team's seconds.
fn measure(name: &str, tensors: &[usize], teams: &mut [Team], rounds: usize) -> Result<Vec<f64>, Failure> {
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
    let medians: Vec<f64> = seconds.iter().cloned().map(median).collect();
    println!("{name}");
    for (place, team) in teams.iter().enumerate() {
        let time = medians[place];
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
    Ok(medians)
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

fn positive(flag: &str, text: &str) -> Result<usize, Failure> {
    let number = text.trim().parse().map(NonZeroUsize::get);
    Ok(number.map_err(|error| format!("{flag} {text}: {error}"))?)
}

fn option(flag: &str) -> Result<Option<String>, Failure> {
    let mut arguments = std::env::args().skip_while(|argument| argument != flag);
    match (arguments.next(), arguments.next()) {
        (None, _) => Ok(None),
        (Some(_), Some(value)) => Ok(Some(value)),
        (Some(_), None) => Err(format!("{flag} takes a value").into()),
    }
}
