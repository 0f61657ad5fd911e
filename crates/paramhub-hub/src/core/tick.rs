//! The work that a core does a few times a second, with or without other work.

use std::time::Instant;

use paramhub_core::liveness::{HEARTBEAT, LivenessChange, LivenessRules};
use paramhub_core::service::JobCounters;
use paramhub_core::wire::Operation;

use super::fault::Fault;
use super::{Core, CoreEvent};

impl Core {
    /// Sends heartbeats, judges silent neighbours, drops streams that took too long to close, and reports late and
    /// awaited ranks and the counters.
    pub(super) fn tick(&mut self, now: Instant) {
        let since_tick = now - self.own_pauses.last_turn();
        let pause = self.own_pauses.turn(now);
        self.awake += since_tick - pause;
        for token in self.lanes.tokens() {
            let Some(lane) = self.lanes.at_mut(token) else { continue };
            if !pause.is_zero() {
                // While this thread did not run, no neighbour could be heard.
                lane.forgive(pause, now);
            }
            if lane.is_overdue(now) {
                self.drop_lane(token);
                continue;
            }
            let (port, index) = (lane.port, lane.shard);
            let hosted = self.shards.index_mut(index);
            let namespace = hosted.shard.plan().namespace;
            let rules = LivenessRules::of_stream(HEARTBEAT, hosted.shard.plan().dead_after);
            let neighbour = hosted.shard.plan().ports.neighbour(port);
            let liveness = if hosted.shard.has_left(port) { None } else { lane.liveness(now, &rules) };
            if lane.wants_heartbeat(now, &rules) && hosted.shard.has_sent_all(port) {
                hosted.shard.message(port, Operation::Heartbeat, Vec::new());
                self.flush(token, now);
            }
            match liveness {
                Some(LivenessChange::Silent(silence)) => {
                    let seconds = Some(silence.as_secs_f64());
                    self.mailbox.send_event(CoreEvent::Silence { namespace, neighbour, seconds });
                }
                Some(LivenessChange::HeardAgain) => {
                    self.mailbox.send_event(CoreEvent::Silence { namespace, neighbour, seconds: None });
                }
                Some(LivenessChange::Dead(silence)) => self.fault(token, &Fault::Silent(silence), now),
                None => {}
            }
        }
        self.report_late();
        self.report_awaited();
        self.final_messages.close_finished(now);
        self.mailbox.retry();
        self.publish();
    }

    /// Copies the counters to the report that other threads read.
    pub(super) fn publish(&mut self) {
        let mut report = self.mailbox.report.lock().expect("no thread panics while it counts");
        report.time.busy_ns = self.busy.as_nanos() as u64;
        report.time.idle_ns = self.idle.as_nanos() as u64;
        report.jobs.clear();
        report.jobs.extend(
            self.shards.values().map(|hosted| (hosted.shard.plan().namespace, hosted.shard.counters())),
        );
        // The time of all shards of a job here together. Readers add the entries of a job.
        report.jobs.extend(self.scheduler.times().map(|(namespace, busy)| {
            (namespace, JobCounters { busy_ns: busy.as_nanos() as u64, ..JobCounters::default() })
        }));
        report.left_out.clear();
        for hosted in self.shards.values() {
            let counted = (0..).zip(hosted.shard.left_out()).filter(|&(_, &updates)| updates > 0);
            let namespace = hosted.shard.plan().namespace;
            report.left_out.extend(counted.map(|(rank, &updates)| (namespace, rank, updates)));
        }
    }

    /// Reports the ranks and sites that keep others waiting.
    fn report_awaited(&mut self) {
        for hosted in self.shards.values_mut().filter(|hosted| !hosted.ending) {
            if let Some(event) = hosted.shard.overdue_event(self.awake) {
                let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
                self.mailbox.send_event(CoreEvent::Awaited { namespace, route, event });
            }
        }
    }

    /// Reports the ranks whose contributions steps did not wait for.
    fn report_late(&mut self) {
        for hosted in self.shards.values_mut() {
            while let Some(late) = hosted.shard.late_rank() {
                let namespace = hosted.shard.plan().namespace;
                self.mailbox.send_event(CoreEvent::Late { namespace, late });
            }
        }
    }
}
