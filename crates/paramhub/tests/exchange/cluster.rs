//! A manager and a hub in this process, and workers that join them over real sockets.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paramhub_control::ManagerClient;
use paramhub_core::auth::{Namespace, Nonce, StreamSecret};
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::service::{CreateService, JobOptions, JobState, JobStatus, ServiceCreated};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_kernels::Hyperparameters;
use paramhub_manager::{Manager, ManagerConfig, RunningManager};
use paramhub_worker::{Job, Member, Membership, Options, Transport, WorkerError};

/// The longest wait in these tests before it counts as a hang.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// The transports of a job's workers: rank r has the one at r modulo their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transports(&'static [Transport]);

impl Transports {
    pub(crate) fn tcp() -> Transports {
        Transports(&[Transport::Tcp])
    }

    pub(crate) fn shm() -> Transports {
        Transports(&[Transport::Shm])
    }

    /// Every other rank shares memory with the hub.
    pub(crate) fn mixed() -> Transports {
        Transports(&[Transport::Tcp, Transport::Shm])
    }

    pub(crate) fn of_rank(self, rank: u32) -> Transport {
        self.0[rank as usize % self.0.len()]
    }
}

pub(crate) struct Cluster {
    transports: Transports,
    pub(crate) client: ManagerClient,
    pub(crate) hub: Option<RunningHub>,
    manager: Option<RunningManager>,
}

/// A job and the data that its workers need to join it.
#[derive(Clone)]
pub(crate) struct Ticket {
    pub(crate) url: String,
    pub(crate) namespace: Namespace,
    pub(crate) nonce: Nonce,
    pub(crate) workers: u32,
    pub(crate) transports: Transports,
    /// The secrets of the ranks that have joined by hand.
    pub(crate) secrets: Arc<Mutex<BTreeMap<u32, StreamSecret>>>,
}

impl Cluster {
    pub(crate) fn new(transports: Transports, cores: usize) -> Cluster {
        Cluster::with(transports, |config| config.cores = cores)
    }

    pub(crate) fn with(transports: Transports, change: impl FnOnce(&mut HubConfig)) -> Cluster {
        let listen = "127.0.0.1:0".parse().unwrap();
        let manager = Manager::start(ManagerConfig { listen, ..Default::default() }).unwrap();
        let client = ManagerClient::new(&manager.url(), None).unwrap();
        let mut config = HubConfig { memory_bytes: Some(4 << 30), ..Default::default() };
        change(&mut config);
        let hub = RunningHub::start(client.clone(), config).unwrap();
        Cluster { transports, client, hub: Some(hub), manager: Some(manager) }
    }

    pub(crate) fn hub(&self) -> &RunningHub {
        self.hub.as_ref().expect("the hub runs")
    }

    /// A job at all hubs that have joined: one that has just started may not have said yet that it takes jobs.
    pub(crate) fn job(&self, name: &str, workers: u32) -> Ticket {
        let hubs = Some(self.client.hubs().unwrap().len() as u32).filter(|&hubs| hubs > 1);
        self.job_with(name, workers, JobOptions { rendezvous_timeout_s: 20.0, hubs, ..Default::default() })
    }

    pub(crate) fn job_with(&self, name: &str, workers: u32, options: JobOptions) -> Ticket {
        let created =
            self.client.create_service(&CreateService { name: name.into(), workers, options }).unwrap();
        Ticket::of(self, created, workers)
    }

    /// Waits until a job's state is as wanted, and returns it.
    pub(crate) fn await_job(&self, name: &str, wanted: impl Fn(&JobStatus) -> bool) -> JobStatus {
        await_true(&format!("job `{name}`"), || self.client.job(name).ok().filter(|status| wanted(status)))
    }

    pub(crate) fn await_end(&self, name: &str) -> JobStatus {
        self.await_job(name, |status| status.state.has_ended())
    }

    pub(crate) fn await_state(&self, name: &str, state: JobState) -> JobStatus {
        self.await_job(name, |status| status.state == state)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(hub) = self.hub.take() {
            hub.stop();
        }
        if let Some(manager) = self.manager.take() {
            manager.stop();
        }
    }
}

/// Polls until `ready` yields something; panics with `what` after [`WAIT_TIMEOUT`].
pub(crate) fn await_true<T>(what: &str, ready: impl Fn() -> Option<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(begun.elapsed() < WAIT_TIMEOUT, "{what} did not come about within {WAIT_TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Ticket {
    pub(crate) fn of(cluster: &Cluster, created: ServiceCreated, workers: u32) -> Ticket {
        Ticket {
            url: cluster.client.url().to_owned(),
            namespace: created.namespace,
            nonce: created.nonce,
            workers,
            transports: cluster.transports,
            secrets: Arc::default(),
        }
    }

    /// The secret of a rank that has joined by hand; for another the nonce, which opens nothing.
    pub(crate) fn secret(&self, rank: u32) -> StreamSecret {
        self.secrets.lock().unwrap().get(&rank).copied().unwrap_or(self.nonce.into())
    }

    pub(crate) fn membership(&self, rank: u32) -> Membership {
        Membership { url: self.url.clone(), namespace: self.namespace, secret: self.nonce.into(), rank }
    }

    pub(crate) fn join(&self, rank: u32, settings: Settings) -> Result<Job, WorkerError> {
        self.join_with(rank, Options::default(), settings)
    }

    /// [`join`](Self::join) with other options than the default; the transport is that of the test.
    pub(crate) fn join_with(
        &self,
        rank: u32,
        options: Options,
        settings: Settings,
    ) -> Result<Job, WorkerError> {
        let transport = self.transports.of_rank(rank);
        Member::connect_with(self.membership(rank), Options { transport, ..options })?.init(settings)
    }

    /// Runs `work` as every rank at once and returns each rank's result, by rank. A rank whose work returns
    /// leaves.
    pub(crate) fn run<T: Send>(&self, settings: &Settings, work: impl Fn(&Job) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..self.workers)
                .map(|rank| {
                    let work = &work;
                    scope.spawn(move || {
                        let job = self.join(rank, settings.clone()).unwrap();
                        let made = work(&job);
                        job.leave().unwrap();
                        made
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

pub(crate) fn keys(sizes: &[u64]) -> KeyTable {
    KeyTable::new(sizes.iter().enumerate().map(|(i, &n)| Key::new(format!("layer{i}"), [n])).collect())
        .unwrap()
}

pub(crate) fn sgd(learning_rate: f64, momentum: f64) -> OptimizerChoice {
    let hyperparameters = Hyperparameters { learning_rate, momentum, ..Default::default() };
    OptimizerChoice { hyperparameters: Some(hyperparameters), ..OptimizerChoice::named("sgd") }
}

/// Numbers that look random, whose sums depend on their order, and that can be computed again.
pub(crate) fn gradient(rank: u32, key: u32, step: u32, elements: usize) -> Vec<f32> {
    let seed = u64::from(rank) << 40 ^ u64::from(key) << 20 ^ u64::from(step);
    (0..elements as u64)
        .map(|element| {
            // SplitMix64.
            let mut bits = (seed << 20 ^ element).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((bits ^ bits >> 31) >> 40) as f32 / (1u64 << 22) as f32 - 2.0
        })
        .collect()
}
