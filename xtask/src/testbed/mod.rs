//! `cargo xtask testbed`: racks of hosts on one machine, made of network namespaces and shaped links (docs/rack.md).

mod delay;
mod guard;
pub(crate) mod options;
mod probe;
mod raise;
mod rate;
mod relay;
mod scenario;
mod shape;
mod system;

use std::fmt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use guard::{Guard, Lock};
use shape::{Shape, interface, prefix};

pub(crate) use guard::stand as stand_guard;
pub(crate) use probe::end::play as play_end;
pub(crate) use relay::play as play_relay;

use crate::packages::SystemProgram;

/// The exit code by which tests recognise that nothing is wrong, but this machine permits no testbeds.
const EXIT_NOT_PERMITTED: u8 = 3;

static IPROUTE2: [SystemProgram; 2] = [
    SystemProgram { name: "ip", probe: &["ip", "-V"], debian_package: "iproute2" },
    SystemProgram { name: "tc", probe: &["tc", "-V"], debian_package: "iproute2" },
];

/// The task that the caller asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Task {
    Help,
    Up(Shape),
    /// Keeps a testbed up until stdin ends.
    Hold(Shape),
    Down {
        name: String,
    },
    Status {
        name: String,
    },
    Hosts {
        name: String,
    },
    Probe {
        name: String,
        json: Option<String>,
    },
    Exec {
        name: String,
        host: String,
        command: Vec<String>,
    },
    Run {
        name: String,
        scenario: String,
        json: Option<String>,
        svg: Option<String>,
        /// Further arguments for bench/rack/run.
        more: Vec<String>,
    },
}

/// The reason why a task cannot be done.
#[derive(Debug)]
enum Problem {
    /// This machine does not permit this user to create testbeds.
    NotPermitted(String),
    Failed(String),
    /// A program of a testbed ended with this exit code and has printed the reason itself.
    Ended(u8),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::NotPermitted(why) => write!(f, "not permitted here: {why}"),
            Problem::Failed(why) => f.write_str(why),
            Problem::Ended(code) => write!(f, "it ended with {code}"),
        }
    }
}

pub(crate) fn perform(task: Task) -> ExitCode {
    match try_to(task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Problem::Ended(code)) => ExitCode::from(code),
        Err(problem) => {
            eprintln!("testbed: {problem}");
            match problem {
                Problem::NotPermitted(_) => ExitCode::from(EXIT_NOT_PERMITTED),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn try_to(task: Task) -> Result<(), Problem> {
    match task {
        Task::Help => print!("{}", options::USAGE),
        Task::Up(shape) => {
            guarded(&shape.name, |lock| up(&shape, lock))?;
            println!("testbed {} is up: {}", shape.name, contents(&shape));
        }
        Task::Hold(shape) => hold(&shape)?,
        Task::Down { name } => {
            let mut lock = Lock::take(&name)?;
            let count = raise::take_down(&name)?;
            lock.write(None)?;
            println!("testbed {name} is down: {count} namespaces removed");
        }
        Task::Status { name } => status(&name)?,
        Task::Hosts { name } => {
            for host in expect(&name)?.hosts() {
                let addresses: Vec<String> = host.addresses.iter().map(ToString::to_string).collect();
                println!("{} {}", host.name, addresses.join("+"));
            }
        }
        Task::Probe { name, json } => {
            let measured = probe::probe(&expect(&name)?)?;
            measured.iter().for_each(|kind| println!("{}", kind.line()));
            if let Some(path) = json {
                let kinds: Vec<String> = measured.iter().map(probe::LinkMeasurement::json).collect();
                std::fs::write(&path, format!("[{}]\n", kinds.join(", ")))
                    .map_err(|error| Problem::Failed(format!("{path}: {error}")))?;
            }
        }
        Task::Exec { name, host, command } => return Err(exec(&expect(&name)?, &host, &command)),
        Task::Run { name, scenario, json, svg, more } => {
            let files = scenario::Files { json: json.as_deref(), svg: svg.as_deref() };
            run(&name, &scenario, files, &more)?;
        }
    }
    Ok(())
}

/// Does the work under a guard, so that nothing is left behind if it fails or breaks off.
fn guarded(name: &str, work: impl FnOnce(&mut Lock) -> Result<(), Problem>) -> Result<(), Problem> {
    let mut lock = Lock::take(name)?;
    refuse_a_second(name)?;
    let guard = Guard::post(&lock)?;
    let result = work(&mut lock);
    if result.is_err() {
        raise::take_down(name)?;
        lock.write(None)?;
    }
    guard.dismiss();
    result
}

fn refuse_a_second(name: &str) -> Result<(), Problem> {
    for program in &IPROUTE2 {
        program.ensure().map_err(|failure| Problem::NotPermitted(failure.reason))?;
    }
    let there = system::namespaces(&prefix(name))?;
    let what = match guard::known(name) {
        _ if there.is_empty() => return Ok(()),
        Some(shape) => format!("testbed {name} is up already: {}", contents(&shape)),
        None => format!("parts of a testbed {name} are there: {}", there.join(", ")),
    };
    Err(Problem::Failed(format!(
        "{what}; take it down with `cargo xtask testbed down --name {name}`, or choose another --name"
    )))
}

fn up(shape: &Shape, lock: &mut Lock) -> Result<(), Problem> {
    raise::try_out(shape)?;
    raise::build(shape)?;
    lock.write(Some(shape))
}

/// Brings the testbed up, runs the scenario and takes the testbed down.
fn run(name: &str, scenario: &str, files: scenario::Files<'_>, more: &[String]) -> Result<(), Problem> {
    let shape = scenario::shape(name, scenario)?;
    up_during(&shape, || scenario::run(&shape, scenario, files, more))
}

/// Keeps a testbed up for the program that holds the other end of stdin. Even if that program is killed, its
/// end is closed.
fn hold(shape: &Shape) -> Result<(), Problem> {
    up_during(shape, || {
        let read = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        read.map(drop).map_err(|error| Problem::Failed(format!("stdin: {error}")))
    })
}

fn up_during(shape: &Shape, work: impl FnOnce() -> Result<(), Problem>) -> Result<(), Problem> {
    let name = &shape.name;
    guarded(name, |lock| {
        up(shape, lock)?;
        println!("testbed {name} is up: {}", contents(shape));
        work()?;
        raise::take_down(name)?;
        lock.write(None)
    })
}

fn status(name: &str) -> Result<(), Problem> {
    let there = system::namespaces(&prefix(name))?;
    if there.is_empty() {
        println!("testbed {name} is not up");
        return Ok(());
    }
    match guard::known(name) {
        Some(shape) => println!("testbed {name} is up: {}", contents(&shape)),
        None => println!("parts of a testbed {name} are there; `testbed down --name {name}` removes them"),
    }
    for namespace in there {
        let processes = system::processes(&namespace)?.len();
        println!("{namespace:<24} {processes} processes");
    }
    Ok(())
}

/// Replaces this process by the command.
fn exec(shape: &Shape, host: &str, command: &[String]) -> Problem {
    if !shape.hosts().iter().any(|known| known.name == host) {
        let name = &shape.name;
        return Problem::Failed(format!(
            "there is no host {host}: see `cargo xtask testbed hosts --name {name}`"
        ));
    }
    let error = Command::new("ip").args(["netns", "exec", &shape.namespace(host)]).args(command).exec();
    Problem::Failed(format!("cannot start ip: {error}"))
}

fn expect(name: &str) -> Result<Shape, Problem> {
    let there = system::namespaces(&prefix(name))?;
    let shape = guard::known(name).filter(|_| !there.is_empty()).ok_or_else(|| {
        Problem::Failed(format!("testbed {name} is not up: see `cargo xtask testbed up --help`"))
    })?;
    match shape.delay.is_none() || relay::is_running(&shape)? {
        true => Ok(shape),
        false => Err(Problem::Failed(format!(
            "the process that delays the packets of testbed {name} is gone, and no link carries anything: take it down \
             with `cargo xtask testbed down --name {name}`"
        ))),
    }
}

/// The parts of the testbed, in words.
fn contents(shape: &Shape) -> String {
    let Shape { racks, workers, rate, hub_interfaces, core_rate, delay, .. } = shape;
    let last = interface(hub_interfaces - 1);
    let core =
        if *racks > 1 { format!(", {core_rate} between each rack and the core") } else { String::new() };
    let delay = delay.map(|delay| format!("; each link delays by {delay}")).unwrap_or_default();
    format!("{racks} x {workers} workers and a hub host with eth0 to {last}, links of {rate}{core}{delay}")
}
