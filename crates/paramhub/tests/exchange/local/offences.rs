//! False entries of a worker in its rings.

use std::time::Instant;

use paramhub_core::codec::Codec;
use paramhub_core::service::JobState;
use paramhub_core::settings::Settings;
use paramhub_core::wire::{HEADER_BYTES, Header, Operation};
use paramhub_transport::shm::RING_BYTES_DEFAULT;
use paramhub_worker::Job;

use super::{BYTES, ENDED, HUBS, LocalRaw, READ, punch, push};
use crate::bystander::beside_a_running_job;
use crate::cluster::{Cluster, Transports, await_true, keys};
use crate::raw::settings;

/// The offence of rank 1 against the hub.
type Offence = Box<dyn Fn(&mut LocalRaw)>;

fn sends(bytes: Vec<u8>) -> Offence {
    Box::new(move |raw| raw.send(&bytes))
}

fn header(change: impl FnOnce(&mut [u8])) -> Offence {
    let mut bytes = push(0);
    change(&mut bytes);
    sends(bytes)
}

#[test]
fn each_offence_in_shared_memory_fails_its_job_with_its_reason_and_no_other_job() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let bare =
        |operation, length| Header { length, codec: Codec::F32, ..Header::bare(operation) }.encode().to_vec();
    let retune = Header { chunk: 1, ..Header::bare(Operation::Retune) }.encode().to_vec();
    let cannot_hold = "which its ring cannot hold";
    // The last field: whether the hub still sends the reason to the offender. It does not over rings whose
    // counts are false.
    let offences: Vec<(&str, Offence, &str, bool)> = vec![
        ("bad operation", header(|bytes| bytes[0] = 200), "operation 200 does not exist", true),
        ("garbage", sends(vec![0xff; 64]), "operation 255 does not exist", true),
        ("the hub's operation", sends(bare(Operation::Parameters, 16)), "does not go this way", true),
        ("a chunk that is not", header(|bytes| bytes[4] = 9), "chunk 9, which is not on this stream", true),
        (
            "wrong length",
            header(|bytes| bytes[12] = 12),
            "12 bytes of f32 for chunk 0 of key `layer0`, which has 16 bytes",
            true,
        ),
        ("no length", header(|bytes| bytes[12] = 0), "0 bytes of f32 for chunk 0", true),
        ("oversized length", header(|bytes| bytes[12..].fill(0xff)), "announces 4294967295 bytes", true),
        ("wrong codec", header(|bytes| bytes[1] = Codec::F16.number()), "16 bytes of f16", true),
        ("future step", sends(push(5)), "step 5 was asked for, but step 0 is under way", true),
        ("an unknown group", sends(retune), "group 1 that cannot be used: the job has no such group", true),
        ("twice", sends([push(0), push(0)].concat()), "before the first was answered", true),
        (
            "parameters without a request",
            sends(bare(Operation::Initialise, 16)),
            "parameters to start from come once, from rank 0",
            true,
        ),
        ("more than a ring", Box::new(|raw| raw.claim(RING_BYTES_DEFAULT as u64 + 1)), cannot_hold, false),
        ("more than memory", Box::new(|raw| raw.claim(u64::MAX)), cannot_hold, false),
        (
            "less than before",
            Box::new(move |raw| {
                raw.send(&bare(Operation::Heartbeat, 0).repeat(2));
                // Waits until the hub has read it.
                await_true("the hub reads", || {
                    let mut read = [0; 8];
                    raw.rings.read(READ, &mut read);
                    (u64::from_le_bytes(read) == raw.written).then_some(())
                });
                raw.claim(HEADER_BYTES as u64);
            }),
            cannot_hold,
            false,
        ),
        (
            "rings taken away",
            Box::new(move |raw| {
                raw.send(&bare(Operation::Heartbeat, 0));
                await_true("the hub reads", || {
                    let mut read = [0; 8];
                    raw.rings.read(READ, &mut read);
                    (u64::from_le_bytes(read) == raw.written).then_some(())
                });
                punch(&raw.rings);
                raw.wake();
            }),
            cannot_hold,
            false,
        ),
        (
            "an end without a leave message",
            Box::new(|raw| {
                raw.rings.write(ENDED, &1_u32.to_le_bytes());
                raw.wake();
            }),
            "without a leave message",
            false,
        ),
        (
            "an end in mid-frame",
            Box::new(|raw| {
                raw.rings.write(ENDED, &u32::MAX.to_le_bytes());
                raw.send(&push(0)[..8]);
            }),
            "the connection ended inside a frame",
            false,
        ),
    ];
    beside_a_running_job(&cluster, || {
        for (number, (what, offend, reason, gets_reason)) in offences.iter().enumerate() {
            let name = format!("offence{number}");
            let ticket = cluster.job(&name, 2);
            std::thread::scope(|scope| {
                let honest = scope.spawn(|| {
                    let exchange =
                        |job: Job| job.push_pull(0, vec![0.0f32; 4], vec![0.0f32; 4])?.wait().map(drop);
                    ticket.join(0, settings()).and_then(exchange)
                });
                let mut raw = LocalRaw::join(&cluster, &ticket, 1, &settings());
                offend(&mut raw);
                if *gets_reason {
                    let failure = raw.await_failure();
                    assert_eq!(failure.rank, Some(1), "{what}: {failure:?}");
                    let message = failure.message;
                    assert!(message.contains(reason), "{what}: {message}");
                    assert!(message.contains(&format!("job `{name}` failed: rank 1")), "{what}: {message}");
                }
                assert!(raw.is_closed(), "{what}");
                if let Err(error) = honest.join().unwrap() {
                    let error = error.to_string();
                    assert!(error.contains(reason) && error.contains("rank 1"), "{what}: {error}");
                } else {
                    assert_eq!(
                        *what, "twice",
                        "only there the honest rank's step can end before the offence"
                    );
                }
            });
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Failed, "{what}");
            assert!(status.message.contains(reason), "{what}: {}", status.message);
            assert!(status.message.contains("rank 1"), "{what}: {}", status.message);
        }
    });
}

#[test]
fn an_offender_that_goes_on_sending_still_gets_the_reason() {
    let cluster = Cluster::new(Transports::shm(), 1);
    for round in 0..40 {
        let name = format!("flood{round}");
        let ticket = cluster.job(&name, 1);
        let mut raw = LocalRaw::join(&cluster, &ticket, 0, &settings());
        raw.send(&push(5));
        let heartbeat = Header::bare(Operation::Heartbeat).encode();
        // Acts like a worker in the middle of a step, which receives the failure when it has sent what it had
        // begun.
        for _ in 0..3000 {
            raw.send(&heartbeat);
        }
        let failure = raw.await_failure();
        assert!(failure.message.contains("step 5 was asked for"), "{name}: {}", failure.message);
    }
}

#[test]
fn random_bytes_in_rings_harm_no_other_job() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let seed: u64 = std::env::var("PARAMHUB_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64);
    println!("PARAMHUB_TEST_SEED={seed}");
    let mut state = seed | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    beside_a_running_job(&cluster, || {
        for round in 0..40 {
            let name = format!("noise{round}");
            let ticket = cluster.job(&name, 1);
            let mut raw = LocalRaw::join(&cluster, &ticket, 0, &settings());
            // Bytes that pass the hub's first check, then noise: a heartbeat, an operation, or a whole ring.
            let mut noise: Vec<u8> = (0..raw.rings.len() / 8).flat_map(|_| random().to_le_bytes()).collect();
            match round % 4 {
                0 => noise[BYTES] = Operation::PushPull as u8,
                1 => noise[BYTES..BYTES + 16].copy_from_slice(&Header::bare(Operation::Heartbeat).encode()),
                _ => {}
            }
            if round % 2 == 0 {
                noise[..8].copy_from_slice(&(random() % RING_BYTES_DEFAULT as u64).to_le_bytes());
            }
            raw.rings.write(0, &noise);
            raw.wake();
            drop(raw);
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Failed, "{status:?}");
            assert!(status.message.contains("rank 0"), "{}", status.message);
        }
    });
}

/// A job of one rank with so many chunks that the answers fill the hub's ring, and the pushes of these
/// chunks.
fn many_chunks() -> (Settings, Vec<Vec<u8>>) {
    let chunks = 2 * RING_BYTES_DEFAULT / HEADER_BYTES;
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[chunks as u64 * 256])) };
    let pushes = (0..chunks as u32).map(|chunk| {
        let header = Header { chunk, length: 1024, ..Header::bare(Operation::PushPull) };
        Header { codec: Codec::F32, ..header }.encode().to_vec()
    });
    (settings, pushes.collect())
}

#[test]
fn a_false_count_of_bytes_read_fails_its_job_when_the_hub_needs_the_room() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let (settings, pushes) = many_chunks();
    beside_a_running_job(&cluster, || {
        for false_count in [1 << 40, u64::MAX] {
            let name = format!("reads-{false_count}");
            let ticket = cluster.job(&name, 1);
            let mut raw = LocalRaw::join(&cluster, &ticket, 0, &settings);
            raw.rings.write(HUBS + READ, &u64::to_le_bytes(false_count));
            for some in pushes.chunks(1000) {
                if cluster.client.job(&name).unwrap().state.has_ended() {
                    break;
                }
                raw.send(&some.concat());
                // This keeps the ring of this side valid.
                let begun = Instant::now();
                let mut read = [0; 8];
                while u64::from_le_bytes(read) < raw.written && begun.elapsed().as_millis() < 500 {
                    raw.rings.read(READ, &mut read);
                }
            }
            assert!(raw.is_closed());
            let status = cluster.await_end(&name);
            assert_eq!(status.state, JobState::Failed);
            assert!(status.message.contains("rank 0 was lost"), "{}", status.message);
            assert!(status.message.contains("bytes are read after"), "{}", status.message);
        }
    });
}

#[test]
fn a_worker_that_reads_nothing_delays_no_other_and_goes_on_when_it_does() {
    let cluster = Cluster::new(Transports::shm(), 1);
    let (settings, pushes) = many_chunks();
    beside_a_running_job(&cluster, || {
        let ticket = cluster.job("lazy", 1);
        let mut raw = LocalRaw::join(&cluster, &ticket, 0, &settings);
        for some in pushes.chunks(1000) {
            raw.send(&some.concat());
            await_true("the hub reads on", || {
                let mut read = [0; 8];
                raw.rings.read(READ, &mut read);
                (u64::from_le_bytes(read) == raw.written).then_some(())
            });
        }
        let mut answered = vec![false; pushes.len()];
        while answered.contains(&false) {
            let (header, _) = raw.await_frame(Operation::Parameters);
            assert_eq!(header.step, 1);
            assert!(!std::mem::replace(&mut answered[header.chunk as usize], true));
            raw.wake();
        }
        raw.send(&Header::bare(Operation::Leave).encode());
        assert_eq!(cluster.await_end("lazy").state, JobState::Finished);
    });
}
