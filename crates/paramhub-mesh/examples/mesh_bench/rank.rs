//! A rank of a paramhub team.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use paramhub_mesh::{ElementType, Mesh, MeshConfig, MeshError, MeshListener, Nonce, ReduceOp};
use paramhub_transport::lend;

use super::Failure;

pub(super) const RANK: &str = "MESH_BENCH_RANK";
pub(super) const SOCKET: &str = "MESH_BENCH_SOCKET";
pub(super) const TRANSPORT: &str = "MESH_BENCH_TRANSPORT";

/// The environment of a rank's process.
pub(super) struct RankEnvironment {
    rank: u32,
    socket: String,
    is_memory: bool,
}

impl RankEnvironment {
    /// `None` in the process that the user started.
    pub(super) fn from_environment() -> Result<Option<RankEnvironment>, Failure> {
        let Ok(rank) = std::env::var(RANK) else { return Ok(None) };
        let is_memory = std::env::var(TRANSPORT)? == "memory";
        Ok(Some(RankEnvironment { rank: rank.parse()?, socket: std::env::var(SOCKET)?, is_memory }))
    }
}

pub(super) fn work(environment: &RankEnvironment) -> Result<(), Failure> {
    let listener = MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    let mut line = BufReader::new(UnixStream::connect(&environment.socket)?);
    writeln!(line.get_mut(), "{} {}", environment.rank, listener.address())?;
    let mut text = String::new();
    line.read_line(&mut text)?;
    let addresses = text.trim().split(' ').map(str::parse).collect::<Result<Vec<SocketAddr>, _>>()?;
    let config = MeshConfig::new(environment.rank, Nonce([1; 32]), addresses);
    let mesh = listener.join(MeshConfig { shares_memory: environment.is_memory, ..config })?;
    if environment.is_memory {
        mesh.shares_memory()?;
    }
    let mut buffer = Vec::new();
    loop {
        text.clear();
        if line.read_line(&mut text)? == 0 {
            break;
        }
        let numbers = text.split_whitespace().skip(1).map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let (&repeats, tensors) = numbers.split_first().ok_or("an order says how often")?;
        buffer.clear();
        buffer.resize(tensors.iter().sum(), (environment.rank + 1) as f32);
        // A rank that was early sleeps in the first barrier; after the second all are awake.
        mesh.barrier()?.wait()?;
        mesh.barrier()?.wait()?;
        let begun = Instant::now();
        for _ in 0..repeats {
            allreduce(&mesh, &mut buffer, tensors)?;
        }
        let seconds = begun.elapsed().as_secs_f64() / repeats as f64;
        // Each repetition sums what the one before has left.
        let ranks = mesh.size() as f32;
        let expected = ranks * (ranks + 1.0) / 2.0 * ranks.powi(repeats as i32 - 1);
        let is_right = |value: &f32| (value / expected - 1.0).abs() < 1e-4;
        let verdict = if buffer.iter().all(is_right) { "right" } else { "wrong" };
        writeln!(line.get_mut(), "{seconds:.9} {verdict}")?;
    }
    Ok(mesh.leave(Duration::from_secs(30))?)
}

/// Starts all tensors' allreduces at once, as a training step does.
fn allreduce(mesh: &Mesh, buffer: &mut [f32], tensors: &[usize]) -> Result<(), MeshError> {
    lend(|lending| {
        let mut rest = buffer;
        let mut handles = Vec::with_capacity(tensors.len());
        for &elements in tensors {
            let (tensor, others) = rest.split_at_mut(elements);
            rest = others;
            handles.push(mesh.allreduce(lending.receive(tensor), ElementType::F32, ReduceOp::Sum)?);
        }
        handles.iter().try_for_each(|handle| handle.wait())
    })
}
