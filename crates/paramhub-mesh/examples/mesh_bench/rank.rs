//! A rank of ours.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use paramhub_mesh::{ElementType, Mesh, MeshConfig, MeshError, MeshListener, Nonce, ReduceOp};
use paramhub_transport::lend;

use super::Failure;

pub(super) const RANK: &str = "MESH_BENCH_RANK";
pub(super) const SOCKET: &str = "MESH_BENCH_SOCKET";
pub(super) const WAY: &str = "MESH_BENCH_WAY";

/// What the environment says of this process.
pub(super) struct Seat {
    rank: u32,
    socket: String,
    is_memory: bool,
}

impl Seat {
    /// None in the process that the user started.
    pub(super) fn from_environment() -> Result<Option<Seat>, Failure> {
        let Ok(rank) = std::env::var(RANK) else { return Ok(None) };
        let is_memory = std::env::var(WAY)? == "memory";
        Ok(Some(Seat { rank: rank.parse()?, socket: std::env::var(SOCKET)?, is_memory }))
    }
}

pub(super) fn work(seat: &Seat) -> Result<(), Failure> {
    let listener = MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST))?;
    let mut line = BufReader::new(UnixStream::connect(&seat.socket)?);
    writeln!(line.get_mut(), "{} {}", seat.rank, listener.address())?;
    let mut text = String::new();
    line.read_line(&mut text)?;
    let addresses = text.trim().split(' ').map(str::parse).collect::<Result<Vec<SocketAddr>, _>>()?;
    let config = MeshConfig::new(seat.rank, Nonce([1; 32]), addresses);
    let mesh = listener.join(MeshConfig { shares_memory: seat.is_memory, ..config })?;
    if seat.is_memory {
        mesh.shares_memory()?;
    }
    let mut buffer = Vec::new();
    let expected = (mesh.size() * (mesh.size() + 1) / 2) as f32;
    loop {
        text.clear();
        if line.read_line(&mut text)? == 0 {
            break;
        }
        let tensors = text.split_whitespace().skip(1).map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        buffer.clear();
        buffer.resize(tensors.iter().sum(), (seat.rank + 1) as f32);
        mesh.barrier()?.wait()?;
        let begun = Instant::now();
        allreduce(&mesh, &mut buffer, &tensors)?;
        let seconds = begun.elapsed().as_secs_f64();
        let verdict = if buffer.iter().all(|value| *value == expected) { "right" } else { "wrong" };
        writeln!(line.get_mut(), "{seconds:.9} {verdict}")?;
    }
    Ok(mesh.leave(Duration::from_secs(30))?)
}

/// All of them at once, as a training step has them.
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
