use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::auth::{Epoch, EpochSecret, Namespace, Nonce};
use crate::checkpoint::{Every, Resume};
use crate::codec::Codec;
use crate::composition::{BetweenSites, Composition, OptimizeAt, Place, Reduction, arrange};
use crate::consistency::Consistency;
use crate::key::{Key, KeyTable};
use crate::placement::{HubShape, InterfaceShape};
use crate::resuming::ResumeTerms;
use crate::scheme::{Cluster, LayerSettings, Plan, Scheme, SchemeChoice};
use crate::service::{JobOptions, JobPlan, OnInterfaceDown, OnWorkerLoss};
use crate::settings::{OptimizerChoice, Settings};
use crate::stragglers::Stragglers;

/// Fails unless each rule about which `caller` asks ends one of the messages.
fn assert_shown(caller: Caller, messages: &[String]) {
    for rule in caller.rules() {
        let shown = format!("{}; {}", rule.why, rule.remedy);
        assert!(messages.iter().any(|message| message.ends_with(&shown)), "no example meets {rule:?}");
    }
}

#[test]
fn no_pair_of_features_is_in_two_rules_and_every_rule_reads_as_a_sentence() {
    let mut pairs = HashSet::new();
    let mut texts = HashSet::new();
    for rule in rules() {
        assert!(!rule.callers.is_empty(), "no caller asks about {rule:?}");
        assert!(texts.insert(rule.why), "a second rule has this reason: {}", rule.why);
        for text in [rule.why, rule.remedy] {
            assert!(!text.is_empty() && !text.ends_with('.') && !text.contains("; "), "{text}");
        }
        for &this in rule.these {
            for &other in rule.those {
                assert!(
                    this != other && pairs.insert([this.min(other), this.max(other)]),
                    "{this} with {other}"
                );
                let conflict = check([this, other].into_iter().collect()).unwrap_err();
                assert_eq!((conflict.rule, conflict.this, conflict.other), (rule, this, other));
                let text = conflict.to_string();
                assert!(text.starts_with(this.name()) && text.contains(other.name()), "{text}");
                assert!(text.ends_with(&format!("{}; {}", rule.why, rule.remedy)), "{text}");
            }
        }
    }
    for &feature in Feature::ALL {
        assert!(pairs.iter().any(|pair| pair.contains(&feature)), "{feature} is in no rule");
        assert_eq!(feature.id().parse(), Ok(feature));
    }
    assert!("no-such-thing".parse::<Feature>().is_err());
}

fn any_features() -> impl Strategy<Value = Features> {
    prop::collection::vec(prop::sample::select(Feature::ALL), 0..6)
        .prop_map(|features| features.into_iter().collect())
}

proptest! {
    #[test]
    fn features_combine_unless_a_rule_has_two_of_them(asked in any_features(), more in any_features()) {
        let holds = |rule: &&Rule| {
            rule.these.iter().any(|&this| asked.has(this)) && rule.those.iter().any(|&other| asked.has(other))
        };
        let first = rules().find(holds);
        let found = check(asked);
        prop_assert_eq!(found.as_ref().err().map(|conflict| conflict.rule), first);
        if let Err(conflict) = found {
            prop_assert!(asked.has(conflict.this) && asked.has(conflict.other));
            prop_assert!(check(asked.and(more)).is_err(), "what is asked for in addition makes nothing right");
            let other = conflict.other_than(conflict.this);
            prop_assert!(conflict_of(conflict.this, Features::NONE.with(other)).is_some());
        }
    }
}

/// A fully connected layer of two matrices of f32.
fn settings() -> Settings {
    let keys = vec![Key::new("fc.weight", [4, 3]), Key::new("fc.bias", [4])];
    let layers = vec![LayerSettings::fully_connected("fc", [0, 1], [4, 3, 2])];
    let optimizer = OptimizerChoice::named("sgd");
    Settings { layers, optimizer, ..Settings::new(KeyTable::new(keys).unwrap()) }
}

fn by(scheme: Scheme) -> Settings {
    Settings { scheme: SchemeChoice::Only(scheme), ..settings() }
}

#[test]
fn settings_show_the_sentence_of_every_rule_about_them() {
    let good = settings();
    assert_eq!(good.check(), Ok(()));
    let stale = |settings: Settings| Settings { consistency: Consistency::BoundedStaleness(2), ..settings };
    let asynchronous = |settings: Settings| Settings { consistency: Consistency::Asynchronous, ..settings };
    let clipped = |settings: Settings| Settings { clip_norm: Some(1.0), ..settings };
    let one_bit = |settings: Settings| Settings { codec: Some(Codec::ONE_BIT), ..settings };
    let of_keys = |keys: Vec<Key>| Settings {
        layers: vec![],
        ..Settings { keys: KeyTable::new(keys).unwrap(), ..settings() }
    };
    let of_layer = |layer: LayerSettings| Settings { layers: vec![layer], ..by(Scheme::Factors) };
    let other = LayerSettings::other("conv", [0]);
    let forced = SchemeChoice::Only(Scheme::FactorsToHub);
    let tied = LayerSettings { tied: true, ..settings().layers.remove(0) };
    let refused: Vec<String> = [
        stale(Settings { reproducible: true, ..good.clone() }),
        asynchronous(clipped(good.clone())),
        Settings { optimizer: OptimizerChoice::default(), ..clipped(good.clone()) },
        stale(one_bit(good.clone())),
        one_bit(of_keys(vec![Key::new("b", [4])])),
        Settings { layers: vec![], ..by(Scheme::FactorsToHub) },
        Settings { layers: vec![other.clone().by(forced)], ..good.clone() },
        Settings { layers: vec![other.with_factors_in(Codec::BF16)], ..good.clone() },
        of_layer(tied.by(forced)),
        asynchronous(by(Scheme::FactorsToHub)),
        Settings { aggregator: "largest".into(), ..by(Scheme::Factors) },
        clipped(by(Scheme::Factors)),
        Settings { optimizer: OptimizerChoice::named("muon"), ..by(Scheme::Factors) },
    ]
    .map(|settings| settings.check().unwrap_err().to_string())
    .into();
    assert_shown(Caller::Settings, &refused);
}

/// A job of two workers at these hubs.
fn job(settings: Settings, options: JobOptions, composition: Composition) -> JobPlan {
    JobPlan {
        name: "digits".into(),
        namespace: Namespace([1; 16]),
        nonce: Nonce([2; 32]),
        epoch: Epoch { number: 1, secret: EpochSecret([3; 32]) },
        version_1_ranks: Vec::new(),
        options,
        composition,
        site: 0,
        hub: 0,
        shares: Vec::new(),
        later_hubs: Vec::new(),
        further: None,
        cluster: Cluster::beside_workers(2),
        settings,
        team: Default::default(),
    }
}

fn hub() -> HubShape {
    let interface = InterfaceShape { address: "127.0.0.1:7771".into(), cores: vec![0], weight: 1 };
    HubShape { interfaces: vec![interface], local: None, between_hubs: None }
}

/// Two racks, each with a hub and a worker.
fn racks() -> Composition {
    let in_rack = |name: &str| Place { rack: name.into(), host: String::new() };
    let hubs = ["a", "b"].map(|rack| (hub(), in_rack(rack)));
    arrange(&hubs, &["a", "b"].map(in_rack), Reduction::Ring, OptimizeAt::EverySite, BetweenSites::F32)
        .unwrap()
        .0
}

#[test]
fn jobs_show_the_sentence_of_every_rule_about_them() {
    let usual = JobOptions::default();
    let continues = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..usual };
    let outlives = JobOptions { on_worker_loss: OnWorkerLoss::Continue, ..usual };
    let rewinds = JobOptions { on_worker_loss: OnWorkerLoss::Rewind, ..usual };
    let begins_again = JobOptions { checkpoint_every: Some("5".parse().unwrap()), ..rewinds };
    let elastic = JobOptions { start_workers: Some(1), ..begins_again };
    let replicas = JobOptions { replicas: 1, ..usual };
    let late = JobOptions { stragglers: Stragglers::Backup(1), ..usual };
    let encrypted = JobOptions { encrypt: true, ..usual };
    let saves = JobOptions { program_state_bytes: 1, ..usual };
    let every = |text: &str| JobOptions { checkpoint_every: Some(text.parse::<Every>().unwrap()), ..usual };
    let at_owner = JobOptions { optimize_at: OptimizeAt::Owner, ..usual };
    let resumes = JobOptions { resume: Some(Resume::Latest), ..usual };
    let in_ring = JobOptions { reduction: Reduction::Ring, ..usual };
    let stale = Settings { consistency: Consistency::BoundedStaleness(1), ..settings() };
    let clipped = Settings { clip_norm: Some(1.0), ..settings() };
    let quantised = Settings { codec: Some(Codec::TWO_BIT), ..settings() };
    let mean = Settings { optimizer: OptimizerChoice::default(), ..settings() };
    let exact = Settings { reproducible: true, ..settings() };
    let flat = || Composition::flat(vec![hub()], 2);
    let two_hubs = Composition::flat(vec![hub(), hub()], 2);
    let conflict = |settings: &Settings, options: JobOptions, composition: Composition| {
        assert_eq!(settings.check(), Ok(()));
        let job = job(settings.clone(), options, composition);
        check_job(&job, &Plan::new(settings, &job.cluster))
    };
    for options in [
        usual,
        continues,
        late,
        outlives,
        rewinds,
        replicas,
        encrypted,
        saves,
        every("30s"),
        every("5"),
        resumes,
    ] {
        assert_eq!(conflict(&settings(), options, flat()), Ok(()));
    }
    for settings in
        [&stale, &clipped, &quantised, &mean, &exact, &by(Scheme::Factors), &by(Scheme::FactorsToHub)]
    {
        assert_eq!(conflict(settings, usual, flat()), Ok(()));
    }
    for options in [usual, begins_again] {
        assert_eq!(conflict(&settings(), options, racks()), Ok(()));
    }
    assert_eq!(conflict(&by(Scheme::Factors), encrypted, flat()), Ok(()));
    for settings in [&clipped, &by(Scheme::Factors)] {
        assert_eq!(conflict(settings, usual, racks()), Ok(()));
    }
    for settings in [&exact, &clipped] {
        assert_eq!([rewinds, continues].map(|options| conflict(settings, options, flat())), [Ok(()), Ok(())]);
    }
    let refused: Vec<String> = [
        (&by(Scheme::FactorsToHub), usual, racks()),
        (&by(Scheme::Factors), every("5"), flat()),
        (&by(Scheme::Factors), continues, flat()),
        (&by(Scheme::FactorsToHub), late, flat()),
        (&stale, usual, racks()),
        (&stale, in_ring, racks()),
        (&clipped, at_owner, racks()),
        (&quantised, usual, racks()),
        (&settings(), continues, racks()),
        (&settings(), late, racks()),
        (&settings(), JobOptions { reduction: Reduction::Ring, ..late }, racks()),
        (&settings(), elastic, racks()),
        (&stale, continues, flat()),
        (&stale, late, flat()),
        (&mean, late, flat()),
        (&exact, late, flat()),
        (&quantised, late, flat()),
        (&clipped, late, flat()),
        (&by(Scheme::Factors), outlives, flat()),
        (&settings(), outlives, racks()),
        (&stale, outlives, flat()),
        (&mean, outlives, flat()),
        (&exact, outlives, flat()),
        (&clipped, outlives, flat()),
        (&quantised, outlives, flat()),
        (&by(Scheme::FactorsToHub), rewinds, flat()),
        (&settings(), rewinds, racks()),
        (&stale, rewinds, flat()),
        (&mean, rewinds, flat()),
        (&quantised, rewinds, flat()),
        (&settings(), replicas, racks()),
        (&stale, replicas, flat()),
        (&clipped, replicas, flat()),
        (&quantised, replicas, flat()),
        (&by(Scheme::FactorsToHub), replicas, flat()),
        (&mean, resumes, flat()),
        (&stale, every("5"), flat()),
        (&settings(), every("30s"), two_hubs),
    ]
    .map(|(settings, options, composition)| conflict(settings, options, composition).unwrap_err().to_string())
    .into();
    assert_shown(Caller::InitService, &refused);
    assert!(
        refused[1].starts_with("layer `fc` goes by factors: the scheme factors cannot"),
        "{}",
        refused[1]
    );
    assert!(refused[7].starts_with("key `fc.weight` (two-bit): hubs that serve racks"), "{}", refused[7]);
}

#[test]
fn streams_are_dialled_again_by_default_where_that_is_exact() {
    let usual = JobOptions::default();
    let grace = |settings: &Settings, options: JobOptions, composition: Composition| {
        let job = job(settings.clone(), options, composition);
        let whole = settings.features().and(options.features()).and(job.composition.features());
        ResumeTerms::of(&options, whole, &Plan::new(settings, &job.cluster)).redial_grace.as_secs_f64()
    };
    let flat = || Composition::flat(vec![hub()], 2);
    let [outlives, rewinds] = [OnWorkerLoss::Continue, OnWorkerLoss::Rewind]
        .map(|on_worker_loss| JobOptions { on_worker_loss, ..usual });
    let patient = JobOptions { redial_grace_s: 7.0, ..usual };
    let continues = JobOptions { on_interface_down: OnInterfaceDown::Continue, ..usual };
    for (options, expected) in
        [(usual, 0.5), (outlives, 0.5), (rewinds, 0.5), (patient, 7.0), (continues, 0.5)]
    {
        assert_eq!(grace(&settings(), options, flat()), expected, "{options:?}");
    }
    let schemes = [Scheme::FactorsToHub, Scheme::Factors];
    assert_eq!(schemes.map(|scheme| grace(&by(scheme), usual, flat())), [0.5; 2]);
    let exact = Settings { reproducible: true, ..settings() };
    let quantised = Settings { codec: Some(Codec::TWO_BIT), ..settings() };
    let clipped = Settings { clip_norm: Some(1.0), ..settings() };
    assert_eq!([&exact, &quantised, &clipped].map(|settings| grace(settings, usual, flat())), [0.5; 3]);

    let never = JobOptions { redial_grace_s: 0.0, ..usual };
    let late = JobOptions { stragglers: Stragglers::Backup(1), ..usual };
    let stale = Settings { consistency: Consistency::BoundedStaleness(1), ..settings() };
    assert_eq!([never, late].map(|options| grace(&settings(), options, flat())), [0.0; 2]);
    assert_eq!(grace(&stale, usual, flat()), 0.0);
    assert_eq!(grace(&settings(), usual, racks()), 0.5);
}

#[test]
fn hubs_without_a_place_show_that_they_reduce_nothing() {
    let hubs = [(hub(), Place::default())];
    let workers = [Place::default(), Place::default()];
    let arranged = |reduction, at, between_sites| {
        arrange(&hubs, &workers, reduction, at, between_sites).map_err(|error| error.to_string())
    };
    assert!(arranged(Reduction::Flat, OptimizeAt::EverySite, BetweenSites::F32).unwrap().0.is_flat());
    let refused = [
        arranged(Reduction::Ring, OptimizeAt::EverySite, BetweenSites::F32).unwrap_err(),
        arranged(Reduction::Auto, OptimizeAt::Owner, BetweenSites::F32).unwrap_err(),
        arranged(Reduction::Auto, OptimizeAt::EverySite, BetweenSites::BF16).unwrap_err(),
    ];
    assert_shown(Caller::ConnectService, &refused);
}
