//! One pass that reads all workers' arenas and writes the bytes that a hub must write.
//!
//! The server has a thread for each core of the hub, with a share of the bytes. A worker signals over a
//! socket that it is ready. When all have, a thread adds up their gradients, reads and writes as many arrays
//! as the optimizer keeps, and writes the sum past the caches to every worker's parameters, or to the one
//! copy that all read. No request is checked and no optimizer runs.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use paramhub_kernels::{shared, sum};
use paramhub_transport::shm::{Segment, receive_segments, send_segments};

use crate::exchange::spec::{Optimizer, Spec};

/// The time that all workers may take to connect, and how long a worker waits for a pass.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Elements processed at once, as in the hub.
const BLOCK_ELEMENTS: usize = 256;
const READY: u8 = 1;

/// The sizes of a pass.
#[derive(Clone, Copy)]
struct Extent {
    workers: usize,
    cores: usize,
    /// Words of f32 in a worker's gradients.
    words: usize,
    /// Arrays of that length that are read and written: the model and the optimizer's state.
    kept: usize,
    shares_parameters: bool,
}

impl Extent {
    fn new(spec: &Spec) -> Extent {
        let kept = match spec.optimizer {
            Optimizer::Mean => 0,
            Optimizer::Sgd => 1,
            Optimizer::Nesterov => 2,
            Optimizer::Adam => 3,
        };
        let words = (spec.keys.bytes() as usize).div_ceil(4).next_multiple_of(BLOCK_ELEMENTS);
        let (workers, shares_parameters) = (spec.workers as usize, spec.shares_parameters);
        Extent { workers, cores: spec.cores, words, kept, shares_parameters }
    }

    /// The bytes of an arena: gradients first, then parameters.
    fn arena_bytes(&self) -> usize {
        2 * 4 * self.words
    }

    /// The share of the words that a core processes.
    fn share(&self, core: usize) -> std::ops::Range<usize> {
        let blocks = self.words / BLOCK_ELEMENTS;
        let first = |core| blocks * core / self.cores * BLOCK_ELEMENTS;
        first(core)..first(core + 1)
    }
}

/// Starts the server. Returns the name of the socket it listens on.
pub(super) fn serve(spec: &Spec) -> anyhow::Result<String> {
    let extent = Extent::new(spec);
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| anyhow::anyhow!("no random numbers: {error}"))?;
    let name = format!("paramhub-bench-{:032x}", u128::from_le_bytes(random));
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)
        .context("the raw server has no socket")?;
    let run = move || {
        if let Err(error) = answer(&listener, extent) {
            eprintln!("the raw server has failed: {error:#}");
        }
    };
    std::thread::Builder::new().name("raw-acceptor".into()).spawn(run)?;
    Ok(name)
}

fn answer(listener: &UnixListener, extent: Extent) -> anyhow::Result<()> {
    let mut arenas: HashMap<usize, Arc<Segment>> = HashMap::new();
    let mut sockets: Vec<Vec<UnixStream>> = (0..extent.cores).map(|_| Vec::new()).collect();
    for _ in 0..extent.workers * extent.cores {
        let (socket, _) = listener.accept()?;
        let mut rank_and_core = [0; 8];
        let (read, mut descriptors) = receive_segments(&socket, &mut rank_and_core)?;
        ensure!(
            read == rank_and_core.len() && descriptors.len() == 1,
            "a worker of the raw run does not send its rank and core"
        );
        let [rank, core] =
            [0, 4].map(|at| u32::from_le_bytes(rank_and_core[at..at + 4].try_into().expect("four")) as usize);
        if let std::collections::hash_map::Entry::Vacant(vacant) = arenas.entry(rank) {
            vacant.insert(Arc::new(Segment::adopt(descriptors.remove(0), extent.arena_bytes())?));
        }
        sockets.get_mut(core).context("a worker of the raw run names a core too many")?.push(socket);
    }
    ensure!(arenas.len() == extent.workers, "two workers of the raw run have one rank");
    let arenas: Arc<[Arc<Segment>]> = arenas.into_values().collect();
    let common = Arc::new(Segment::create("raw-parameters", 4 * extent.words)?);
    for (core, sockets) in sockets.into_iter().enumerate() {
        let (arenas, common) = (arenas.clone(), common.clone());
        let run = move || serve_share(extent, core, sockets, &arenas, &common);
        std::thread::Builder::new().name(format!("raw-core-{core}")).spawn(run)?;
    }
    Ok(())
}

/// Serves one share until a worker ends.
fn serve_share(
    extent: Extent,
    core: usize,
    mut sockets: Vec<UnixStream>,
    arenas: &[Arc<Segment>],
    common: &Segment,
) {
    let share = extent.share(core);
    let mut kept = vec![vec![0.0_f32; share.len()]; extent.kept];
    loop {
        for socket in &mut sockets {
            if socket.read_exact(&mut [0]).is_err() {
                return;
            }
        }
        pass(&extent, share.clone(), arenas, common, &mut kept);
        shared::fence();
        for socket in &mut sockets {
            // If this fails, the next read reports it.
            let _ = socket.write_all(&[READY]);
        }
    }
}

fn pass(
    extent: &Extent,
    share: std::ops::Range<usize>,
    arenas: &[Arc<Segment>],
    common: &Segment,
    kept: &mut [Vec<f32>],
) {
    let mut total = [0.0_f32; BLOCK_ELEMENTS];
    let mut sources = Vec::with_capacity(arenas.len());
    for first in share.clone().step_by(BLOCK_ELEMENTS) {
        sources.clear();
        sources.extend(arenas.iter().map(|arena| arena.floats(4 * first, BLOCK_ELEMENTS)));
        shared::gather(&mut total, false, &sources);
        let here = first - share.start..first - share.start + BLOCK_ELEMENTS;
        for array in kept.iter_mut() {
            sum::add_f32(&mut array[here.clone()], &total);
        }
        let bytes: &[u8] = bytemuck::cast_slice(&total);
        match extent.shares_parameters {
            true => common.stream(4 * first, bytes),
            false => arenas.iter().for_each(|arena| arena.stream(4 * (extent.words + first), bytes)),
        }
    }
}

/// A worker's end.
pub(crate) struct RawArena {
    sockets: Vec<UnixStream>,
    /// The server has a mapping of its own. This one keeps the worker's pages alive.
    _arena: Segment,
}

impl RawArena {
    pub(super) fn connect(name: &str, spec: &Spec, rank: u32) -> anyhow::Result<RawArena> {
        let extent = Extent::new(spec);
        let arena = Segment::create("raw-arena", extent.arena_bytes())?;
        let ones = [1.0_f32; BLOCK_ELEMENTS];
        for first in (0..extent.words).step_by(BLOCK_ELEMENTS) {
            arena.write(4 * first, bytemuck::cast_slice(&ones));
        }
        let mut sockets = Vec::new();
        for core in 0..extent.cores as u32 {
            let socket = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)
                .context("cannot reach the raw server")?;
            socket.set_read_timeout(Some(WAIT_TIMEOUT))?;
            let rank_and_core = [rank.to_le_bytes(), core.to_le_bytes()].concat();
            send_segments(&socket, &rank_and_core, &[arena.as_fd()])?;
            sockets.push(socket);
        }
        Ok(RawArena { sockets, _arena: arena })
    }

    pub(super) fn exchange(&mut self) -> anyhow::Result<()> {
        for socket in &mut self.sockets {
            socket.write_all(&[READY]).context("the raw server is gone")?;
        }
        for socket in &mut self.sockets {
            let mut answer = [0];
            socket.read_exact(&mut answer).context("the raw server does not answer")?;
            if answer != [READY] {
                bail!("the raw server answers {answer:?}");
            }
        }
        Ok(())
    }

    #[cfg(test)]
    fn parameters(&self, words: usize) -> Vec<f32> {
        let mut bytes = vec![0; 4 * words];
        self._arena.read(self._arena.len() / 2, &mut bytes);
        bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().expect("four"))).collect()
    }
}

#[cfg(test)]
mod tests {
    use paramhub::{Key, KeyTable};

    use super::*;
    use crate::exchange::spec::Transport;

    #[test]
    fn every_word_of_every_worker_is_added_and_handed_back() {
        let keys = KeyTable::new(vec![Key::new("k", [1001])]).unwrap();
        let spec = Spec {
            optimizer: Optimizer::Nesterov,
            is_raw: true,
            transport: Transport::Shm,
            chunk_bytes: 1024,
            ..Spec::new(keys, 3, 2)
        };
        let name = serve(&spec).unwrap();
        std::thread::scope(|threads| {
            for rank in 0..3 {
                let (name, spec) = (&name, &spec);
                threads.spawn(move || {
                    let mut arena = RawArena::connect(name, spec, rank).unwrap();
                    for _ in 0..3 {
                        arena.exchange().unwrap();
                        assert!(arena.parameters(1024).iter().all(|&word| word == 3.0));
                    }
                });
            }
        });
    }
}
