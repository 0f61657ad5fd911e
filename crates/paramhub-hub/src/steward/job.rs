use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use paramhub_core::auth::{Namespace, Nonce};
use paramhub_core::chunk::ChunkMap;
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

use super::checkpoints::Checkpoints;
use crate::checkpoint::Keeper;
use crate::core::{Absence, Neighbour, Ports, ShardPlan, Snapshot, memory_bytes};

/// One job at this hub.
pub(crate) struct Job {
    pub(super) name: String,
    pub(super) namespace: Namespace,
    pub(super) nonce: Nonce,
    pub(super) composed: Arc<Composed>,
    /// Where in it this hub is.
    pub(super) site: SiteId,
    /// Of this hub's routes.
    pub(super) ports: HashMap<RouteId, Arc<Ports>>,
    pub(super) rendezvous: Duration,
    pub(super) dead_after: Duration,
    /// Streams go on over other interfaces.
    pub(super) continues: bool,
    /// Whether steps wait for late workers.
    pub(super) stragglers: Stragglers,
    /// Parameters stay as they are until every worker has contributed to the next step.
    pub(super) stands_still: bool,
    /// How long others may wait for somebody, if that ends the job.
    pub(super) progress_timeout: Option<Duration>,
    /// Routes at which others wait for somebody.
    pub(super) awaited: BTreeMap<RouteId, Absence>,
    /// Who was told of last, and how many digits the seconds had.
    pub(super) told_awaited: Option<(Vec<Neighbour>, u32)>,
    /// Of every rank that was left out, how many digits the steps had that it was last said to have missed.
    pub(super) told_late: HashMap<u32, u32>,
    /// Of every rank, updates that routes which are closed have made without it.
    pub(super) left_out: Vec<u64>,
    /// When somebody was last said to go on over an interface.
    pub(super) moved: HashMap<(Neighbour, u16), Instant>,
    pub(super) settings: Arc<Settings>,
    /// Of the site, this one included.
    pub(super) hubs: usize,
    /// Values of state the optimizer keeps a parameter.
    pub(super) state_slots: u8,
    /// This hub's routes that carry chunks.
    pub(super) routes: Vec<(RouteId, Route)>,
    pub(super) memory_bytes: u64,
    /// Of a core's time, against other jobs' weights.
    pub(super) weight: u32,
    pub(super) state: State,
    /// The streams to the sites above have been asked for.
    pub(super) is_linked: bool,
    pub(super) left: HashSet<(RouteId, u32)>,
    pub(super) silent: HashSet<Neighbour>,
    pub(super) counters: JobCounters,
    pub(super) checkpoints: Option<Checkpoints>,
    /// Memory for them, until their keeper has it.
    pub(super) snapshots: Vec<Snapshot>,
    pub(super) keeper: Option<Keeper>,
    /// Why it has failed, if it does not finish: its launcher has said that it ends the workers.
    pub(super) announced: Option<String>,
    /// Its workers' processes have ended: why it has failed, if it has not finished by then.
    pub(super) concluding: Option<(Instant, String)>,
    /// Every worker has left, and the last checkpoint is being taken.
    pub(super) is_finishing: bool,
    /// It has left a last checkpoint while it goes on, and has no others.
    pub(super) has_left_last: bool,
    /// The step that the chunks began with, where it is a checkpoint's.
    pub(super) resumed_step: Option<u32>,
}

/// Where a job stands.
pub(super) enum State {
    /// Cores allocate; so many routes are not done.
    Opening { routes: usize },
    /// Streams come; after `until` those missing are named.
    Connecting { until: Instant },
    /// All streams are here.
    Running,
    /// Cores free; so many routes are not done.
    Ending { routes: usize, end: JobEnd, since: Instant },
}

impl Job {
    /// Places a job's chunks and says what each core of this hub is to open, or why the hub cannot serve it.
    pub(super) fn plan(
        plan: &JobPlan,
        shape: &HubShape,
        registry: &Registry,
        checkpoints: Option<Checkpoints>,
    ) -> Result<(Job, Vec<(u16, ShardPlan)>), String> {
        let rendezvous = seconds("rendezvous_timeout_s", plan.options.rendezvous_timeout_s)?;
        let dead_after = seconds("dead_after_s", plan.options.dead_after_s)?;
        let progress_timeout = plan.options.progress_timeout_s;
        let progress_timeout =
            progress_timeout.map(|value| seconds("progress_timeout_s", value)).transpose()?;
        let weight = plan.options.weight.clamp(1, WEIGHT_MAX);
        let settings = &plan.settings;
        settings.check().map_err(|error| error.to_string())?;
        if plan.options.continues() {
            settings.may_resume().map_err(|error| format!("job `{}`: {error}", plan.name))?;
            if plan.composition.sites.len() > 1 {
                return Err(format!(
                    "job `{}` is to go on over other interfaces, but its hubs reduce for hosts or racks, and streams between \
                     hubs cannot be resumed: use on_interface_down = fail, or reduction = flat",
                    plan.name
                ));
            }
        }
        let stragglers = plan.options.stragglers;
        if stragglers.leaves_out() {
            let refused = |why: String| format!("job `{}` is to leave late workers out: {why}", plan.name);
            settings.may_leave_out().map_err(|error| refused(error.to_string()))?;
            stragglers.check(plan.composition.workers()).map_err(refused)?;
            if plan.composition.sites.len() > 1 {
                let why = "its hubs reduce for hosts or racks, whose sums would come late as wholes: use stragglers = wait, or \
                           reduction = flat";
                return Err(refused(why.into()));
            }
        }
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
        let schemes = Plan::new(settings, &plan.cluster);
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
                    checkpoints: checkpoints.as_ref().is_some_and(Checkpoints::are_written),
                    restored: None,
                };
                (route.core, shard)
            })
            .collect();
        let job = Job {
            name: plan.name.clone(),
            namespace: plan.namespace,
            nonce: plan.nonce,
            rendezvous,
            dead_after,
            continues: plan.options.continues(),
            stragglers,
            stands_still: plan.options.stands_still(&plan.settings),
            progress_timeout,
            awaited: BTreeMap::new(),
            told_awaited: None,
            told_late: HashMap::new(),
            left_out: Vec::new(),
            moved: HashMap::new(),
            weight,
            memory_bytes: shards.iter().map(|(_, shard)| memory_bytes(shard)).sum(),
            state: State::Opening { routes: routes.len() },
            settings,
            hubs: plan.composition.sites[usize::from(site)].hubs.len(),
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
            keeper: None,
            announced: None,
            concluding: None,
            is_finishing: false,
            has_left_last: false,
            resumed_step: None,
        };
        Ok((job, shards))
    }

    /// The cores that serve it, each once.
    pub(super) fn cores(&self) -> impl Iterator<Item = u16> + use<> {
        let mut cores: Vec<u16> = self.routes.iter().map(|(_, route)| route.core).collect();
        cores.sort_unstable();
        cores.dedup();
        cores.into_iter()
    }

    /// Of its site.
    pub(super) fn placement(&self) -> &Placement {
        &self.composed.placements[usize::from(self.site)]
    }

    /// How people call somebody.
    pub(super) fn name_of(&self, who: Neighbour) -> String {
        match who {
            Neighbour::Worker(rank) => format!("rank {rank}"),
            Neighbour::Site(site) => self.composed.composition.name(site),
        }
    }

    /// Whether everybody has said goodbye by every port, and we to those above.
    pub(super) fn everybody_left(&self) -> bool {
        self.left.len() == self.ports.values().map(|ports| ports.len() as usize).sum::<usize>()
    }
}

/// A wait as the manager gives it, which has checked it.
fn seconds(option: &str, value: f64) -> Result<Duration, String> {
    let wait =
        Duration::try_from_secs_f64(value).ok().filter(|&wait| Instant::now().checked_add(wait).is_some());
    wait.ok_or_else(|| format!("{option} is {value}, which is no time to wait"))
}
