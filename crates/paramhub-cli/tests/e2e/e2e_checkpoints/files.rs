//! The files of checkpoints: their contents, and which are refused.

use std::path::PathBuf;
use std::time::Instant;

use super::cluster::{
    Cluster, SIZES, all, complete, scratch, settings, train, train_on, waiting_for_checkpoints,
};
use crate::common::{WAIT_TIMEOUT, wait_until};
use paramhub::checkpoint::Resume;
use paramhub::settings::{OptimizerChoice, Settings};
use paramhub::{Codec, Consistency, Dtype, Job, Key, KeyTable};
use safetensors::SafeTensors;

#[test]
fn the_file_of_one_hub_is_a_state_dict_and_masters_of_half_keys_are_single() {
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
fn a_torn_damaged_or_foreign_checkpoint_is_refused_and_the_one_before_offered() {
    let folder = scratch();
    let cluster = Cluster::new(folder.path(), &[1]);
    let settings = settings();
    let keep = waiting_for_checkpoints(folder.path(), "w", 2);
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

    // Manifests of an older release, of another model and of another optimizer. No other checkpoint exists to
    // fall back to.
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
    // A hub that died while it wrote has left no manifest, so the checkpoint does not exist.
    std::fs::remove_file(file("hub-0.json")).unwrap();
    assert_eq!(resume(Resume::Latest, &settings), Ok(4));

    let mean = Settings { optimizer: OptimizerChoice::named("mean"), ..settings.clone() };
    let refused = cluster.run("m", cluster.options(Some("2"), None), &mean, |_| ()).unwrap_err().to_string();
    assert!(refused.contains("the hubs keep no parameters"), "{refused}");
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
            assert!(begun.elapsed() < WAIT_TIMEOUT);
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
