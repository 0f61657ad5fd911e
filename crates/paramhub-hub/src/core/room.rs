//! Shards that open and close: their memory is taken and given back by turns, so that a large job's keeps no other job waiting.
//!
//! The core does it itself, not a thread beside it: pages lie in the NUMA node of the thread that writes them first, and that
//! takes its share of the core's time as the job's other work does.

use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::stragglers::Quorum;
use paramhub_core::wire::{Failure, Header, Operation};

use super::plan::ShardPlan;
use super::shard::Shard;
use super::turns::Unit;
use super::{Core, CoreEvent, Hosted, Memory};

/// Bytes of memory that are taken, filled or given back before the streams have their turn: about as much as one of them brings in
/// its.
const MEMORY_TURN_BYTES: usize = 256 << 10;

impl Core {
    /// Reserves a route's memory, which turns will take.
    pub(super) fn open(&mut self, plan: ShardPlan) {
        let (namespace, route, ports) = (plan.namespace, plan.route, plan.ports.len() as usize);
        let weight = plan.weight;
        match Shard::reserve(plan) {
            Ok(shard) => {
                let job = self.turns.admit(namespace, weight);
                let index = self.shards.insert_index(Hosted {
                    shard,
                    route,
                    job,
                    lane_of: vec![None; ports],
                    memory: Memory::Opening,
                    ending: false,
                    releases: false,
                    copies: false,
                    makes: false,
                });
                self.shard_of.insert((namespace, route), index);
                self.turns.add(job, Unit::Memory(index));
                // So that whoever asks whether the hub holds anything is told from the beginning.
                self.publish();
            }
            Err(missing) => {
                let missing_bytes = Some(missing.bytes);
                self.mailbox.tell(CoreEvent::Opened { namespace, missing_bytes, snapshot: None });
            }
        }
    }

    /// Takes some of a shard's memory, or gives some back.
    pub(super) fn take_or_give_memory(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        let goes_on = match hosted.memory {
            Memory::Opening => hosted.shard.open_some(MEMORY_TURN_BYTES),
            Memory::Freeing => hosted.shard.free_some(MEMORY_TURN_BYTES),
            Memory::Open | Memory::Freed => return,
        };
        if goes_on {
            return self.turns.add(hosted.job, Unit::Memory(index));
        }
        if hosted.memory == Memory::Freeing {
            hosted.memory = Memory::Freed;
            return self.close_if_over(index);
        }
        hosted.memory = Memory::Open;
        let snapshot = hosted.shard.hand_out_snapshot();
        let plan = hosted.shard.plan();
        let namespace = plan.namespace;
        if plan.stragglers.quorum(plan.workers()) == Some(Quorum::Clock) {
            self.timed.push(index);
        }
        self.publish();
        self.mailbox.tell(CoreEvent::Opened { namespace, missing_bytes: None, snapshot });
    }

    /// Begins to free all of a job.
    pub(super) fn end(&mut self, namespace: Namespace, failure: Option<&Failure>, now: Instant) {
        if let Some(failure) = failure {
            self.farewells.remember(namespace, failure.clone());
        }
        let here: Vec<usize> =
            self.shard_of.iter().filter(|((job, _), _)| *job == namespace).map(|(_, &index)| index).collect();
        for index in here {
            let hosted = self.shards.index_mut(index);
            if std::mem::replace(&mut hosted.ending, true) {
                continue;
            }
            let arenas = hosted.shard.close();
            if arenas.has_any() {
                // Who lets go of it last unmaps it, which takes long where it is large. Where there can be no thread, this one waits.
                let _ = std::thread::Builder::new().name("hub-unmap".into()).spawn(move || drop(arenas));
            }
            // One that is opening waits for a turn already.
            if std::mem::replace(&mut hosted.memory, Memory::Freeing) == Memory::Open {
                self.turns.add(hosted.job, Unit::Memory(index));
            }
            let lanes: Vec<(usize, u64)> = hosted
                .lane_of
                .iter()
                .enumerate()
                .filter_map(|(port, lane)| lane.map(|lane| (port, lane)))
                .collect();
            for (port, token) in lanes {
                if let Some(failure) = failure {
                    let payload = failure.encode();
                    let header = Header { length: payload.len() as u32, ..Header::bare(Operation::Failure) };
                    self.shards.index_mut(index).shard.outboxes[port].message(header, payload);
                }
                if let Some(lane) = self.lanes.at_mut(token) {
                    lane.drain(now);
                }
                self.flush(token, now);
            }
        }
    }

    /// Forgets a shard of a job that is over, once its memory is given back and its streams are closed.
    pub(super) fn close_if_over(&mut self, index: usize) {
        let hosted = self.shards.index_mut(index);
        if hosted.memory != Memory::Freed || hosted.lane_of.iter().any(Option::is_some) {
            return;
        }
        let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
        let mut counters = hosted.shard.counters();
        if let Some(busy) = self.turns.dismiss(hosted.job, index) {
            counters.busy_ns = busy.as_nanos() as u64;
        }
        let left_out = hosted.shard.left_out().to_vec();
        self.timed.retain(|&other| other != index);
        self.shards.remove_index(index);
        self.shard_of.remove(&(namespace, route));
        // So that a job shorter than a tick has been counted when it is over.
        self.publish();
        self.mailbox.tell(CoreEvent::Closed { namespace, counters, left_out });
    }
}
