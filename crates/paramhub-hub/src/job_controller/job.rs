use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Namespace, Nonce};
use paramhub_core::chunk::ChunkMap;
use paramhub_core::combinations::{Feature, Features, check_job};
use paramhub_core::composition::{Composed, SiteId};
use paramhub_core::factors::FactorBlock;
use paramhub_core::hyperparameters::Hyperparameters;
use paramhub_core::limits::{STATE_SLOTS_MAX, WEIGHT_MAX};
use paramhub_core::placement::{HubShape, Placement, Route, RouteId};
use paramhub_core::scheme::Plan;
use paramhub_core::service::{JobCounters, JobEnd, JobPlan};
use paramhub_core::settings::Settings;
use paramhub_core::stragglers::Stragglers;
use paramhub_kernels::Registry;

use super::checkpoints::CheckpointPlan;
use crate::checkpoint::CheckpointWriter;
use crate::core::{Neighbour, OverdueNeighbours, Ports, ShardPlan, Snapshot, memory_bytes};

/// One job at this hub.
pub(crate) struct HubJob {
    pub(super) name: String,
    pub(super) namespace: Namespace,
    pub(super) nonce: Nonce,
    pub(super) composed: Arc<Composed>,
    /// The hub's site in the composition.
    pub(super) site: SiteId,
    /// The ports of this hub's routes.
    pub(super) ports: HashMap<RouteId, Arc<Ports>>,
    pub(super) rendezvous: Duration,
    pub(super) dead_after: Duration,
    /// Whether streams continue over other interfaces.
    pub(super) continues: bool,
    /// Whether steps wait for late workers.
    pub(super) stragglers: Stragglers,
    /// The features of its settings, its options and the hubs of the site.
    pub(super) features: Features,
    /// How long members may wait for one of them, if a longer wait ends the job.
    pub(super) progress_timeout: Option<Duration>,
    /// The routes at which members wait for others.
    pub(super) awaited: BTreeMap<RouteId, OverdueNeighbours>,
    /// The neighbours in the last announcement of a wait, and the number of digits of its seconds.
    pub(super) announced_awaited: Option<(Vec<Neighbour>, u32)>,
    /// For each rank that was left out: the number of digits of the missed steps when these were last
    /// reported.
    pub(super) announced_late: HashMap<u32, u32>,
    /// For each rank: the updates that left it out on routes that are closed.
    pub(super) left_out: Vec<u64>,
    /// When a neighbour was last reported to continue over an interface.
    pub(super) moved: HashMap<(Neighbour, u16), Instant>,
    pub(super) settings: Arc<Settings>,
    /// State values per parameter of the job's optimizer.
    pub(super) state_slots: u8,
    /// This hub's routes that carry chunks.
    pub(super) routes: Vec<(RouteId, Route)>,
    pub(super) memory_bytes: u64,
    /// The job's share of a core's time, relative to other jobs' weights.
    pub(super) weight: u32,
    pub(super) state: JobPhase,
    /// Whether the streams to the sites above were ordered.
    pub(super) is_linked: bool,
    pub(super) left: HashSet<(RouteId, u32)>,
    pub(super) silent: HashSet<Neighbour>,
    pub(super) counters: JobCounters,
    pub(super) checkpoints: Option<CheckpointPlan>,
    /// The memory for snapshots, until their writer has it.
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) checkpoint_writer: Option<CheckpointWriter>,
    /// Why the job has failed, unless it finishes: its launcher has announced that it ends the workers.
    pub(super) announced_end: Option<String>,
    /// Until when frames may arrive, since the processes of its workers have ended, and why the job has
    /// failed if it has not finished by then.
    pub(super) concluding: Option<(Instant, String)>,
    /// Whether every worker has left, and the last checkpoint is being taken.
    pub(super) is_finishing: bool,
    /// Whether it has taken a last checkpoint while it goes on, after which it takes no others.
    pub(super) has_left_last: bool,
    /// The step with which the chunks began, if it is a checkpoint's.
    pub(super) resumed_step: Option<u32>,
}

/// The state of a job.
pub(super) enum JobPhase {
    /// Cores allocate; this many routes are not done.
    Opening { routes: usize },
    /// Streams connect; after `until` the missing ones are reported.
    Connecting { until: Instant },
    /// All streams are here.
    Running,
    /// Cores free their memory; this many routes are not done.
    Ending { routes: usize, end: JobEnd, since: Instant },
}

impl HubJob {
    /// Places a job's chunks and returns what each core of this hub must open, or why the hub cannot serve
    /// it.
    pub(super) fn plan(
        plan: &JobPlan,
        shape: &HubShape,
        registry: &Registry,
        checkpoints: Option<CheckpointPlan>,
    ) -> Result<(HubJob, Vec<(u16, ShardPlan)>), String> {
        let rendezvous = seconds("rendezvous_timeout_s", plan.options.rendezvous_timeout_s)?;
        let dead_after = seconds("dead_after_s", plan.options.dead_after_s)?;
        let progress_timeout = plan.options.progress_timeout_s;
        let progress_timeout =
            progress_timeout.map(|value| seconds("progress_timeout_s", value)).transpose()?;
        let weight = plan.options.weight.clamp(1, WEIGHT_MAX);
        let settings = &plan.settings;
        let refused = |why: String| format!("job `{}`: {why}", plan.name);
        settings.check().map_err(|error| refused(error.to_string()))?;
        let schemes = Plan::new(settings, &plan.cluster);
        check_job(plan, &schemes).map_err(|conflict| refused(conflict.to_string()))?;
        let stragglers = plan.options.stragglers;
        stragglers
            .check(plan.composition.workers())
            .map_err(|why| refused(format!("stragglers = {stragglers}: {why}")))?;
        let here = plan
            .composition
            .sites
            .get(usize::from(plan.site))
            .and_then(|site| site.hubs.get(plan.hub as usize));
        if here != Some(shape) {
            return Err(format!("job `{}` was planned for other interfaces than this hub has", plan.name));
        }
        let optimizer = registry.optimizer(&settings.optimizer.name).map_err(|error| error.to_string())?;
        let aggregator = registry.aggregator(&settings.aggregator).map_err(|error| error.to_string())?;
        let groups: Arc<[Hyperparameters]> = settings.optimizer.of_groups(optimizer.defaults()).into();
        for (group, hyperparameters) in groups.iter().enumerate() {
            let of_group = if groups.len() > 1 { format!(", group {group}") } else { String::new() };
            optimizer
                .check(hyperparameters)
                .map_err(|error| format!("optimizer `{}`{of_group}: {error}", settings.optimizer.name))?;
        }
        let state_slots =
            groups.iter().map(|group| optimizer.state_slots(group)).max().expect("there is a group 0");
        let state_slots = u8::try_from(state_slots).map_err(|_| {
            format!(
                "optimizer `{}` keeps {state_slots} values of state a parameter, more than the {STATE_SLOTS_MAX} a hub can number",
                settings.optimizer.name
            )
        })?;

        let map = ChunkMap::new(&settings.keys, settings.chunk_bytes).map_err(|error| error.to_string())?;
        let spreads = schemes.spreads(settings.keys.len());
        let blocks: Arc<[FactorBlock]> = FactorBlock::planned(settings, &map, &schemes).into();
        let composed = Composed::planned(&settings.keys, &map, plan.composition.clone(), &spreads)
            .map_err(|error| error.to_string())?;
        let (composed, site) = (Arc::new(composed), plan.site);
        let placement = &composed.placements[usize::from(site)];
        let (map, settings) = (Arc::new(map), Arc::new(settings.clone()));
        let carries = |route: RouteId| !placement.chunks(route).is_empty();
        let routes: Vec<(RouteId, Route)> = (0..)
            .zip(placement.routes().iter().copied())
            .filter(|&(id, route)| u32::from(route.hub) == plan.hub && carries(id))
            .collect();
        let ports: HashMap<RouteId, Arc<Ports>> =
            routes.iter().map(|&(id, _)| (id, Arc::new(Ports::new(&composed, site, id)))).collect();
        let shards: Vec<(u16, ShardPlan)> = routes
            .iter()
            .map(|&(id, route)| {
                let shard = ShardPlan {
                    name: plan.name.clone(),
                    namespace: plan.namespace,
                    dead_after,
                    continues: plan.options.continues(),
                    stragglers,
                    progress_timeout,
                    weight,
                    settings: settings.clone(),
                    map: map.clone(),
                    blocks: blocks.clone(),
                    composed: composed.clone(),
                    site,
                    route: id,
                    ports: ports[&id].clone(),
                    aggregator: aggregator.clone(),
                    optimizer: optimizer.clone(),
                    groups: groups.clone(),
                    checkpoints: checkpoints.as_ref().is_some_and(CheckpointPlan::are_written),
                    restored: None,
                };
                (route.core, shard)
            })
            .collect();
        let hubs = plan.composition.sites[usize::from(site)].hubs.len();
        let of_site = Features::of([(Feature::SeveralHubs, hubs > 1)]);
        let job = HubJob {
            name: plan.name.clone(),
            namespace: plan.namespace,
            nonce: plan.nonce,
            rendezvous,
            dead_after,
            continues: plan.options.continues(),
            stragglers,
            features: plan.settings.features().and(plan.options.features()).and(of_site),
            progress_timeout,
            awaited: BTreeMap::new(),
            announced_awaited: None,
            announced_late: HashMap::new(),
            left_out: Vec::new(),
            moved: HashMap::new(),
            weight,
            memory_bytes: shards.iter().map(|(_, shard)| memory_bytes(shard)).sum(),
            state: JobPhase::Opening { routes: routes.len() },
            settings,
            composed,
            site,
            ports,
            state_slots,
            routes,
            is_linked: false,
            left: HashSet::new(),
            silent: HashSet::new(),
            counters: JobCounters::default(),
            checkpoints,
            snapshots: Vec::new(),
            checkpoint_writer: None,
            announced_end: None,
            concluding: None,
            is_finishing: false,
            has_left_last: false,
            resumed_step: None,
        };
        Ok((job, shards))
    }

    /// The cores that serve the job, each once.
    pub(super) fn cores(&self) -> impl Iterator<Item = u16> + use<> {
        let mut cores: Vec<u16> = self.routes.iter().map(|(_, route)| route.core).collect();
        cores.sort_unstable();
        cores.dedup();
        cores.into_iter()
    }

    /// The placement at the hub's site.
    pub(super) fn placement(&self) -> &Placement {
        &self.composed.placements[usize::from(self.site)]
    }

    /// The name of a neighbour for people.
    pub(super) fn name_of(&self, who: Neighbour) -> String {
        match who {
            Neighbour::Worker(rank) => format!("rank {rank}"),
            Neighbour::Site(site) => self.composed.composition.name(site),
        }
    }

    /// Whether every neighbour has left by every port, and this hub has left the sites above.
    pub(super) fn everybody_left(&self) -> bool {
        self.left.len() == self.ports.values().map(|ports| ports.len() as usize).sum::<usize>()
    }
}

/// A wait in seconds, which the manager has checked.
fn seconds(option: &str, value: f64) -> Result<Duration, String> {
    let wait =
        Duration::try_from_secs_f64(value).ok().filter(|&wait| Instant::now().checked_add(wait).is_some());
    wait.ok_or_else(|| format!("{option} is {value}, which is no time to wait"))
}
