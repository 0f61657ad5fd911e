//! Sites from places: which hubs serve which workers, and which site is above which.

use std::collections::BTreeMap;

use thiserror::Error;

use super::{BetweenSites, Composition, Crossing, OptimizeAt, Place, Reduction, Site, SiteId};
use crate::combinations::{Conflict, Feature, conflict_of, features_of_reduction};
use crate::placement::HubShape;

/// The reason why hubs and workers at these places make no sites.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ArrangeError {
    /// No hub serves a worker.
    #[error(
        "rank {rank} is in rack {rack:?}, which no hub serves: start one there with --rack, or one without it for all workers"
    )]
    Unserved {
        /// The worker's rank.
        rank: u32,
        /// The worker's rack.
        rack: String,
    },
    /// Every hub serves a single host.
    #[error("every hub serves its own host only: start one that serves a rack or all workers")]
    NoHub,
    /// The ranks of two sites interleave, but sums are to go from site to site in the order of ranks.
    #[error(
        "the reduction line sums in the order of ranks, and {site} has rank {rank} but not rank {missing}: number ranks host by host and rack by rack, or use another reduction"
    )]
    Interleaved {
        /// The site, as `the host of rank 0` or `rack r1`.
        site: String,
        /// A rank of the site.
        rank: u32,
        /// The rank before it, which is elsewhere.
        missing: u32,
    },
    /// The hubs do not combine with what the job asks of them.
    #[error(transparent)]
    Combination(#[from] Conflict),
}

/// A job's sites, and the hubs of each site by their positions in the input.
pub type Arranged = (Composition, Vec<Vec<usize>>);

/// The workers that a site serves; the order is that of the sites' numbers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Scope {
    Host(String),
    Rack(String),
    AllWorkers,
}

/// Arranges hubs and workers, each by its place, into sites.
///
/// # Errors
/// If a worker has no hub, or if the hubs do not combine with the reduction that is asked for.
pub fn arrange(
    hubs: &[(HubShape, Place)],
    workers: &[Place],
    reduction: Reduction,
    optimize_at: OptimizeAt,
    between_sites: BetweenSites,
) -> Result<Arranged, ArrangeError> {
    if hubs.iter().all(|(_, place)| !place.host.is_empty()) {
        return Err(ArrangeError::NoHub);
    }
    let scope_of = |place: &Place| match (place.host.is_empty(), place.rack.is_empty()) {
        (false, _) => Scope::Host(place.host.clone()),
        (_, false) => Scope::Rack(place.rack.clone()),
        _ => Scope::AllWorkers,
    };
    let mut serving: BTreeMap<Scope, Vec<usize>> = BTreeMap::new();
    for (index, (_, place)) in hubs.iter().enumerate() {
        serving.entry(scope_of(place)).or_default().push(index);
    }
    let is_placed = serving.keys().any(|scope| *scope != Scope::AllWorkers);
    if !is_placed {
        let asked = features_of_reduction(reduction, optimize_at, between_sites);
        conflict_of(Feature::UnplacedHubs, asked).map_or(Ok(()), Err)?;
    }
    if reduction == Reduction::Flat || !is_placed {
        let all: Vec<usize> = (0..hubs.len()).filter(|&hub| hubs[hub].1.host.is_empty()).collect();
        let shapes = all.iter().map(|&hub| hubs[hub].0.clone()).collect();
        return Ok((Composition::flat(shapes, workers.len() as u32), vec![all]));
    }

    // The ranks of each site.
    let mut members: BTreeMap<Scope, Vec<u32>> = BTreeMap::new();
    for (rank, place) in (0..).zip(workers) {
        let host = Scope::Host(place.host.clone());
        let rack = Scope::Rack(rack_of(place, &host, &serving, hubs));
        let scope =
            [host, rack.clone(), Scope::AllWorkers].into_iter().find(|scope| serving.contains_key(scope));
        let Some(scope) = scope else {
            let Scope::Rack(rack) = rack else { unreachable!("made above") };
            return Err(ArrangeError::Unserved { rank, rack });
        };
        members.entry(scope).or_default().push(rank);
    }
    // A site for one worker would only pass on what the worker can send itself. In a line it stays, since the worker's rank
    // could come between others in the site above.
    let alone: Vec<Scope> = members
        .iter()
        .filter(|(scope, ranks)| {
            matches!(scope, Scope::Host(_)) && ranks.len() == 1 && reduction != Reduction::Line
        })
        .map(|(scope, _)| scope.clone())
        .collect();
    for scope in alone {
        if let Some(above) = above(&scope, &serving, hubs) {
            let ranks = members.remove(&scope).expect("it was found there");
            members.entry(above).or_default().extend(ranks);
        }
    }
    // The sites above a needed site are needed, too.
    for scope in members.keys().cloned().collect::<Vec<_>>() {
        let mut at = scope;
        while let Some(above) = above(&at, &serving, hubs) {
            if crosses(&at, reduction) {
                break;
            }
            members.entry(above.clone()).or_default();
            at = above;
        }
    }
    let (mut composition, of_sites) = compose(&members, &serving, hubs, reduction, optimize_at);
    if reduction == Reduction::Line {
        check_order(&composition.sites)?;
    }
    if !composition.is_flat() {
        composition.between_sites = between_sites;
    }
    Ok((composition, of_sites))
}

fn compose(
    members: &BTreeMap<Scope, Vec<u32>>,
    serving: &BTreeMap<Scope, Vec<usize>>,
    hubs: &[(HubShape, Place)],
    reduction: Reduction,
    optimize_at: OptimizeAt,
) -> Arranged {
    let scopes: Vec<&Scope> = members.keys().collect();
    let number = |scope: &Scope| scopes.iter().position(|other| *other == scope).map(|at| at as SiteId);
    let mut sites: Vec<Site> = Vec::new();
    let mut of_sites = Vec::new();
    let mut members: Vec<_> = members.iter().collect();
    if reduction == Reduction::Line {
        members.sort_by_key(|(_, ranks)| ranks.iter().min());
    }
    for (scope, ranks) in members {
        let mut workers = ranks.clone();
        workers.sort_unstable();
        let name = match scope {
            Scope::Host(_) => {
                let first = workers.first().map_or_else(String::new, |rank| format!(" of rank {rank}"));
                format!("the host{first}")
            }
            Scope::Rack(rack) => format!("rack {rack}"),
            Scope::AllWorkers => String::new(),
        };
        let above = above(scope, serving, hubs).filter(|_| !crosses(scope, reduction));
        let parent = above.and_then(|above| number(&above));
        let shapes = serving[scope].iter().map(|&hub| hubs[hub].0.clone()).collect();
        sites.push(Site { name, hubs: shapes, workers, parent });
        of_sites.push(serving[scope].clone());
    }
    let tops: Vec<usize> = (0..sites.len()).filter(|&site| sites[site].parent.is_none()).collect();
    if reduction == Reduction::Tree {
        let is_host = |&&site: &&usize| matches!(scopes[site], Scope::Host(_));
        let top = *tops.iter().find(|site| !is_host(site)).unwrap_or(&tops[0]);
        tops.into_iter()
            .filter(|&site| site != top)
            .for_each(|site| sites[site].parent = Some(top as SiteId));
    }
    let crossing = match reduction {
        Reduction::Ring => Crossing::Ring,
        Reduction::Line => Crossing::Line,
        Reduction::Auto | Reduction::Flat | Reduction::Tree | Reduction::Sharded => Crossing::Sharded,
    };
    (Composition { sites, crossing, optimize_at, between_sites: BetweenSites::default() }, of_sites)
}

/// Refuses sites in a line if the ranks of one come between those of another.
fn check_order(sites: &[Site]) -> Result<(), ArrangeError> {
    for site in sites {
        let gap = site.workers.windows(2).find(|pair| pair[0] + 1 != pair[1]);
        if let Some(&[_, rank]) = gap {
            let name = if site.name.is_empty() { "the hub of all workers" } else { &site.name };
            return Err(ArrangeError::Interleaved { site: name.into(), rank, missing: rank - 1 });
        }
    }
    Ok(())
}

/// Returns whether a site's sums go to its peers, even if a hub serves all racks.
fn crosses(scope: &Scope, reduction: Reduction) -> bool {
    match reduction {
        Reduction::Ring | Reduction::Sharded => matches!(scope, Scope::Rack(_)),
        Reduction::Line => true,
        Reduction::Auto | Reduction::Flat | Reduction::Tree => false,
    }
}

/// The rack of a worker: the one that the worker states, or that of the hub on its host.
fn rack_of(
    place: &Place,
    host: &Scope,
    serving: &BTreeMap<Scope, Vec<usize>>,
    hubs: &[(HubShape, Place)],
) -> String {
    let by_hub = || serving.get(host).map(|of_host| hubs[of_host[0]].1.rack.clone());
    if place.rack.is_empty() { by_hub().unwrap_or_default() } else { place.rack.clone() }
}

/// The site above `scope`, among those that hubs serve.
fn above(scope: &Scope, serving: &BTreeMap<Scope, Vec<usize>>, hubs: &[(HubShape, Place)]) -> Option<Scope> {
    let candidates = match scope {
        Scope::Host(_) => vec![Scope::Rack(hubs[serving[scope][0]].1.rack.clone()), Scope::AllWorkers],
        Scope::Rack(_) => vec![Scope::AllWorkers],
        Scope::AllWorkers => vec![],
    };
    candidates.into_iter().find(|candidate| serving.contains_key(candidate))
}
