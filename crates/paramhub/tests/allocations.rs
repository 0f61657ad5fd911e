//! The data path allocates nothing per chunk: the number of allocations in a run does not grow with the
//! number of its chunks, counted over every thread of workers, hub and manager.

use std::path::Path;
use std::time::{Duration, Instant};

use paramhub::scheme::{LayerSettings, Scheme, SchemeChoice};
use paramhub::service::{CreateService, JobOptions};
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{
    CheckpointConfig, Codec, FactorBuffers, HubConfig, Hyperparameters, Key, KeyTable, Manager,
    ManagerClient, ManagerConfig, Member, Membership, Options, ParameterSharing, RunningHub, Transport,
};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const ELEMENTS: usize = 1 << 20;
const WORKERS: u32 = 2;
const STEPS: u32 = 20;

/// The store through which two ranks exchange, and its options.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    transports: [Transport; WORKERS as usize],
    shared_parameters: ParameterSharing,
    in_place: bool,
    reproducible: bool,
    codec: Codec,
    /// `true` if the key is the weight of a layer whose factors go to the hub.
    factors: bool,
    /// `true` if a checkpoint is taken during the steps that are counted.
    kept: bool,
}

/// The samples of that layer.
const SAMPLES: usize = 4;
/// The step of that checkpoint.
const KEPT: u32 = 15;

/// Allocations during the steady steps of a job whose one key is cut into chunks of this size.
fn allocations(client: &ManagerClient, folder: &Path, chunk_bytes: u32, way: Way) -> u64 {
    let request = CreateService {
        name: format!("{chunk_bytes}-{}-{}-{}", way.name, way.reproducible, way.codec),
        workers: WORKERS,
        options: JobOptions {
            checkpoint_every: way.kept.then(|| KEPT.to_string().parse().unwrap()),
            ..Default::default()
        },
    };
    let created = &client.create_service(&request).unwrap();
    let run: String = created.namespace.to_string().chars().take(12).collect();
    let manifest = folder.join(&request.name).join(format!("step-{KEPT:010}.{run}")).join("hub-0.json");
    let hyperparameters = Hyperparameters { momentum: 0.9, ..Default::default() };
    let settings = Settings {
        optimizer: OptimizerChoice {
            hyperparameters: Some(hyperparameters),
            ..OptimizerChoice::named("sgd")
        },
        chunk_bytes,
        reproducible: way.reproducible,
        codec: Some(way.codec),
        // A matrix, as a job's quantised codec applies to matrices only.
        ..Settings::new(KeyTable::new(vec![Key::new("w", [ELEMENTS as u64 / 256, 256])]).unwrap())
    };
    let mut settings = settings;
    if way.factors {
        let layer = LayerSettings::fully_connected("w", [0], [ELEMENTS as u64 / 256, 256, SAMPLES as u64]);
        settings.layers = vec![layer.by(SchemeChoice::Only(Scheme::FactorsToHub))];
    }
    let barrier = std::sync::Barrier::new(WORKERS as usize);
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..WORKERS)
            .map(|rank| {
                let (settings, barrier, url) = (settings.clone(), &barrier, client.url().to_owned());
                let manifest = &manifest;
                scope.spawn(move || {
                    let options = Options {
                        transport: way.transports[rank as usize],
                        shared_parameters: way.shared_parameters,
                        ..Default::default()
                    };
                    let membership = Membership::of_job(url, created, rank);
                    let job = Member::connect_with(membership, options).unwrap().init(settings).unwrap();
                    let mut parameters = vec![vec![0.0f32; ELEMENTS]];
                    job.broadcast(&mut parameters, 0).unwrap();
                    let (mut gradient, mut out) = (vec![1.0f32; ELEMENTS], parameters.remove(0));
                    let mut factors = FactorBuffers::<Vec<f32>, Vec<f32>>::default();
                    factors.inputs.resize(SAMPLES * 256, 1.0f32);
                    factors.output_gradients.resize(SAMPLES * ELEMENTS / 256, 1.0f32);
                    let mut step = || {
                        if way.factors {
                            factors.weight = std::mem::take(&mut out);
                            let done = job.push_pull_factors(0, std::mem::take(&mut factors));
                            factors = done.unwrap().wait().unwrap();
                            out = std::mem::take(&mut factors.weight);
                            return;
                        }
                        let (given, into) = (std::mem::take(&mut gradient), std::mem::take(&mut out));
                        if way.shared_parameters == ParameterSharing::Always {
                            (gradient, _) = job.push_pull_shared(0, given).unwrap().wait().unwrap();
                        } else if way.in_place {
                            ((), gradient) = job.push_pull_in_place(0, given).unwrap().wait().unwrap();
                        } else {
                            (gradient, out) = job.push_pull(0, given, into).unwrap().wait().unwrap();
                        }
                    };
                    // The first steps may grow buffers that then stay.
                    (0..5).for_each(|_| step());
                    barrier.wait();
                    let before = dhat::HeapStats::get().total_blocks;
                    (0..STEPS).for_each(|_| step());
                    let begun = Instant::now();
                    while way.kept && !manifest.exists() {
                        assert!(begun.elapsed() < Duration::from_secs(30), "no {}", manifest.display());
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    barrier.wait();
                    let after = dhat::HeapStats::get().total_blocks;
                    job.leave().unwrap();
                    after - before
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    counts.into_iter().max().unwrap()
}

#[test]
fn allocations_do_not_grow_with_the_number_of_chunks() {
    let _profiler = dhat::Profiler::builder().testing().build();
    let listen = "127.0.0.1:0".parse().unwrap();
    let manager = Manager::start(ManagerConfig { listen, ..Default::default() }).unwrap();
    let client = ManagerClient::new(&manager.url(), None).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Some(CheckpointConfig { folder: folder.path().into(), keep: 1 });
    let config = HubConfig { checkpoints, ..HubConfig::default() };
    let hub = RunningHub::start(client.clone(), config).unwrap();
    let way = |name, transports, shared_parameters| Way {
        name,
        transports,
        shared_parameters,
        in_place: false,
        reproducible: false,
        codec: Codec::F32,
        factors: false,
        kept: false,
    };
    let ways = [
        way("tcp", [Transport::Tcp; 2], ParameterSharing::Never),
        way("shm", [Transport::Shm; 2], ParameterSharing::Never),
        way("mixed", [Transport::Tcp, Transport::Shm], ParameterSharing::Never),
        way("shared", [Transport::Shm; 2], ParameterSharing::Always),
    ];
    let mut cases: Vec<Way> = ways.iter().flat_map(|&way| [way, Way { reproducible: true, ..way }]).collect();
    cases.push(Way { codec: Codec::F16, ..ways[1] });
    cases.push(Way { codec: Codec::ONE_BIT, ..ways[0] });
    cases.push(Way { codec: Codec::INT8, ..ways[0] });
    cases.push(Way { codec: Codec::TWO_BIT, reproducible: true, in_place: true, ..ways[0] });
    cases.extend([0, 1].map(|way| Way {
        name: ["tcp-in-place", "shm-in-place"][way],
        in_place: true,
        ..ways[way]
    }));
    cases.extend([("tcp-factors", ways[0]), ("shm-factors", ways[1])].map(|(name, way)| Way {
        name,
        factors: true,
        ..way
    }));
    cases.extend([("tcp-kept", ways[0]), ("shm-kept", ways[1])].map(|(name, way)| Way {
        name,
        kept: true,
        ..way
    }));
    for way in cases {
        let few_chunks = allocations(&client, folder.path(), 1 << 20, way);
        let many_chunks = allocations(&client, folder.path(), 4 << 10, way);
        let Way { name, reproducible, codec, .. } = way;
        // 4 chunks against 1,024, each pushed and answered by both ranks at every step: one allocation a
        // chunk would make a difference of over 40,000, and one for each chunk that is copied for a
        // checkpoint a difference of 1,020. The allocations that there are come from requests, heartbeats and
        // counters.
        let counted = format!("{few_chunks} with 4 chunks, {many_chunks} with 1,024");
        println!("{name}, {codec}, reproducible {reproducible}: allocations in {STEPS} steps: {counted}");
        assert!(many_chunks < few_chunks + 1_000, "{name}, {codec}, reproducible {reproducible}: {counted}");
    }
    hub.stop();
    manager.stop();
}
