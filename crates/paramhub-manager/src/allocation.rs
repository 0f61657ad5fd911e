//! The placement of a job whose ranks agree, and the plan that each of its hubs receives.

use std::sync::Arc;

use axum::body::Bytes;
use paramhub_core::auth::Namespace;
use paramhub_core::chunk::ChunkMap;
use paramhub_core::combinations;
use paramhub_core::composition::Composed;
use paramhub_core::membership::{Job, SettingsSummary, SitePlacement};
use paramhub_core::scheme::{InformationBook, Plan, Roster};
use paramhub_core::service::{ErrorCode, HubCommand, JobPlan, ServiceError, TeamAllowance};
use paramhub_core::settings::Settings;

use crate::blocking::blocking;
use crate::clock::now;
use crate::error::refusal;
use crate::hub_queues::command_json;
use crate::registry::Registry;

/// The most chunks of a job. Placing one takes about 40 bytes, here and on every worker, so that this many
/// take about 3 GB; at the default chunk size they are 2 TiB of parameters.
const CHUNKS_MAX: u32 = 1 << 26;

struct Allocation {
    summary: SettingsSummary,
    /// The placement of every site.
    placements: Vec<SitePlacement>,
    information_book: Arc<InformationBook>,
    /// The command of each hub, site by site in placement order.
    commands: Vec<Bytes>,
}

/// Places a job and asks its hubs to allocate.
pub(crate) async fn allocate(registry: Arc<Registry>, namespace: Namespace, settings: Arc<Settings>) {
    let Ok(turn) = registry.placing.acquire().await else { return };
    let plan = registry.with(|state| {
        let membership = &state.membership;
        Ok::<_, ServiceError>(plan_of(
            membership.job(namespace)?,
            membership.roster(namespace)?,
            membership.allowance(namespace),
        ))
    });
    let Ok(plan) = plan else { return };
    // All ranks' settings have been compared by now, so this takes the table and copies nothing.
    let made = blocking(move || place(plan(Arc::unwrap_or_clone(settings)))).await.and_then(|made| made);
    drop(turn);
    registry.with(|state| match made {
        Ok(Allocation { summary, placements, information_book, commands }) => {
            let hubs = state.membership.place(namespace, summary, placements, information_book);
            hubs.into_iter().zip(commands).for_each(|(hub, command)| state.queues.push_json(hub, command));
        }
        Err(refused) => state.membership.cannot_place(namespace, refused, now()),
    });
}

/// The data for a job's hubs besides its settings.
fn plan_of(
    job: &Job,
    roster: Roster,
    team: TeamAllowance,
) -> impl FnOnce(Settings) -> (JobPlan, Roster) + Send + use<> {
    let (name, namespace, nonce) = (job.name.clone(), job.namespace, job.nonce);
    let (options, composition) = (job.options_told(), job.composition());
    let (epoch, version_1_ranks) = (job.epoch, job.version_1_ranks());
    let shares = job.shares().to_vec();
    move |settings| {
        let composition = composition.expect("a job has sites before its ranks hand in settings");
        let composition = Arc::unwrap_or_clone(composition);
        let cluster = roster.cluster();
        let plan = JobPlan {
            name,
            namespace,
            nonce,
            epoch: epoch.expect("a job that has not ended is in an epoch"),
            version_1_ranks,
            options,
            composition,
            site: 0,
            hub: 0,
            shares,
            later_hubs: Vec::new(),
            further: None,
            cluster,
            settings,
            team,
        };
        (plan, roster)
    }
}

fn place((mut plan, roster): (JobPlan, Roster)) -> Result<Allocation, ServiceError> {
    let does_not_fit = |what: String| {
        refusal(ErrorCode::DoesNotFit, format!("job `{}` cannot be placed: {what}", plan.name))
    };
    let settings = &plan.settings;
    let (keys, bytes) = (&settings.keys, settings.chunk_bytes);
    // The chunks are counted before a map of them is made: a job that is refused must not cost memory.
    let chunks = ChunkMap::count(keys, bytes).map_err(|wrong| does_not_fit(wrong.to_string()))?;
    if chunks > CHUNKS_MAX {
        return Err(does_not_fit(format!(
            "its keys make {chunks} chunks of {bytes} bytes, more than {CHUNKS_MAX}: choose a larger chunk size"
        )));
    }
    let map = ChunkMap::new(keys, bytes).map_err(|wrong| does_not_fit(wrong.to_string()))?;
    let schemes = Plan::new(settings, &plan.cluster);
    combinations::check_job(&plan, &schemes).map_err(|conflict| does_not_fit(conflict.to_string()))?;
    let spreads = schemes.spreads(settings.keys.len());
    let composed = Composed::planned(&settings.keys, &map, plan.composition.clone(), &spreads)
        .map_err(|wrong| does_not_fit(wrong.to_string()))?;
    let placements = composed.placements.iter().map(SitePlacement::of).collect();
    drop((composed, map, spreads));
    let information_book = Arc::new(InformationBook { job: plan.name.clone(), roster, plan: schemes });
    let summary = SettingsSummary {
        digest: settings_digest(settings),
        keys: settings.keys.len() as u64,
        bytes: settings.keys.bytes(),
        optimizer: settings.optimizer.name.clone(),
        consistency: settings.consistency.to_string(),
    };
    let sizes: Vec<usize> = plan.composition.sites.iter().map(|site| site.hubs.len()).collect();
    let mut commands = Vec::with_capacity(sizes.iter().sum());
    for (site, hubs) in (0..).zip(sizes) {
        for hub in 0..hubs as u32 {
            (plan.site, plan.hub) = (site, hub);
            let command = HubCommand::Allocate(Box::new(plan));
            commands.push(command_json(&command));
            let HubCommand::Allocate(returned) = command else { unreachable!("it was made one above") };
            plan = *returned;
        }
    }
    Ok(Allocation { summary, placements, information_book, commands })
}

/// A digest of settings in hexadecimal digits. It is equal for settings that agree.
pub(crate) fn settings_digest(settings: &Settings) -> String {
    let text = serde_json::to_vec(settings).expect("settings are plain data");
    blake3::hash(&text).to_hex().to_string()
}
