use proptest::prelude::*;

use super::*;
use crate::key::Key;
use crate::placement::InterfaceShape;

fn hub(name: &str, weight: u32) -> HubShape {
    let interface = InterfaceShape { address: format!("{name}:1"), cores: vec![0], weight };
    HubShape { interfaces: vec![interface], local: None, between_hubs: None }
}

/// Sites from their ranks and parents.
fn compose(sites: &[(&[u32], Option<SiteId>)], crossing: Crossing) -> Composition {
    let site = |(at, &(workers, parent)): (usize, &(&[u32], Option<SiteId>))| Site {
        name: format!("rack {at}"),
        hubs: vec![hub(&format!("r{at}"), 1)],
        workers: workers.to_vec(),
        parent,
    };
    let sites = sites.iter().enumerate().map(site).collect();
    Composition { sites, crossing, optimize_at: OptimizeAt::EverySite, between_sites: BetweenSites::F32 }
}

fn keys() -> (KeyTable, ChunkMap) {
    let table = KeyTable::new(vec![Key::new("a", [100_000]), Key::new("b", [5000])]).unwrap();
    let map = ChunkMap::new(&table, 4096).unwrap();
    (table, map)
}

#[test]
fn sites_that_are_no_tree_are_refused() {
    let refused = |sites: &[(&[u32], Option<SiteId>)]| compose(sites, Crossing::Ring).check().unwrap_err();
    assert_eq!(refused(&[]), CompositionError::Sites(0));
    assert_eq!(refused(&[(&[0], Some(1))]), CompositionError::Parent(0));
    assert_eq!(refused(&[(&[0], Some(0))]), CompositionError::Parent(0));
    assert_eq!(refused(&[(&[0], Some(1)), (&[1], Some(0))]), CompositionError::Parent(0));
    assert_eq!(refused(&[(&[0, 1], None), (&[], None)]), CompositionError::Idle("rack 1".into()));
    assert_eq!(refused(&[(&[0], None), (&[0], None)]), CompositionError::Rank(0));
    assert_eq!(refused(&[(&[0], None), (&[2], None)]), CompositionError::Rank(2));
    assert_eq!(refused(&[(&[1, 0], None)]), CompositionError::Rank(1));
    let four_high: [(&[u32], Option<SiteId>); 4] =
        [(&[0], Some(1)), (&[1], Some(2)), (&[2], Some(3)), (&[3], None)];
    assert_eq!(refused(&four_high), CompositionError::Parent(0));
    compose(&four_high[1..].iter().map(|_| (&[][..], None)).collect::<Vec<_>>(), Crossing::Ring)
        .check()
        .unwrap_err();
}

#[test]
fn a_host_below_a_rack_below_a_cluster_is_as_deep_as_it_gets() {
    let three = compose(&[(&[0, 1], Some(1)), (&[2], Some(2)), (&[], None)], Crossing::Sharded);
    three.check().unwrap();
    assert_eq!(three.above(0, 2), Some(1));
    assert_eq!(three.above(1, 2), Some(2));
    assert_eq!(three.above(2, 2), None);
    assert_eq!(three.member_sites(2), [1]);
    assert_eq!(three.site_of(2), Some(1));
    assert_eq!(three.site_of(3), None);
}

#[test]
fn peers_own_chunks_by_their_weight() {
    let mut peers = compose(&[(&[0], None), (&[1], None)], Crossing::Sharded);
    peers.sites[0].hubs[0].interfaces[0].weight = 3;
    let (table, map) = keys();
    let owners = peers.owners(&table, &map);
    let of_first = owners.iter().filter(|&&owner| owner == 0).count();
    assert!((of_first as f64 / owners.len() as f64 - 0.75).abs() < 0.02, "{of_first} of {}", owners.len());
}

proptest! {
    /// In any tree: a chunk's sum reaches its owner from every site, every site above knows its members,
    /// those that contribute to a chunk come first among them, and none contributes twice.
    #[test]
    fn every_sum_reaches_its_owner(
        tops in 1usize..6,
        below in prop::collection::vec(0usize..6, 0..8),
        is_ring: bool,
    ) {
        let crossing = if is_ring { Crossing::Ring } else { Crossing::Sharded };
        let mut sites: Vec<(Vec<u32>, Option<SiteId>)> = (0..tops).map(|top| (vec![top as u32], None)).collect();
        for (rank, parent) in (tops as u32..).zip(&below) {
            sites.push((vec![rank], Some((parent % tops) as SiteId)));
        }
        let borrowed: Vec<_> = sites.iter().map(|(ranks, parent)| (&ranks[..], *parent)).collect();
        let composition = compose(&borrowed, crossing);
        composition.check().unwrap();
        for &owner in &composition.tops() {
            for site in 0..composition.sites.len() as SiteId {
                let (mut at, mut hops) = (site, 0);
                while let Some(above) = composition.above(at, owner) {
                    prop_assert!(composition.member_sites(above).contains(&at));
                    (at, hops) = (above, hops + 1);
                    prop_assert!(hops <= tops + 1);
                }
                prop_assert_eq!(at, owner);
                let contributes: Vec<bool> = composition
                    .member_sites(site)
                    .into_iter()
                    .map(|member| composition.above(member, owner) == Some(site))
                    .collect();
                prop_assert!(contributes.is_sorted_by(|a, b| a >= b), "{contributes:?}");
            }
        }
    }

    /// A peer sends no more than in a ring's reduce-scatter and all-gather, in either crossing.
    #[test]
    fn a_crossing_costs_what_a_ring_does(tops in 2usize..6, is_ring: bool) {
        let crossing = if is_ring { Crossing::Ring } else { Crossing::Sharded };
        let ranks: Vec<Vec<u32>> = (0..tops as u32).map(|rank| vec![rank]).collect();
        let sites: Vec<_> = ranks.iter().map(|ranks| (&ranks[..], None)).collect();
        let composition = compose(&sites, crossing);
        let (table, map) = keys();
        let composed = Composed::new(&table, &map, composition.clone()).unwrap();
        for site in 0..tops as SiteId {
            let mut sent = 0;
            for chunk in 0..map.len() {
                sent += usize::from(composed.above(site, chunk).is_some());
                let members = composition.member_sites(site);
                sent += members.iter().filter(|&&member| composed.above(member, chunk) == Some(site)).count();
            }
            let bound = 2.0 * (tops - 1) as f64 / tops as f64 * f64::from(map.len());
            prop_assert!((sent as f64 - bound).abs() <= 2.0 * tops as f64, "{sent} chunks, {bound}");
        }
    }
}

fn at(rack: &str, host: &str) -> Place {
    Place { rack: rack.into(), host: host.into() }
}

#[test]
fn the_papers_condition_decides_between_flat_and_hierarchical() {
    let hubs: Vec<(HubShape, Place)> =
        ["a", "b"].map(|rack| (hub(rack, 2000), at(rack, ""))).into_iter().collect();
    let workers: Vec<Place> = (0..8).map(|rank| at(if rank < 4 { "a" } else { "b" }, "h")).collect();
    let choice = |core: &str| choose(&hubs, &workers, core.parse().unwrap()).unwrap();
    let slow = choice("100mbit");
    // 4 * 8e6 / 2 / 100e6 against max(4 * 8e6 / 2e9, 8e6 / 2e9) + 8e6 / 2 / 100e6.
    assert!((slow.inequality.flat_s - 0.16).abs() < 1e-9);
    assert!((slow.inequality.hierarchical_s() - (0.016 + 0.04)).abs() < 1e-9);
    assert_eq!(slow.reduction, Reduction::Sharded);
    assert!(slow.to_string().contains("160.00 ms through the core, flat, > 56.00 ms"), "{slow}");
    assert_eq!(slow.hub.to_string(), "2 Gbit/s");
    assert_eq!(choice("100gbit").reduction, Reduction::Flat);
    assert_eq!(choose(&hubs, &workers[..4], "1gbit".parse().unwrap()), None, "one rack has nothing to cross");
    assert_eq!(choose(&[(hub("x", 1), at("", ""))], &workers, "1gbit".parse().unwrap()), None);
}

#[test]
fn hubs_serve_those_at_their_place() {
    let hubs = vec![
        (hub("all-workers", 1), at("", "")),
        (hub("rack-a", 1), at("a", "")),
        (hub("host-a1", 1), at("a", "a1")),
        (hub("rack-b", 1), at("b", "")),
        (hub("rack-a-too", 1), at("a", "")),
        (hub("host-b1", 1), at("b", "b1")),
    ];
    let workers = [at("a", "a1"), at("", "a1"), at("a", "a2"), at("b", "b1"), at("c", "c1")];
    let sites = |reduction| {
        let (composition, of_sites) =
            arrange(&hubs, &workers, reduction, OptimizeAt::EverySite, BetweenSites::BF16).unwrap();
        composition.check().unwrap();
        assert_eq!(composition.is_flat(), composition.between_sites == BetweenSites::F32);
        let shown = composition.sites.into_iter().zip(of_sites);
        shown.map(|(site, hubs)| (hubs, site.workers, site.parent)).collect::<Vec<_>>()
    };
    // Rank 3 is alone on its host, so it exchanges at its rack.
    let tree = [
        (vec![2], vec![0, 1], Some(1)),
        (vec![1, 4], vec![2], Some(3)),
        (vec![3], vec![3], Some(3)),
        (vec![0], vec![4], None),
    ];
    assert_eq!(sites(Reduction::Auto), tree);
    assert_eq!(sites(Reduction::Tree), tree);
    let ring = sites(Reduction::Ring);
    assert_eq!(ring.iter().map(|site| site.2).collect::<Vec<_>>(), [Some(1), None, None, None]);
    assert_eq!(sites(Reduction::Flat), [(vec![0, 1, 3, 4], vec![0, 1, 2, 3, 4], None)]);
}

#[test]
fn workers_without_a_hub_are_named() {
    let rack = (hub("rack-a", 1), at("a", ""));
    let refused = |hubs: &[(HubShape, Place)]| {
        arrange(
            hubs,
            &[at("a", "x"), at("z", "x")],
            Reduction::Auto,
            OptimizeAt::EverySite,
            BetweenSites::F32,
        )
        .unwrap_err()
    };
    assert_eq!(refused(&[rack]), ArrangeError::Unserved { rank: 1, rack: "z".into() });
    assert_eq!(refused(&[(hub("host", 1), at("a", "x"))]), ArrangeError::NoHub);
}

#[test]
fn the_first_rack_is_the_trees_top_without_a_hub_for_all_workers() {
    let hubs = vec![
        (hub("host", 1), at("b", "h")),
        (hub("rack-b", 1), at("b", "")),
        (hub("rack-a", 1), at("a", "")),
        (hub("rack-c", 1), at("c", "")),
    ];
    let workers = [at("b", "h"), at("b", "h"), at("a", ""), at("c", "")];
    let (composition, _) =
        arrange(&hubs, &workers, Reduction::Tree, OptimizeAt::Owner, BetweenSites::BF16).unwrap();
    composition.check().unwrap();
    let parents: Vec<Option<SiteId>> = composition.sites.iter().map(|site| site.parent).collect();
    assert_eq!(parents, [Some(2), None, Some(1), Some(1)]);
}

#[test]
fn a_line_goes_through_all_sites_in_the_order_of_ranks() {
    let hubs = vec![
        (hub("rack-b", 1), at("b", "")),
        (hub("host", 1), at("a", "h")),
        (hub("rack-a", 1), at("a", "")),
        (hub("all", 1), at("", "")),
    ];
    let arranged = |workers: &[Place]| {
        arrange(&hubs, workers, Reduction::Line, OptimizeAt::EverySite, BetweenSites::F32)
    };
    // The hub of all serves no worker, and the host has one.
    let (line, of_sites) =
        arranged(&[at("b", "x"), at("b", "y"), at("a", "h"), at("a", "z"), at("a", "z")]).unwrap();
    line.check().unwrap();
    let workers: Vec<&[u32]> = line.sites.iter().map(|site| &site.workers[..]).collect();
    assert_eq!((workers, of_sites), (vec![&[0, 1][..], &[2], &[3, 4]], vec![vec![0], vec![1], vec![2]]));
    let (table, map) = keys();
    assert_eq!(line.owners(&table, &map), vec![2; map.len() as usize]);
    assert_eq!([0, 1, 2].map(|site| line.above(site, 2)), [Some(1), Some(2), None]);
    assert_eq!([0, 1, 2].map(|site| line.member_sites(site)), [vec![], vec![0], vec![1]]);

    let refused = arranged(&[at("a", "z"), at("b", "x"), at("a", "z")]).unwrap_err();
    assert_eq!(refused, ArrangeError::Interleaved { site: "rack a".into(), rank: 2, missing: 1 });
    let refused = arranged(&[at("a", "z"), at("a", "h"), at("elsewhere", "z"), at("a", "h")]).unwrap_err();
    assert_eq!(refused, ArrangeError::Interleaved { site: "the host of rank 1".into(), rank: 3, missing: 2 });

    let out_of_order = Composition { sites: line.sites.iter().rev().cloned().collect(), ..line.clone() };
    assert_eq!(out_of_order.check(), Err(CompositionError::Order));
    let mut tree = line;
    tree.sites[0].parent = Some(1);
    assert_eq!(tree.check(), Err(CompositionError::Order));
}
