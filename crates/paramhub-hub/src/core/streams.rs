//! The streams of a core: how one is adopted, brings frames, takes answers, and ends.

use std::time::Instant;

use paramhub_core::auth::Namespace;
use paramhub_core::placement::RouteId;
use paramhub_core::ports::Side;
use paramhub_transport::Interest;

use super::fault::Fault;
use super::lane::{AcceptedStream, Flushed, Lane, ReceiveOutcome};
use super::scheduler::WorkUnit;
use super::{Core, CoreEvent};

/// Turns for which a worker may sleep although an answer is there, while the core serves others.
const UNANNOUNCED_TURNS: u32 = 8;

impl Core {
    pub(super) fn adopt(
        &mut self,
        namespace: Namespace,
        route: RouteId,
        port: u32,
        accepted: AcceptedStream,
        now: Instant,
    ) {
        let living =
            self.shard_of.get(&(namespace, route)).copied().filter(|&shard| !self.shards.index(shard).ending);
        let Some(shard) = living else {
            // The job ended during the stream's handshake.
            return self.final_messages.send(namespace, accepted, now);
        };
        let hosted = self.shards.index_mut(shard);
        if !hosted.serves && matches!(hosted.shard.plan().ports.side(port), Side::Worker(_)) {
            // The stream was admitted before this hub ceased to serve the route. The worker dials again.
            return;
        }
        debug_assert!(hosted.lane_of[port as usize].is_none(), "a port is given once");
        let plan = hosted.shard.plan();
        let (frame_bytes_max, to) = (plan.frame_bytes_max(), plan.ports.side(port).incoming());
        let arenas = accepted.memory().map(|memory| memory.arenas.clone());
        let added = accepted.connect(to, frame_bytes_max).and_then(|stream| {
            let lane = Lane::new(stream, shard, port, now);
            let token = self.lanes.insert(lane);
            let lane = self.lanes.at_mut(token).expect("it was just put in");
            let added = self.poller.add(&*lane, token, Interest::READABLE);
            if added.is_err() {
                self.lanes.remove(token);
            }
            added.map(|()| token)
        });
        match added {
            Ok(token) => {
                let hosted = self.shards.index_mut(shard);
                hosted.lane_of[port as usize] = Some(token);
                self.scheduler.add_lane(hosted.job);
                if let Some(arenas) = arenas {
                    hosted.shard.attach(port, arenas);
                }
                self.flush(token, now);
            }
            Err(error) => {
                let plan = self.shards.index(shard).shard.plan();
                let culprit = plan.ports.neighbour(port);
                let fault = Fault::Lost(format!("the hub cannot serve its stream: {error}"));
                let message = fault.message(&plan.name(culprit));
                let cause = fault.cause();
                self.mailbox.send_event(CoreEvent::Faulted { namespace, route, culprit, message, cause });
            }
        }
    }

    pub(super) fn serve_lane(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let due = std::mem::take(&mut lane.readiness);
        if lane.is_cut() {
            return;
        }
        // Frames that a worker sent before its stream broke, such as a Leave, are handled before the break.
        if due.readable {
            self.receive(token, now);
        }
        if due.writable || self.lanes.at_mut(token).is_some_and(|lane| lane.waits_for_doorbell()) {
            self.flush(token, now);
        }
    }

    /// Takes what a stream has brought and sends the answers that result.
    pub(super) fn receive(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let hosted = self.shards.index_mut(lane.shard);
        let left_before = hosted.shard.has_left(lane.port);
        let taken = lane.receive(&mut hosted.shard, &mut self.scratch, now);
        let (shard, port) = (lane.shard, lane.port);
        if hosted.shard.is_releasing() && !std::mem::replace(&mut hosted.releases, true) {
            self.scheduler.add(hosted.job, WorkUnit::UpdateReleased(shard));
        }
        if hosted.shard.is_making() && !std::mem::replace(&mut hosted.makes, true) {
            self.scheduler.add(hosted.job, WorkUnit::SumFactors(shard));
        }
        if hosted.shard.has_steps_to_end() && !std::mem::replace(&mut hosted.changes_members, true) {
            self.scheduler.add(hosted.job, WorkUnit::ChangeMembers(shard));
        }
        let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
        for port in hosted.shard.take_left_elsewhere() {
            self.mailbox.send_event(CoreEvent::Left { namespace, route, port });
        }
        if hosted.shard.has_left(port) && !left_before {
            self.mailbox.send_event(CoreEvent::Left { namespace, route, port });
        }
        self.answer(shard, now);
        self.report_standby_ready(shard);
        self.end_snapshot(shard);
        match taken {
            Ok(ReceiveOutcome::Closed) => {
                self.leave_above(shard, port);
                self.drop_lane(token);
            }
            Ok(ReceiveOutcome::Open) => {}
            Ok(ReceiveOutcome::Cut(cut)) => self.cut(token, cut),
            // Shared memory reports it only once.
            Ok(ReceiveOutcome::More) => self.due(token, true, true),
            Err(fault) => self.fault(token, &fault, now),
        }
    }

    /// Sends by every port of a shard that has something new. A stream that takes no more for now is served
    /// when the poller reports room.
    pub(super) fn answer(&mut self, shard: usize, now: Instant) {
        while let Some(port) = self.shards.index_mut(shard).shard.next_dirty_port() {
            if let Some(token) = self.shards.index_mut(shard).lane_of[port as usize]
                && self.lanes.at_mut(token).is_some_and(|lane| !lane.waits_writable && !lane.is_cut())
            {
                self.flush(token, now);
            }
        }
    }

    pub(super) fn flush(&mut self, token: u64, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token).filter(|lane| !lane.is_cut()) else { return };
        let hosted = self.shards.index_mut(lane.shard);
        match lane.flush(&mut hosted.shard, now) {
            Ok(flushed) => {
                if flushed == Flushed::All && hosted.shard.has_sent_leave(lane.port) {
                    // If this fails, the stream is broken, and receiving shows how.
                    let _ = lane.end_sending();
                }
                let (unfinished, is_shm) = (flushed != Flushed::All, lane.is_shm());
                if lane.is_unannounced() && !self.unannounced.contains(&token) {
                    self.unannounced.push(token);
                }
                if unfinished != lane.waits_writable {
                    lane.waits_writable = unfinished;
                    let interest = lane.interest();
                    if is_shm {
                        // A stream over shared memory reports room by its doorbell, to which the core always
                        // listens.
                    } else if let Err(error) = self.poller.modify(&*lane, token, interest) {
                        return self.fault(token, &Fault::Lost(error.to_string()), now);
                    }
                }
                if is_shm && flushed == Flushed::Some {
                    self.due(token, true, true);
                }
            }
            Err(error) => match lane.cut_by(&hosted.shard, &error, now) {
                Some(cut) => self.cut(token, cut),
                None => self.fault(token, &Fault::Lost(error.to_string()), now),
            },
        }
    }

    /// Wakes the workers that sleep over an answer, once there is nothing else to do for them.
    pub(super) fn announce(&mut self, now: Instant) {
        if self.unannounced.is_empty() {
            return;
        }
        // Work of others must not keep a worker asleep over its answer for long.
        self.turns_unannounced += 1;
        let all = self.scheduler.is_empty() || self.turns_unannounced > UNANNOUNCED_TURNS;
        if all {
            self.turns_unannounced = 0;
        }
        for position in (0..self.unannounced.len()).rev() {
            let token = self.unannounced[position];
            let Some(lane) = self.lanes.at_mut(token) else {
                self.unannounced.swap_remove(position);
                continue;
            };
            if all || self.scheduler.has_no_work(self.shards.index(lane.shard).job) {
                self.unannounced.swap_remove(position);
                if let Err(error) = lane.announce() {
                    self.fault(token, &Fault::Lost(error.to_string()), now);
                }
            }
        }
    }

    /// Handles a stream that cannot go on: the job controller decides about the job, and the stream waits for
    /// the reason.
    pub(super) fn fault(&mut self, token: u64, fault: &Fault, now: Instant) {
        let Some(lane) = self.lanes.at_mut(token) else { return };
        let port = lane.port;
        let hosted = self.shards.index_mut(lane.shard);
        let was_reported = lane.is_draining();
        let leaves_quietly = hosted.shard.has_left(port) && matches!(fault, Fault::Lost(_));
        let plan = hosted.shard.plan();
        let namespace = plan.namespace;
        lane.mute(now);
        let shard = lane.shard;
        if !was_reported && !leaves_quietly && !hosted.ending {
            let culprit = fault.culprit(plan.ports.neighbour(port));
            let message = fault.message(&plan.name(culprit));
            let (route, cause) = (hosted.route, fault.cause());
            self.mailbox.send_event(CoreEvent::Faulted { namespace, route, culprit, message, cause });
        }
        if leaves_quietly && !was_reported {
            self.leave_above(shard, port);
        }
        if matches!(fault, Fault::Lost(_)) {
            self.drop_lane(token);
        }
    }

    /// Reports that this hub has left a site above, if that is at the other end of a stream which has ended: the site has
    /// closed it after the Leave, or cannot be reached any more. In that case the site either has the Leave, or ends the job
    /// because this one is lost.
    fn leave_above(&mut self, shard: usize, port: u32) {
        let hosted = self.shards.index(shard);
        if hosted.shard.leaves_above(port) && !hosted.ending {
            let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
            self.mailbox.send_event(CoreEvent::Left { namespace, route, port });
        }
    }

    pub(super) fn drop_lane(&mut self, token: u64) {
        if let Some(lane) = self.take_lane(token) {
            self.close_if_over(lane.shard);
        }
    }

    /// Removes a stream from its port.
    pub(super) fn take_lane(&mut self, token: u64) -> Option<Lane> {
        let lane = self.lanes.remove(token)?;
        // This fails only if the descriptor is not in the set; then there is nothing to remove.
        let _ = self.poller.remove(&lane);
        let hosted = self.shards.index_mut(lane.shard);
        hosted.lane_of[lane.port as usize] = None;
        self.scheduler.remove_lane(hosted.job, token);
        Some(lane)
    }
}
