//! Streams of workers and between sites that are cut at any moment: the numbers stay those of an undisturbed job.

use std::cell::Cell;

use paramhub_core::composition::{BetweenSites, Composition, Crossing, OptimizeAt, Site, SiteId};
use paramhub_core::settings::Settings;

use super::cut_streams::{CHUNKS, Job, expected, settings};
use crate::core::stepped_hub::with_cores;

const SEEDS: u64 = 60;

/// A site with one hub of so many cores.
fn site(cores: u16, workers: &[u32], parent: Option<SiteId>) -> Site {
    Site { name: String::new(), hubs: vec![with_cores(cores)], workers: workers.to_vec(), parent }
}

/// A tree, and peers, whose sites divide the chunks among different numbers of routes.
fn compositions(optimize_at: OptimizeAt) -> [(&'static str, Composition); 5] {
    let between_sites = BetweenSites::F32;
    let of = |sites, crossing| Composition { sites, crossing, optimize_at, between_sites };
    let tree = vec![site(2, &[3], None), site(1, &[0, 1], Some(0)), site(3, &[2], Some(1))];
    let hosts = vec![site(3, &[], None), site(2, &[0, 1], Some(0)), site(1, &[2, 3], Some(0))];
    let peers = || vec![site(2, &[1, 2], None), site(3, &[0], None), site(1, &[3], None)];
    let line = vec![site(2, &[0], None), site(3, &[1, 2], None), site(1, &[3], None)];
    [
        ("tree", of(tree, Crossing::Sharded)),
        ("hosts", of(hosts, Crossing::Sharded)),
        ("sharded", of(peers(), Crossing::Sharded)),
        ("ring", of(peers(), Crossing::Ring)),
        ("line", of(line, Crossing::Line)),
    ]
}

/// Runs jobs with these settings whose streams are cut, and returns how often. `expected` are the parameters of each chunk at
/// the end.
fn run(
    compositions: impl IntoIterator<Item = (&'static str, Composition)>,
    settings: &Settings,
    seeds: u64,
    expected: impl Fn(&Composition) -> Vec<f32>,
) -> u32 {
    let mut cuts = 0;
    for (name, composition) in compositions {
        let expected = expected(&composition);
        for seed in 0..seeds {
            // Some jobs have most of their frames cut, and others hardly any; in some a cut comes after all steps.
            let job = run_once(&composition, settings, seed, 5_000 * (seed % 8));
            for (rank, values) in job.values() {
                assert_eq!(values, expected, "{name}, seed {seed}, rank {rank}");
            }
            job.assert_at_hubs(&expected, &format!("{name}, seed {seed}"));
            cuts += job.cuts;
        }
    }
    cuts
}

/// Runs a job whose streams are cut until `calm_from` frames and cuts have been.
fn run_once(composition: &Composition, settings: &Settings, seed: u64, calm_from: u64) -> Job {
    let mut job = Job::new(composition, settings, seed);
    let mut acts = 0;
    while !job.is_done() {
        // A job whose streams are cut for ever need not end.
        job.act(acts < calm_from);
        acts += 1;
        assert!(acts < 2_000_000, "seed {seed}: the job is stuck");
    }
    job
}

/// The parameters if all sums are exact.
fn exact(settings: &Settings) -> Vec<f32> {
    (0..CHUNKS).map(|chunk| expected(chunk, settings.is_two_phase())).collect()
}

#[test]
fn streams_between_sites_that_are_cut_at_any_moment_change_no_number() {
    let all = [OptimizeAt::EverySite, OptimizeAt::Owner].into_iter().flat_map(compositions);
    let cuts = run(all, &settings(), SEEDS, |_| exact(&settings()));
    assert!(cuts > 2_000, "{cuts} cuts only");
}

#[test]
fn norms_and_releases_pass_between_sites_whatever_is_cut() {
    let settings = Settings { two_phase: true, ..settings() };
    let cuts = run(compositions(OptimizeAt::EverySite), &settings, SEEDS, |_| exact(&settings));
    assert!(cuts > 2_000, "{cuts} cuts only");
}

#[test]
fn sums_that_are_rounded_between_sites_are_rounded_alike_whatever_is_cut() {
    let settings = settings();
    let exact = exact(&settings);
    for between_sites in [BetweenSites::BF16, BetweenSites::ONE_BIT, BetweenSites::TWO_BIT] {
        let rounding = |(name, composition)| (name, Composition { between_sites, ..composition });
        let all = [OptimizeAt::EverySite, OptimizeAt::Owner].into_iter().flat_map(compositions).map(rounding);
        let differing = Cell::new(0);
        let cuts = run(all, &settings, SEEDS / 3, |composition| {
            let undisturbed = run_once(composition, &settings, 0, 0);
            assert_eq!(undisturbed.cuts, 0);
            let rounded = undisturbed.values().next().expect("rank 0 has some").1.to_vec();
            differing.set(differing.get() + u32::from(rounded != exact));
            for (rounded, exact) in rounded.iter().zip(&exact) {
                assert!((rounded - exact).abs() < exact.abs() / 64.0, "{rounded}, not about {exact}");
            }
            rounded
        });
        assert!(cuts > 700, "{cuts} cuts only");
        // Where owners optimise, the sums of some shapes are exact.
        assert!(differing.get() >= 4, "{between_sites}: only {differing:?} of 8 shapes have rounded any sum");
    }
}
