//! Checkpoints: real files, hubs that are killed, and training that goes on to the same bits.

mod common;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{hub, paramhub, wait_until};
use paramhub::checkpoint::{Every, Resume};
use paramhub::composition::{OptimizeAt, Reduction};
use paramhub::scheme::{LayerSettings, Scheme, SchemeChoice};
use paramhub::service::{CreateService, JobOptions};
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{
    CheckpointConfig, Codec, Consistency, Dtype, FactorBuffers, HubConfig, Hyperparameters, Job, Key,
    KeyTable, Manager, ManagerClient, ManagerConfig, Member, Membership, Options, RunningHub, RunningManager,
    WorkerError,
};
use paramhub_hub::{Flaw, Found, list_checkpoints};
use rustix::process::Signal;
use safetensors::SafeTensors;
use tempfile::TempDir;

/// On both sides of a chunk, whole blocks and not.
const SIZES: [u64; 4] = [1, 8192, 30_011, 300];
const WORKERS: u32 = 2;

/// A manager and hubs that share a folder of checkpoints.
struct Cluster {
    client: ManagerClient,
    hubs: Vec<RunningHub>,
    /// Of the ranks, if they have any.
    racks: Vec<&'static str>,
    manager: Option<RunningManager>,
}

impl Cluster {
    /// A hub with so many cores each.
    fn new(folder: &Path, cores: &[usize]) -> Cluster {
        Cluster::with(folder, cores, Vec::new())
    }

    /// Each hub, and each rank, in a rack of that name.
    fn of_racks(folder: &Path, racks: Vec<&'static str>) -> Cluster {
        Cluster::with(folder, &vec![2; racks.len()], racks)
    }

    fn with(folder: &Path, cores: &[usize], racks: Vec<&'static str>) -> Cluster {
        let listen = "127.0.0.1:0".parse().unwrap();
        let manager = Manager::start(ManagerConfig { listen, ..Default::default() }).unwrap();
        let client = ManagerClient::new(&manager.url(), None).unwrap();
        let hub = |(number, &cores): (usize, &usize)| {
            let checkpoints = Some(CheckpointConfig { folder: folder.to_path_buf(), keep: 3 });
            let (memory_bytes, rack) = (Some(2 << 30), racks.get(number).map(ToString::to_string));
            let config = HubConfig { cores, rack, checkpoints, memory_bytes, ..Default::default() };
            RunningHub::start(client.clone(), config).unwrap()
        };
        let hubs = cores.iter().enumerate().map(hub).collect();
        Cluster { client, hubs, racks, manager: Some(manager) }
    }

    fn options(&self, every: Option<&str>, resume: Option<Resume>) -> JobOptions {
        JobOptions {
            rendezvous_timeout_s: 30.0,
            checkpoint_every: every.map(|every| every.parse::<Every>().unwrap()),
            resume,
            hubs: Some(self.hubs.len() as u32),
            ..Default::default()
        }
    }

    /// What each rank of a job makes of it.
    fn run<T: Send>(
        &self,
        name: &str,
        options: JobOptions,
        settings: &Settings,
        work: impl Fn(&Job) -> T + Sync,
    ) -> Result<Vec<T>, WorkerError> {
        let request = CreateService { name: name.into(), workers: WORKERS, options };
        let created = self.client.create_service(&request).unwrap();
        let made = std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..WORKERS)
                .map(|rank| {
                    let (work, url) = (&work, self.client.url().to_owned());
                    let rack = self.racks.get(rank as usize).map(ToString::to_string);
                    let membership =
                        Membership { url, namespace: created.namespace, nonce: created.nonce, rank };
                    scope.spawn(move || {
                        let job = Member::connect_with(membership, Options { rack, ..Default::default() })?
                            .init(settings.clone())?;
                        let made = work(&job);
                        job.leave()?;
                        Ok(made)
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        // Its name is free again.
        self.await_end(name);
        made
    }

    /// Waits until the hubs are done with a job, its last checkpoint included.
    fn await_end(&self, name: &str) {
        wait_until("the job's end", || self.client.job(name).is_ok_and(|job| job.state.has_ended()));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.hubs.drain(..).for_each(RunningHub::stop);
        if let Some(manager) = self.manager.take() {
            manager.stop();
        }
    }
}

fn settings() -> Settings {
    let hyperparameters =
        Hyperparameters { learning_rate: 0.1 / 3.0, weight_decay: 1e-3, ..Default::default() };
    let keys = SIZES.iter().enumerate().map(|(i, &n)| Key::new(format!("layer{i}.weight"), [n]));
    Settings {
        optimizer: OptimizerChoice {
            hyperparameters: Some(hyperparameters),
            ..OptimizerChoice::named("adamw")
        },
        reproducible: true,
        ..Settings::new(KeyTable::new(keys.collect()).unwrap())
    }
}

fn gradient(rank: u32, key: u32, step: u32, elements: usize) -> Vec<f32> {
    let seed = u64::from(rank) << 40 ^ u64::from(key) << 20 ^ u64::from(step);
    let number = |element: u64| {
        let mut bits = (seed << 20 ^ element).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((bits >> 40) as f32 / (1_u64 << 23) as f32) - 1.0
    };
    (0..elements as u64).map(number).collect()
}

/// Trains until `end` from wherever the job is, and says where it began; `between` is called by rank 0 after each step, while
/// the others go ahead by no more than that step's gradient.
fn train(job: &Job, end: u32, between: impl Fn(u32)) -> (u32, Vec<Vec<f32>>) {
    let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&n| vec![0.5; n as usize]).collect();
    job.broadcast(&mut model, 0).unwrap();
    let begin = job.next_step(0).unwrap();
    for step in begin..end {
        let handles: Vec<_> = (0..SIZES.len() as u32)
            .map(|key| {
                let out = std::mem::take(&mut model[key as usize]);
                job.push_pull(key, gradient(job.rank(), key, step, out.len()), out).unwrap()
            })
            .collect();
        for (handle, key) in handles.into_iter().zip(&mut model) {
            *key = handle.wait().unwrap().1;
        }
        if job.rank() == 0 {
            between(step + 1);
        }
    }
    (begin, model)
}

fn scratch() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A job's checkpoints, the newest first.
fn all(folder: &Path, job: &str) -> Vec<Found> {
    list_checkpoints(folder).ok().and_then(|mut jobs| jobs.remove(job)).unwrap_or_default()
}

fn complete(folder: &Path, job: &str) -> Vec<u32> {
    all(folder, job).into_iter().filter(|found| found.flaw.is_none()).map(|found| found.step).collect()
}

/// Lets every checkpoint due at a multiple of `every` be written before the step after it.
fn at_leisure<'a>(folder: &'a Path, job: &'a str, every: u32) -> impl Fn(u32) + Sync + 'a {
    move |step| {
        if step.is_multiple_of(every) {
            wait_until("a checkpoint", || complete(folder, job).contains(&step));
        }
    }
}

#[test]
fn a_job_goes_on_from_its_checkpoint_to_the_same_bits_on_other_hubs() {
    let folder = scratch();
    let cluster = Cluster::new(folder.path(), &[2, 1]);
    let settings = settings();
    let whole =
        cluster.run("whole", cluster.options(None, None), &settings, |job| train(job, 9, |_| {})).unwrap();
    let keep = at_leisure(folder.path(), "part/a", 2);
    let options = cluster.options(Some("2"), None);
    let half = cluster.run("part/a", options, &settings, |job| train(job, 7, &keep)).unwrap();
    // The last one of all is that of the end.
    wait_until("the last checkpoint", || complete(folder.path(), "part/a").first() == Some(&7));
    assert_eq!(complete(folder.path(), "part/a"), [7, 6, 4], "the newest three stay");
    // What is being removed may be there, too.
    let newest = all(folder.path(), "part/a").into_iter().find(|found| found.flaw.is_none()).unwrap();
    assert_eq!(newest.parts.len(), 2, "a part a hub");
    newest.verify().unwrap();
    assert!(newest.parts.iter().all(|part| part.workers == WORKERS && part.is_consistent));
    let told = cluster.client.job("part/a").unwrap().checkpoints.unwrap();
    assert_eq!((told.failed, told.failure.as_str()), (0, ""));
    assert!(told.step >= Some(6) && told.bytes > 3 * 4 * SIZES.iter().sum::<u64>(), "{told:?}");
    drop(cluster);

    // One hub instead of two, more cores, other chunks.
    let cluster = Cluster::new(folder.path(), &[3]);
    let other = Settings { chunk_bytes: 4096, ..settings.clone() };
    let resumed = |from: Resume| {
        cluster.run("part/a", cluster.options(None, Some(from)), &other, |job| train(job, 9, |_| {})).unwrap()
    };
    for (from, step) in [(Resume::Latest, 7), (Resume::Step(4), 4)] {
        for (rank, (begin, model)) in resumed(from).into_iter().enumerate() {
            assert_eq!(begin, step);
            assert!(model == whole[rank].1, "rank {rank} went on otherwise from step {step}");
        }
    }
    assert_ne!(half[0].1, whole[0].1);
    // Nothing but state makes it so: from the parameters alone it goes on otherwise.
    let forgetful = cluster.run("other", cluster.options(None, None), &other, |job| {
        let mut model = half[0].1.clone();
        job.broadcast(&mut model, 7).unwrap();
        train_on(job, model, 7, 9)
    });
    assert_ne!(forgetful.unwrap()[0], whole[0].1);
}

fn train_on(job: &Job, mut model: Vec<Vec<f32>>, begin: u32, end: u32) -> Vec<Vec<f32>> {
    for step in begin..end {
        for key in 0..SIZES.len() as u32 {
            let out = std::mem::take(&mut model[key as usize]);
            let gradient = gradient(job.rank(), key, step, out.len());
            model[key as usize] = job.push_pull(key, gradient, out).unwrap().wait().unwrap().1;
        }
    }
    model
}

#[test]
fn a_layer_whose_factors_go_to_a_hub_goes_on_from_a_checkpoint_to_the_same_bits() {
    const SIDES: [usize; 3] = [200, 90, 4];
    let folder = scratch();
    let [outputs, inputs, samples] = SIDES;
    let layer = LayerSettings::fully_connected("fc", [0, 1], SIDES.map(|side| side as u64));
    let keys = vec![Key::new("w", [outputs as u64, inputs as u64]), Key::new("b", [outputs as u64])];
    let settings = Settings {
        layers: vec![layer.by(SchemeChoice::Only(Scheme::FactorsToHub))],
        keys: KeyTable::new(keys).unwrap(),
        chunk_bytes: 4096,
        ..settings()
    };
    let train = |job: &Job, end: u32, between: &dyn Fn(u32)| {
        let mut model = [vec![0.5_f32; outputs * inputs], vec![0.5; outputs]];
        job.broadcast(&mut model, 0).unwrap();
        let begin = job.next_step(0).unwrap();
        let mut model = model.map(Some);
        for step in begin..end {
            let buffers = FactorBuffers {
                inputs: gradient(job.rank(), 0, step, samples * inputs),
                output_gradients: gradient(job.rank(), 1, step, samples * outputs),
                weight: model[0].take().unwrap(),
                bias: model[1].take(),
            };
            let done = job.push_pull_factors(0, buffers).unwrap().wait().unwrap();
            model = [Some(done.weight), done.bias];
            if job.rank() == 0 {
                between(step + 1);
            }
        }
        (begin, model)
    };
    let cluster = Cluster::new(folder.path(), &[2]);
    let options = |every, resume| cluster.options(every, resume);
    let whole = cluster.run("whole", options(None, None), &settings, |job| train(job, 8, &|_| ())).unwrap();
    let keep = at_leisure(folder.path(), "part", 3);
    cluster.run("part", options(Some("3"), None), &settings, |job| train(job, 5, &keep)).unwrap();
    wait_until("the last checkpoint", || complete(folder.path(), "part").first() == Some(&5));
    for (from, step) in [(Resume::Latest, 5), (Resume::Step(3), 3)] {
        let resumed =
            cluster.run("part", options(None, Some(from)), &settings, |job| train(job, 8, &|_| ())).unwrap();
        for (rank, (begin, model)) in resumed.into_iter().enumerate() {
            assert_eq!(begin, step);
            assert!(model == whole[rank].1, "rank {rank} went on otherwise from step {step}");
        }
    }
}

#[test]
fn jobs_of_several_racks_go_on_however_their_hubs_reduce() {
    let settings = settings();
    for reduction in [Reduction::Tree, Reduction::Ring, Reduction::Sharded] {
        for optimize_at in [OptimizeAt::EverySite, OptimizeAt::Owner] {
            let folder = scratch();
            let cluster = Cluster::of_racks(folder.path(), vec!["a", "b"]);
            let how = format!("{reduction} {optimize_at}");
            let options =
                |every, resume| JobOptions { reduction, optimize_at, ..cluster.options(every, resume) };
            let run = |name, every, resume, end| {
                let keep = at_leisure(folder.path(), "part", 2);
                let between = |step: u32| {
                    if every == Some("2") {
                        keep(step)
                    }
                };
                cluster.run(name, options(every, resume), &settings, |job| train(job, end, between)).unwrap()
            };
            let whole = run("whole", None, None, 6);
            run("part", Some("2"), None, 4);
            let found = all(folder.path(), "part").into_iter().find(|found| found.flaw.is_none()).unwrap();
            assert_eq!(found.step, 4, "{how}");
            found.verify().unwrap();
            let resumed = run("part", None, Some(Resume::Latest), 6);
            for (whole, resumed) in whole.iter().zip(&resumed) {
                assert_eq!(resumed.0, 4, "{how}");
                assert!(resumed.1 == whole.1, "{how}");
            }
        }
    }
}

#[test]
fn what_one_hub_writes_is_a_state_dict_and_masters_of_half_keys_are_single() {
    let folder = scratch();
    let cluster = Cluster::new(folder.path(), &[2]);
    let mut keys: Vec<Key> = settings().keys.keys().to_vec();
    keys[2].dtype = Dtype::BF16;
    keys[3].shape = vec![3, 100];
    let settings = Settings { keys: KeyTable::new(keys).unwrap(), codec: Some(Codec::BF16), ..settings() };
    let work = |job: &Job| {
        let ones: Vec<half::bf16> = vec![half::bf16::ONE; SIZES[2] as usize];
        for key in [0, 1, 3] {
            let values = vec![1.0_f32; SIZES[key as usize] as usize];
            match job.rank() {
                0 => drop(job.initialise(key, values, 0).unwrap().wait().unwrap()),
                _ => drop(job.pull(key, values).unwrap().wait().unwrap()),
            }
        }
        match job.rank() {
            0 => drop(job.initialise(2, ones.clone(), 0).unwrap().wait().unwrap()),
            _ => drop(job.pull(2, ones.clone()).unwrap().wait().unwrap()),
        }
        for key in [0, 1, 3] {
            let values = vec![0.25_f32; SIZES[key as usize] as usize];
            job.push(key, values).unwrap().wait().unwrap();
        }
        job.push(2, ones).unwrap().wait().unwrap();
    };
    cluster.run("halves", cluster.options(Some("1"), None), &settings, work).unwrap();
    wait_until("a checkpoint", || complete(folder.path(), "halves") == [1]);
    let found = all(folder.path(), "halves").remove(0);
    let file = std::fs::read(found.path.join("hub-0.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    assert_eq!(names, ["layer0.weight", "layer1.weight", "layer2.weight", "layer3.weight"]);
    assert_eq!(tensors.tensor("layer3.weight").unwrap().shape(), [3, 100]);
    let master = tensors.tensor("layer2.weight").unwrap();
    assert_eq!(master.dtype(), safetensors::Dtype::F32);
    let value = f32::from_le_bytes(master.data()[..4].try_into().unwrap());
    assert_ne!(value, half::bf16::from_f32(value).to_f32(), "{value} would not survive as bf16");
    let file = std::fs::read(found.path.join("hub-0.state.safetensors")).unwrap();
    assert_eq!(SafeTensors::deserialize(&file).unwrap().len(), 8, "two values a parameter");

    let before = master.data().to_vec();
    let same = |job: &Job| assert_eq!(job.resumed_step(), Some(1));
    cluster.run("halves", cluster.options(Some("1"), Some(Resume::Latest)), &settings, same).unwrap();
    let untouched = std::fs::read(found.path.join("hub-0.safetensors")).unwrap();
    assert!(SafeTensors::deserialize(&untouched).unwrap().tensor("layer2.weight").unwrap().data() == before);
}

#[test]
fn what_is_torn_damaged_or_foreign_is_refused_and_the_one_before_offered() {
    let folder = scratch();
    let cluster = Cluster::new(folder.path(), &[1]);
    let settings = settings();
    let keep = at_leisure(folder.path(), "w", 2);
    cluster.run("w", cluster.options(Some("2"), None), &settings, |job| drop(train(job, 6, &keep))).unwrap();
    assert_eq!(complete(folder.path(), "w"), [6, 4, 2]);
    let resume = |from, settings: &Settings| {
        let asked =
            cluster.run("w", cluster.options(None, Some(from)), settings, |job| train(job, 6, |_| {}).0);
        asked.map(|begins| begins[0]).map_err(|error| error.to_string())
    };
    #[track_caller]
    fn expect(refused: Result<u32, String>, parts: &[&str]) {
        let refused = refused.unwrap_err();
        for part in parts {
            assert!(refused.contains(part), "no `{part}` in: {refused}");
        }
    }
    let newest = all(folder.path(), "w").remove(0).path;
    let file = |name: &str| -> PathBuf { newest.join(name) };
    let before_offered = "the one before it, of step 4, can be used: resume with 4";
    for name in ["hub-0.safetensors", "hub-0.state.safetensors", "hub-0.json"] {
        let whole = std::fs::read(file(name)).unwrap();
        for at in [0, 20, whole.len() / 2, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            std::fs::write(file(name), damaged).unwrap();
            expect(resume(Resume::Latest, &settings), &[name, before_offered]);
        }
        std::fs::write(file(name), &whole[..whole.len() / 3]).unwrap();
        expect(resume(Resume::Latest, &settings), &["torn", name, before_offered]);
        std::fs::write(file(name), whole).unwrap();
    }
    assert_eq!(resume(Resume::Latest, &settings), Ok(6), "mended");

    // Of an older release, of another model, of another optimizer; then there is none before it, either.
    let manifest = std::fs::read_to_string(file("hub-0.json")).unwrap();
    let body = manifest.split_once("\"manifest\":").unwrap().1.strip_suffix("}\n").unwrap();
    let body = body.replacen("\"format\":1", "\"format\":9", 1);
    let digest = blake3_of(&body);
    std::fs::write(file("hub-0.json"), format!("{{\"blake3\":\"{digest}\",\"manifest\":{body}}}\n")).unwrap();
    expect(resume(Resume::Latest, &settings), &["format 9", before_offered]);
    std::fs::write(file("hub-0.json"), &manifest).unwrap();
    let mut keys = settings.keys.keys().to_vec();
    keys[1].shape = vec![8193];
    let other = Settings { keys: KeyTable::new(keys).unwrap(), ..settings.clone() };
    let foreign =
        ["another key table: key 1 is `layer1.weight` f32 [8192] there", "[8193] in this job", "none before"];
    expect(resume(Resume::Latest, &other), &foreign);
    let other = Settings { optimizer: OptimizerChoice::named("sgd"), ..settings.clone() };
    expect(resume(Resume::Latest, &other), &["the optimizer adamw, this job sgd"]);
    expect(resume(Resume::Step(5), &settings), &["no complete checkpoint of step 5"]);
    // A hub that died in the midst of it has left no manifest: there is no such checkpoint.
    std::fs::remove_file(file("hub-0.json")).unwrap();
    assert_eq!(resume(Resume::Latest, &settings), Ok(4));

    let mean = Settings { optimizer: OptimizerChoice::named("mean"), ..settings.clone() };
    let refused = cluster.run("m", cluster.options(Some("2"), None), &mean, |_| ()).unwrap_err().to_string();
    assert!(refused.contains("its hubs keep no parameters"), "{refused}");
    let stale = Settings { consistency: Consistency::Asynchronous, reproducible: false, ..settings };
    let refused = cluster.run("s", cluster.options(Some("2"), None), &stale, |_| ()).unwrap_err().to_string();
    assert!(refused.contains("give seconds, as in 30s"), "{refused}");
}

fn blake3_of(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

#[test]
fn an_asynchronous_job_is_kept_as_it_is_and_says_so() {
    let folder = scratch();
    let cluster = Cluster::new(folder.path(), &[2]);
    let settings = Settings { consistency: Consistency::Asynchronous, reproducible: false, ..settings() };
    let begun = Instant::now();
    let work = |job: &Job| {
        let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&n| vec![0.5; n as usize]).collect();
        job.broadcast(&mut model, 0).unwrap();
        let mut step = 0;
        while complete(folder.path(), "a").is_empty() {
            model = train_on(job, model, step, step + 1);
            step += 1;
            assert!(begun.elapsed() < common::PATIENCE);
        }
        step
    };
    let steps = cluster.run("a", cluster.options(Some("1s"), None), &settings, work).unwrap();
    wait_until("the last checkpoint", || all(folder.path(), "a").iter().all(|found| found.flaw.is_none()));
    let found = all(folder.path(), "a").remove(0);
    assert!(!found.parts[0].is_consistent && found.step <= *steps.iter().max().unwrap());
    found.verify().unwrap();
    let begins = |job: &Job| train(job, 0, |_| {}).0;
    let resumed = cluster.run("a", cluster.options(None, Some(Resume::Latest)), &settings, begins).unwrap();
    assert_eq!(resumed, [found.step; 2]);
}

/// A small file system of its own; taken away when it is dropped.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mount(size: &str) -> Option<SmallDisk> {
        let folder = scratch();
        let options = format!("size={size}");
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(folder.path());
        mount.output().is_ok_and(|done| done.status.success()).then_some(SmallDisk(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}

/// Trains while an obstacle is in the way of checkpoints, and on when it is gone.
fn tried_again(folder: &Path, obstacle: &Path) {
    let cluster = Cluster::new(folder, &[1]);
    let status = || cluster.client.job("w").ok().and_then(|job| job.checkpoints).unwrap_or_default();
    let told = |step: u32| match step {
        1 => {
            wait_until("the failure", || status().failed >= 1);
            let status = status();
            assert!(status.failure.contains("cannot be written to") && status.step.is_none(), "{status:?}");
            assert!(complete(folder, "w").is_empty());
        }
        2 => std::fs::remove_file(obstacle).unwrap(),
        4 => wait_until("a checkpoint", || !complete(folder, "w").is_empty()),
        _ => {}
    };
    cluster.run("w", cluster.options(Some("1"), None), &settings(), |job| drop(train(job, 6, told))).unwrap();
    wait_until("the last report", || status().failure.is_empty());
    assert!(status().written >= 1 && status().failed >= 1, "{:?}", status());
}

#[test]
fn a_folder_that_cannot_be_written_stops_no_job_and_is_tried_again() {
    let folder = scratch();
    // Where the job's folder would be.
    let in_the_way = folder.path().join("w");
    std::fs::write(&in_the_way, "").unwrap();
    tried_again(folder.path(), &in_the_way);
}

#[test]
fn a_full_disk_stops_no_job_and_is_tried_again() {
    let Some(disk) = SmallDisk::mount("4m") else {
        eprintln!("skipped: this user may not mount a small file system");
        return;
    };
    // Room for less than one checkpoint is left.
    let filler = disk.0.path().join("filler");
    std::fs::write(&filler, vec![1; 3_900_000]).unwrap();
    tried_again(disk.0.path(), &filler);
}

#[test]
fn a_key_that_is_not_pushed_with_the_others_is_named() {
    let folder = scratch();
    let cluster = Cluster::new(folder.path(), &[1]);
    let failure = || cluster.client.job("l").ok().and_then(|job| job.checkpoints).unwrap_or_default().failure;
    let work = |job: &Job| {
        let mut model: Vec<Vec<f32>> = SIZES.iter().map(|&n| vec![0.5; n as usize]).collect();
        job.broadcast(&mut model, 0).unwrap();
        for step in 0..30 {
            for key in [0, 1, 3] {
                let gradient = gradient(job.rank(), key, step, model[key as usize].len());
                job.push(key, gradient).unwrap().wait().unwrap();
            }
        }
        wait_until("the reason", || failure().contains("key `layer2.weight` is not updated in every step"));
    };
    cluster.run("l", cluster.options(Some("2"), None), &settings(), work).unwrap();
    assert!(complete(folder.path(), "l").is_empty());
}

/// A job of one worker at a hub in another process, until something ends it; the step it began at.
fn push_until_the_end(url: &str, name: &str, every: &str, resume: Option<Resume>) -> Result<u32, String> {
    let options = JobOptions { checkpoint_every: Some(every.parse().unwrap()), resume, ..Default::default() };
    let client = ManagerClient::new(url, None).unwrap();
    let request = CreateService { name: name.into(), workers: 1, options };
    let created = client.create_service(&request).map_err(|error| error.to_string())?;
    let (namespace, nonce) = (created.namespace, created.nonce);
    let membership = Membership { url: url.into(), namespace, nonce, rank: 0 };
    let hyperparameters = Hyperparameters { momentum: 0.9, ..Default::default() };
    let settings = Settings {
        optimizer: OptimizerChoice {
            hyperparameters: Some(hyperparameters),
            ..OptimizerChoice::named("sgd")
        },
        ..Settings::new(KeyTable::new(vec![Key::new("w", [1 << 19])]).unwrap())
    };
    let member = Member::connect_with(membership, Options::default()).map_err(|error| error.to_string())?;
    let job = member.init(settings).map_err(|error| error.to_string())?;
    let begin = job.resumed_step().unwrap_or(0);
    let mut model = vec![vec![0.0_f32; 1 << 19]];
    job.broadcast(&mut model, 0).map_err(|error| error.to_string())?;
    let (mut gradient, mut out) = (vec![1e-3_f32; 1 << 19], model.remove(0));
    loop {
        let exchanged = job.push_pull(0, gradient, out).and_then(|handle| handle.wait());
        let Ok(back) = exchanged else { return Ok(begin) };
        (gradient, out) = back;
        // Some computing: a machine that only exchanges would write nothing.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_hub_killed_in_mid_write_at_fifty_random_points_loses_nothing_that_was_complete() {
    let folder = scratch();
    let path = folder.path().to_str().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = now.as_nanos() as u64;
    println!("seed {seed}");
    let mut random = seed | 1;
    let (mut unfinished, mut newest) = (0, None);
    for round in 0..50 {
        let (hub, url) = hub(["--checkpoints", path, "--checkpoint-keep", "2"]);
        let resume = newest.map(|_| Resume::Latest);
        let worker = std::thread::spawn(move || push_until_the_end(&url, "killed", "1", resume));
        wait_until("a newer checkpoint", || {
            assert!(!worker.is_finished(), "round {round}: the worker has ended");
            complete(folder.path(), "killed").first() > newest.as_ref()
        });
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_micros((random >> 33) % 40_000));
        let before = complete(folder.path(), "killed").remove(0);
        hub.signal(Signal::KILL);
        drop(hub);
        let begin = worker.join().unwrap().unwrap();
        assert_eq!(begin, newest.unwrap_or(0), "round {round} of seed {seed}: it went on from the newest");
        let left = all(folder.path(), "killed");
        let whole: Vec<&Found> = left.iter().filter(|found| found.flaw.is_none()).collect();
        for found in &left {
            assert!(!matches!(found.flaw, Some(Flaw::Damaged(_))), "round {round} of seed {seed}: {found:?}");
        }
        whole.iter().for_each(|found| found.verify().unwrap());
        assert!(whole[0].step >= before, "round {round} of seed {seed}: {} was complete", before);
        unfinished += usize::from(left.iter().any(|found| found.flaw == Some(Flaw::Incomplete)));
        newest = Some(whole[0].step);
    }
    assert!(unfinished > 10, "{unfinished} of 50 were killed in mid-write: the pauses are no good");
    assert!(all(folder.path(), "killed").len() <= 2 + 4, "what is unfinished does not pile up");
    let verified = paramhub(["checkpoints", "verify", path]).finish().expect_code(0);
    assert!(verified.stdout.contains("verified"), "{}", verified.stdout);
}

#[test]
fn a_hub_that_is_told_to_end_leaves_the_newest_step() {
    let folder = scratch();
    let path = folder.path().to_str().unwrap();
    let (hub, url) = hub(["--checkpoints", path]);
    let (at, name) = (url.clone(), "told");
    let worker = std::thread::spawn(move || push_until_the_end(&at, name, "1000000", None));
    let client = ManagerClient::new(&url, None).unwrap();
    wait_until("some steps", || client.job(name).is_ok_and(|job| job.counters.updates > 1000));
    assert!(complete(folder.path(), name).is_empty());
    hub.signal(Signal::TERM);
    hub.finish().expect_code(0);
    worker.join().unwrap().unwrap();
    let steps = complete(folder.path(), name);
    assert!(steps.len() == 1 && steps[0] >= 10, "{steps:?}");
    all(folder.path(), name)[0].verify().unwrap();
}

const TRAIN: [&str; 9] =
    ["train", "--net", "lenet", "--epochs", "5", "--workers", "2", "--reproducible", "--save=p.safetensors"];

#[test]
fn training_that_is_killed_and_resumed_ends_at_the_bits_of_one_that_was_not() {
    let uninterrupted = paramhub(TRAIN).finish().expect_code(0).read("p.safetensors");
    for signal in [Signal::KILL, Signal::INT] {
        let folder = scratch();
        let path = folder.path().to_str().unwrap();
        let kept = ["--checkpoints", path, "--checkpoint-every", "9"];
        let first = paramhub(TRAIN.into_iter().chain(kept)).start();
        wait_until("a checkpoint", || !complete(folder.path(), "train").is_empty());
        first.signal(signal);
        let ended = first.finish();
        assert_ne!(ended.code, 0, "it was to be interrupted: {}", ended.stdout);
        let steps = complete(folder.path(), "train");
        assert!(steps[0] < 220, "{steps:?}: it had ended");
        let resume = ["--resume", "--cores", "2", "--chunk-bytes", "8K"];
        let second = paramhub(TRAIN.into_iter().chain(kept).chain(resume)).finish().expect_code(0);
        assert!(second.read("p.safetensors") == uninterrupted, "from step {} of {signal:?}", steps[0]);
    }
}

#[test]
fn wrong_wishes_are_explained() {
    let refused = paramhub(["train", "--exchange", "local", "--resume"]).finish().expect_code(2);
    refused.expect_error(&["--exchange hub"]);
    let refused = paramhub(["run", "--checkpoints", "x", "--", "true"]).finish().expect_code(2);
    refused.expect_error(&["--name"]);
    let refused = paramhub(["train", "--checkpoint-every", "soon"]).finish().expect_code(2);
    assert!(refused.stderr.contains("as in 30s"), "{}", refused.stderr);
    let folder = scratch();
    let path = folder.path().to_str().unwrap();
    let refused = paramhub(["train", "--checkpoints", path, "--resume"]).finish().expect_code(1);
    assert!(refused.stderr.contains("no complete checkpoint"), "{}", refused.stderr);
    let (_hub, url) = hub([]);
    let refused = paramhub(["train", "--hub", &url, "--checkpoint-every", "10"]).finish().expect_code(1);
    assert!(refused.stderr.contains("start it with --checkpoints DIR"), "{}", refused.stderr);
    let listed = paramhub(["checkpoints", "list", path]).finish().expect_code(0);
    assert!(listed.stdout.starts_with("no checkpoints in"), "{}", listed.stdout);
}
