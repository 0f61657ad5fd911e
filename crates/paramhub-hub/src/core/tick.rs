//! What a core does a few times a second, whatever comes.

use std::time::Instant;

use paramhub_core::service::JobCounters;
use paramhub_core::wire::{Header, Operation};

use super::fault::Fault;
use super::lane::Pulse;
use super::{Core, CoreEvent, TICK};

impl Core {
    /// Heartbeats, silent workers, streams that were given time to close, and counters.
    pub(super) fn tick(&mut self, now: Instant) {
        let pause = (now - self.last_tick).saturating_sub(TICK * 4);
        self.awake += (now - self.last_tick).saturating_sub(pause);
        self.last_tick = now;
        for token in self.lanes.tokens() {
            let Some(lane) = self.lanes.at_mut(token) else { continue };
            if !pause.is_zero() {
                lane.forgive(pause);
            }
            if lane.is_overdue(now) {
                self.drop_lane(token);
                continue;
            }
            let (port, index) = (lane.port, lane.shard);
            let hosted = self.shards.index_mut(index);
            let namespace = hosted.shard.plan().namespace;
            let dead_after = hosted.shard.plan().dead_after;
            let who = hosted.shard.plan().ports.neighbour(port);
            let pulse = if hosted.shard.has_left(port) { None } else { lane.pulse(now, dead_after) };
            if lane.wants_heartbeat(now, dead_after) && hosted.shard.outboxes[port as usize].is_empty() {
                hosted.shard.outboxes[port as usize].message(Header::bare(Operation::Heartbeat), Vec::new());
                self.flush(token, now);
            }
            match pulse {
                Some(Pulse::Silent(silence)) => {
                    let seconds = Some(silence.as_secs_f64());
                    self.mailbox.tell(CoreEvent::Silence { namespace, who, seconds });
                }
                Some(Pulse::HeardAgain) => {
                    self.mailbox.tell(CoreEvent::Silence { namespace, who, seconds: None });
                }
                Some(Pulse::Dead(silence)) => self.fault(token, &Fault::Silent(silence), now),
                None => {}
            }
        }
        self.tell_of_late();
        self.tell_of_awaited();
        self.farewells.let_go(now);
        self.mailbox.retry();
        self.publish();
    }

    pub(super) fn publish(&mut self) {
        let mut report = self.mailbox.report.lock().expect("nobody panics while counting");
        report.time.busy_ns = self.busy.as_nanos() as u64;
        report.time.idle_ns = self.idle.as_nanos() as u64;
        report.jobs.clear();
        report.jobs.extend(
            self.shards.values().map(|hosted| (hosted.shard.plan().namespace, hosted.shard.counters())),
        );
        // Of a job's shards here together.
        report.jobs.extend(self.turns.times().map(|(namespace, busy)| {
            (namespace, JobCounters { busy_ns: busy.as_nanos() as u64, ..JobCounters::default() })
        }));
        report.left_out.clear();
        for hosted in self.shards.values() {
            let counted = (0..).zip(hosted.shard.left_out()).filter(|&(_, &updates)| updates > 0);
            let namespace = hosted.shard.plan().namespace;
            report.left_out.extend(counted.map(|(rank, &updates)| (namespace, rank, updates)));
        }
    }

    /// Says who keeps the others waiting.
    fn tell_of_awaited(&mut self) {
        for hosted in self.shards.values_mut().filter(|hosted| !hosted.ending) {
            if let Some(news) = hosted.shard.news_of_awaited(self.awake) {
                let (namespace, route) = (hosted.shard.plan().namespace, hosted.route);
                self.mailbox.tell(CoreEvent::Awaited { namespace, route, news });
            }
        }
    }

    /// Says which ranks steps end without.
    fn tell_of_late(&mut self) {
        for hosted in self.shards.values_mut() {
            while let Some(late) = hosted.shard.news_of_late() {
                let namespace = hosted.shard.plan().namespace;
                self.mailbox.tell(CoreEvent::Late { namespace, late });
            }
        }
    }
}
