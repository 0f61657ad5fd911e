//! The placement of a job whose ranks agree, and the plan that each of its hubs receives, as the product's `allocation`
//! makes them.

use std::sync::Arc;

use paramhub_core::auth::Namespace;
use paramhub_core::composition::SiteId;
use paramhub_core::membership::{Membership, SettingsSummary, SitePlacement};
use paramhub_core::scheme::{InformationBook, Plan};
use paramhub_core::service::{self, HubCommand, ServiceError};
use paramhub_core::settings::Settings;

use crate::job::JobPlan;

/// What stands for the digest of settings.
pub(super) fn digest(settings: &Settings) -> String {
    format!("{settings:?}")
}

/// Places a job. Returns the command of each of its hubs.
pub(super) fn place(
    membership: &mut Membership,
    namespace: Namespace,
    settings: &Arc<Settings>,
    plan: &JobPlan,
) -> Result<Vec<(u32, HubCommand)>, ServiceError> {
    let (job, roster) = (membership.job(namespace)?, membership.roster(namespace)?);
    let Some(composition) = job.composition() else { return Ok(Vec::new()) };
    let Some(epoch) = job.epoch else { return Ok(Vec::new()) };
    let mut ordered = service::JobPlan {
        name: job.name.clone(),
        namespace,
        nonce: job.nonce,
        epoch,
        version_1_ranks: job.version_1_ranks(),
        options: job.options,
        composition: (*composition).clone(),
        site: 0,
        hub: 0,
        shares: job.shares().to_vec(),
        later_hubs: Vec::new(),
        further: None,
        cluster: roster.cluster(),
        settings: (**settings).clone(),
        team: membership.allowance(namespace),
    };
    let composed = plan.compose(ordered.composition.clone());
    let placements = composed.placements.iter().map(SitePlacement::of);
    let summary = SettingsSummary {
        keys: settings.keys.len() as u64,
        bytes: settings.keys.bytes(),
        optimizer: settings.optimizer.name.clone(),
        consistency: settings.consistency.to_string(),
        digest: digest(settings),
    };
    let schemes = Plan::new(settings, &ordered.cluster);
    let information_book = InformationBook { job: ordered.name.clone(), roster, plan: schemes };
    let hubs = membership.place(namespace, summary, placements.collect(), Arc::new(information_book));
    let sites = (0..).zip(&ordered.composition.sites);
    let places: Vec<(SiteId, u32)> = sites
        .flat_map(|(site, of_site)| (0..of_site.hubs.len() as u32).map(move |hub| (site, hub)))
        .collect();
    let command = |((site, position), hub): ((SiteId, u32), u32)| {
        (ordered.site, ordered.hub) = (site, position);
        (hub, HubCommand::Allocate(Box::new(ordered.clone())))
    };
    Ok(places.into_iter().zip(hubs).map(command).collect())
}
