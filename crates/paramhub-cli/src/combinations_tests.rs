//! Options of `run`, `train` and `hub` that do not combine.

use std::num::NonZeroUsize;

use paramhub_core::codec::Codec;
use paramhub_core::combinations::Caller;
use paramhub_core::composition::Reduction;

use super::train::RankLauncher;
use super::{hub, run, train};
use crate::config::{
    Bytes, Config, Deployment, ExchangeKind, HubSection, RunSection, TrainOptimizer, TrainSection,
};
use paramhub::Transport;
use paramhub::service::{OnInterfaceDown, OnWorkerLoss};

fn of_run(url: Option<&str>, run: RunSection) -> Result<(), String> {
    run::check(&Config { url: url.map(str::to_owned), run, ..Config::default() })
        .map_err(|refused| refused.to_string())
}

fn of_train(url: Option<&str>, launcher: Option<RankLauncher>, train: TrainSection) -> Result<(), String> {
    train::check(&Config { url: url.map(str::to_owned), train, ..Config::default() }, launcher)
}

const URL: Option<&str> = Some("http://10.0.0.1:7770");

#[test]
fn options_of_commands_show_the_sentence_of_every_rule_about_them() {
    let of = |deployment: Deployment| RunSection { deployment: Some(deployment), ..RunSection::default() };
    let several = |host_rank| RunSection { hosts: 2, host_rank, ..RunSection::default() };
    let folder = || Some("checkpoints".into());
    let resume = || Some("latest".parse().unwrap());
    let run = RunSection::default;
    let train = TrainSection::default;
    let chaos = || TrainSection { chaos_s: Some(1.0), ..train() };
    let by = |exchange| TrainSection { exchange, ..train() };
    let (local, depcha) = (by(ExchangeKind::Local), by(ExchangeKind::Depcha));
    let shm = TrainSection { transport: Transport::Shm, ..train() };
    let keep = HubSection { checkpoint_keep: 7, ..HubSection::default() };
    let joins =
        HubSection { join: URL.map(str::to_owned), hub_dead_after_s: Some(3.0), ..HubSection::default() };
    let by_run = Some(RankLauncher::Run);
    let refused = [
        of_run(None, of(Deployment::Ncs)),
        of_run(URL, RunSection { hubs: Some(2), ..of(Deployment::Ncc) }),
        of_run(URL, RunSection { hubs: Some(2), ..of(Deployment::Cs) }),
        of_run(URL, RunSection { hubs: Some(0), ..of(Deployment::Ncs) }),
        of_run(None, RunSection { hubs: Some(2), ..run() }),
        of_run(None, RunSection { hubs: Some(0), cores: 2, ..run() }),
        of_run(None, RunSection { reduction: Reduction::Ring, ..run() }),
        of_run(URL, RunSection { cores: 2, ..run() }),
        of_run(URL, RunSection { checkpoints: folder(), ..run() }),
        of_run(URL, RunSection { replicas: 1, ..of(Deployment::Ncc) }),
        of_run(None, RunSection { hub_label: Some("ssd".parse().unwrap()), ..run() }),
        of_run(None, RunSection { resume: resume(), ..run() }),
        of_run(None, RunSection { checkpoints: folder(), ..run() }),
        of_run(None, RunSection { host_rank: Some(1), ..run() }),
        of_run(None, RunSection { max_restarts: 1, ..run() }),
        of_run(None, RunSection { rewind_every: 2, ..run() }),
        of_run(URL, RunSection { max_workers: Some(4), ..run() }),
        of_run(URL, RunSection { max_workers: Some(4), on_worker_loss: OnWorkerLoss::Rewind, ..run() }),
        of_run(None, RunSection { max_workers: Some(4), on_worker_loss: OnWorkerLoss::Continue, ..run() }),
        of_run(None, RunSection { join: Some("digits".into()), ..run() }),
        of_run(URL, RunSection { join: Some("digits".into()), hubs: Some(2), ..run() }),
        of_run(URL, several(None)),
        of_run(None, several(Some(1))),
        of_run(URL, several(Some(1))),
        of_train(URL, None, TrainSection { deployment: Some(Deployment::Cs), ..train() }),
        of_train(URL, None, TrainSection { hubs: Some(0), ..train() }),
        of_train(None, by_run, local.clone()),
        of_train(None, Some(RankLauncher::Mpi), TrainSection { workers: Some(2), ..train() }),
        of_train(None, by_run, TrainSection { cores: 2, ..train() }),
        of_train(None, None, TrainSection { codec: Codec::F16, ..local.clone() }),
        of_train(None, None, TrainSection { name: Some("digits".into()), ..local.clone() }),
        of_train(None, None, TrainSection { transport: Transport::Tcp, ..local.clone() }),
        of_train(None, None, TrainSection { chunk_bytes: Bytes(4096), ..local }),
        of_train(None, None, TrainSection { transport: Transport::Shm, ..depcha.clone() }),
        of_train(None, None, TrainSection { reproducible: true, ..depcha }),
        of_train(None, None, TrainSection { compute_threads: NonZeroUsize::new(2).unwrap(), ..train() }),
        of_train(None, None, TrainSection { check_collectives: true, ..train() }),
        of_train(None, None, TrainSection { chaos_s: Some(1.0), ..by(ExchangeKind::Funnel) }),
        of_train(None, None, TrainSection { reproducible: true, ..chaos() }),
        of_train(None, by_run, chaos()),
        of_train(None, None, TrainSection { chaos_seed: Some(3), ..train() }),
        of_train(None, None, TrainSection { momentum: 0.5, optimizer: TrainOptimizer::AdamW, ..train() }),
        of_train(None, None, TrainSection { on_interface_down: OnInterfaceDown::Continue, ..shm.clone() }),
        of_train(None, None, TrainSection { encrypt: true, ..shm }),
        hub::check(&keep).map_err(|refused| refused.to_string()),
        hub::check(&joins).map_err(|refused| refused.to_string()),
    ]
    .map(Result::unwrap_err);
    for rule in Caller::CommandLine.rules() {
        let shown = format!("{}; {}", rule.why, rule.remedy);
        assert!(refused.iter().any(|message| message.ends_with(&shown)), "no example meets {rule:?}");
    }
}

#[test]
fn settings_that_combine_are_accepted() {
    let run = RunSection::default;
    let named = RunSection { name: Some("digits".into()), ..run() };
    for (url, section) in [
        (None, run()),
        (None, RunSection { hubs: Some(0), ..run() }),
        (None, RunSection { reduction: Reduction::Flat, ..run() }),
        (
            None,
            RunSection { on_worker_loss: OnWorkerLoss::Continue, max_restarts: 1, min_workers: 1, ..run() },
        ),
        (
            None,
            RunSection { on_worker_loss: OnWorkerLoss::Rewind, max_restarts: 1, rewind_every: 5, ..run() },
        ),
        (URL, RunSection { replicas: 1, hubs: Some(2), ..run() }),
        (
            URL,
            RunSection {
                max_hubs: Some(1),
                hub_label: Some("ssd".parse().unwrap()),
                deployment: Some(Deployment::Ncc),
                ..run()
            },
        ),
        (URL, RunSection { on_worker_loss: OnWorkerLoss::Continue, max_workers: Some(4), ..run() }),
        (URL, RunSection { join: Some("digits".into()), max_restarts: 2, ..run() }),
        (None, RunSection { checkpoints: Some("checkpoints".into()), ..named.clone() }),
        (URL, RunSection { resume: Some("latest".parse().unwrap()), ..named.clone() }),
        (URL, RunSection { hosts: 2, host_rank: Some(1), ..named.clone() }),
        (URL, RunSection { deployment: Some(Deployment::Cs), cores: 2, ..named }),
    ] {
        of_run(url, section).unwrap();
    }
    let train = TrainSection::default;
    let local = TrainSection { exchange: ExchangeKind::Local, reproducible: true, ..train() };
    let funnel = TrainSection { exchange: ExchangeKind::Funnel, transport: Transport::Tcp, ..train() };
    for (url, launcher, section) in [
        (None, None, local),
        (URL, None, funnel),
        (URL, Some(RankLauncher::Run), TrainSection { reproducible: true, ..train() }),
        (None, Some(RankLauncher::Mpi), TrainSection { cores: 2, ..train() }),
        (URL, None, TrainSection { chaos_s: Some(0.5), chaos_seed: Some(3), ..train() }),
    ] {
        of_train(url, launcher, section).unwrap();
    }
    let joined = HubSection {
        join: URL.map(str::to_owned),
        state: Some("state".parse().unwrap()),
        ..HubSection::default()
    };
    hub::check(&joined).unwrap();
}
