//! Meshes to test with, and numbers to put into them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use paramhub_mesh::{Handle, Mesh, MeshConfig, MeshError, MeshListener, Nonce};

/// Far more than any healthy wait takes: a hang becomes a failure.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// The way in which the ranks of these tests, which are on one host, exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Memory,
    /// As ranks of several hosts.
    Tcp,
    /// The same, encrypted.
    Encrypted,
}

pub(crate) fn secret() -> Nonce {
    Nonce([42; 32])
}

pub(crate) fn listeners(size: u32) -> (Vec<MeshListener>, Vec<SocketAddr>) {
    let listeners: Vec<MeshListener> =
        (0..size).map(|_| MeshListener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST)).unwrap()).collect();
    let addresses = listeners.iter().map(MeshListener::address).collect();
    (listeners, addresses)
}

pub(crate) fn config(rank: u32, addresses: &[SocketAddr]) -> MeshConfig {
    let config = MeshConfig::new(rank, secret(), addresses.to_vec());
    MeshConfig { name: "test".into(), shares_memory: true, ..config }
}

/// All ranks' meshes.
pub(crate) fn meshes(way: Way, size: u32) -> Vec<Mesh> {
    let shares_memory = way == Way::Memory;
    let encrypts = way == Way::Encrypted;
    let meshes = meshes_with(size, |config| MeshConfig { shares_memory, encrypts, ..config });
    for mesh in &meshes {
        assert_eq!(mesh.shares_memory().is_ok(), shares_memory && size > 1, "{mesh:?}");
    }
    meshes
}

pub(crate) fn meshes_with(size: u32, change: impl Fn(MeshConfig) -> MeshConfig + Sync) -> Vec<Mesh> {
    let (listeners, addresses) = listeners(size);
    thread::scope(|scope| {
        let joins: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                let config = change(config(rank as u32, &addresses));
                scope.spawn(move || listener.join(config).unwrap())
            })
            .collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    })
}

/// Runs `f` at every rank, leaves in order, and returns each rank's result.
pub(crate) fn run<T: Send>(way: Way, size: u32, f: impl Fn(&Mesh) -> T + Sync) -> Vec<T> {
    at_all(meshes(way, size), |mesh| {
        let result = f(&mesh);
        mesh.leave(WAIT_TIMEOUT).unwrap();
        result
    })
}

/// Runs `f` with every mesh at once.
pub(crate) fn at_all<T: Send>(meshes: Vec<Mesh>, f: impl Fn(Mesh) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let f = &f;
        let ranks: Vec<_> = meshes.into_iter().map(|mesh| scope.spawn(move || f(mesh))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Waits for a good end. On a hang it prints the ranks that the operation waits for, and ends the process: a
/// lent region would keep the test from ending.
#[track_caller]
pub(crate) fn done(handle: Result<Handle, MeshError>) -> Result<(), MeshError> {
    let handle = handle?;
    match handle.wait_timeout(WAIT_TIMEOUT)? {
        true => Ok(()),
        false => {
            eprintln!(
                "{}: still waiting for ranks {:?}",
                std::panic::Location::caller(),
                handle.awaited_ranks()
            );
            std::process::exit(101);
        }
    }
}

/// Numbers that are the same for the same seed: SplitMix64.
#[derive(Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(count);
        bytes
    }
}

/// `PARAMHUB_TEST_SEED`, or one from the clock; printed either way.
pub(crate) fn seed() -> u64 {
    let seed = match std::env::var("PARAMHUB_TEST_SEED") {
        Ok(text) => text.parse().expect("PARAMHUB_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
    };
    println!("PARAMHUB_TEST_SEED={seed}");
    seed
}
