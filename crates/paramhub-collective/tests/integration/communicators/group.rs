//! A communicator's ranks, each on a thread.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;

use paramhub_collective::communicator::MeshCommunicator;
use paramhub_mesh::{MeshConfig, MeshListener, Nonce};

/// Runs `f` at every rank with its mesh communicator, whose configuration `change` may change, and returns
/// each rank's result.
pub(crate) fn at_all<T: Send>(
    size: u32,
    change: impl Fn(MeshConfig) -> MeshConfig + Sync,
    work: impl Fn(MeshCommunicator) -> T + Sync,
) -> Vec<T> {
    let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
    let listeners: Vec<MeshListener> = (0..size).map(|_| MeshListener::bind(loopback).unwrap()).collect();
    let addresses: Vec<SocketAddr> = listeners.iter().map(MeshListener::address).collect();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..)
            .zip(listeners)
            .map(|(rank, listener)| {
                let config = change(MeshConfig::new(rank, Nonce([5; 32]), addresses.clone()));
                let work = &work;
                scope.spawn(move || work(MeshCommunicator::join(listener, config).unwrap()))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
