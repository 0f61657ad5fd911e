//! A job as this hub has planned it, besides its phase.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::chunk::ChunkMap;
use paramhub_core::combinations::{Feature, Features, check_job};
use paramhub_core::composition::{Composed, SiteId};
use paramhub_core::factors::FactorBlock;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::job_control::{JobTerms, RouteTerms};
use paramhub_core::limits::{PROGRAM_STATE_BYTES_MAX, STATE_SLOTS_MAX, WEIGHT_MAX};
use paramhub_core::placement::{HubShape, Route, RouteId};
use paramhub_core::ports::{Ports, Side};
use paramhub_core::resuming::{Cuts, ResumeTerms};
use paramhub_core::scheme::Plan;
use paramhub_core::service::JobPlan;
use paramhub_core::settings::Settings;
use paramhub_core::standbys::{Role, Share, route_at};
use paramhub_core::stream_admission::StreamSecrets;
use paramhub_kernels::{Aggregator, Optimizer, Registry};

use super::checkpoints::CheckpointPlan;
use crate::checkpoint::CheckpointWriter;
use crate::core::{Restored, ShardPlan, Snapshot, memory_bytes};

/// What the hub keeps of one job, besides its phase.
pub(crate) struct HubJob {
    pub(super) name: String,
    pub(super) secrets: StreamSecrets,
    /// The sites of the job, and where each of them placed its chunks.
    pub(super) composed: Arc<Composed>,
    /// The number of workers that are there from the beginning.
    pub(super) first_workers: u32,
    /// The hub's site in the composition.
    pub(super) site: SiteId,
    /// The hub's position among the hubs of the job at its site.
    pub(super) position: u16,
    /// The hubs of each share, if the chunks have standbys, and the hubs that the job has got since it began.
    pub(super) shares: Vec<Share>,
    pub(super) later_hubs: Vec<HubShape>,
    /// What this hub is for each route when it opens the job.
    pub(super) roles: HashMap<RouteId, Role>,
    /// The ports of this hub's routes.
    pub(super) ports: HashMap<RouteId, Arc<Ports>>,
    /// Which streams are replaced when they are cut.
    pub(super) resuming: ResumeTerms,
    /// How often the streams to sites above were cut, by route and port.
    pub(super) cuts: HashMap<(RouteId, u32), Cuts>,
    pub(super) encrypts: bool,
    /// The features of its settings, its options and the hubs of the site.
    pub(super) features: Features,
    pub(super) settings: Arc<Settings>,
    /// State values per parameter of the job's optimizer.
    pub(super) state_slots: u8,
    /// The routes that carry chunks and that this hub serves or stands by for: their share, with the interface and the core here.
    pub(super) routes: Vec<(RouteId, Route)>,
    /// What each core must open, until the core has been told.
    pub(super) shards: Vec<(u16, ShardPlan)>,
    /// What was read of a checkpoint for each of them, if the job begins with one.
    pub(super) restored: Vec<Restored>,
    pub(super) checkpoints: Option<CheckpointPlan>,
    /// The memory for snapshots, until their writer has it.
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) checkpoint_writer: Option<CheckpointWriter>,
    /// The step of the checkpoint from which the job resumes, if it does.
    pub(super) resumed_step: Option<u32>,
    /// The name of that checkpoint's folder.
    pub(super) resumed_from: Option<String>,
    /// What is planned of further shares, until the rules accept it.
    pub(super) further: Option<Box<HubJob>>,
}

impl HubJob {
    /// Places a job's chunks and returns what the hub keeps of the job and the terms for job control, or why
    /// the hub cannot serve the job.
    pub(super) fn plan(
        job_plan: &JobPlan,
        shape: &HubShape,
        registry: &Registry,
        checkpoints: Option<CheckpointPlan>,
    ) -> Result<(HubJob, JobTerms), String> {
        let timeouts = Timeouts::of(job_plan)?;
        let schemes = checked_schemes(job_plan, shape)?;
        let update_method = UpdateMethod::of(&job_plan.settings, registry)?;
        let mut placed = PlacedChunks::of(job_plan, &schemes)?;
        if let Some(further) = &job_plan.further {
            placed.routes.retain(|(_, route)| further.shares.contains(&route.hub));
        }
        let resuming = ResumeTerms::of(&job_plan.options, features_of(job_plan), &schemes);
        let shards = placed.shards(job_plan, &timeouts, resuming, &update_method, checkpoints.as_ref());
        let terms = placed.terms(job_plan, &timeouts, &shards, checkpoints.as_ref());
        let hubs = job_plan.composition.sites[usize::from(job_plan.site)].hubs.len();
        let of_site = Features::of([(Feature::SeveralHubs, hubs > 1)]);
        let job = HubJob {
            name: job_plan.name.clone(),
            secrets: StreamSecrets {
                nonce: job_plan.nonce,
                epoch: job_plan.epoch,
                newest_epoch: job_plan.epoch.number,
                version_1_ranks: job_plan.version_1_ranks.clone(),
            },
            composed: placed.composed,
            first_workers: job_plan.options.first_workers(job_plan.composition.workers()),
            site: job_plan.site,
            position: job_plan.hub as u16,
            shares: job_plan.shares.clone(),
            later_hubs: job_plan.later_hubs.clone(),
            roles: if job_plan.shares.is_empty() { HashMap::new() } else { placed.roles },
            ports: placed.ports,
            resuming,
            cuts: HashMap::new(),
            encrypts: job_plan.options.encrypt,
            features: job_plan.settings.features().and(job_plan.options.features()).and(of_site),
            settings: placed.settings,
            state_slots: update_method.state_slots,
            routes: placed.routes,
            shards,
            restored: Vec::new(),
            checkpoints,
            snapshots: Vec::new(),
            checkpoint_writer: None,
            resumed_step: None,
            resumed_from: None,
            further: None,
        };
        Ok((job, terms))
    }
}

impl HubJob {
    /// The name, for people, of the hub at this position in the job.
    pub(super) fn name_of_hub(&self, position: u16) -> String {
        let first = &self.composed.composition.sites[usize::from(self.site)].hubs;
        let shape = first.iter().chain(&self.later_hubs).nth(usize::from(position));
        shape.map_or(String::new(), hub_name)
    }

    /// The routes of a job with standbys that this hub serves now.
    pub(super) fn served_routes(&self) -> HashSet<RouteId> {
        let serves = |route: &Route| {
            self.shares.get(usize::from(route.hub)).is_some_and(|share| share.served_by == self.position)
        };
        self.routes.iter().filter(|(_, route)| serves(route)).map(|&(id, _)| id).collect()
    }

    /// The routes that this hub serves when it opens the job.
    pub(super) fn own_routes(&self) -> impl Iterator<Item = (RouteId, Route)> + '_ {
        self.routes.iter().copied().filter(|(id, _)| self.roles.get(id) != Some(&Role::StandsBy))
    }

    /// Takes over what was planned of further shares. Returns, for each route, the core and the interface that have it, and the
    /// plan for that core.
    pub(super) fn take_further(&mut self) -> Vec<(RouteId, Route, ShardPlan)> {
        let Some(HubJob { routes, shards, mut ports, .. }) = self.further.take().map(|further| *further)
        else {
            return Vec::new();
        };
        let taken = routes.into_iter().zip(shards).map(|((id, route), (_, shard))| {
            self.routes.push((id, route));
            self.roles.insert(id, Role::StandsBy);
            self.ports.extend(ports.remove(&id).map(|ports| (id, ports)));
            (id, route, shard)
        });
        taken.collect()
    }

    /// Forgets a route with which this hub has nothing more to do.
    pub(super) fn give_up(&mut self, route: RouteId) {
        self.routes.retain(|(id, _)| *id != route);
        self.ports.remove(&route);
        self.roles.remove(&route);
    }

    /// The routes for which it is the standby.
    pub(super) fn standby_routes(&self) -> impl Iterator<Item = (RouteId, Route)> + '_ {
        self.routes.iter().copied().filter(|(id, _)| self.roles.get(id) == Some(&Role::StandsBy))
    }
}

/// Checks that the settings and the options go together and that the job was planned for this hub. Returns
/// how its layers are exchanged.
fn checked_schemes(job_plan: &JobPlan, shape: &HubShape) -> Result<Plan, String> {
    let refused = |why: String| format!("job `{}`: {why}", job_plan.name);
    job_plan.settings.check().map_err(|error| refused(error.to_string()))?;
    let schemes = Plan::new(&job_plan.settings, &job_plan.cluster);
    check_job(job_plan, &schemes).map_err(|conflict| refused(conflict.to_string()))?;
    let (stragglers, composition) = (job_plan.options.stragglers, &job_plan.composition);
    stragglers
        .check(composition.workers())
        .and_then(|()| {
            composition.fewest_in_member_site().map_or(Ok(()), |fewest| stragglers.check_sites(fewest))
        })
        .map_err(|why| refused(format!("stragglers = {stragglers}: {why}")))?;
    let site = job_plan.composition.sites.get(usize::from(job_plan.site));
    let here = job_plan.hub_at(job_plan.hub as usize);
    if here != Some(shape) {
        return Err(format!("job `{}` was planned for other interfaces than this hub has", job_plan.name));
    }
    let hubs = site.map_or(0, |site| site.hubs.len());
    let is_hub = |position: u16| usize::from(position) < hubs + job_plan.later_hubs.len();
    let fits = |share: &Share| is_hub(share.served_by) && share.standby.is_none_or(is_hub);
    if !job_plan.shares.is_empty() && (job_plan.shares.len() != hubs || !job_plan.shares.iter().all(fits)) {
        return Err(format!("job `{}` was planned with standbys that are none of its hubs", job_plan.name));
    }
    Ok(schemes)
}

/// The job's timeouts.
struct Timeouts {
    rendezvous: Duration,
    dead_after: Duration,
    progress_timeout: Option<Duration>,
}

impl Timeouts {
    fn of(job_plan: &JobPlan) -> Result<Timeouts, String> {
        let options = &job_plan.options;
        let progress = |value| seconds("progress_timeout_s", value);
        Ok(Timeouts {
            rendezvous: seconds("rendezvous_timeout_s", options.rendezvous_timeout_s)?,
            dead_after: seconds("dead_after_s", options.dead_after_s)?,
            progress_timeout: options.progress_timeout_s.map(progress).transpose()?,
        })
    }
}

/// How a job's chunks are summed and updated.
struct UpdateMethod {
    aggregator: Arc<dyn Aggregator>,
    optimizer: Arc<dyn Optimizer>,
    /// The hyperparameters of each group at step 0.
    groups: Arc<[Hyperparameters]>,
    /// State values per parameter.
    state_slots: u8,
}

impl UpdateMethod {
    fn of(settings: &Settings, registry: &Registry) -> Result<UpdateMethod, String> {
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
        if optimizer.needs_tensor_norms() {
            settings.check_tensor_norms().map_err(|error| error.to_string())?;
            if !settings.is_two_phase() {
                return Err(format!(
                    "optimizer `{named}` needs the norms of tensors: give two_phase or clip_norm"
                ));
            }
        }
        let state_slots =
            groups.iter().map(|group| optimizer.state_slots(group)).max().expect("there is a group 0");
        let state_slots = u8::try_from(state_slots).map_err(|_| {
            format!(
                "optimizer `{named}` keeps {state_slots} values of state a parameter, more than the {STATE_SLOTS_MAX} a hub can number"
            )
        })?;
        Ok(UpdateMethod { aggregator, optimizer, groups, state_slots })
    }
}

/// Where a job's chunks are.
struct PlacedChunks {
    settings: Arc<Settings>,
    map: Arc<ChunkMap>,
    factor_blocks: Arc<[FactorBlock]>,
    composed: Arc<Composed>,
    /// The routes with chunks of this hub, with the interface and the core here.
    routes: Vec<(RouteId, Route)>,
    /// What this hub is for each of them.
    roles: HashMap<RouteId, Role>,
    ports: HashMap<RouteId, Arc<Ports>>,
}

impl PlacedChunks {
    fn of(job_plan: &JobPlan, schemes: &Plan) -> Result<PlacedChunks, String> {
        let settings = &job_plan.settings;
        let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).map_err(|error| error.to_string())?;
        let spreads = schemes.spreads(settings.keys.len());
        let factor_blocks = FactorBlock::planned(settings, &map, schemes).into();
        let composed = Composed::planned(&settings.keys, &map, job_plan.composition.clone(), &spreads)
            .map_err(|error| error.to_string())?;
        let placement = &composed.placements[usize::from(job_plan.site)];
        let carries = |route: RouteId| !placement.chunks(route).is_empty();
        let (hub, hubs) = (job_plan.hub as u16, &job_plan.composition.sites[usize::from(job_plan.site)].hubs);
        let (mut routes, mut roles, mut ports) = (Vec::new(), HashMap::new(), HashMap::new());
        for (id, route) in (0..).zip(placement.routes().iter().copied()).filter(|&(id, _)| carries(id)) {
            let role = match job_plan.shares.get(usize::from(route.hub)) {
                Some(share) => share.role(hub),
                None if route.hub == hub => Role::Serves { has_standby: false },
                None => Role::None,
            };
            let of_route = Ports::new(&composed, job_plan.site, id);
            let of_route = match role {
                Role::Serves { has_standby: true } => {
                    of_route.with_counterpart(Side::Standby, job_plan.site, id)
                }
                Role::StandsBy => of_route.with_counterpart(Side::Serving, job_plan.site, id),
                Role::Serves { has_standby: false } => of_route,
                Role::None => continue,
            };
            let (interface, core) = match route.hub == hub {
                true => (route.interface, route.core),
                false => {
                    let here = job_plan.hub_at(usize::from(hub)).expect("it was compared with this hub");
                    route_at(&route, &hubs[usize::from(route.hub)], here)
                }
            };
            routes.push((id, Route { interface, core, ..route }));
            roles.insert(id, role);
            ports.insert(id, Arc::new(of_route));
        }
        let (composed, map) = (Arc::new(composed), Arc::new(map));
        let settings = Arc::new(settings.clone());
        Ok(PlacedChunks { settings, map, factor_blocks, composed, routes, roles, ports })
    }

    /// What each core of this hub must open.
    fn shards(
        &self,
        job_plan: &JobPlan,
        timeouts: &Timeouts,
        resuming: ResumeTerms,
        update_method: &UpdateMethod,
        checkpoints: Option<&CheckpointPlan>,
    ) -> Vec<(u16, ShardPlan)> {
        let shard = |&(id, route): &(RouteId, Route)| {
            let shard = ShardPlan {
                name: job_plan.name.clone(),
                namespace: job_plan.namespace,
                dead_after: timeouts.dead_after,
                resuming,
                stragglers: job_plan.options.stragglers,
                quorum: job_plan.options.quorum(job_plan.composition.workers()),
                first_workers: job_plan.options.first_workers(job_plan.composition.workers()),
                rewind_every: keeps_copies(job_plan).then_some(job_plan.options.rewind_every),
                outlives_hubs: job_plan.options.outlives_hubs()
                    && checkpoints.is_some_and(CheckpointPlan::are_written),
                program_state_bytes: job_plan.options.program_state_bytes.min(PROGRAM_STATE_BYTES_MAX),
                progress_timeout: timeouts.progress_timeout,
                weight: weight(job_plan),
                encrypts: job_plan.options.encrypt,
                settings: self.settings.clone(),
                map: self.map.clone(),
                factor_blocks: self.factor_blocks.clone(),
                composed: self.composed.clone(),
                site: job_plan.site,
                route: id,
                ports: self.ports[&id].clone(),
                role: self.roles[&id],
                standby: standby_served(job_plan, route.hub),
                counterpart: counterpart_name(job_plan, route.hub),
                aggregator: update_method.aggregator.clone(),
                optimizer: update_method.optimizer.clone(),
                groups: update_method.groups.clone(),
                checkpoints: checkpoints.is_some_and(CheckpointPlan::are_written),
            };
            (route.core, shard)
        };
        self.routes.iter().map(shard).collect()
    }

    /// What job control needs to know of the job.
    fn terms(
        &self,
        job_plan: &JobPlan,
        timeouts: &Timeouts,
        shards: &[(u16, ShardPlan)],
        checkpoints: Option<&CheckpointPlan>,
    ) -> JobTerms {
        let route = |&(id, route): &(RouteId, Route)| RouteTerms {
            id,
            core: route.core,
            interface: route.interface,
            share: route.hub,
            streams: self.ports[&id].len(),
            memory_bytes: shards
                .iter()
                .find(|(_, shard)| shard.route == id)
                .map_or(0, |(_, shard)| memory_bytes(shard)),
        };
        JobTerms {
            namespace: job_plan.namespace,
            name: job_plan.name.clone(),
            composed: self.composed.clone(),
            site: job_plan.site,
            routes: self.routes.iter().map(route).collect(),
            rendezvous: timeouts.rendezvous,
            dead_after: timeouts.dead_after,
            progress_timeout: timeouts.progress_timeout,
            continues: job_plan.options.continues(),
            min_workers: job_plan
                .options
                .least_workers(job_plan.composition.workers())
                .filter(|_| job_plan.composition.is_flat() && !job_plan.options.has_standbys()),
            first_workers: job_plan.options.first_workers(job_plan.composition.workers()),
            shares: job_plan.shares.clone(),
            hub: job_plan.hub as u16,
            rewinds: keeps_copies(job_plan),
            begins_again: job_plan.options.outlives_hubs() && !keeps_copies(job_plan),
            epoch: job_plan.epoch.number,
            stragglers: job_plan.options.stragglers,
            weight: weight(job_plan),
            team: job_plan.team.clone(),
            resumes: checkpoints.is_some_and(CheckpointPlan::is_read),
            writes_checkpoints: checkpoints.is_some_and(CheckpointPlan::are_written),
            checkpoint_folder: checkpoints.map(CheckpointPlan::folder).unwrap_or_default(),
        }
    }
}

/// The position of a share's standby, if this hub serves the share.
fn standby_served(job_plan: &JobPlan, share: u16) -> Option<u16> {
    let share = job_plan.shares.get(usize::from(share))?;
    share.standby.filter(|_| u32::from(share.served_by) == job_plan.hub)
}

/// The name, for people, of the other hub of a share of which this hub is one; empty if there is none.
fn counterpart_name(job_plan: &JobPlan, share: u16) -> String {
    let share = job_plan.shares.get(usize::from(share));
    let other = share.and_then(|share| share.counterpart(job_plan.hub as u16));
    other.and_then(|other| job_plan.hub_at(usize::from(other))).map_or(String::new(), hub_name)
}

/// The name of another hub of the job for people.
fn hub_name(shape: &HubShape) -> String {
    format!("the hub at {}", shape.interfaces[0].address)
}

/// The features of the job as a whole.
fn features_of(job_plan: &JobPlan) -> Features {
    job_plan.settings.features().and(job_plan.options.features()).and(job_plan.composition.features())
}

/// Whether the hub keeps copies of the chunks to which all workers can go back. At several sites no hub could go back alone.
fn keeps_copies(job_plan: &JobPlan) -> bool {
    job_plan.options.keeps_copies(!job_plan.composition.is_flat())
}

/// The job's share of a core's time, relative to other jobs' weights.
fn weight(job_plan: &JobPlan) -> u32 {
    job_plan.options.weight.clamp(1, WEIGHT_MAX)
}

/// Converts seconds. The manager has checked the bounds; this refuses only what a clock cannot hold.
fn seconds(option: &str, value: f64) -> Result<Duration, String> {
    let wait =
        Duration::try_from_secs_f64(value).ok().filter(|&wait| Instant::now().checked_add(wait).is_some());
    wait.ok_or_else(|| format!("{option} is {value}, which is not a valid time in seconds"))
}
