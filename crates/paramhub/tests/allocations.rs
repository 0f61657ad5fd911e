//! The data path allocates nothing per chunk: the number of allocations of a run does not grow with the number of its
//! chunks, counted over every thread of workers, hub and manager.

use paramhub::service::CreateService;
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{
    HubConfig, Hyperparameters, Key, KeyTable, Manager, ManagerClient, ManagerConfig, Member, Membership,
    RunningHub,
};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

const ELEMENTS: usize = 1 << 20;
const WORKERS: u32 = 2;
const STEPS: u32 = 20;

/// Allocations during the steady steps of a job whose one key is cut into chunks of this size.
fn allocations(client: &ManagerClient, chunk_bytes: u32, reproducible: bool) -> u64 {
    let request = CreateService {
        name: format!("{chunk_bytes}-{reproducible}"),
        workers: WORKERS,
        options: Default::default(),
    };
    let created = client.create_service(&request).unwrap();
    let hyperparameters = Hyperparameters { momentum: 0.9, ..Default::default() };
    let settings = Settings {
        optimizer: OptimizerChoice { name: "sgd".into(), hyperparameters: Some(hyperparameters) },
        chunk_bytes,
        reproducible,
        ..Settings::new(KeyTable::new(vec![Key::new("w", [ELEMENTS as u64])]).unwrap())
    };
    let barrier = std::sync::Barrier::new(WORKERS as usize);
    let counts: Vec<u64> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..WORKERS)
            .map(|rank| {
                let (settings, barrier, url) = (settings.clone(), &barrier, client.url().to_owned());
                scope.spawn(move || {
                    let (namespace, nonce) = (created.namespace, created.nonce);
                    let member = Member::connect(Membership { url, namespace, nonce, rank }).unwrap();
                    let job = member.init(settings).unwrap();
                    let mut parameters = vec![vec![0.0f32; ELEMENTS]];
                    job.broadcast(&mut parameters, 0).unwrap();
                    let (mut gradient, mut out) = (vec![1.0f32; ELEMENTS], parameters.remove(0));
                    let mut step = || {
                        let buffers = (std::mem::take(&mut gradient), std::mem::take(&mut out));
                        (gradient, out) = job.push_pull(0, buffers.0, buffers.1).unwrap().wait().unwrap();
                    };
                    // The first steps may grow what then stays.
                    (0..5).for_each(|_| step());
                    barrier.wait();
                    let before = dhat::HeapStats::get().total_blocks;
                    (0..STEPS).for_each(|_| step());
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
    let hub = RunningHub::start(client.clone(), HubConfig::default()).unwrap();
    for reproducible in [false, true] {
        let few_chunks = allocations(&client, 1 << 20, reproducible);
        let many_chunks = allocations(&client, 4 << 10, reproducible);
        // 4 chunks against 1,024, each pushed and answered by both ranks at every step: one allocation a chunk would make
        // a difference of over 40,000. What there is comes from requests, heartbeats and counters.
        println!("allocations in {STEPS} steps: {few_chunks} with 4 chunks, {many_chunks} with 1,024");
        assert!(many_chunks < few_chunks + 1_000, "{few_chunks} with 4 chunks, {many_chunks} with 1,024");
    }
    hub.stop();
    manager.stop();
}
