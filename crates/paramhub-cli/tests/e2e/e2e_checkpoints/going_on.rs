//! Jobs that resume from a checkpoint, to the same bits.

use super::cluster::{
    Cluster, SIZES, WORKERS, all, complete, gradient, scratch, settings, train, train_on,
    waiting_for_checkpoints,
};
use crate::common::{paramhub, wait_until};
use paramhub::checkpoint::Resume;
use paramhub::composition::{OptimizeAt, Reduction};
use paramhub::scheme::{LayerSettings, Scheme, SchemeChoice};
use paramhub::service::JobOptions;
use paramhub::settings::Settings;
use paramhub::{FactorBuffers, Job, Key, KeyTable};
use rustix::process::Signal;
use tempfile::TempDir;

#[test]
fn a_job_goes_on_from_its_checkpoint_to_the_same_bits_on_other_hubs() {
    let folder = scratch();
    let cluster = Cluster::new(folder.path(), &[2, 1]);
    let settings = settings();
    let whole =
        cluster.run("whole", cluster.options(None, None), &settings, |job| train(job, 9, |_| {})).unwrap();
    let keep = waiting_for_checkpoints(folder.path(), "part/a", 2);
    let options = cluster.options(Some("2"), None);
    let half = cluster.run("part/a", options, &settings, |job| train(job, 7, &keep)).unwrap();
    // The last checkpoint of all is that of the end.
    wait_until("the last checkpoint", || complete(folder.path(), "part/a").first() == Some(&7));
    assert_eq!(complete(folder.path(), "part/a"), [7, 6, 4], "the newest three stay");
    // Checkpoints that are being removed may be there, too.
    let newest = all(folder.path(), "part/a").into_iter().find(|found| found.flaw.is_none()).unwrap();
    assert_eq!(newest.parts.len(), 2, "a part a hub");
    newest.verify().unwrap();
    assert!(newest.parts.iter().all(|part| part.workers == WORKERS && part.is_consistent));
    let reported = cluster.client.job("part/a").unwrap().checkpoints.unwrap();
    assert_eq!((reported.failed, reported.failure.as_str()), (0, ""));
    assert!(reported.step >= Some(6) && reported.bytes > 3 * 4 * SIZES.iter().sum::<u64>(), "{reported:?}");
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
    // The state is what makes the difference: from the parameters alone the job goes on otherwise.
    let forgetful = cluster.run("other", cluster.options(None, None), &other, |job| {
        let mut model = half[0].1.clone();
        job.broadcast(&mut model, 7).unwrap();
        train_on(job, model, 7, 9)
    });
    assert_ne!(forgetful.unwrap()[0], whole[0].1);
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
    let keep = waiting_for_checkpoints(folder.path(), "part", 3);
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
                let keep = waiting_for_checkpoints(folder.path(), "part", 2);
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

const TRAIN: [&str; 9] =
    ["train", "--net", "lenet", "--epochs", "5", "--workers", "2", "--reproducible", "--save=p.safetensors"];

#[test]
fn training_that_is_killed_and_resumed_ends_at_the_bits_of_one_that_was_not() {
    let uninterrupted = paramhub(TRAIN).finish().expect_code(0).read("p.safetensors");
    for signal in [Signal::KILL, Signal::INT] {
        let (folder, step) = interrupted_training(signal);
        let path = folder.path().to_str().unwrap();
        let kept = ["--checkpoints", path, "--checkpoint-every", "9"];
        let resume = ["--resume", "--cores", "2", "--chunk-bytes", "8K"];
        let second = paramhub(TRAIN.into_iter().chain(kept).chain(resume)).finish().expect_code(0);
        assert!(second.read("p.safetensors") == uninterrupted, "from step {step} of {signal:?}");
    }
}

/// Ends a training in its midst by a signal. Returns the folder of its checkpoints and the newest one's step.
fn interrupted_training(signal: Signal) -> (TempDir, u32) {
    // On a busy machine a training may be over before the signal is sent.
    for _ in 0..10 {
        let folder = scratch();
        let kept = ["--checkpoints", folder.path().to_str().unwrap(), "--checkpoint-every", "9"];
        let training = paramhub(TRAIN.into_iter().chain(kept)).start();
        wait_until("a checkpoint", || !complete(folder.path(), "train").is_empty());
        training.signal(signal);
        let ended = training.finish();
        let newest = complete(folder.path(), "train")[0];
        if ended.code != 0 && newest < 220 {
            return (folder, newest);
        }
    }
    panic!("ten trainings ended before they could be interrupted");
}
