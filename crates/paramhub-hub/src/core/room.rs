//! Shards that open and close: their memory is taken and given back in turns, so that a large job's does not
//! keep another job waiting.
//!
//! The core does this itself, not a thread beside it: pages are in the NUMA node of the thread that first
//! writes them, and the work counts towards the job's share of the core's time.

use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::between_sites;
use paramhub_core::standbys::Role;
use paramhub_core::stragglers::Quorum;
use paramhub_core::wire::{Failure, Operation};

use super::plan::ShardPlan;
use super::restored::Restored;
use super::scheduler::WorkUnit;
use super::shard::Shard;
use super::tick::tick_interval;
use super::{Core, CoreEvent, HostedShard, MemoryState};

/// Bytes of memory that are taken, filled or given back before the streams are served: about as much as one
/// stream brings in its turn.
const MEMORY_TURN_BYTES: usize = 256 << 10;

impl Core {
    /// Reserves a route's memory, which turns will take.
    pub(super) fn open(&mut self, plan: ShardPlan, restored: Option<Restored>) {
        let (namespace, route, ports) = (plan.namespace, plan.route, plan.ports.len() as usize);
        let weight = plan.weight;
        self.final_messages.forget(namespace);
        match Shard::reserve(plan, restored) {
            Ok(shard) => {
                let serves = matches!(shard.plan().role, Role::Serves { .. });
                let job = self.scheduler.add_shard(namespace, weight);
                let index = self.shards.insert_index(HostedShard {
                    shard,
                    route,
                    job,
                    lane_of: vec![None; ports],
                    newest_streams: vec![None; ports],
                    rewound: None,
                    memory: MemoryState::Opening,
                    ending: false,
                    releases: false,
                    copies: false,
                    makes: false,
                    serves,
                    ends_sums: false,
                    changes_members: false,
                });
                self.shard_of.insert((namespace, route), index);
                self.set_tick_interval();
                self.scheduler.add(job, WorkUnit::Memory(index));
                // From now on the published state shows that the hub holds something.
                self.publish();
            }
            Err(missing) => {
                let missing_bytes = Some(missing.bytes);
                self.mailbox.send_event(CoreEvent::Opened { namespace, missing_bytes, snapshot: None });
            }
        }
    }

    /// Takes some of a shard's memory, or gives some back.
    pub(super) fn take_or_give_memory(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        let goes_on = match hosted.memory {
            MemoryState::Opening => hosted.shard.open_some(MEMORY_TURN_BYTES),
            MemoryState::Freeing => hosted.shard.free_some(MEMORY_TURN_BYTES),
            MemoryState::Open | MemoryState::Freed => return,
        };
        if goes_on {
            return self.scheduler.add(hosted.job, WorkUnit::Memory(index));
        }
        if hosted.memory == MemoryState::Freeing {
            hosted.memory = MemoryState::Freed;
            return self.close_if_over(index);
        }
        hosted.memory = MemoryState::Open;
        let snapshot = hosted.shard.hand_out_snapshot();
        let plan = hosted.shard.plan();
        let namespace = plan.namespace;
        if plan.stragglers.quorum(plan.workers()) == Some(Quorum::Clock) {
            self.timed.push(index);
        }
        self.publish();
        self.mailbox.send_event(CoreEvent::Opened { namespace, missing_bytes: None, snapshot });
    }

    /// Begins to free everything of a job.
    pub(super) fn end(&mut self, namespace: Namespace, failure: Option<&Failure>, now: Instant) {
        if let Some(failure) = failure {
            self.final_messages.remember(namespace, failure.clone());
        }
        let here: Vec<usize> =
            self.shard_of.iter().filter(|((job, _), _)| *job == namespace).map(|(_, &index)| index).collect();
        here.into_iter().for_each(|index| self.end_shard(index, failure, now));
    }

    /// Begins to free a route.
    pub(super) fn end_shard(&mut self, index: usize, failure: Option<&Failure>, now: Instant) {
        let hosted = self.shards.index_mut(index);
        if std::mem::replace(&mut hosted.ending, true) {
            return;
        }
        let arenas = hosted.shard.close();
        if arenas.has_any() {
            // The last owner unmaps it, which takes long for large memory. If no thread can be started,
            // this one does it.
            let _ = std::thread::Builder::new().name("hub-unmap".into()).spawn(move || drop(arenas));
        }
        // A shard that is opening already waits for a turn.
        if std::mem::replace(&mut hosted.memory, MemoryState::Freeing) == MemoryState::Open {
            self.scheduler.add(hosted.job, WorkUnit::Memory(index));
        }
        let lanes: Vec<(usize, u64)> = hosted
            .lane_of
            .iter()
            .enumerate()
            .filter_map(|(port, lane)| lane.map(|lane| (port, lane)))
            .collect();
        for (port, token) in lanes {
            if let Some(failure) = failure {
                let shard = &mut self.shards.index_mut(index).shard;
                shard.message(port as u32, Operation::Failure, failure.encode());
            }
            if let Some(lane) = self.lanes.at_mut(token) {
                lane.drain(now);
            }
            self.flush(token, now);
        }
    }

    /// Removes a shard of a job that is over, once its memory is given back and its streams are closed.
    pub(super) fn close_if_over(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        if hosted.memory != MemoryState::Freed || hosted.lane_of.iter().any(Option::is_some) {
            return;
        }
        let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
        let mut counters = hosted.shard.counters();
        if let Some(busy) = self.scheduler.remove_shard(hosted.job, index) {
            counters.busy_ns = busy.as_nanos() as u64;
        }
        let left_out = hosted.shard.left_out_by_rank();
        self.timed.retain(|&other| other != index);
        self.shards.remove_index(index);
        self.shard_of.remove(&(namespace, route));
        self.set_tick_interval();
        // Therefore a job shorter than a tick is counted before it is over.
        self.publish();
        self.mailbox.send_event(CoreEvent::Closed { namespace, counters, left_out });
    }

    fn set_tick_interval(&mut self) {
        let rules = |hosted: &HostedShard| {
            let plan = hosted.shard.plan();
            between_sites::shortest_liveness(&plan.resuming, &plan.ports, plan.dead_after)
        };
        self.tick_interval = tick_interval(self.shards.values().map(rules));
    }
}
