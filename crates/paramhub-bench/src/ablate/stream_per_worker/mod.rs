//! Worker by interface, PHub's alternative to key by interface and core (section 4.5): a worker has one
//! stream, which belongs to one core, and every core may use every chunk.
//!
//! The workers are real ones. To them this is a hub with one interface and one core, and the handshake and
//! the frames are those of the protocol. Parts that a measurement does not need are missing: a manager,
//! heartbeats, tenants.

mod chunks;
mod core;

use core::ByWorkerCore;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use paramhub::Job;
use paramhub::auth::{Namespace, Nonce};
use paramhub::placement::{HubShape, InterfaceShape};
use paramhub::service::{JobOptions, ServiceCreated};
use paramhub_core::auth::{Incarnation, Proof};
use paramhub_core::scheme::Roster;
use paramhub_core::wire::{Caller, HELLO_BYTES, HubHandshake, PROOF_BYTES, Welcome};
use paramhub_harness::exchange::CoreServer;
use paramhub_harness::exchange::spec::Spec;
use paramhub_transport::greeting::{draw, read_exact_by, write_all_by};
use paramhub_worker::{JobConfig, Options, Transport};

use chunks::Chunks;

/// The time that all workers may take to connect.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Workers send no heartbeats here, and they may wait for their commands meanwhile.
const DEAD_AFTER_S: f64 = 86_400.0;

/// Starts a thread for each core. The threads end when their workers have left.
pub(crate) fn serve(spec: &Spec) -> anyhow::Result<CoreServer> {
    let mut secret = ([0; 16], [0; 32]);
    getrandom::fill(&mut secret.0).context("the system gives no random numbers")?;
    getrandom::fill(&mut secret.1).context("the system gives no random numbers")?;
    let job = ServiceCreated { namespace: Namespace(secret.0), nonce: Nonce(secret.1), authority: None };
    let chunks = Arc::new(Chunks::new(spec)?);
    let mut addresses = Vec::new();
    for number in 0..spec.cores {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("the server has no port")?;
        addresses.push(listener.local_addr()?);
        let (chunks, job) = (Arc::clone(&chunks), job.clone());
        let run = move || {
            let run = || {
                let workers = admit(&listener, &chunks, number, &job)?;
                ByWorkerCore::new(&chunks, number, workers)?.run()
            };
            if let Err(error) = run() {
                eprintln!("core {number} of worker by interface has failed: {error:#}");
            }
        };
        // The core's processor time is found by this name.
        std::thread::Builder::new().name(format!("hub-core-{number}")).spawn(run)?;
    }
    Ok(CoreServer { job, addresses })
}

/// Joins as rank `rank`.
pub(crate) fn join(
    spec: &Spec,
    rank: u32,
    job: &ServiceCreated,
    addresses: &[SocketAddr],
) -> anyhow::Result<Job> {
    let address = addresses.get(rank as usize % spec.cores).context("the server named too few addresses")?;
    let interface = InterfaceShape { address: address.to_string(), cores: vec![0], weight: 1 };
    let hubs = vec![HubShape { interfaces: vec![interface], local: None, between_hubs: None }];
    let job_config = JobConfig {
        name: "bench".into(),
        namespace: job.namespace,
        secret: job.nonce.into(),
        epoch: 0,
        rank,
        workers: spec.workers,
        incarnation: Incarnation([0; 16]),
        roster: Roster::beside_workers(spec.workers, &hubs),
        hubs,
        shares: Vec::new(),
        settings: spec.settings()?,
        job_options: JobOptions { dead_after_s: DEAD_AFTER_S, ..JobOptions::default() },
        resumed_step: None,
        joined_running: false,
        placement_hash: None,
    };
    Ok(job_config.open(Options { transport: Transport::Tcp, ..Options::default() })?)
}

/// The streams of a core's workers, by rank.
fn admit(
    listener: &TcpListener,
    chunks: &Chunks,
    core: usize,
    job: &ServiceCreated,
) -> anyhow::Result<Vec<(u32, TcpStream)>> {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    listener.set_nonblocking(true)?;
    let expected = chunks.ranks_of(core).count();
    let mut workers: Vec<(u32, TcpStream)> = Vec::new();
    while workers.len() < expected {
        match listener.accept() {
            Ok((socket, _)) => {
                let (rank, socket) = shake_hands(socket, job, deadline)?;
                if !chunks.ranks_of(core).any(|own| own == rank)
                    || workers.iter().any(|(own, _)| *own == rank)
                {
                    bail!("rank {rank} came, which is not awaited here");
                }
                workers.push((rank, socket));
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if Instant::now() > deadline {
                    bail!("only {} of {expected} workers came", workers.len());
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(workers)
}

/// The hub's side of a stream's beginning.
fn shake_hands(
    mut socket: TcpStream,
    job: &ServiceCreated,
    deadline: Instant,
) -> anyhow::Result<(u32, TcpStream)> {
    socket.set_nonblocking(false)?;
    let mut hello = [0; HELLO_BYTES];
    read_exact_by(&mut socket, &mut hello, deadline).context("a worker said nothing")?;
    let handshake = HubHandshake::begin(&hello, draw().context("the system gives no random numbers")?)?;
    write_all_by(&mut socket, handshake.challenge_message(), deadline)?;
    let secret = job.nonce.into();
    let mut given = [0; PROOF_BYTES];
    read_exact_by(&mut socket, &mut given, deadline).context("a worker did not prove itself")?;
    if !handshake.is_proven(&secret, &Proof(given)) {
        bail!("a connection did not prove that it knows the job's nonce");
    }
    write_all_by(&mut socket, &handshake.welcome(&secret, &Welcome::default()), deadline)?;
    match handshake.hello().caller {
        Caller::Worker { rank, .. } => Ok((rank, socket)),
        Caller::Hub { .. } | Caller::Prober => bail!("a hub came"),
    }
}

#[cfg(test)]
mod tests {
    use paramhub::{Dtype, Key, KeyTable};
    use paramhub_harness::exchange::spec::Optimizer;

    use super::*;

    /// Three workers of two cores. The benchmark itself checks the numbers of every exchange.
    #[test]
    fn cores_share_every_chunk_and_hand_each_other_the_answers() {
        for (dtype, optimizer) in [(Dtype::F32, Optimizer::Mean), (Dtype::BF16, Optimizer::Sgd)] {
            let keys = [1, 5000, 70_000].iter().enumerate();
            let keys = keys.map(|(i, &n)| Key { dtype, ..Key::new(format!("k{i}"), [n]) }).collect();
            let keys = KeyTable::new(keys).unwrap();
            let spec = Spec { optimizer, chunk_bytes: 1024, ..Spec::new(keys, 3, 2) };
            let server = serve(&spec).unwrap();
            std::thread::scope(|threads| {
                for rank in 0..3 {
                    let (spec, server) = (&spec, &server);
                    threads.spawn(move || exchange(spec, rank, server));
                }
            });
        }
    }

    fn exchange(spec: &Spec, rank: u32, server: &CoreServer) {
        let job = join(spec, rank, &server.job, &server.addresses).unwrap();
        let bytes = |value: f32| match spec.keys.keys()[0].dtype {
            Dtype::F32 => value.to_le_bytes().to_vec(),
            // The upper half of an f32 is a bf16.
            _ => value.to_le_bytes()[2..].to_vec(),
        };
        let elements: Vec<usize> =
            spec.keys.keys().iter().map(|key| key.elements().unwrap() as usize).collect();
        let tensors = |value: f32| elements.iter().map(|&n| bytes(value).repeat(n)).collect::<Vec<_>>();
        let mut parameters = tensors(1.0);
        if job.settings().has_parameters() {
            job.broadcast(&mut parameters, 0).unwrap();
        }
        for step in 1..=3 {
            // The mean of the ranks is the step's number.
            let gradients = tensors(step as f32 + rank as f32 - 1.0);
            job.scope(|scope| {
                let handles =
                    gradients.iter().zip(&mut parameters).zip(0..).map(|((gradient, parameters), key)| {
                        scope.push_pull(key, &gradient[..], &mut parameters[..])
                    });
                let handles: Vec<_> = handles.collect::<Result<_, _>>()?;
                handles.into_iter().try_for_each(|handle| handle.wait().map(drop))
            })
            .unwrap();
            if spec.optimizer == Optimizer::Mean {
                let third = 1.0_f32 / 3.0;
                assert_eq!(parameters, tensors(3.0 * step as f32 * third), "rank {rank}, step {step}");
            } else {
                assert_ne!(parameters, tensors(1.0), "rank {rank}, step {step}");
            }
        }
        job.leave().unwrap();
    }
}
