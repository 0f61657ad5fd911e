//! Hubs in several sites: racks beside one another, racks below a parent, hosts below a rack. The numbers are
//! those of one hub.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use paramhub_control::ManagerClient;
use paramhub_core::codec::{Codec, Dtype};
use paramhub_core::composition::{OptimizeAt, Reduction};
use paramhub_core::consistency::Consistency;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::service::{CreateService, JobOptions, JobStatus};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_hub::{HubConfig, RunningHub};
use paramhub_kernels::Hyperparameters;
use paramhub_manager::{Manager, ManagerConfig, RunningManager};
use paramhub_worker::{Job, Member, Membership, Options, WorkerError};

use crate::cluster::{Transports, WAIT_TIMEOUT, await_true, gradient, keys, sgd};

over_transports!(
    [tcp shm mixed]
    the_mean_is_that_of_all_workers_whatever_the_tree,
    every_site_optimises_alike_and_as_one_hub_does,
    owners_may_optimise_for_all,
    state_that_rank_0_restores_reaches_every_site,
    narrow_gradients_are_summed_in_f32_across_sites,
    settings_that_sites_cannot_serve_are_refused_with_the_reason,
    state_is_not_read_where_the_optimizer_does_not_run,
    a_hub_that_goes_away_is_named_everywhere,
    a_rank_that_dies_is_named_in_every_rack,
    a_rank_stuck_behind_another_racks_hub_is_named_to_all,
);

pub(crate) const SIZES: [u64; 5] = [1, 8192, 8193, 60_011, 300];
const STEPS: u32 = 4;

/// A manager and hubs, each of which serves a rack, a host or all workers.
pub(crate) struct Racks {
    transports: Transports,
    client: ManagerClient,
    hubs: Vec<Option<RunningHub>>,
    manager: Option<RunningManager>,
    jobs: AtomicU32,
}

/// The host of a hub that serves only its host, and of that hub's workers.
const HOST: &str = "workstation";

/// The workers that a hub serves, and its cores.
#[derive(Clone, Copy)]
pub(crate) enum Hub {
    Rack(&'static str, usize),
    Host(&'static str, usize),
    AllWorkers(usize),
}

impl Racks {
    pub(crate) fn new(transports: Transports, hubs: &[Hub]) -> Racks {
        let listen = "127.0.0.1:0".parse().unwrap();
        let manager = Manager::start(ManagerConfig { listen, ..Default::default() }).unwrap();
        let client = ManagerClient::new(&manager.url(), None).unwrap();
        let start = |hub: &Hub| {
            let (rack, host, cores) = match *hub {
                Hub::Rack(rack, cores) => (Some(rack.to_owned()), None, cores),
                Hub::Host(rack, cores) => (Some(rack.to_owned()), Some(HOST.to_owned()), cores),
                Hub::AllWorkers(cores) => (None, None, cores),
            };
            let config = HubConfig { memory_bytes: Some(4 << 30), rack, host, cores, ..Default::default() };
            Some(RunningHub::start(client.clone(), config).unwrap())
        };
        let hubs = hubs.iter().map(start).collect();
        Racks { transports, client, hubs, manager: Some(manager), jobs: AtomicU32::new(0) }
    }

    /// Runs `work` as every rank at once, each in its rack, and returns each rank's result. A rank whose work
    /// returns leaves.
    pub(crate) fn run<T: Send>(
        &self,
        racks: &[&str],
        options: JobOptions,
        settings: &Settings,
        work: impl Fn(&Job) -> T + Sync,
    ) -> Vec<T> {
        self.try_run(racks, options, settings, |job| {
            let made = work(job);
            Ok(made)
        })
        .into_iter()
        .map(Result::unwrap)
        .collect()
    }

    pub(crate) fn try_run<T: Send>(
        &self,
        racks: &[&str],
        options: JobOptions,
        settings: &Settings,
        work: impl Fn(&Job) -> Result<T, WorkerError> + Sync,
    ) -> Vec<Result<T, WorkerError>> {
        self.as_every_rank(racks, options, |membership, options| {
            let job = Member::connect_with(membership, options)?.init(settings.clone())?;
            let made = work(&job)?;
            job.leave()?;
            Ok(made)
        })
    }

    /// Waits until the last job has ended, and returns its status.
    pub(crate) fn await_end(&self) -> JobStatus {
        let name = format!("composed-{}", self.jobs.load(Ordering::Relaxed) - 1);
        await_true(&name, || self.client.job(&name).ok().filter(|status| status.state.has_ended()))
    }

    /// Creates a job, and calls `join` for every rank at once with what it needs to join in its rack.
    pub(crate) fn as_every_rank<T: Send>(
        &self,
        racks: &[&str],
        options: JobOptions,
        join: impl Fn(Membership, Options) -> T + Sync,
    ) -> Vec<T> {
        let rendezvous_timeout_s = options.rendezvous_timeout_s.min(20.0);
        let options = JobOptions { rendezvous_timeout_s, ..options };
        // The job before may still be ending at some hub.
        let name = format!("composed-{}", self.jobs.fetch_add(1, Ordering::Relaxed));
        let request = CreateService { name, workers: racks.len() as u32, options };
        let created = self.client.create_service(&request).unwrap();
        let join = |rank: u32, rack: &str| {
            let transport = self.transports.of_rank(rank);
            let (rack, host) =
                rack.strip_prefix("workstation in ").map_or((rack, None), |rack| (rack, Some(HOST)));
            let (rack, host) = (Some(rack.to_owned()), host.map(str::to_owned));
            let options = Options { transport, rack, host, ..Default::default() };
            join(Membership::of_job(self.client.url(), &created, rank), options)
        };
        std::thread::scope(|scope| {
            let join = &join;
            let ranks: Vec<_> = (0..)
                .zip(racks)
                .map(|(rank, rack)| scope.spawn(move || join(rank, rack)))
                .collect::<Vec<_>>();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

impl Drop for Racks {
    fn drop(&mut self) {
        self.hubs.drain(..).flatten().for_each(RunningHub::stop);
        if let Some(manager) = self.manager.take() {
            manager.stop();
        }
    }
}

pub(crate) fn options(reduction: Reduction) -> JobOptions {
    JobOptions { reduction, ..Default::default() }
}

/// A name, hubs, the racks of the ranks, and reductions. Where the reduction is not a line, ranks of one rack need not follow one
/// another.
pub(crate) type Shape = (&'static str, Vec<Hub>, Vec<&'static str>, Vec<Reduction>);

pub(crate) fn shapes() -> Vec<Shape> {
    use Hub::{AllWorkers, Host, Rack};
    use Reduction::{Auto, Flat, Line, Ring, Sharded, Tree};
    vec![
        (
            "two racks",
            vec![Rack("a", 1), Rack("b", 2)],
            vec!["a", "b", "a", "b", "a"],
            vec![Auto, Ring, Tree, Flat],
        ),
        (
            "three racks, rank 0 in the last",
            vec![Rack("b", 2), Rack("c", 1), Rack("a", 3)],
            vec!["c", "a", "b", "a"],
            vec![Sharded, Ring, Tree],
        ),
        (
            "a parent hub with a worker of its own",
            vec![Rack("a", 1), AllWorkers(2), Rack("b", 1)],
            vec!["a", "b", "elsewhere", "b"],
            vec![Auto, Tree, Ring],
        ),
        (
            "two hubs in a rack",
            vec![Rack("a", 1), Rack("b", 2), Rack("a", 2)],
            vec!["b", "a", "a"],
            vec![Ring, Sharded, Line],
        ),
        (
            "a host below a rack beside another",
            vec![Rack("a", 2), Host("a", 1), Rack("b", 1)],
            vec!["workstation in a", "b", "workstation in a", "a"],
            vec![Auto, Ring, Tree],
        ),
        (
            "a host below a rack below a parent",
            vec![Rack("a", 2), Host("a", 1), AllWorkers(2), Rack("b", 1)],
            vec!["b", "workstation in a", "workstation in a"],
            vec![Auto, Flat, Line],
        ),
        (
            "a host below a parent",
            vec![AllWorkers(1), Host("", 2)],
            vec!["workstation in ", "workstation in ", ""],
            vec![Auto, Line],
        ),
    ]
}

/// Small integers, whose sum is exact in any order.
fn whole(rank: u32, key: u32, step: u32, len: usize) -> Vec<f32> {
    gradient(rank, key, step, len).iter().map(|value| (value * 8.0).round()).collect()
}

fn the_mean_is_that_of_all_workers_whatever_the_tree(transports: Transports) {
    for (name, hubs, racks, reductions) in shapes() {
        let cluster = Racks::new(transports, &hubs);
        let settings = Settings::new(keys(&SIZES));
        let workers = racks.len() as u32;
        for reduction in reductions {
            cluster.run(&racks, options(reduction), &settings, |job| {
                for step in 0..STEPS {
                    let handles: Vec<_> = (0..SIZES.len() as u32)
                        .map(|key| {
                            let len = SIZES[key as usize] as usize;
                            job.push_pull(key, whole(job.rank(), key, step, len), vec![f32::NAN; len])
                                .unwrap()
                        })
                        .collect();
                    for (key, handle) in (0..).zip(handles) {
                        let (_, mean) = handle.wait().unwrap();
                        let all: Vec<Vec<f32>> =
                            (0..workers).map(|rank| whole(rank, key, step, mean.len())).collect();
                        for (element, &mean) in mean.iter().enumerate() {
                            let sum: f32 = all.iter().map(|gradient| gradient[element]).sum();
                            let expected = sum * (1.0 / workers as f32);
                            assert_eq!(
                                mean, expected,
                                "{name}, {reduction:?}: key {key}, step {step}, {element}"
                            );
                        }
                    }
                }
            });
        }
    }
}

/// The state of every rank after some steps: parameters and optimizer state of all keys.
pub(crate) type Outcome = (Vec<Vec<f32>>, Vec<Vec<f32>>);

/// Trains from rank 0's parameters, with a learning rate that one rank changes on the way.
fn train(job: &Job, retuner: u32) -> Outcome {
    let mut model: Vec<Vec<f32>> = job
        .settings()
        .keys
        .keys()
        .iter()
        .map(|key| (0..key.elements().unwrap()).map(|i| job.rank() as f32 + i as f32 / 1000.0).collect())
        .collect();
    job.broadcast(&mut model, 0).unwrap();
    for step in 0..STEPS {
        if job.rank() == retuner && step == 2 {
            let initial = job.settings().optimizer.hyperparameters.unwrap();
            job.set_hyperparameters(2, &Hyperparameters { learning_rate: 0.5, ..initial }).unwrap();
        }
        let handles: Vec<_> = (0..)
            .zip(&model)
            .map(|(key, values)| {
                let own = gradient(job.rank(), key, step, values.len());
                job.push_pull(key, own, vec![f32::NAN; values.len()]).unwrap()
            })
            .collect();
        model = handles.into_iter().map(|handle| handle.wait().unwrap().1).collect();
    }
    let state = (0..)
        .zip(&model)
        .flat_map(|(key, values)| (0..job.state_slots()).map(move |slot| (key, slot, values.len())))
        .map(|(key, slot, len)| job.pull_state(key, slot, vec![f32::NAN; len]).unwrap().finish().parameters)
        .collect();
    (model, state)
}

pub(crate) fn assert_close(name: &str, found: &Outcome, expected: &Outcome) {
    let pairs = found.0.iter().chain(&found.1).zip(expected.0.iter().chain(&expected.1));
    for (tensor, (found, expected)) in pairs.enumerate() {
        for (element, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let difference = (found - expected).abs();
            assert!(
                difference <= 2e-6 * expected.abs().max(1.0),
                "{name}: tensor {tensor}, element {element}: {found}, not {expected}"
            );
        }
    }
}

fn every_site_optimises_alike_and_as_one_hub_does(transports: Transports) {
    let adamw = OptimizerChoice {
        hyperparameters: Some(Hyperparameters { learning_rate: 0.01, ..Default::default() }),
        ..OptimizerChoice::named("adamw")
    };
    for (name, hubs, racks, reductions) in shapes() {
        let retuner = racks.len() as u32 - 1;
        for optimizer in [sgd(0.1, 0.9), adamw.clone()] {
            let settings = Settings { optimizer, reproducible: true, ..Settings::new(keys(&SIZES)) };
            let flat = Racks::new(transports, &[Hub::AllWorkers(2)]).run(
                &racks,
                options(Reduction::Flat),
                &settings,
                |job| train(job, retuner),
            );
            let cluster = Racks::new(transports, &hubs);
            for &reduction in &reductions {
                let name = format!("{name}, {reduction:?}, {}", settings.optimizer.name);
                let runs: Vec<Vec<Outcome>> = (0..2)
                    .map(|_| cluster.run(&racks, options(reduction), &settings, |job| train(job, retuner)))
                    .collect();
                for (rank, outcome) in runs.iter().flatten().enumerate() {
                    assert!(
                        *outcome == runs[0][0],
                        "{name}: rank {rank} differs from rank 0, or run from run"
                    );
                }
                assert_close(&name, &runs[0][0], &flat[0]);
            }
        }
    }
}

fn owners_may_optimise_for_all(transports: Transports) {
    for (name, hubs, racks, reductions) in shapes() {
        let settings = Settings { optimizer: sgd(0.1, 0.9), ..Settings::new(keys(&SIZES)) };
        let model = |job: &Job| {
            let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&size| vec![1.0; size as usize]).collect();
            job.broadcast(&mut model, 0).unwrap();
            for step in 0..STEPS {
                for (key, values) in (0..).zip(&mut model) {
                    let own = whole(job.rank(), key, step, values.len());
                    *values = job.push_pull(key, own, std::mem::take(values)).unwrap().wait().unwrap().1;
                }
            }
            (model, vec![])
        };
        let flat = Racks::new(transports, &[Hub::AllWorkers(1)]).run(
            &racks,
            options(Reduction::Flat),
            &settings,
            model,
        );
        let cluster = Racks::new(transports, &hubs);
        // With the reduction flat no site is an owner, and the option is refused.
        for reduction in reductions.into_iter().filter(|reduction| *reduction != Reduction::Flat) {
            let job_options = JobOptions { reduction, optimize_at: OptimizeAt::Owner, ..Default::default() };
            for outcome in cluster.run(&racks, job_options, &settings, model) {
                assert_close(&format!("{name}, {reduction:?}"), &outcome, &flat[0]);
            }
        }
    }
}

fn state_that_rank_0_restores_reaches_every_site(transports: Transports) {
    let racks = ["a", "b", "c"];
    let cluster = Racks::new(transports, &racks.map(|rack| Hub::Rack(rack, 1)));
    let settings = Settings { optimizer: sgd(0.1, 0.9), ..Settings::new(keys(&SIZES)) };
    for reduction in [Reduction::Ring, Reduction::Sharded, Reduction::Tree] {
        let found = cluster.run(&racks, options(reduction), &settings, |job| {
            let velocity = |key: u32, len: usize| gradient(7, key, 0, len);
            if job.rank() == 0 {
                for (key, &size) in (0..).zip(&SIZES) {
                    let values = velocity(key, size as usize);
                    job.initialise_state(key, 0, values, 12).unwrap().wait().unwrap();
                }
            }
            let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&size| vec![1.0; size as usize]).collect();
            job.broadcast(&mut model, 0).unwrap();
            for (key, &size) in (0..).zip(&SIZES) {
                let len = size as usize;
                let pulled = job.pull_state(key, 0, vec![f32::NAN; len]).unwrap().finish();
                pulled.outcome.unwrap();
                assert!(
                    pulled.parameters == velocity(key, len) && pulled.updates == 12,
                    "{reduction:?}: key {key}"
                );
            }
            let handles = (0..).zip(&SIZES).map(|(key, &size)| {
                job.push_pull(key, vec![0.0_f32; size as usize], vec![f32::NAN; size as usize]).unwrap()
            });
            handles.collect::<Vec<_>>().into_iter().map(|handle| handle.wait().unwrap().1).collect::<Vec<_>>()
        });
        assert!(found.iter().all(|model| *model == found[0]), "{reduction:?}");
        assert!(found[0][1][0] != 1.0, "the restored velocity moves the model");
    }
}

fn narrow_gradients_are_summed_in_f32_across_sites(transports: Transports) {
    let key = |name: &str, dtype| Key { dtype, ..Key::new(name, [20_000]) };
    let table = KeyTable::new(vec![key("half", Dtype::F16), key("brain", Dtype::BF16)]).unwrap();
    let settings = Settings::new(table);
    let racks = ["a", "b", "a", "b"];
    let cluster = Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 1)]);
    // 2,048 + 1 is neither an f16 nor a bf16; the sum of all four by four is both.
    let bits = |dtype: u32, large: bool| -> u16 {
        match (dtype, large) {
            (0, true) => 0x6800,
            (0, false) => 0x3c00,
            (_, true) => 0x4500,
            (_, false) => 0x3f80,
        }
    };
    for reduction in [Reduction::Ring, Reduction::Tree] {
        cluster.run(&racks, options(reduction), &settings, |job| {
            for key in 0..2 {
                let own = vec![bits(key, job.rank() == 0); 20_000];
                let (_, mean) = job.push_pull(key, own, vec![0u16; 20_000]).unwrap().wait().unwrap();
                // (2048 + 3) / 4 = 512.75, which f16 rounds to 513 and bf16 to 512.
                let expected: u16 = if key == 0 { 0x6002 } else { 0x4400 };
                assert!(mean.iter().all(|&value| value == expected), "{reduction:?}: {:#06x}", mean[0]);
            }
        });
    }
}

fn settings_that_sites_cannot_serve_are_refused_with_the_reason(transports: Transports) {
    let racks = ["a", "b"];
    let cluster = Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 1)]);
    let wrong = |racks: &[&str], reduction: Reduction, settings: &Settings| {
        let options = JobOptions { rendezvous_timeout_s: 1.0, ..options(reduction) };
        let outcomes = cluster.try_run(racks, options, settings, |_| Ok(()));
        outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect::<Vec<_>>()
    };
    let asynchronous = Settings { consistency: Consistency::Asynchronous, ..Settings::new(keys(&[4])) };
    let one_bit = Key::new("w", [4]).in_codec(Codec::ONE_BIT);
    let quantised = Settings::new(KeyTable::new(vec![one_bit]).unwrap());
    let ring = "or synchronous steps";
    let mut cases = vec![(asynchronous, ring, "use the reduction tree, sharded or flat")];
    if transports == Transports::tcp() {
        let quantised_key = "key `w` (one-bit): hubs that serve racks or hosts cannot";
        cases.push((quantised, quantised_key, "use the reduction flat"));
    }
    for (settings, reason, remedy) in cases {
        for refused in wrong(&racks, Reduction::Ring, &settings) {
            assert!(refused.contains(reason) && refused.contains(remedy), "{refused}");
        }
    }
    // A hub may still join until the time is up. The rank that gives up second gets the reason of the first
    // as well.
    for refused in wrong(&["a", "z"], Reduction::Auto, &Settings::new(keys(&[4]))) {
        assert!(refused.contains("rank 1 is in rack \"z\", which no hub serves"), "{refused}");
    }
}

fn state_is_not_read_where_the_optimizer_does_not_run(transports: Transports) {
    let racks = ["a", "b"];
    let cluster = Racks::new(transports, &racks.map(|rack| Hub::Rack(rack, 1)));
    let settings = Settings { optimizer: sgd(0.1, 0.9), ..Settings::new(keys(&[60_011])) };
    // The reduction is given: with `auto`, the rates between the hubs here would choose `flat`, where every
    // worker exchanges with every hub.
    let options = JobOptions { optimize_at: OptimizeAt::Owner, ..options(Reduction::Ring) };
    let outcomes = cluster.try_run(&racks, options, &settings, |job| {
        job.broadcast(&mut [vec![1.0_f32; 60_011]], 0)?;
        job.pull_state(0, 0, vec![0.0_f32; 60_011])?.finish().outcome
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("optimizer state of key `layer0`") && error.contains("every-site"), "{error}");
    }
}

fn a_hub_that_goes_away_is_named_everywhere(transports: Transports) {
    for lost in 0..3 {
        let mut cluster = Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 1), Hub::Rack("c", 1)]);
        let address = cluster.hubs[lost].as_ref().unwrap().addresses()[0].to_string();
        let victim = Mutex::new(cluster.hubs[lost].take());
        let settings = Settings::new(keys(&SIZES));
        let begun = Instant::now();
        let outcomes = cluster.try_run(&["a", "b", "c"], options(Reduction::Ring), &settings, |job| {
            for step in 0.. {
                if step == 3 && job.rank() == 1 {
                    drop(victim.lock().unwrap().take());
                }
                let handles: Vec<_> = (0..)
                    .zip(&SIZES)
                    .map(|(key, &size)| {
                        job.push_pull(key, vec![1.0f32; size as usize], vec![0.0f32; size as usize])
                    })
                    .collect();
                for handle in handles {
                    handle?.wait()?;
                }
                assert!(begun.elapsed() < WAIT_TIMEOUT, "no rank got an error");
            }
            Ok(())
        });
        for outcome in outcomes {
            let error = outcome.unwrap_err().to_string();
            assert!(
                error.contains(&address) || error.contains("shutting down"),
                "{error}, which was {address}"
            );
        }
    }
}

fn a_rank_that_dies_is_named_in_every_rack(transports: Transports) {
    let cluster = Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 1)]);
    let settings = Settings::new(keys(&SIZES));
    let outcomes = cluster.try_run(&["a", "b", "a"], options(Reduction::Sharded), &settings, |job| {
        for step in 0.. {
            if job.rank() == 2 && step == 2 {
                // The rank leaves while the others go on, because they would never end otherwise.
                return Ok(());
            }
            job.push_pull(3, vec![1.0f32; SIZES[3] as usize], vec![0.0f32; SIZES[3] as usize])?.wait()?;
        }
        Ok(())
    });
    for rank in [0, 1] {
        let error = outcomes[rank].as_ref().unwrap_err().to_string();
        assert!(error.contains("rank 2 left the job"), "{error}");
    }
}

fn a_rank_stuck_behind_another_racks_hub_is_named_to_all(transports: Transports) {
    for (reduction, ranks) in [
        (Reduction::Tree, &["a", "b", "a", "b"][..]),
        (Reduction::Ring, &["a", "b", "a", "b"]),
        // The stuck rank is alone in its rack, where no other rank waits for it.
        (Reduction::Tree, &["a", "a", "a", "b"]),
    ] {
        let racks = Racks::new(transports, &[Hub::Rack("a", 1), Hub::Rack("b", 1)]);
        let settings =
            Settings { optimizer: OptimizerChoice::named("mean"), ..Settings::new(keys(&[300, 20_000])) };
        let notified_ranks = AtomicU32::new(0);
        racks.run(ranks, options(reduction), &settings, |job| {
            let step = |job: &Job| {
                let pushed = [(0, 300), (1, 20_000)]
                    .map(|(key, n)| job.push_pull(key, vec![1.0_f32; n], vec![0.0_f32; n]));
                pushed.into_iter().for_each(|pushed| drop(pushed.unwrap().wait().unwrap()));
            };
            step(job);
            let names_it = || {
                let messages = job.notices().into_iter().map(|notice| notice.message);
                messages.into_iter().find(|message| message.contains("awaited") && message.contains("rank 3"))
            };
            let await_in_all_ranks = || {
                crate::cluster::await_true(
                    &format!("{reduction}: its name at rank {}", job.rank()),
                    names_it,
                );
                notified_ranks.fetch_add(1, Ordering::SeqCst);
                let all = || (notified_ranks.load(Ordering::SeqCst) == 4).then_some(());
                crate::cluster::await_true("all ranks", all);
            };
            std::thread::scope(|scope| {
                let waiting = (job.rank() != 3).then(|| scope.spawn(await_in_all_ranks));
                if job.rank() == 3 {
                    await_in_all_ranks();
                }
                step(job);
                waiting.into_iter().for_each(|thread| thread.join().unwrap());
            });
        });
    }
}
