//! Several streams of a worker to each core and interface.

use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::wire::{Refusal, Verdict};
use paramhub_hub::{HubConfig, HubError, RunningHub};

use crate::cluster::{Cluster, Ticket, Transports, gradient, keys, sgd};
use crate::raw::Raw;

const CHUNK_BYTES: u32 = 4096;

fn settings(optimizer: OptimizerChoice) -> Settings {
    let settings = Settings::new(keys(&[100_000, 5, 30_001]));
    Settings { optimizer, reproducible: true, chunk_bytes: CHUNK_BYTES, ..settings }
}

/// The number of this process's sockets that are connected to one of the ports. A worker's and the hub's ends
/// are both here.
fn connected_to(ports: &[u16]) -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let remote = |line: &str| -> Option<(u16, bool)> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let port = u16::from_str_radix(fields.get(2)?.split_once(':')?.1, 16).ok()?;
        Some((port, fields[3] == "01"))
    };
    table.lines().filter_map(remote).filter(|(port, is_up)| *is_up && ports.contains(port)).count()
}

fn train(ticket: &Ticket, settings: &Settings, on_the_way: impl Fn() + Sync) -> Vec<Vec<Vec<f32>>> {
    let all_workers_are_here = std::sync::Barrier::new(ticket.workers as usize);
    ticket.run(settings, |job| {
        let sizes = settings.keys.keys().iter().map(|key| key.elements().unwrap() as usize);
        let mut model: Vec<Vec<f32>> = sizes.map(|elements| vec![0.0; elements]).collect();
        job.broadcast(&mut model, 0).unwrap();
        all_workers_are_here.wait();
        if job.rank() == 0 {
            on_the_way();
        }
        all_workers_are_here.wait();
        for step in 0..3 {
            let handles: Vec<_> = (0..model.len() as u32)
                .map(|key| {
                    let out = std::mem::take(&mut model[key as usize]);
                    job.push_pull(key, gradient(job.rank(), key, step, out.len()), out).unwrap()
                })
                .collect();
            for (key, handle) in handles.into_iter().enumerate() {
                model[key] = handle.wait().unwrap().1;
            }
        }
        model
    })
}

#[test]
fn two_cores_with_three_streams_each_make_what_one_stream_makes() {
    let settings = settings(sgd(0.5, 0.9));
    let expected = train(&Cluster::new(Transports::tcp(), 1).job("one", 2), &settings, || {}).remove(0);
    for (listen, cores, streams, per_worker) in [
        (&["127.0.0.1:0"][..], 2, 3, 6),
        // Each interface has one of the cores.
        (&["127.0.0.1:0", "127.0.0.2:0"], 2, 3, 6),
        // Both interfaces share the core.
        (&["127.0.0.1:0", "127.0.0.2:0"], 1, 2, 4),
    ] {
        let cluster = Cluster::with(Transports::tcp(), |config| {
            config.listen = listen.iter().map(|address| address.parse().unwrap()).collect();
            (config.cores, config.streams) = (cores, streams);
        });
        let ports: Vec<u16> = cluster.hub().addresses().iter().map(|address| address.port()).collect();
        let count = || assert_eq!(connected_to(&ports), 2 * per_worker, "{listen:?}, {cores} cores");
        let models = train(&cluster.job("many", 2), &settings, count);
        assert!(
            models.iter().all(|model| *model == expected),
            "{listen:?}, {cores} cores, {streams} streams"
        );
        cluster.await_end("many");
    }
}

#[test]
fn a_stream_may_be_for_any_copy_of_the_address_it_came_in_by_and_for_no_other() {
    let cluster = Cluster::with(Transports::tcp(), |config| {
        config.listen = vec!["127.0.0.1:0".parse().unwrap(), "127.0.0.2:0".parse().unwrap()];
        (config.cores, config.streams) = (2, 2);
    });
    let settings = Settings { chunk_bytes: 1024, ..Settings::new(keys(&[4096])) };
    let ticket = cluster.job("copies", 1);
    let (_, mut hello) = Raw::join_with(&cluster, &ticket, 0, &settings);
    // A stream that ends would end the job, so they are kept.
    let mut admitted = Vec::new();
    // (listener, interface, core): interfaces 0 and 1 are the first address, 2 and 3 the second.
    for (listener, interface, core, is_welcome) in [
        (0, 2, 1, false),
        (1, 1, 0, false),
        (0, 0, 1, false),
        (0, 4, 0, false),
        (0, 1, 0, true),
        (1, 3, 1, true),
    ] {
        (hello.interface, hello.core) = (interface, core);
        let mut raw = Raw::dial(cluster.hub().addresses()[listener]);
        let verdict = raw.shake_hands(&hello, &ticket);
        match verdict {
            Verdict::Welcome { .. } => {
                assert!(is_welcome, "{listener}, {interface}, {core}");
                admitted.push(raw);
            }
            Verdict::Refused { refusal, message } => {
                assert!(
                    !is_welcome && refusal == Refusal::Route,
                    "{listener}, {interface}, {core}: {message}"
                );
            }
        }
    }
}

#[test]
fn more_streams_than_interfaces_can_be_numbered_are_refused() {
    let cluster = Cluster::new(Transports::tcp(), 1);
    for (interfaces, streams) in [(1, 0), (1, 65), (2, 33), (3, usize::MAX)] {
        let listen = (1..=interfaces).map(|host| format!("127.0.0.{host}:0").parse().unwrap()).collect();
        let config = HubConfig { listen, streams, ..Default::default() };
        let Err(HubError::Config(why)) = RunningHub::start(cluster.client.clone(), config) else {
            panic!("{interfaces} interfaces with {streams} streams were taken")
        };
        assert!(why.contains(&format!("not {streams}")) && why.contains("1 to "), "{why}");
    }
}
