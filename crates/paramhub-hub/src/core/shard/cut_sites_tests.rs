//! Streams of workers and between sites that are cut at any moment: the numbers stay those of an undisturbed job.

use paramhub_core::composition::{Composition, Crossing, OptimizeAt, Site, SiteId};
use paramhub_core::settings::Settings;

use super::cut_streams::{CHUNKS, Job, expected, settings};
use crate::core::stepped_hub::with_cores;

const SEEDS: u64 = 60;

/// A site with one hub of so many cores.
fn site(cores: u16, workers: &[u32], parent: Option<SiteId>) -> Site {
    Site { name: String::new(), hubs: vec![with_cores(cores)], workers: workers.to_vec(), parent }
}

/// A tree, and peers, whose sites divide the chunks among different numbers of routes.
fn compositions(optimize_at: OptimizeAt) -> [(&'static str, Composition); 4] {
    let of = |sites, crossing| Composition { sites, crossing, optimize_at };
    let tree = vec![site(2, &[3], None), site(1, &[0, 1], Some(0)), site(3, &[2], Some(1))];
    let hosts = vec![site(3, &[], None), site(2, &[0, 1], Some(0)), site(1, &[2, 3], Some(0))];
    let peers = || vec![site(2, &[1, 2], None), site(3, &[0], None), site(1, &[3], None)];
    [
        ("tree", of(tree, Crossing::Sharded)),
        ("hosts", of(hosts, Crossing::Sharded)),
        ("sharded", of(peers(), Crossing::Sharded)),
        ("ring", of(peers(), Crossing::Ring)),
    ]
}

/// Runs jobs with these settings whose streams are cut, and returns how often.
fn run(compositions: impl IntoIterator<Item = (&'static str, Composition)>, settings: &Settings) -> u32 {
    let mut cuts = 0;
    for (name, composition) in compositions {
        for seed in 0..SEEDS {
            // Some jobs have most of their frames cut, and others hardly any; in some a cut comes after all steps.
            let (mut job, calm_from) = (Job::new(&composition, settings, seed), 5_000 * (seed % 8));
            let mut acts = 0;
            while !job.is_done() {
                // A job whose streams are cut for ever need not end.
                job.act(acts < calm_from);
                acts += 1;
                assert!(acts < 2_000_000, "{name}, seed {seed}: the job is stuck");
            }
            let expected: Vec<f32> =
                (0..CHUNKS).map(|chunk| expected(chunk, settings.is_two_phase())).collect();
            for (rank, values) in job.values() {
                assert_eq!(values, expected, "{name}, seed {seed}, rank {rank}");
            }
            job.assert_at_hubs(&expected, &format!("{name}, seed {seed}"));
            cuts += job.cuts;
        }
    }
    cuts
}

#[test]
fn streams_between_sites_that_are_cut_at_any_moment_change_no_number() {
    let all = [OptimizeAt::EverySite, OptimizeAt::Owner].into_iter().flat_map(compositions);
    let cuts = run(all, &settings());
    assert!(cuts > 2_000, "{cuts} cuts only");
}

#[test]
fn norms_and_releases_pass_between_sites_whatever_is_cut() {
    let settings = Settings { two_phase: true, ..settings() };
    let cuts = run(compositions(OptimizeAt::EverySite), &settings);
    assert!(cuts > 2_000, "{cuts} cuts only");
}
