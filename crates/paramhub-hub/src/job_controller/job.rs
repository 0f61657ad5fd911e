//! A job as this hub has planned it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::Nonce;
use paramhub_core::chunk::ChunkMap;
use paramhub_core::combinations::{Feature, Features, check_job};
use paramhub_core::composition::{Composed, SiteId};
use paramhub_core::factors::FactorBlock;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::job_control::{JobTerms, RouteTerms};
use paramhub_core::limits::{STATE_SLOTS_MAX, WEIGHT_MAX};
use paramhub_core::placement::{HubShape, Route, RouteId};
use paramhub_core::scheme::Plan;
use paramhub_core::service::JobPlan;
use paramhub_core::settings::Settings;
use paramhub_kernels::{Aggregator, Optimizer, Registry};

use super::checkpoints::CheckpointPlan;
use crate::checkpoint::CheckpointWriter;
use crate::core::{Ports, Restored, ShardPlan, Snapshot, memory_bytes};

/// What the hub keeps of one job, besides the state in which it is.
pub(crate) struct HubJob {
    pub(super) name: String,
    pub(super) nonce: Nonce,
    pub(super) composed: Arc<Composed>,
    /// The hub's site in the composition.
    pub(super) site: SiteId,
    /// The ports of this hub's routes.
    pub(super) ports: HashMap<RouteId, Arc<Ports>>,
    /// Whether streams continue over other interfaces.
    pub(super) continues: bool,
    /// The features of its settings, its options and the hubs of the site.
    pub(super) features: Features,
    pub(super) settings: Arc<Settings>,
    /// State values per parameter of the job's optimizer.
    pub(super) state_slots: u8,
    /// This hub's routes that carry chunks.
    pub(super) routes: Vec<(RouteId, Route)>,
    /// What each core must open, until it has the order.
    pub(super) shards: Vec<(u16, ShardPlan)>,
    /// What was read of a checkpoint for each of them, if the job begins with one.
    pub(super) restored: Vec<Restored>,
    pub(super) checkpoints: Option<CheckpointPlan>,
    /// The memory for snapshots, until their writer has it.
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) checkpoint_writer: Option<CheckpointWriter>,
    /// The step with which the chunks began, if it is a checkpoint's.
    pub(super) resumed_step: Option<u32>,
}

impl HubJob {
    /// Places a job's chunks and returns what the hub keeps of the job and what its rules need, or why the hub
    /// cannot serve it.
    pub(super) fn plan(
        plan: &JobPlan,
        shape: &HubShape,
        registry: &Registry,
        checkpoints: Option<CheckpointPlan>,
    ) -> Result<(HubJob, JobTerms), String> {
        let waits = Waits::of(plan)?;
        let schemes = check(plan, shape)?;
        let updates = Updates::of(&plan.settings, registry)?;
        let placed = Placed::of(plan, &schemes)?;
        let shards = placed.shards(plan, &waits, &updates, checkpoints.as_ref());
        let terms = placed.terms(plan, &waits, &shards, checkpoints.as_ref());
        let hubs = plan.composition.sites[usize::from(plan.site)].hubs.len();
        let of_site = Features::of([(Feature::SeveralHubs, hubs > 1)]);
        let job = HubJob {
            name: plan.name.clone(),
            nonce: plan.nonce,
            composed: placed.composed,
            site: plan.site,
            ports: placed.ports,
            continues: plan.options.continues(),
            features: plan.settings.features().and(plan.options.features()).and(of_site),
            settings: placed.settings,
            state_slots: updates.state_slots,
            routes: placed.routes,
            shards,
            restored: Vec::new(),
            checkpoints,
            snapshots: Vec::new(),
            checkpoint_writer: None,
            resumed_step: None,
        };
        Ok((job, terms))
    }
}

/// Checks that the settings and the options go together and that the job was planned for this hub. Returns
/// how its layers are exchanged.
fn check(plan: &JobPlan, shape: &HubShape) -> Result<Plan, String> {
    let refused = |why: String| format!("job `{}`: {why}", plan.name);
    plan.settings.check().map_err(|error| refused(error.to_string()))?;
    let schemes = Plan::new(&plan.settings, &plan.cluster);
    check_job(plan, &schemes).map_err(|conflict| refused(conflict.to_string()))?;
    let stragglers = plan.options.stragglers;
    stragglers
        .check(plan.composition.workers())
        .map_err(|why| refused(format!("stragglers = {stragglers}: {why}")))?;
    let site = plan.composition.sites.get(usize::from(plan.site));
    let here = site.and_then(|site| site.hubs.get(plan.hub as usize));
    if here != Some(shape) {
        return Err(format!("job `{}` was planned for other interfaces than this hub has", plan.name));
    }
    Ok(schemes)
}

/// How long a job waits for what.
struct Waits {
    rendezvous: Duration,
    dead_after: Duration,
    progress_timeout: Option<Duration>,
}

impl Waits {
    fn of(plan: &JobPlan) -> Result<Waits, String> {
        let options = &plan.options;
        let progress = |value| seconds("progress_timeout_s", value);
        Ok(Waits {
            rendezvous: seconds("rendezvous_timeout_s", options.rendezvous_timeout_s)?,
            dead_after: seconds("dead_after_s", options.dead_after_s)?,
            progress_timeout: options.progress_timeout_s.map(progress).transpose()?,
        })
    }
}

/// How a job's chunks are summed and updated.
struct Updates {
    aggregator: Arc<dyn Aggregator>,
    optimizer: Arc<dyn Optimizer>,
    /// The hyperparameters of each group at step 0.
    groups: Arc<[Hyperparameters]>,
    /// State values per parameter.
    state_slots: u8,
}

impl Updates {
    fn of(settings: &Settings, registry: &Registry) -> Result<Updates, String> {
        let named = &settings.optimizer.name;
        let optimizer = registry.optimizer(named).map_err(|error| error.to_string())?;
        let aggregator = registry.aggregator(&settings.aggregator).map_err(|error| error.to_string())?;
        let groups: Arc<[Hyperparameters]> = settings.optimizer.of_groups(optimizer.defaults()).into();
        for (group, hyperparameters) in groups.iter().enumerate() {
            let of_group = if groups.len() > 1 { format!(", group {group}") } else { String::new() };
            optimizer
                .check(hyperparameters)
                .map_err(|error| format!("optimizer `{named}`{of_group}: {error}"))?;
        }
        let state_slots =
            groups.iter().map(|group| optimizer.state_slots(group)).max().expect("there is a group 0");
        let state_slots = u8::try_from(state_slots).map_err(|_| {
            format!(
                "optimizer `{named}` keeps {state_slots} values of state a parameter, more than the {STATE_SLOTS_MAX} a hub can number"
            )
        })?;
        Ok(Updates { aggregator, optimizer, groups, state_slots })
    }
}

/// Where a job's chunks are.
struct Placed {
    settings: Arc<Settings>,
    map: Arc<ChunkMap>,
    blocks: Arc<[FactorBlock]>,
    composed: Arc<Composed>,
    /// This hub's routes that carry chunks.
    routes: Vec<(RouteId, Route)>,
    ports: HashMap<RouteId, Arc<Ports>>,
}

impl Placed {
    fn of(plan: &JobPlan, schemes: &Plan) -> Result<Placed, String> {
        let settings = &plan.settings;
        let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).map_err(|error| error.to_string())?;
        let spreads = schemes.spreads(settings.keys.len());
        let blocks = FactorBlock::planned(settings, &map, schemes).into();
        let composed = Composed::planned(&settings.keys, &map, plan.composition.clone(), &spreads)
            .map_err(|error| error.to_string())?;
        let placement = &composed.placements[usize::from(plan.site)];
        let carries = |route: RouteId| !placement.chunks(route).is_empty();
        let routes: Vec<(RouteId, Route)> = (0..)
            .zip(placement.routes().iter().copied())
            .filter(|&(id, route)| u32::from(route.hub) == plan.hub && carries(id))
            .collect();
        let ports = |&(id, _): &(RouteId, Route)| (id, Arc::new(Ports::new(&composed, plan.site, id)));
        let ports = routes.iter().map(ports).collect();
        let (composed, map) = (Arc::new(composed), Arc::new(map));
        Ok(Placed { settings: Arc::new(settings.clone()), map, blocks, composed, routes, ports })
    }

    /// What each core of this hub must open.
    fn shards(
        &self,
        plan: &JobPlan,
        waits: &Waits,
        updates: &Updates,
        checkpoints: Option<&CheckpointPlan>,
    ) -> Vec<(u16, ShardPlan)> {
        let shard = |&(id, route): &(RouteId, Route)| {
            let shard = ShardPlan {
                name: plan.name.clone(),
                namespace: plan.namespace,
                dead_after: waits.dead_after,
                continues: plan.options.continues(),
                stragglers: plan.options.stragglers,
                progress_timeout: waits.progress_timeout,
                weight: weight(plan),
                settings: self.settings.clone(),
                map: self.map.clone(),
                blocks: self.blocks.clone(),
                composed: self.composed.clone(),
                site: plan.site,
                route: id,
                ports: self.ports[&id].clone(),
                aggregator: updates.aggregator.clone(),
                optimizer: updates.optimizer.clone(),
                groups: updates.groups.clone(),
                checkpoints: checkpoints.is_some_and(CheckpointPlan::are_written),
            };
            (route.core, shard)
        };
        self.routes.iter().map(shard).collect()
    }

    /// What the rules of the hub's jobs need.
    fn terms(
        &self,
        plan: &JobPlan,
        waits: &Waits,
        shards: &[(u16, ShardPlan)],
        checkpoints: Option<&CheckpointPlan>,
    ) -> JobTerms {
        let route = |&(id, route): &(RouteId, Route)| RouteTerms {
            id,
            core: route.core,
            interface: route.interface,
            streams: self.ports[&id].len(),
        };
        JobTerms {
            namespace: plan.namespace,
            name: plan.name.clone(),
            composed: self.composed.clone(),
            site: plan.site,
            routes: self.routes.iter().map(route).collect(),
            rendezvous: waits.rendezvous,
            dead_after: waits.dead_after,
            progress_timeout: waits.progress_timeout,
            continues: plan.options.continues(),
            stragglers: plan.options.stragglers,
            weight: weight(plan),
            memory_bytes: shards.iter().map(|(_, shard)| memory_bytes(shard)).sum(),
            resumes: checkpoints.is_some_and(CheckpointPlan::is_read),
            writes_checkpoints: checkpoints.is_some_and(CheckpointPlan::are_written),
            checkpoint_folder: checkpoints.map(CheckpointPlan::folder).unwrap_or_default(),
        }
    }
}

/// The job's share of a core's time, relative to other jobs' weights.
fn weight(plan: &JobPlan) -> u32 {
    plan.options.weight.clamp(1, WEIGHT_MAX)
}

/// A wait in seconds, which the manager has checked.
fn seconds(option: &str, value: f64) -> Result<Duration, String> {
    let wait =
        Duration::try_from_secs_f64(value).ok().filter(|&wait| Instant::now().checked_add(wait).is_some());
    wait.ok_or_else(|| format!("{option} is {value}, which is no time to wait"))
}
