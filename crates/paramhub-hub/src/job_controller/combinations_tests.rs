//! What a hub refuses because it does not combine.

use std::path::Path;

use paramhub_core::auth::{Epoch, EpochSecret, Namespace, Nonce};
use paramhub_core::checkpoint::Resume;
use paramhub_core::combinations::{Caller, Feature, Features};
use paramhub_core::composition::Composition;
use paramhub_core::consistency::Consistency;
use paramhub_core::key::{Key, KeyTable};
use paramhub_core::placement::{HubShape, InterfaceShape};
use paramhub_core::scheme::Cluster;
use paramhub_core::service::{JobOptions, JobPlan};
use paramhub_core::settings::{OptimizerChoice, Settings};
use paramhub_core::stragglers::Stragglers;
use paramhub_kernels::Registry;
use paramhub_transport::interface::Sysfs;

use super::checkpoints::CheckpointPlan;
use super::job::HubJob;
use crate::config::HubConfig;
use crate::interfaces::addresses_of;
use crate::local::JobMemory;

fn shape() -> HubShape {
    let interface = InterfaceShape { address: "127.0.0.1:1".into(), cores: vec![0], weight: 1 };
    HubShape { interfaces: vec![interface], local: None, between_hubs: None }
}

/// A job of two workers at one hub.
fn job(consistency: Consistency, options: JobOptions) -> JobPlan {
    let keys = KeyTable::new(vec![Key::new("w", [4, 3])]).unwrap();
    JobPlan {
        name: "digits".into(),
        namespace: Namespace([1; 16]),
        nonce: Nonce([2; 32]),
        epoch: Epoch { number: 1, secret: EpochSecret([3; 32]) },
        version_1_ranks: Vec::new(),
        options,
        composition: Composition::flat(vec![shape()], 2),
        site: 0,
        hub: 0,
        shares: Vec::new(),
        later_hubs: Vec::new(),
        further: None,
        cluster: Cluster::beside_workers(2),
        settings: Settings { consistency, optimizer: OptimizerChoice::named("sgd"), ..Settings::new(keys) },
        team: Default::default(),
    }
}

fn planned(job: &JobPlan) -> Result<(), String> {
    HubJob::plan(job, &shape(), &Registry::with_builtins(), None).map(drop)
}

#[test]
fn a_hub_shows_the_sentence_of_every_rule_that_it_asks_about() {
    let exact = job(Consistency::Synchronous, JobOptions::default()).settings;
    let memory = |settings: &Settings, others: [(Feature, bool); 1]| {
        JobMemory::new(settings, settings.features().and(Features::of(others))).check_sharing()
    };
    let late = [(Feature::LateLeftOut, true)];
    let several = [(Feature::SeveralHubs, true)];
    let resumes = JobOptions { resume: Some(Resume::Latest), ..JobOptions::default() };
    let fixed = HubConfig { interfaces: "eth1".parse().unwrap(), ..HubConfig::default() };
    let nothing = Sysfs::at(Path::new("no such folder").to_path_buf());
    let refused = [
        memory(&exact, late).unwrap_err(),
        memory(&exact, several).unwrap_err(),
        CheckpointPlan::of(&job(Consistency::Synchronous, resumes), None).unwrap_err(),
        addresses_of(&fixed, &[], &nothing).unwrap_err().to_string(),
    ];
    for rule in Caller::Hub.rules() {
        let shown = format!("{}; {}", rule.why, rule.remedy);
        assert!(refused.iter().any(|message| message.ends_with(&shown)), "no example meets {rule:?}");
    }
}

#[test]
fn a_job_that_does_not_combine_is_refused_before_anything_is_allocated() {
    let late = JobOptions { stragglers: Stragglers::Backup(1), ..JobOptions::default() };
    planned(&job(Consistency::Synchronous, late)).unwrap();
    let refused = planned(&job(Consistency::Asynchronous, late)).unwrap_err();
    assert!(
        refused.starts_with("job `digits`: `stragglers` other than wait would have no effect"),
        "{refused}"
    );
    let everyone = JobOptions { stragglers: Stragglers::Backup(2), ..JobOptions::default() };
    let refused = planned(&job(Consistency::Synchronous, everyone)).unwrap_err();
    assert!(
        refused.contains("stragglers = backup:2") && refused.ends_with("use backup:1 or less"),
        "{refused}"
    );
}
