//! Jobs whose gradients are quantised resume with the losses that their hubs had yet to feed back.

use std::path::Path;

use paramhub::checkpoint::Resume;
use paramhub::settings::Settings;
use paramhub::{Codec, Job, Key, KeyTable};
use paramhub_hub::FoundCheckpoint;
use safetensors::SafeTensors;

use super::cluster::{Cluster, all, complete, gradient, scratch, settings, waiting_for_checkpoints};
use crate::common::wait_until;

/// Keys of several chunks and of less than one, and one that is not quantised.
const SHAPES: [(&str, [u64; 2], Codec); 4] = [
    ("fc1", [130, 200], Codec::ONE_BIT),
    ("fc2", [130, 130], Codec::TWO_BIT),
    ("fc3", [3, 5], Codec::ONE_BIT),
    ("exact", [64, 64], Codec::F32),
];

fn quantised() -> Settings {
    let keys = SHAPES.iter().map(|&(name, shape, codec)| Key::new(name, shape).in_codec(codec));
    Settings { keys: KeyTable::new(keys.collect()).unwrap(), ..settings() }
}

fn train(job: &Job, end: u32, between: impl Fn(u32)) -> (u32, Vec<Vec<f32>>) {
    let keys = job.settings().keys.clone();
    let mut model: Vec<Vec<f32>> =
        keys.keys().iter().map(|key| vec![0.5; key.elements().unwrap() as usize]).collect();
    job.broadcast(&mut model, 0).unwrap();
    let begin = job.next_step(0).unwrap();
    for step in begin..end {
        for (key, values) in (0..).zip(&mut model) {
            let out = std::mem::take(values);
            let gradient = gradient(job.rank(), key, step, out.len());
            *values = job.push_pull(key, gradient, out).unwrap().wait().unwrap().1;
        }
        if job.rank() == 0 {
            between(step + 1);
        }
    }
    (begin, model)
}

fn newest(folder: &Path, job: &str) -> FoundCheckpoint {
    all(folder, job).into_iter().find(|found| found.flaw.is_none()).unwrap()
}

/// A tensor in one of a hub's files, by its name.
fn tensor(found: &FoundCheckpoint, file: &str, name: &str) -> Option<Vec<f32>> {
    let file = std::fs::read(found.path.join(file)).ok()?;
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let tensor = tensors.tensor(name).ok()?;
    Some(tensor.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect())
}

#[test]
fn quantised_keys_go_on_to_the_same_bits_from_every_step_that_checkpoints_are_due_at() {
    let folder = scratch();
    let settings = quantised();
    let cluster = Cluster::new(folder.path(), &[2, 1]);
    let run = |name, resume, end, keeps: bool| {
        let keep = waiting_for_checkpoints(folder.path(), name, 2);
        let between = |step| {
            if keeps {
                keep(step);
            }
        };
        cluster
            .run(name, cluster.options(Some("2"), resume), &settings, |job| train(job, end, between))
            .unwrap()
    };
    let whole = run("whole", None, 9, false);
    for (name, from, step) in [("newest", Resume::Latest, 6), ("before", Resume::Step(4), 4)] {
        run(name, None, 6, true);
        assert_eq!(complete(folder.path(), name), [6, 4, 2]);
        newest(folder.path(), name).verify().unwrap();
        for (rank, (begin, model)) in run(name, Some(from), 9, false).into_iter().enumerate() {
            assert_eq!(begin, step);
            assert!(model == whole[rank].1, "rank {rank} went on otherwise from step {step}");
        }
    }
}

/// The same keys, none of them quantised.
fn exact(keys: &KeyTable) -> KeyTable {
    let exact = keys.keys().iter().map(|key| key.clone().in_codec(Codec::F32));
    KeyTable::new(exact.collect()).unwrap()
}

#[test]
fn received_parameters_are_in_a_file_of_their_own_for_quantised_keys_only() {
    let folder = scratch();
    let settings = quantised();
    let cluster = Cluster::new(folder.path(), &[2]);
    let keep = waiting_for_checkpoints(folder.path(), "part", 4);
    let options = cluster.options(Some("4"), None);
    let trained = cluster.run("part", options, &settings, |job| train(job, 4, &keep)).unwrap();
    let found = newest(folder.path(), "part");
    for (key, (name, _, codec)) in SHAPES.iter().enumerate() {
        let received = tensor(&found, "hub-0.received.safetensors", name);
        let parameters = tensor(&found, "hub-0.safetensors", name).unwrap();
        match codec.is_quantised() {
            true => {
                let received = received.unwrap();
                assert!(trained.iter().all(|(_, model)| model[key] == received), "{name}");
                assert!(received != parameters, "{name}: nothing to feed back?");
            }
            false => {
                assert!(received.is_none(), "{name}");
                assert!(trained[0].1[key] == parameters, "{name}");
            }
        }
    }
    // A damaged file is refused like other damaged files.
    let path = found.path.join("hub-0.received.safetensors");
    let mut file = std::fs::read(&path).unwrap();
    let last = file.len() - 1;
    file[last] ^= 1;
    std::fs::write(&path, file).unwrap();
    let resume = cluster.options(None, Some(Resume::Latest));
    let refused = cluster.run("part", resume, &settings, |_| ()).unwrap_err().to_string();
    assert!(refused.contains("hub-0.received.safetensors has another digest than was written"), "{refused}");
}

#[test]
fn keys_may_be_quantised_from_a_checkpoint_on_or_no_longer() {
    let folder = scratch();
    let cluster = Cluster::new(folder.path(), &[2]);
    let quantised = quantised();
    let plain = Settings { keys: exact(&quantised.keys), ..quantised.clone() };
    for (name, before, after) in [("from", &plain, &quantised), ("until", &quantised, &plain)] {
        cluster.run(name, cluster.options(Some("100"), None), before, |job| train(job, 3, |_| ())).unwrap();
        wait_until("the last checkpoint", || complete(folder.path(), name).first() == Some(&3));
        let found = newest(folder.path(), name);
        let resume = cluster.options(None, Some(Resume::Latest));
        let begun = cluster.run(name, resume, after, |job| train(job, 3, |_| ())).unwrap();
        for (key, (tensor_name, ..)) in SHAPES.iter().enumerate() {
            let parameters = tensor(&found, "hub-0.safetensors", tensor_name).unwrap();
            assert!(
                begun.iter().all(|(begin, model)| *begin == 3 && model[key] == parameters),
                "{tensor_name}"
            );
        }
    }
}
