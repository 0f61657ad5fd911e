//! Communicators of a job's ranks, which a real connection manager brings together without a hub.

use std::sync::Arc;
use std::time::Duration;

use paramhub::collective::communicator::{Communicator, RendezvousOptions, rendezvous};
use paramhub::collective::engine::{Engine, EngineConfig};
use paramhub::collective::kvstore::{Array, StoreKind, StoreOptions, create};
use paramhub::service::{CreateService, JobOptions, JobState, ServiceCreated};
use paramhub::{Dtype, Manager, ManagerClient, ManagerConfig, Membership, Options, RunningManager};

struct HublessJob {
    manager: RunningManager,
    client: ManagerClient,
    job: ServiceCreated,
}

impl HublessJob {
    fn new(name: &str, workers: u32, options: JobOptions) -> HublessJob {
        HublessJob::of(ManagerConfig::default(), name, workers, options)
    }

    fn of(config: ManagerConfig, name: &str, workers: u32, options: JobOptions) -> HublessJob {
        let listen = "127.0.0.1:0".parse().unwrap();
        let manager = Manager::start(ManagerConfig { listen, ..config }).unwrap();
        let client = ManagerClient::new(&manager.url(), None).unwrap();
        let options = JobOptions { hubs: Some(0), ..options };
        let job = client.create_service(&CreateService { name: name.into(), workers, options }).unwrap();
        HublessJob { manager, client, job }
    }

    fn membership(&self, rank: u32) -> Membership {
        Membership::of_job(self.manager.url(), &self.job, rank)
    }

    /// Runs `part` with every rank's communicator. Returns the results by rank.
    fn all<T: Send>(&self, ranks: u32, part: impl Fn(Box<dyn Communicator>) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let rank = |rank| {
                let (membership, part) = (self.membership(rank), &part);
                scope.spawn(move || part(rendezvous(membership, RendezvousOptions::default()).unwrap()))
            };
            let ranks: Vec<_> = (0..ranks).map(rank).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn status(&self) -> (JobState, String) {
        let job = self.client.job(&self.job.namespace.to_string()).unwrap();
        (job.state, job.message)
    }
}

fn sum(communicator: &dyn Communicator) -> Result<f32, String> {
    let mut values = [communicator.rank() as f32 + 1.0; 1000];
    let bytes = bytemuck::cast_slice_mut(&mut values);
    communicator.allreduce("values", bytes, Dtype::F32).map_err(|error| error.to_string())?;
    Ok(values[999])
}

#[test]
fn ranks_meet_and_leave_and_their_copies_with_them() {
    let hubless = HublessJob::new("ring", 3, JobOptions::default());
    let sums = hubless.all(3, |communicator| {
        let copy = communicator.duplicate().unwrap();
        let another = communicator.duplicate().unwrap();
        let sums = [sum(&communicator), sum(&copy), sum(&another)];
        another.leave().unwrap();
        copy.leave().unwrap();
        communicator.leave().unwrap();
        sums
    });
    assert_eq!(sums, vec![[Ok(6.0), Ok(6.0), Ok(6.0)]; 3]);
    assert_eq!(hubless.status().0, JobState::Finished);
}

#[test]
fn a_store_of_several_communicators_needs_nothing_but_the_job() {
    let hubless = HublessJob::new("stores", 2, JobOptions::default());
    let sums = hubless.all(2, |communicator| {
        let engine = Arc::new(Engine::new(EngineConfig::default()).unwrap());
        let options =
            StoreOptions { communicator: Some(communicator), ..StoreOptions::new(Arc::clone(&engine)) };
        let store = create(StoreKind::ConCom, options).unwrap();
        let arrays: Vec<Array> =
            (0..9).map(|_| Array::new(&engine, vec![store.rank() as f32 + 1.0; 50])).collect();
        for (key, array) in (0_u64..).zip(&arrays) {
            store.init(&key.into(), array).unwrap();
            store.pushpull(&key.into(), std::slice::from_ref(array), std::slice::from_ref(array), 0).unwrap();
        }
        store.barrier().unwrap();
        let values = arrays.iter().map(|array| array.to_vec(&engine).unwrap()[49]).collect::<Vec<f32>>();
        store.leave().unwrap();
        values
    });
    assert_eq!(sums, vec![vec![3.0; 9]; 2]);
    assert_eq!(hubless.status().0, JobState::Finished);
}

#[test]
fn a_rank_that_ends_without_leaving_ends_the_job_for_all() {
    let hubless = HublessJob::new("quitter", 3, JobOptions::default());
    let all = std::sync::Barrier::new(3);
    let ends = hubless.all(3, |communicator| {
        sum(&communicator).unwrap();
        all.wait();
        match communicator.rank() {
            1 => Ok(0.0),
            _ => sum(&communicator),
        }
    });
    for rank in [0, 2] {
        let error = ends[rank].as_ref().unwrap_err();
        assert!(error.contains("rank 1"), "{error}");
    }
    let (state, message) = hubless.status();
    assert_eq!(state, JobState::Failed);
    assert!(message.contains("left"), "{message}");
}

#[test]
fn a_stop_of_the_job_reaches_ranks_that_wait() {
    let hubless = HublessJob::new("stopped", 2, JobOptions { lease_s: 1.0, ..JobOptions::default() });
    let both = std::sync::Barrier::new(2);
    let ends = hubless.all(2, |communicator| {
        let end = match communicator.rank() {
            0 => {
                hubless.client.stop_job_because("stopped", "no more power").unwrap();
                Ok(0.0)
            }
            _ => sum(&communicator),
        };
        // Rank 0 stays and calls no collective.
        both.wait();
        end
    });
    let error = ends[1].as_ref().unwrap_err();
    assert!(error.contains("no more power"), "{error}");
}

#[test]
fn a_job_lives_as_long_as_its_ranks_stay_and_no_longer() {
    let hubless = HublessJob::new("leased", 2, JobOptions { lease_s: 0.4, ..JobOptions::default() });
    hubless.all(2, |communicator| {
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!(hubless.status().0, JobState::Running);
        communicator.barrier().unwrap();
        communicator.leave().unwrap();
    });
    assert_eq!(hubless.status().0, JobState::Finished);
}

#[test]
fn ranks_go_on_without_their_manager_for_longer_than_their_lease() {
    let scratch = tempfile::tempdir().unwrap();
    let config = ManagerConfig { state: Some(scratch.path().to_path_buf()), ..ManagerConfig::default() };
    let options = JobOptions { lease_s: 1.0, ..JobOptions::default() };
    let HublessJob { manager, job, .. } = HublessJob::of(config.clone(), "outlives", 2, options);
    let (url, address) = (manager.url(), manager.address());
    let manager = std::sync::Mutex::new(Some(manager));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (membership, config, manager) =
                (Membership::of_job(&url, &job, rank), config.clone(), &manager);
            scope.spawn(move || {
                let communicator = rendezvous(membership, RendezvousOptions::default()).unwrap();
                assert_eq!(sum(&communicator), Ok(3.0));
                if rank == 0 {
                    manager.lock().unwrap().take().unwrap().stop();
                }
                for _ in 0..6 {
                    std::thread::sleep(Duration::from_millis(500));
                    assert_eq!(sum(&communicator), Ok(3.0));
                }
                if rank == 0 {
                    *manager.lock().unwrap() =
                        Some(Manager::start(ManagerConfig { listen: address, ..config }).unwrap());
                }
                // The new manager counts the lease from its start.
                std::thread::sleep(Duration::from_millis(1500));
                assert_eq!(sum(&communicator), Ok(3.0));
                communicator.leave().unwrap();
            });
        }
    });
    let client = ManagerClient::new(&url, None).unwrap();
    assert_eq!(client.job("outlives").unwrap().state, JobState::Finished);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let hubless =
        HublessJob::new("lonely", 2, JobOptions { rendezvous_timeout_s: 0.3, ..JobOptions::default() });
    let refused = rendezvous(hubless.membership(0), RendezvousOptions::default())
        .err()
        .expect("no other rank comes")
        .to_string();
    assert!(refused.contains("rank 1 has not connected"), "{refused}");
}

#[test]
fn tcp_is_what_travels_where_the_worker_says_so() {
    let hubless = HublessJob::new("tcp", 2, JobOptions::default());
    let transports: Vec<&str> = std::thread::scope(|scope| {
        let rank = |rank| {
            let worker = Options { transport: paramhub::Transport::Tcp, ..Options::default() };
            let membership = hubless.membership(rank);
            scope.spawn(move || {
                let communicator =
                    rendezvous(membership, RendezvousOptions { worker, ..RendezvousOptions::default() })
                        .unwrap();
                communicator.leave().unwrap();
                communicator.transport()
            })
        };
        [rank(0), rank(1)].map(|rank| rank.join().unwrap()).to_vec()
    });
    assert_eq!(transports, ["tcp"; 2]);
}
