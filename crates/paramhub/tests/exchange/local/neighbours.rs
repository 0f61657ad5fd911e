//! A worker that misuses memory and sockets that it shares with the hub: at worst its own numbers are wrong.

use std::io::Write;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paramhub_core::codec::Codec;
use paramhub_core::service::{JobOptions, JobState, OnInterfaceDown};
use paramhub_core::settings::Settings;
use paramhub_core::wire::{Attempt, Header, Hello, Operation, Verdict};

use super::{
    BYTES, HUBS, LocalRaw, READER_SLEEPS, WRITER_SLEEPS, WRITTEN, arena, at_core, dial, punch, push, rings,
    shake_hands,
};
use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Transports, WAIT_TIMEOUT, keys};
use crate::raw::{Raw, hello, settings};

#[test]
fn a_flood_of_bells_leaves_a_core_to_the_other_jobs() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let ticket = cluster.job("flood", 1);
    let raw = LocalRaw::join(&cluster, &ticket, 0, &settings());
    let (socket, over) = (&raw.socket, AtomicBool::new(false));
    socket.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    std::thread::scope(|scope| {
        // Several threads, so that the socket is never empty for long.
        for _ in 0..4 {
            scope.spawn(|| {
                let (bells, begun) = (vec![1; 256 << 10], Instant::now());
                while !over.load(Ordering::Relaxed) && begun.elapsed() < WAIT_TIMEOUT {
                    let _ = (&*socket).write(&bells);
                }
            });
        }
        let others = catch_unwind(AssertUnwindSafe(|| {
            cluster.job("beside", 2).run(&settings(), |job| {
                for _ in 0..200 {
                    let (_, mean) =
                        job.push_pull(0, vec![1.0f32; 4], vec![0.0f32; 4]).unwrap().wait().unwrap();
                    assert_eq!(mean, [1.0; 4]);
                }
            });
        }));
        over.store(true, Ordering::Relaxed);
        others.unwrap_or_else(|panic| resume_unwind(panic));
    });
    assert!(!cluster.client.job("flood").unwrap().state.has_ended(), "ringing is no offence");
}

#[test]
fn a_stream_over_shared_memory_is_not_resumed_over_tcp() {
    let cluster = Cluster::new(Transports::shm(), 1);
    beside_a_running_job(&cluster, || {
        let options = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..Default::default() };
        let ticket = cluster.job_with("two-ways", 1, options);
        let mut local = LocalRaw::join(&cluster, &ticket, 0, &settings());
        let resumes = Attempt::Numbered { epoch: 1, number: 1 };
        let hello = Hello { attempt: resumes, ..hello(&ticket, 0, &settings(), &cluster) };
        let mut other = Raw::dial(cluster.hub().addresses()[0]);
        match other.shake_hands(&hello, &ticket) {
            Verdict::Refused { message, .. } => {
                assert!(
                    message.contains("rank 0 of job `two-ways` resumes a stream over shared memory"),
                    "{message}"
                );
            }
            Verdict::Welcome { .. } => {
                // The hub's core must answer this over a stream that it takes for the old one.
                other.send(&crate::raw::push(0));
                other.await_frame(Operation::Parameters);
                panic!("it was let in");
            }
        }
        local.send(&push(0));
        assert_eq!(local.await_frame(Operation::Parameters).0.step, 1, "the first stream goes on");
    });
    assert_eq!(cluster.hub().failure(), None);
}

#[test]
fn memory_that_is_brought_twice_harms_its_own_job_at_most() {
    let cluster = Cluster::new(Transports::shm(), 2);
    // An arena as large as the rings.
    let elements = (rings().len() / 2 / 4) as u64;
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[elements])) };
    assert_eq!(arena(&settings).len(), rings().len());
    let chunks = chunks_of_cores(&cluster, &settings);
    beside_a_running_job(&cluster, || {
        for (name, arena_is_rings) in [("same-arena", false), ("same-everything", true)] {
            let ticket = cluster.job(name, 2);
            let common = rings();
            let join = |rank| {
                let (_, hello) = Raw::join_with(&cluster, &ticket, rank, &settings);
                [0, 1].map(|core| {
                    let (socket, own) = (dial(&cluster), rings());
                    let offer = [common.as_fd(), if arena_is_rings { common.as_fd() } else { own.as_fd() }];
                    let verdict = shake_hands(&socket, &at_core(&hello, core), &ticket, &offer);
                    assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
                    LocalRaw { socket, rings: own, written: 0, read: 0 }
                })
            };
            std::thread::scope(|scope| {
                let ranks = [0, 1].map(|rank| scope.spawn(move || join(rank)));
                let mut streams = ranks.map(|rank| rank.join().unwrap());
                for step in 0..20_u32 {
                    for (raw, chunks) in
                        streams.iter_mut().flat_map(|streams| streams.iter_mut().zip(&chunks))
                    {
                        for &(chunk, elements) in chunks {
                            let (operation, codec, length) = (Operation::PushPull, Codec::F32, elements * 4);
                            let wire = Header { operation, codec, chunk, step, length }.encode();
                            match arena_is_rings {
                                true => common.write(BYTES + 16 * (step as usize), &wire),
                                false => raw.send(&wire),
                            }
                        }
                        if arena_is_rings {
                            common.write(WRITTEN, &u64::from(16 * step).to_le_bytes());
                            raw.wake();
                        }
                    }
                    for (raw, chunks) in
                        streams.iter_mut().flat_map(|streams| streams.iter_mut().zip(&chunks))
                    {
                        for _ in chunks.iter().filter(|_| !arena_is_rings) {
                            assert_eq!(raw.await_frame(Operation::Parameters).0.step, step + 1);
                        }
                    }
                }
            });
            // At the latest, what is left of the job is lost with its streams.
            let status = cluster.await_end(name);
            assert_eq!(status.state, JobState::Failed, "{status:?}");
        }
    });
}

#[test]
fn scribbles_in_flags_and_arenas_harm_no_other_job_and_end_none() {
    const ELEMENTS: usize = 60_000;
    const STEPS: u32 = 60;
    let cluster = Cluster::new(Transports::shm(), 2);
    beside_a_running_job(&cluster, || {
        for reproducible in [false, true] {
            let settings = Settings { reproducible, ..Settings::new(keys(&[ELEMENTS as u64])) };
            let name = format!("scribbled-{reproducible}");
            let ticket = cluster.job(&name, 2);
            let (shared, over) = (arena(&settings), AtomicBool::new(false));
            std::thread::scope(|scope| {
                let rank_0 = scope.spawn(|| {
                    let job = ticket.join(0, settings.clone()).unwrap();
                    for _ in 0..STEPS {
                        let (gradient, out) = (vec![1.0f32; ELEMENTS], vec![0.0f32; ELEMENTS]);
                        job.push_pull(0, gradient, out).unwrap().wait().unwrap();
                    }
                    job.leave().unwrap();
                });
                let (_, hello) = Raw::join_with(&cluster, &ticket, 1, &settings);
                let mut streams = [0, 1].map(|core| {
                    let (socket, rings) = (dial(&cluster), rings());
                    let offer = [shared.as_fd(), rings.as_fd()];
                    let verdict = shake_hands(&socket, &at_core(&hello, core), &ticket, &offer);
                    assert!(matches!(verdict, Verdict::Welcome { .. }), "{verdict:?}");
                    LocalRaw { socket, rings, written: 0, read: 0 }
                });
                scope.spawn(|| {
                    let (mut noise, begun) = (0x9e37_79b9_u32, Instant::now());
                    while !over.load(Ordering::Relaxed) && begun.elapsed() < WAIT_TIMEOUT {
                        for at in (0..shared.len() - 4).step_by(4) {
                            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                            shared.write(at, &noise.to_le_bytes());
                        }
                        // It also removes the pages, which their owner may do: they come back as zeros.
                        punch(&shared);
                    }
                });
                exchange_scribbling(&mut streams, &chunks_of_cores(&cluster, &settings), STEPS);
                over.store(true, Ordering::Relaxed);
                // By the flags a hub may have to wake this rank, whose sockets must be there until the other rank has left.
                rank_0.join().unwrap();
                drop(streams);
            });
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Finished, "{status:?}");
        }
    });
}

/// Pushes every chunk in every step over rings whose flags hold arbitrary values, and leaves.
fn exchange_scribbling(streams: &mut [LocalRaw; 2], chunks: &[Vec<(u32, u32)>], steps: u32) {
    for step in 0..steps {
        for (raw, chunks) in streams.iter_mut().zip(chunks) {
            for flag in [READER_SLEEPS, WRITER_SLEEPS, HUBS + READER_SLEEPS, HUBS + WRITER_SLEEPS] {
                raw.rings.write(flag, &(0xdead_0000 + step).to_le_bytes());
            }
            for &(chunk, elements) in chunks {
                let (operation, codec, length) = (Operation::PushPull, Codec::F32, elements * 4);
                raw.send(&Header { operation, codec, chunk, step, length }.encode());
            }
        }
        for (raw, chunks) in streams.iter_mut().zip(chunks) {
            for _ in chunks {
                assert_eq!(raw.await_frame(Operation::Parameters).0.step, step + 1);
            }
        }
    }
    streams.iter_mut().for_each(|raw| raw.send(&Header::bare(Operation::Leave).encode()));
}

/// The chunks of each of the hub's two cores, with their elements.
fn chunks_of_cores(cluster: &Cluster, settings: &Settings) -> Vec<Vec<(u32, u32)>> {
    use paramhub_core::chunk::ChunkMap;
    use paramhub_core::placement::Placement;
    let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).unwrap();
    let shape = cluster.client.hubs().unwrap().remove(0).shape;
    let placement = Placement::new(&settings.keys, &map, &[shape]).unwrap();
    let mut cores = vec![Vec::new(); 2];
    for (id, route) in (0..).zip(placement.routes()) {
        for &chunk in placement.chunks(id) {
            cores[usize::from(route.core)].push((chunk, map.extent(chunk).unwrap().elements));
        }
    }
    cores
}
