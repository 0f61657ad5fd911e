//! Times collectives between processes of this machine, over TCP on loopback.
//!
//! ```sh
//! cargo run --release -p paramhub-mesh --example mesh_bench -- --ranks 4 --rounds 30
//! ```
//! Prints the median over the rounds of rank 0's time, all sizes in turn within each round, so that what else the machine does
//! meets all of them alike.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use paramhub_mesh::{ElementType, Mesh, MeshConfig, MeshError, MeshListener, Nonce, ReduceOp};
use paramhub_transport::lend;

const RANK: &str = "MESH_BENCH_RANK";
const SIZES: [usize; 7] = [8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 100 << 20];

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let (ranks, rounds) = (number("--ranks", 4)?, number("--rounds", 20)?);
    match std::env::var(RANK) {
        Ok(rank) => work(rank.parse()?, rounds),
        Err(_) => launch(ranks),
    }
}

fn number(flag: &str, default: usize) -> Result<usize, Failure> {
    let mut arguments = std::env::args().skip_while(|argument| argument != flag);
    match (arguments.next(), arguments.next()) {
        (None, _) => Ok(default),
        (Some(_), Some(value)) => Ok(value.parse()?),
        (Some(_), None) => Err(format!("{flag} takes a number").into()),
    }
}

/// Starts every rank, tells all of them the addresses, and waits.
fn launch(ranks: usize) -> Result<(), Failure> {
    let start = |rank: usize| -> Result<(Child, String), Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(std::env::args().skip(1))
            .env(RANK, rank.to_string())
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        // The address comes on stderr, so that stdout stays the table's.
        let mut line = String::new();
        BufReader::new(child.stderr.take().ok_or("no stderr")?).read_line(&mut line)?;
        Ok((child, line.trim().to_owned()))
    };
    let mut children = (0..ranks).map(start).collect::<Result<Vec<_>, _>>()?;
    let addresses: Vec<String> = children.iter().map(|(_, address)| address.clone()).collect();
    for (child, _) in &mut children {
        writeln!(child.stdin.as_mut().ok_or("no stdin")?, "{}", addresses.join(" "))?;
    }
    for (mut child, _) in children {
        if !child.wait()?.success() {
            return Err("a rank failed".into());
        }
    }
    Ok(())
}

fn work(rank: u32, rounds: usize) -> Result<(), Failure> {
    let listener = MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    eprintln!("{}", listener.address());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let addresses = line.trim().split(' ').map(str::parse).collect::<Result<Vec<SocketAddr>, _>>()?;
    let mesh = listener.join(MeshConfig::new(rank, Nonce([1; 32]), addresses))?;
    type Timed = fn(&Mesh, &mut [f32]) -> Result<(), MeshError>;
    let operations: [(&str, Timed); 3] =
        [("allreduce", allreduce), ("broadcast", broadcast), ("allgather", allgather)];
    let mut times = vec![Vec::with_capacity(rounds); operations.len() * SIZES.len()];
    let mut buffer = vec![0_f32; SIZES[SIZES.len() - 1] / 4];
    for _ in 0..=rounds {
        for (place, times) in times.iter_mut().enumerate() {
            let (_, operation) = operations[place / SIZES.len()];
            let part = &mut buffer[..SIZES[place % SIZES.len()] / 4];
            mesh.barrier()?.wait()?;
            let begun = Instant::now();
            operation(&mesh, part)?;
            times.push(begun.elapsed());
        }
    }
    for (place, times) in times.iter_mut().enumerate().filter(|_| rank == 0) {
        // The first round warmed up.
        times.remove(0);
        times.sort_unstable();
        let (median, bytes) = (times[times.len() / 2], SIZES[place % SIZES.len()]);
        let rate = bytes as f64 / median.as_secs_f64() / 1e9;
        println!(
            "{:<10} {bytes:>10} bytes {median:>12.1?} {rate:>8.3} GB/s",
            operations[place / SIZES.len()].0
        );
    }
    Ok(mesh.leave(Duration::from_secs(30))?)
}

fn allreduce(mesh: &Mesh, buffer: &mut [f32]) -> Result<(), MeshError> {
    lend(|lending| mesh.allreduce(lending.receive(buffer), ElementType::F32, ReduceOp::Sum)?.wait())
}

fn broadcast(mesh: &Mesh, buffer: &mut [f32]) -> Result<(), MeshError> {
    lend(|lending| mesh.broadcast(lending.receive(buffer), 0)?.wait())
}

fn allgather(mesh: &Mesh, buffer: &mut [f32]) -> Result<(), MeshError> {
    let size = mesh.size() as usize;
    let length = buffer.len() / size * size;
    lend(|lending| {
        let mut rest = &mut buffer[..length];
        let mut blocks = Vec::with_capacity(size);
        for _ in 0..size {
            let (block, others) = std::mem::take(&mut rest).split_at_mut(length / size);
            blocks.push(lending.receive(block));
            rest = others;
        }
        mesh.allgather(None, blocks)?.wait()
    })
}
