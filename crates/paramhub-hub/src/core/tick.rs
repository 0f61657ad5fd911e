//! The work that a core does a few times a second, with or without other work.

use std::time::{Duration, Instant};

use paramhub_core::between_sites;
use paramhub_core::liveness::{LivenessChange, LivenessRules};
use paramhub_core::service::JobCounters;
use paramhub_core::wire::Operation;

use super::fault::Fault;
use super::{Core, CoreEvent};

/// The interval of ticks of a core that has no job, or jobs that give silent workers up late.
const TICK: Duration = Duration::from_millis(250);

/// The interval at which a core checks the clock for heartbeats, silent workers and counters, if its shards have these rules.
/// A job that soon gives a neighbour up, or must soon find a cut stream, would otherwise wait for the tick longer than for
/// anything else.
pub(super) fn tick_interval(rules: impl Iterator<Item = LivenessRules>) -> Duration {
    rules.map(|rules| rules.check_every()).fold(TICK, Duration::min)
}

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
            let plan = hosted.shard.plan();
            let rules = between_sites::liveness(&plan.resuming, plan.ports.side(port), plan.dead_after);
            let neighbour = plan.ports.neighbour(port);
            let leaves_above = hosted.shard.leaves_above(port);
            let liveness = match lane.liveness(now, &rules) {
                // The site above is to close the stream.
                Some(LivenessChange::Dead(silence)) if leaves_above => {
                    let reason = format!("it has not been heard for {:.0} s", silence.as_secs_f64());
                    self.fault(token, &Fault::Lost(reason), now);
                    continue;
                }
                _ if hosted.shard.has_left(port) => None,
                change => change,
            };
            // No frame follows a Leave.
            let may_send = hosted.shard.has_sent_all(port) && !leaves_above;
            if lane.wants_heartbeat(now, &rules) && may_send {
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
            let namespace = hosted.shard.plan().namespace;
            report.left_out.extend(hosted.shard.left_out().map(|(rank, updates)| (namespace, rank, updates)));
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

    /// Reports the ranks and sites whose contributions steps did not wait for.
    fn report_late(&mut self) {
        for hosted in self.shards.values_mut() {
            while let Some(late) = hosted.shard.late_neighbour() {
                let namespace = hosted.shard.plan().namespace;
                self.mailbox.send_event(CoreEvent::Late { namespace, late });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_job_that_gives_workers_up_first_decides_how_often_a_core_checks_them() {
        let rules = |heartbeat, dead_after| {
            LivenessRules::of_stream(Duration::from_secs_f64(heartbeat), Duration::from_secs_f64(dead_after))
        };
        let interval = |jobs: &[LivenessRules]| tick_interval(jobs.iter().copied()).as_secs_f64();
        assert_eq!(interval(&[]), 0.25);
        assert_eq!(interval(&[rules(1.0, 30.0), rules(1.0, 86_400.0)]), 0.25);
        assert_eq!(interval(&[rules(1.0, 30.0), rules(1.0, 1.0), rules(1.0, 2.0)]), 1.0 / 16.0);
        assert_eq!(interval(&[rules(1.0, 30.0), rules(0.25, 30.0)]), 1.0 / 16.0);
    }
}
