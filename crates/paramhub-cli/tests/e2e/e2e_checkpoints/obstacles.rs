//! Obstacles to writing checkpoints stop no job, and are reported.

use std::path::Path;
use std::time::Duration;

use super::cluster::{Cluster, SIZES, complete, gradient, scratch, settings, train};
use crate::common::{hub, paramhub, wait_until};
use paramhub::Job;
use tempfile::TempDir;

/// A small file system of its own, unmounted when this is dropped.
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

/// The last step of a job that writes a checkpoint after each.
const LAST: u32 = 60;

/// Trains while an obstacle prevents checkpoints, and goes on when it is gone.
fn tried_again(folder: &Path, obstacle: &Path) {
    let cluster = Cluster::new(folder, &[1]);
    let status = || cluster.client.job("w").ok().and_then(|job| job.checkpoints).unwrap_or_default();
    let after_step = |step: u32| match step {
        1 => {
            wait_until("the failure", || status().failed >= 1);
            let status = status();
            assert!(status.failure.contains("cannot be written to") && status.step.is_none(), "{status:?}");
            assert!(complete(folder, "w").is_empty());
        }
        2 => std::fs::remove_file(obstacle).unwrap(),
        LAST => wait_until("a checkpoint", || !complete(folder, "w").is_empty()),
        // On a busy machine the write that fails may last for some steps, whose own checkpoints are left out.
        _ if complete(folder, "w").is_empty() => std::thread::sleep(Duration::from_millis(100)),
        _ => {}
    };
    cluster
        .run("w", cluster.options(Some("1"), None), &settings(), |job| drop(train(job, LAST, after_step)))
        .unwrap();
    wait_until("the last report", || status().failure.is_empty());
    assert!(status().written >= 1 && status().failed >= 1, "{:?}", status());
}

#[test]
fn a_folder_that_cannot_be_written_stops_no_job_and_is_tried_again() {
    let folder = scratch();
    // The obstacle is at the path of the job's folder.
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
    // Less space is left than one checkpoint needs.
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

#[test]
fn a_folder_that_cannot_be_written_is_found_out_at_the_start() {
    let folder = scratch();
    let file = folder.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    for path in [file.clone(), file.join("below"), "/proc/checkpoints".into()] {
        let path = path.to_str().unwrap();
        let hub = ["hub", "--listen", "127.0.0.1:0", "--manager", "127.0.0.1:0", "--checkpoints", path];
        let run = ["run", "-n", "1", "--name", "r", "--checkpoints", path, "--", "true"];
        let train = ["train", "--epochs", "1", "--checkpoints", path];
        for arguments in [&hub[..], &run[..], &train[..]] {
            let refused = paramhub(arguments.iter().copied()).finish().expect_code(1);
            let expected = ["no checkpoint can be written to", path, "Give --checkpoints a directory"];
            let refused = refused.expect_error(&expected);
            assert!(!refused.stdout.contains("hub ready"), "{}", refused.stdout);
        }
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    // A missing folder is created, and only checkpoints stay in it.
    let made = folder.path().join("made/here");
    let (hub, _) = hub(["--checkpoints", made.to_str().unwrap()]);
    assert_eq!(std::fs::read_dir(&made).unwrap().count(), 0);
    drop(hub);
}

#[test]
fn wrong_wishes_are_explained() {
    let refused = paramhub(["train", "--exchange", "local", "--resume"]).finish().expect_code(2);
    refused.expect_error(&["`resume`", "use the exchange hub"]);
    let refused = paramhub(["run", "--checkpoints", "x", "--", "true"]).finish().expect_code(2);
    refused.expect_error(&["--name"]);
    let refused = paramhub(["train", "--checkpoint-every", "soon"]).finish().expect_code(2);
    assert!(refused.stderr.contains("as in 30s"), "{}", refused.stderr);
    let folder = scratch();
    let path = folder.path().to_str().unwrap();
    let refused = paramhub(["train", "--checkpoints", path, "--resume"]).finish().expect_code(1);
    assert!(refused.stderr.contains("no complete checkpoint"), "{}", refused.stderr);
    let (_hub, url) = hub([]);
    let refused = paramhub(["train", "--hub", &url, "--checkpoint-every", "10"]).finish().expect_code(2);
    assert!(refused.stderr.contains("start the hub with `--checkpoints DIR`"), "{}", refused.stderr);
    let asked = ["jobs", "create", "early", "--hub", &url, "--workers", "2", "--checkpoint-every", "10"];
    let refused = paramhub(asked).finish().expect_code(2);
    assert!(refused.stderr.contains("no hub that has joined keeps any"), "{}", refused.stderr);
    let listed = paramhub(["checkpoints", "list", path]).finish().expect_code(0);
    assert!(listed.stdout.starts_with("no checkpoints in"), "{}", listed.stdout);
}
